"""Nodes on one machine: network namespaces on a switch of their own, each with a host name, a daemon and trainers.

Nothing of the machine's own network is touched: the switch is a bridge in one more namespace. Processes see the
machine's file systems, so that a directory can be what nodes share. Needs root, ip, nsenter and unshare.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import IO, Any, Callable, Iterator, Optional, Sequence

REPO = pathlib.Path(__file__).resolve().parents[2]
PORT = 29500  # of rank 0's store; free in a namespace of its own

_numbers = itertools.count()


def program(name: str) -> pathlib.Path:
    """A program of the build: beside $MLPO_DAEMON, if that is set."""
    daemon = pathlib.Path(os.environ.get("MLPO_DAEMON", REPO / "build" / "bin" / "mlpo-daemon"))
    found = daemon.with_name(name)
    if not found.exists():
        raise FileNotFoundError(f"{found} is missing: build the project, or set MLPO_DAEMON")
    return found


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


def missing() -> str:
    """Why there can be no nodes here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for needed in ("ip", "nsenter", "unshare"):
        if shutil.which(needed) is None:
            return f"there is no program {needed} (Debian: iproute2, util-linux)"
    try:
        with network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"this machine makes no network of namespaces: {' '.join(error.cmd)}: {error.stderr.strip()}"


class Node:
    """One of them. Processes that run here are ended with the network."""

    def __init__(self, namespace: str, index: int, directory: pathlib.Path, count: int) -> None:
        self.name = f"node{index}"
        self.index, self.count = index, count
        self.address = f"10.77.0.{index + 1}"
        self.directory = directory / self.name
        self.directory.mkdir()
        self.socket = str(self.directory / "mlpo.sock")
        self.namespace = namespace
        self._started: list[subprocess.Popen[bytes]] = []
        self.daemon: Optional[subprocess.Popen[bytes]] = None

    def start(self, command: Sequence[object], log: IO[bytes], **environment: str) -> subprocess.Popen[bytes]:
        """Starts a command on this node; its pid is the command's."""
        inside = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "sh", "-c"]
        named = 'hostname "$0" && exec "$@"'
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MLPO_")}
        process = subprocess.Popen(
            [*inside, named, self.name, *map(str, command)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=clean | environment,
        )  # fmt: skip
        self._started.append(process)
        return process

    def start_daemon(self, config: str, under: Sequence[object] = ()) -> None:
        """Starts the node's daemon and waits until it serves. `under`: a command that runs it."""
        file = self.directory / "mlpo.toml"
        file.write_text(config)
        command = [*under, program("mlpo-daemon"), "--config", file, "--socket", self.socket]
        with self.log.open("ab") as log:
            self.daemon = self.start(command, log)
        deadline = time.monotonic() + 60
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, contextlib.suppress(OSError):
                probe.connect(self.socket)
                return
            assert self.daemon.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    @property
    def log(self) -> pathlib.Path:
        return self.directory / "daemon.log"

    def stop_daemon(self) -> None:
        """In order, which it must."""
        assert self.daemon is not None
        self.daemon.send_signal(signal.SIGTERM)
        assert self.daemon.wait(timeout=60) == 0, self.log.read_text()

    def ctl(self, *arguments: str, codes: Sequence[int] = (0,)) -> str:
        """mlpo-ctl, of this node's daemon."""
        command = [program("mlpo-ctl"), *arguments, "--socket", self.socket]
        done = subprocess.run(command, timeout=60, capture_output=True, text=True)
        assert done.returncode in codes, done.stdout + done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.ctl("status", "--json", codes=(0, 2))))

    def path(self, name: str) -> dict[str, Any]:
        """The daemon's view of a path."""
        (found,) = [path for path in self.status()["paths"] if path["name"] == name]
        return dict(found)

    def torchrun(self, script: pathlib.Path, *arguments: object, ranks: int = 1) -> subprocess.Popen[bytes]:
        """This node's part of a job on all nodes, launched as users do; its output is in `output`."""
        launch = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.count}", f"--nproc-per-node={ranks}",
            f"--node-rank={self.index}", "--master-addr=10.77.0.1", f"--master-port={PORT}",
        ]  # fmt: skip
        with self.output.open("wb") as log:
            return self.start(
                [*launch, script, *arguments], log,
                MLPO_SOCKET=self.socket, MLPO_JOB="nodes", GLOO_SOCKET_IFNAME="eth0" if self.count > 1 else "lo",
                OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1",
            )  # fmt: skip

    @property
    def output(self) -> pathlib.Path:
        return self.directory / "trainer.log"

    def die(self) -> None:
        """As a node does that loses its power: whatever runs here is killed at once."""
        for _ in range(3):  # those that are being made meanwhile, too
            listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
            for pid in map(int, listed.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait(timeout=60)


@contextlib.contextmanager
def network(count: int, directory: Optional[pathlib.Path] = None) -> Iterator[list[Node]]:
    """`count` nodes that reach each other, at 10.77.0.1 and on. Their folders are in `directory`; None: no nodes, only
    the namespaces, to see whether they can be."""
    prefix = f"mlpo{os.getpid()}-{next(_numbers)}"
    switch = f"{prefix}-switch"
    namespaces: list[str] = []
    nodes: list[Node] = []
    try:
        _ip("netns", "add", switch)
        namespaces.append(switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for index in range(count):
            name = f"{prefix}-node{index}"
            _ip("netns", "add", name)
            namespaces.append(name)
            port = f"port{index}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "address", "add", f"10.77.0.{index + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            if directory is not None:
                nodes.append(Node(name, index, directory, count))
        yield nodes
    finally:
        for node in nodes:
            node.die()
        for name in namespaces:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)


def run_together(nodes: Sequence[Node], start: Callable[[Node], subprocess.Popen[bytes]], timeout: float) -> list[Any]:
    """Starts a part on each node, waits for all, and returns the JSON line that each node's output ends with."""
    parts = [start(node) for node in nodes]
    deadline = time.monotonic() + timeout
    codes: list[Optional[int]] = []
    for part in parts:
        try:
            codes.append(part.wait(timeout=max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    said = "\n\n".join(f"{node.name}:\n{node.output.read_text()}" for node in nodes)
    assert codes == [0] * len(parts), f"exit codes {codes}; None: not ended after {timeout} s\n{said}"
    lines = [[line for line in node.output.read_text().splitlines() if line.startswith("{")] for node in nodes]
    assert all(lines), said
    return [json.loads(each[-1]) for each in lines]
