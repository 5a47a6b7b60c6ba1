"""What a daemon makes of the nodes that share a path with it: by the ranks that are here, and by what they tell."""

from __future__ import annotations

import contextlib
import errno
import grp
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any, Iterator, Optional

import mlpo
import pytest
import torch
from conftest import new_job
from running_daemon import SMALL_BLOCKS, Daemon, Layout, program

SCRIPT = pathlib.Path(__file__).with_name("node_shares_process.py")
SMALL = Layout(paths=1, block=1024, pool="48KiB")  # four blocks


def node(name: str, directory: pathlib.Path, share: str, limits: str = "") -> str:
    """Configuration of a node with a path "pfs" besides its own."""
    directory.mkdir(exist_ok=True)
    return (
        f'[daemon]\nnode = "{name}"\n[[path]]\nname = "pfs"\ndirectory = "{directory}"\nshare = {share}\n{limits}\n'
    )


LIMITS = 'read_limit = "400MB/s"\nwrite_limit = "300MB/s"\nduplex = 0.5\n'


def pfs(daemon: Daemon) -> dict[str, Any]:
    (path,) = [path for path in daemon.status()["paths"] if path["name"] == "pfs"]
    return dict(path)


def awaited(daemon: Daemon, name: str, value: Any) -> dict[str, Any]:
    """The path once its node_share has this value: what a session brings, and takes along, comes a moment later."""
    deadline = time.monotonic() + 20
    while pfs(daemon)["node_share"][name] != value:
        assert time.monotonic() < deadline, pfs(daemon)
        time.sleep(0.01)
    return pfs(daemon)


@contextlib.contextmanager
def connected(daemon: Daemon, job: str, rank: int = 0, world_size: int = 1) -> Iterator[mlpo.Client]:
    with mlpo.connect(socket=daemon.socket, job=job, rank=rank, world_size=world_size) as client:
        client.subgroup("w", 8)  # answered: the daemon knows that the session is there
        yield client


def test_the_part_is_that_of_the_ranks_which_are_here(tmp_path: pathlib.Path) -> None:
    job = new_job()
    with Daemon(tmp_path, SMALL, more=node("a", tmp_path / "shared", '"equal"', LIMITS)) as daemon:
        assert pfs(daemon)["model"]["read_bytes_per_s"] == 400e6
        with connected(daemon, job, 4, 8):
            half = awaited(daemon, "part", 1 / 8)
            assert half["model"]["read_bytes_per_s"] == pytest.approx(50e6)
            with connected(daemon, job, 5, 8):
                both = awaited(daemon, "part", 2 / 8)
                assert both["model"]["write_bytes_per_s"] == pytest.approx(75e6)
                assert both["model"]["worth_bytes_per_s"] == pytest.approx(75e6)
        # A job that is all here has all of it.
        with connected(daemon, new_job()):
            assert awaited(daemon, "part", 1)["model"]["read_bytes_per_s"] == 400e6


def test_a_number_is_a_fixed_part(tmp_path: pathlib.Path) -> None:
    with Daemon(tmp_path, SMALL, more=node("a", tmp_path / "shared", "0.25", LIMITS)) as daemon:
        path = pfs(daemon)
        assert path["model"]["read_bytes_per_s"] == pytest.approx(100e6)
        with connected(daemon, new_job(), 0, 8) as client:
            assert client.share_figures()["paths"] == {}
            assert pfs(daemon)["node_share"] == path["node_share"]
            assert path["node_share"]["part"] == 0.25 and path["node_share"]["share"] == "0.25"


def test_what_nodes_tell_is_granted_while_the_job_is_here(tmp_path: pathlib.Path) -> None:
    job = new_job()
    with Daemon(tmp_path, SMALL, more=node("a", tmp_path / "shared", '"measured"', LIMITS)) as daemon:
        with connected(daemon, job, 0, 2) as client, connected(daemon, job, 1, 2) as second:
            assert pfs(daemon)["node_share"]["part"] == 1
            figures = client.share_figures()
            assert figures["daemon"] == second.share_figures()["daemon"]
            assert list(figures["paths"]) == ["pfs"]
            seen, busy_s, others, step_bytes = figures["paths"]["pfs"]
            assert seen == pytest.approx(300e6) and busy_s >= 0 and step_bytes == 0
            # This node has 40 MB/s of its own, the other 100, and 120 are shared: 260 for both, so 130 each.
            told = client.set_path_share("pfs", [[60e6, 1, 100e6, 1e9], [60e6, 1, 40e6, 1e9]], 1)
            assert told == {"nodes": 2, "granted_bytes_per_s": pytest.approx(90e6), "total_bytes_per_s": 120e6}
            share = pfs(daemon)["node_share"]
            assert share["nodes"] == 2 and share["granted_bytes_per_s"] == pytest.approx(90e6)
            assert pfs(daemon)["model"]["worth_bytes_per_s"] == pytest.approx(90e6)
            assert pfs(daemon)["model"]["read_bytes_per_s"] == 400e6  # what it does is what it does
            # Figures that say nothing change nothing.
            told = second.set_path_share("pfs", [[60e6, 0, 100e6, 1e9], [60e6, 0, 40e6, 1e9]], 1)
            assert told["granted_bytes_per_s"] is None
            assert pfs(daemon)["node_share"]["granted_bytes_per_s"] == pytest.approx(90e6)
            ctl = [program().parent / "mlpo-ctl", "status", "--socket", daemon.socket]
            shown = subprocess.run(ctl, timeout=60, check=True, stdout=subprocess.PIPE, text=True).stdout
            row = next(line.split() for line in shown.splitlines() if "measured" in line)
            assert row == ["pfs", "measured", "100.0", "%", "2", "300.0", "MB/s", "90.0", "MB/s"]
        assert awaited(daemon, "granted_bytes_per_s", None)["model"]["worth_bytes_per_s"] == pytest.approx(300e6)


