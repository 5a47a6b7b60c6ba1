"""Jobs on several nodes: network namespaces with a daemon each, a directory that all of them see, torchrun on each."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Iterator

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from node_network import REPO, Node, missing, network, run_together  # noqa: E402

SCRIPT = pathlib.Path(__file__).with_name("node_training.py")
TESTBED = REPO / "tests" / "bench" / "testbed"
UID = str(os.geteuid())
STEPS = 14  # more than three exchanges of figures

_missing = missing()
if not _missing and not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    _missing = "this torch has no gloo"
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"skipped: {_missing}")


def config(own: pathlib.Path, shared: pathlib.Path, share: str = '"measured"', pool: str = "96KiB") -> str:
    """A small state does not fit the pool, and is cut into many blocks."""
    own.mkdir(exist_ok=True)
    shared.mkdir(exist_ok=True)
    return f"""
[memory]
pool = "{pool}"
block = 1024
arenas = "256MiB"
[adam]
workers = 1
pin = false
[[path]]
name = "own"
directory = "{own}"
[[path]]
name = "pfs"
directory = "{shared}"
share = {share}
read_limit = "400MB/s"
write_limit = "400MB/s"
"""


def start_daemons(nodes: list[Node], shared: pathlib.Path) -> None:
    for node in nodes:
        node.start_daemon(config(node.directory / "own", shared))


def rank_folders(listed: list[str]) -> dict[str, set[str]]:
    """Node to the ranks that have working files there: UID/NODE/UID-JOB/RANK-GENERATION/FILE."""
    found: dict[str, set[str]] = {}
    for file in listed:
        parts = file.split("/")
        if len(parts) == 5 and parts[2] == f"{UID}-nodes":
            found.setdefault(parts[1], set()).add(parts[3].partition("-")[0])
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
def test_nodes_train_as_the_ranks_of_one_do(tmp_path: pathlib.Path, count: int) -> None:
    """To the bit, each on files of its own below the directory that they share, and with an equal part of it."""
    shared = tmp_path / "shared"
    with network(count, tmp_path) as nodes:
        start_daemons(nodes, shared)
        said = run_together(nodes, lambda node: node.torchrun(SCRIPT, "train", STEPS, shared), 300)
        for each in said:
            assert rank_folders(each["files"]) == {f"node{rank}": {str(rank)} for rank in range(count)}, each["files"]
        for node in nodes:
            share = node.path("pfs")["node_share"]
            assert share["part"] == pytest.approx(1 / count)
            node.stop_daemon()
        assert {each["digest"] for each in said} == {said[0]["digest"]}
    alone = tmp_path / "alone"
    alone.mkdir()
    with network(1, alone) as (node,):
        node.start_daemon(config(node.directory / "own", tmp_path / "shared-alone"))
        (one,) = run_together(
            [node], lambda n: n.torchrun(SCRIPT, "train", STEPS, tmp_path / "shared-alone", ranks=count), 300
        )
        node.stop_daemon()
    assert one["digest"] == said[0]["digest"]


def test_daemons_are_told_what_the_other_nodes_see(tmp_path: pathlib.Path) -> None:
    """By the trainers' own all-gather: both nodes' figures reach both daemons, while the job is there."""
    with network(2, tmp_path) as nodes:
        start_daemons(nodes, tmp_path / "shared")
        said = run_together(nodes, lambda node: node.torchrun(SCRIPT, "updates", 1 << 20, 30, "pfs"), 300)
        for node, each in zip(nodes, said):
            assert each["share"]["nodes"] == 2 and each["share"]["granted_bytes_per_s"] > 0, each
            listening = subprocess.run(
                ["nsenter", f"--net=/run/netns/{node.namespace}", "ss", "-Htulnp"], capture_output=True, text=True
            )
            assert "mlpo" not in listening.stdout  # daemons serve nobody beyond their node
            deadline = time.monotonic() + 30
            while node.path("pfs")["node_share"]["granted_bytes_per_s"] is not None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            node.stop_daemon()


def await_line(node: Node, name: str, seconds: float) -> str:
    """The value of a JSON line that the trainer of this node prints."""
    deadline = time.monotonic() + seconds
    while True:
        for line in node.output.read_text().splitlines():
            if line.startswith("{") and name in json.loads(line):
                return str(json.loads(line)[name])
        assert time.monotonic() < deadline, node.output.read_text()
        time.sleep(0.05)


def test_a_node_that_dies_leaves_the_others_well(tmp_path: pathlib.Path) -> None:
    """The other node's daemon serves on, its files and what both have saved are whole, and the dead node's stay as they
    were until it comes back."""
    shared, saved = tmp_path / "shared", tmp_path / "checkpoints"
    saved.mkdir()
    with network(2, tmp_path) as (first, second):
        start_daemons([first, second], shared)
        parts = [node.torchrun(SCRIPT, "train_on", saved) for node in (first, second)]
        digests = {await_line(node, "saved", 180) for node in (first, second)}
        assert len(digests) == 1
        left = shared / "mlpo" / UID / "node1"
        second.die()
        # Its trainers cannot go on, and say so; the daemon has nothing of them any more.
        assert parts[0].wait(timeout=180) != 0
        deadline = time.monotonic() + 60
        while first.status()["sessions"]:
            assert time.monotonic() < deadline, first.status()
            time.sleep(0.05)
        status = first.status()
        assert status["state"] == "ready" and status["totals"]["sessions"] == 0
        assert all(path["state"] == "healthy" and path["error"] == "" for path in status["paths"])
        assert first.daemon is not None and first.daemon.poll() is None
        files = sorted(path for path in left.rglob("*") if path.is_file())
        sizes = [path.stat().st_size for path in files]
        assert any("1-" in str(path.relative_to(left)) for path in files), files
        # One node goes on, from what both have saved.
        first.count = 1
        (said,) = run_together([first], lambda node: node.torchrun(SCRIPT, "go_on", saved), 180)
        assert said == {"loaded": digests.pop(), "step": 3, "changed": True}
        assert [path.stat().st_size for path in files] == sizes  # nobody has touched what is not his
        # Not even when it is asked to: a node counts as dead some time after its last sign of life.
        refused = json.loads(first.ctl("gc", "--node", "node1", "--json", codes=(1,)))
        assert not refused["removed"] and "another host" in refused["failed"][0]["why"], refused
        assert all(path.exists() for path in files)
        # When the node comes back, its daemon removes what its last one has left.
        second.start_daemon(config(second.directory / "own", shared))
        assert not [path for path in files if path.exists() and f"{UID}-nodes" in str(path)]
        assert second.status()["state"] == "ready" and first.status()["state"] == "ready"
        second.stop_daemon()
        first.stop_daemon()
    for name in ("node0", "node1"):  # nothing of any session stays
        assert not list((shared / "mlpo" / UID / name).glob(f"{UID}-nodes/*/*"))


@pytest.fixture
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Paths with limits of their own, which hold for all processes that run under `testbed run`."""
    checked = subprocess.run([TESTBED, "check"], capture_output=True, text=True)
    if checked.returncode == 77:
        pytest.skip(f"skipped: {checked.stderr.strip()}")
    directory = tmp_path_factory.mktemp("testbed") / "paths"
    up = subprocess.run(
        [TESTBED, "up", "--dir", directory, "--paths", "3", "--size", "2"], capture_output=True, text=True
    )
    if up.returncode == 77:
        pytest.skip(f"skipped: {up.stderr.strip()}")
    try:
        assert up.returncode == 0, up.stderr
        yield directory
    finally:
        subprocess.run([TESTBED, "down", "--dir", directory], check=True, capture_output=True)


