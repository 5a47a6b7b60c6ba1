"""What the tests of looking into a daemon (inspect_*_test.py) have in common: real daemons with two paths, mlpo-ctl, and
the environment that both have. The first argument of the program is the folder of the programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from typing import Callable, Iterator

BIN = pathlib.Path(sys.argv[1])
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("MLPO_")}
DEADLINE = 60
libc = ctypes.CDLL(None, use_errno=True)


def ctl(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "mlpo-ctl"), *arguments]
    return subprocess.run(command, env=CLEAN, timeout=DEADLINE, capture_output=True, text=True, **options)  # type: ignore


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("it did not come true in time")
        time.sleep(0.02)


class Daemon:
    def __init__(self, folder: pathlib.Path, config: str) -> None:
        self.folder, self.socket = folder, str(folder / "mlpo.sock")
        (folder / "mlpo.toml").write_text(config + '\n[memory]\npool = "16MiB"\nblock = 16384\narenas = "64MiB"\n')
        self.paths = [folder / "one", folder / "two"]
        for path in self.paths:
            path.mkdir(exist_ok=True)
        command = [BIN / "mlpo-daemon", "--config", folder / "mlpo.toml", "--socket", self.socket]
        for path in self.paths:
            command += ["--path", path]
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=CLEAN, stdout=log, stderr=log)
        eventually(self.ready)

    def ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(self.log.read_text())
        return b"event=ready" in self.log.read_bytes()

    def thread(self, name: str) -> int:
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            if (task / "comm").read_text().strip() == name:
                return int(task.name)
        raise AssertionError(f"no thread {name}")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE)


@contextlib.contextmanager
def stopped_thread(thread: int) -> Iterator[None]:
    """Stops one thread alone, as if it were stuck."""
    seize, interrupt, detach, wall = 0x4206, 0x4207, 17, 0x40000000
    if libc.ptrace(seize, thread, None, None) != 0:
        raise unittest.SkipTest(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
    try:
        assert libc.ptrace(interrupt, thread, None, None) == 0
        os.waitpid(thread, wall)
        yield
    finally:
        libc.ptrace(detach, thread, None, None)


class Case(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="mlpo-inspect-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def daemon(self, folder: str = "", config: str = "") -> Daemon:
        (self.folder / folder).mkdir(exist_ok=True)
        daemon = Daemon(self.folder / folder, config)
        self.addCleanup(daemon.process.wait)
        self.addCleanup(daemon.process.kill)
        return daemon

    def train(self, daemon: Daemon) -> None:
        command = [BIN / "mlpo-bench", "train", "--params", "2M", "--steps", "3", "--socket", daemon.socket, "--json"]
        result = subprocess.run(command, env=CLEAN, timeout=DEADLINE, capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