def test_what_cannot_be_told_is_refused(tmp_path: pathlib.Path) -> None:
    def refused(client: mlpo.Client, *arguments: Any) -> str:
        with pytest.raises(mlpo.MlpoError) as caught:
            client.set_path_share(*arguments)
        assert caught.value.errno == errno.EPROTO
        return str(caught.value)

    rows = [[60e6, 1, 100e6, 1e9]]
    with Daemon(tmp_path, SMALL, more=node("a", tmp_path / "shared", '"measured"')) as daemon:
        with connected(daemon, new_job()) as client:
            assert "no path 'path0' with share" in refused(client, "path0", rows, 0)
            assert "no path 'x' with share" in refused(client, "x", rows, 0)
            assert '"me" (an index' in refused(client, "pfs", rows, 1)
            assert '"me" (an index' in refused(client, "pfs", [[60e6, 1, 100e6]], 0)
            assert '"me" (an index' in refused(client, "pfs", [[-1, 1, 100e6, 1e9]], 0)
            client.job = "somebody-elses"
            assert "no session of job 'somebody-elses'" in refused(client, "pfs", rows, 0)


def session_of_nobody(socket_name: str, until: int) -> None:
    """In a child process, for good: a session of user and group 65534, until the descriptor is closed."""
    code = 1
    try:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with mlpo.connect(socket=socket_name, job="other"):
            os.read(until, 1)
        code = 0
    finally:
        os._exit(code)


@pytest.mark.skipif(os.geteuid() != 0, reason="skipped: sessions of another user need root")
def test_nobody_takes_a_path_from_another_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("users")
    for folder in (directory, directory.parent, directory.parent.parent):
        folder.chmod(0o755)
    group = grp.getgrgid(65534).gr_name
    more = node("a", directory / "shared", '"measured"', LIMITS).replace("[daemon]\n", f'[daemon]\ngroup = "{group}"\n')
    with Daemon(directory, SMALL, more=more) as daemon, connected(daemon, new_job()) as client:
        rows = [[60e6, 1, 100e6, 1e9], [60e6, 1, 40e6, 1e9]]
        client.set_path_share("pfs", rows, 0)
        told = pfs(daemon)["node_share"]["granted_bytes_per_s"]
        assert told == pytest.approx(30e6)
        # With a second user's session what the first has told is no longer in force, and nobody can tell.
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(send)
            session_of_nobody(daemon.socket, receive)
        os.close(receive)
        try:
            awaited(daemon, "granted_bytes_per_s", None)
            with pytest.raises(mlpo.MlpoError, match="several users"):
                client.set_path_share("pfs", rows, 0)
        finally:
            os.close(send)
            _, status = os.waitpid(child, 0)
        assert status == 0
        awaited(daemon, "granted_bytes_per_s", told)  # alone again: what was told before counts


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    sockets: list[str], directory: pathlib.Path, path: str, local_size: Optional[int]
) -> list[dict[str, Any]]:
    """What node_shares_process.py prints on each rank."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLPO_")}
    environment |= {
        "MLPO_JOB": new_job(), "WORLD_SIZE": str(len(sockets)), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    environment |= {} if local_size is None else {"LOCAL_WORLD_SIZE": str(local_size)}
    ranks = []
    files = [directory / f"rank{rank}.log" for rank in range(len(sockets))]
    try:
        for rank, name in enumerate(sockets):
            with files[rank].open("w") as file:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, SCRIPT, path], env=environment | {"RANK": str(rank), "MLPO_SOCKET": name},
                        stdout=file, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        codes = [rank.wait(timeout=120) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    outputs = [file.read_text() for file in files]
    assert codes == [0] * len(sockets), "\n\n".join(outputs)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="skipped: this torch has no gloo",
)


@needs_distributed
def test_two_nodes_exchange_figures_while_they_train(tmp_path: pathlib.Path) -> None:
    """Two daemons on one directory stand for two nodes; a rank on each. The files of neither are the other's."""
    with contextlib.ExitStack() as stack:
        daemons = []
        for name in "ab":
            folder = tmp_path / name
            folder.mkdir()
            more = node(name, tmp_path / "shared", '"measured"', LIMITS)
            daemons.append(stack.enter_context(Daemon(folder, SMALL, more=more)))
        owner = str(os.geteuid())
        names = sorted(path.name for path in (tmp_path / "shared" / "mlpo" / owner).iterdir())
        assert names == ["a", "b"]
        shares = run_ranks([daemon.socket for daemon in daemons], tmp_path, "pfs", None)
        for share in shares:
            assert share["nodes"] == 2 and share["part"] == 0.5, shares
            assert share["granted_bytes_per_s"] > 0, shares


@needs_distributed
@pytest.mark.parametrize("local_size", [None, 2])
def test_ranks_of_one_node_have_nobody_to_tell(tmp_path: pathlib.Path, local_size: Optional[int]) -> None:
    """By what the launcher says, or what the first exchange finds."""
    with Daemon(tmp_path, SMALL, more=node("a", tmp_path / "shared", '"measured"', LIMITS)) as daemon:
        shares = run_ranks([daemon.socket] * 2, tmp_path, "pfs", local_size)
        assert all(share["nodes"] == 0 and share["granted_bytes_per_s"] is None for share in shares), shares


@needs_distributed
def test_without_measured_shares_nothing_is_exchanged(daemon_of, tmp_path: pathlib.Path) -> None:
    shares = run_ranks([daemon_of(SMALL_BLOCKS).socket] * 2, tmp_path, "path1", None)
    assert all(share["nodes"] == 0 and share["share"] == "1" for share in shares), shares