POOL = 96 << 20
LIMITS = {"nvme": (345e6, 265e6), "pfs": (180e6, 180e6), "third": (100e6, 100e6)}  # of profile paper


def limited(paths: dict[str, str], testbed: pathlib.Path) -> str:
    """Configuration with these paths of the testbed, name to `share`, and their limits declared as they are for all."""
    text = f'[memory]\npool = {POOL}\nblock = "256Ki"\narenas = "1GiB"\n[adam]\nworkers = 2\npin = false\n'
    for name, share in paths.items():
        read, write = LIMITS[name]
        text += f'[[path]]\nname = "{name}"\ndirectory = "{testbed / name}"\nshare = {share}\n'
        text += f"read_limit = {read}\nwrite_limit = {write}\nduplex = 0.5\n"
    return text


def period_s(nodes: list[Node], testbed: pathlib.Path, parameters: int, steps: int, counted: int) -> float:
    """The median of the last `counted` steps of a job with so many parameters on each node."""
    said = run_together(nodes, lambda node: node.torchrun(SCRIPT, "updates", parameters, steps, "pfs"), 600)
    print(json.dumps([each["share"] for each in said]))
    return max(statistics.median(each["periods"][-counted:]) for each in said)


def test_two_nodes_take_a_shared_path_in_equal_parts(testbed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With no other path, a step reads and writes both nodes' state at the one path's limit."""
    parameters = 16 << 20
    ideal_s = 2 * (12 * parameters - POOL) / min(LIMITS["pfs"])
    with network(2, tmp_path) as nodes:
        for node in nodes:
            node.start_daemon(limited({"pfs": '"equal"'}, testbed), [TESTBED, "run", "--dir", testbed])
        took_s = period_s(nodes, testbed, parameters, 12, 8)
        for node in nodes:
            node.stop_daemon()
    print(f"{took_s:.3f} s a step, {ideal_s:.3f} s at the limit: {ideal_s / took_s:.3f}")
    assert 0.9 <= ideal_s / took_s <= 1.03


def test_the_node_with_the_slower_paths_takes_more_of_the_shared_one(
    testbed: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The step is what all paths of both nodes together allow, though one node's own path is far slower. If both took
    as much of the shared path as they see of it, the slower node's step would be at 0.82 of that at best: for S bytes a
    node it has (100 + 90) MB/s until the other one is done, at S/(265 + 90), and (100 + 180) from then on."""
    parameters = 32 << 20
    own = {"node0": "nvme", "node1": "third"}
    e = {name: min(limits) for name, limits in LIMITS.items()}
    ideal_s = 2 * (12 * parameters - POOL) / sum(e.values())
    with network(2, tmp_path) as nodes:
        for node in nodes:
            paths = {own[node.name]: "1", "pfs": '"measured"'}
            node.start_daemon(limited(paths, testbed), [TESTBED, "run", "--dir", testbed])
        took_s = period_s(nodes, testbed, parameters, 48, 12)
        for node in nodes:
            node.stop_daemon()
    print(f"{took_s:.3f} s a step, {ideal_s:.3f} s at the limits: {ideal_s / took_s:.3f}")
    assert 0.85 <= ideal_s / took_s <= 1.03
