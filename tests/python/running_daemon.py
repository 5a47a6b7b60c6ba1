"""A private daemon for tests: its own socket, paths in a temporary directory, its log kept."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import Any, Callable, Optional

REPO = pathlib.Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Layout:
    """How a daemon is set up; frozen, so that tests with the same one share a daemon."""

    paths: int = 2
    pool: str = "64MiB"
    block: int = 1 << 20  # parameters
    engine: str = "auto"
    target: str = "auto"
    persistent: bool = False  # its paths

    def __str__(self) -> str:
        kept = "-persistent" if self.persistent else ""
        return f"{self.paths}-path-{self.pool}-block{self.block}-{self.engine}-{self.target}{kept}"


# Blocks of 1024 parameters take 12 KiB, so that a model of 100,000 parameters has a hundred of them.
SMALL_BLOCKS = Layout(block=1024, pool="256KiB")
THREE_BUFFERS = Layout(block=1024, pool="36KiB")


def program() -> pathlib.Path:
    """The daemon under test: $MLPO_DAEMON, else the build's."""
    found = pathlib.Path(os.environ.get("MLPO_DAEMON", REPO / "build" / "bin" / "mlpo-daemon"))
    if not found.exists():
        raise FileNotFoundError(f"{found} is missing: build the project, or set MLPO_DAEMON")
    return found


def lacks(target: str) -> str:
    """Why this CPU cannot run the kernel's instruction set, or ""."""
    needed = {"avx2": ["avx2", "fma"], "avx512": ["avx512f", "avx512bw", "avx512dq", "avx512vl"]}.get(target, [])
    flags: set[str] = set()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.split())
            break
    missing = [flag for flag in needed if flag not in flags]
    return f"this CPU lacks {', '.join(missing)} for {target}" if missing else ""


class Daemon:
    """A running daemon. Use as a context manager; stopping checks that it leaves in order."""

    def __init__(
        self,
        directory: pathlib.Path,
        layout: Layout,
        again: bool = False,
        enter: Optional[Callable[[], None]] = None,
        more: str = "",
    ) -> None:
        """`again`: on the paths that an earlier one had there. `enter`: called in its process before the program.
        `more`: of the configuration, behind the layout's."""
        self.layout = layout
        self.socket = str(directory / "mlpo.sock")
        self.log = directory / "daemon.log"
        config = directory / "mlpo.toml"
        lines = [
            "[memory]", f'pool = "{layout.pool}"', f"block = {layout.block}", 'arenas = "4GiB"',
            "[adam]", f'target = "{layout.target}"', "pin = false",
        ]  # fmt: skip
        self.path_directories = [directory / f"path{index}" for index in range(layout.paths)]
        for path in self.path_directories:
            path.mkdir(exist_ok=again)
            lines += ["[[path]]", f'directory = "{path}"', f'engine = "{layout.engine}"']
            lines += ["persistent = true"] if layout.persistent else []
        config.write_text("\n".join(lines) + "\n" + more)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MLPO_")}
        with self.log.open("ab" if again else "wb") as log:
            self.process = subprocess.Popen(
                [program(), "--config", config, "--socket", self.socket],
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=enter,
            )
        try:
            self._await_socket()
        except BaseException:
            self.kill()
            raise

    def _await_socket(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the daemon left with {self.process.returncode}:\n{self.log.read_text()}")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                try:
                    probe.connect(self.socket)
                    return
                except OSError:
                    time.sleep(0.01)
        raise RuntimeError(f"no socket after 30 s:\n{self.log.read_text()}")

    def status(self) -> Any:
        """What mlpo-ctl status tells, as JSON."""
        ctl = [program().parent / "mlpo-ctl", "status", "--json", "--socket", self.socket]
        return json.loads(subprocess.run(ctl, timeout=60, check=True, stdout=subprocess.PIPE).stdout)

    def pause(self) -> None:
        """Nothing is answered from the return on until resume(); the daemon lives."""
        self.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task")
        while any(stat.read_text().rpartition(")")[2].split()[0] not in "TZ" for stat in tasks.glob("*/stat")):
            assert time.monotonic() < deadline, "the daemon does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM; the daemon must leave with 0."""
        self.resume()
        self.process.terminate()
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the daemon did not stop within 30 s:\n{self.log.read_text()}") from None
        assert code == 0, f"the daemon left with {code}:\n{self.log.read_text()}"

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()
