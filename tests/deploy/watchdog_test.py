"""What the daemon tells systemd: ready, stopping, and that it lives, as long as its main and its data thread get on.

    watchdog_test.py BUILD_FOLDER

Threads are stopped one by one, as a debugger does it. systemd's end of the socket is this test's.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import node

WATCHDOG_S = 0.8
_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_libc = ctypes.CDLL(None, use_errno=True)


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) != 0:
        error = ctypes.get_errno()
        if error == 1:
            node.skip("needs ptrace, which this machine does not allow")
        raise OSError(error, os.strerror(error))


class Stopped:
    """A thread that does nothing for a while."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        _ptrace(_SEIZE, self._thread)
        _ptrace(_INTERRUPT, self._thread)
        os.waitpid(self._thread, 0x40000000)  # __WALL: a thread of another process

    def __exit__(self, *_: object) -> None:
        _ptrace(_DETACH, self._thread)


def thread_of(pid: int, name: str) -> int:
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().startswith(name):
            return int(task.name)
    node.fail(f"the daemon has no thread {name}")


def check_progress(daemon: node.Service) -> None:
    pid = daemon.process.pid
    for name, thread in (("main", pid), ("data", thread_of(pid, "mlpo-data"))):
        with Stopped(thread):
            if not daemon.quiet_for(2 * WATCHDOG_S):
                node.fail(f"the watchdog is fed while the {name} thread hangs: {daemon.heard[-1]}")
        daemon.wait_for("WATCHDOG=1")
    for name in ("io-path", "mlpo-adam"):
        with Stopped(thread_of(pid, name)):
            for _ in range(4):
                daemon.wait_for("WATCHDOG=1", timeout=WATCHDOG_S)


def check_drain(daemon: node.Service, bench: list[str]) -> None:
    """With work that a device holds up, the deadline is extended until it comes."""
    trainer = subprocess.Popen(bench, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    daemon.wait_for("STATUS=ready, sessions: 2")
    time.sleep(0.5)
    with Stopped(thread_of(daemon.process.pid, "io-path")):
        time.sleep(0.5)  # so that all that there is waits for it
        daemon.process.terminate()
        daemon.wait_for("STOPPING=1")
        daemon.wait_for("STATUS=draining")
        for _ in range(3):
            daemon.wait_for("EXTEND_TIMEOUT_USEC=60000000", timeout=2 * WATCHDOG_S)
    if daemon.process.wait(60) != 0:
        node.fail(f"exit code {daemon.process.returncode}\n{daemon.log()}")
    if trainer.wait(60) == 0:
        node.fail("the trainer has not noticed that its daemon ended")


def main() -> None:
    programs = pathlib.Path(sys.argv[1]) / "bin"
    with tempfile.TemporaryDirectory(prefix="mlpo-watchdog.", dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        folder = pathlib.Path(name)
        (folder / "path").mkdir()
        socket, notify = f"{folder}/mlpo.sock", f"{folder}/notify"
        command = [f"{programs}/mlpo-daemon", "--socket", socket, "--path", f"{folder}/path", "--memory", "6MiB"]
        settings = {"MLPO_MEMORY__BLOCK": "64Ki", "XDG_CONFIG_HOME": name}
        watched = {**settings, "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}

        daemon = node.Service(command, notify, environment=watched)
        daemon.wait_for("READY=1")
        making = "making the first of a pool of 6291456 bytes"
        for step in ("opening path path", making, "registering the pool with path path"):
            said = daemon.heard.index(f"STATUS={step}") if f"STATUS={step}" in daemon.heard else len(daemon.heard)
            if daemon.heard[said + 1 : said + 2] != ["EXTEND_TIMEOUT_USEC=60000000"]:
                node.fail(f"no time for {step} was asked for: {daemon.heard}")
        daemon.wait_for("STATUS=ready, sessions: 0")
        check_progress(daemon)
        bench = [f"{programs}/mlpo-bench", "train", "--params", "3M", "--ranks", "2", "--steps", "1000000"]
        check_drain(daemon, [*bench, "--socket", socket])

        daemon = node.Service(command, notify, environment={**watched, "WATCHDOG_PID": "1"})
        daemon.wait_for("READY=1")
        daemon.wait_for("STATUS=ready")
        if not daemon.quiet_for(2 * WATCHDOG_S):
            node.fail(f"a watchdog for another process is fed as often as that asks: {daemon.heard}")
        daemon.stop()
        if "STOPPING=1" not in daemon.heard:
            node.fail(f"SIGTERM without STOPPING=1: {daemon.heard}")

        daemon = node.Service([*command, "--path", f"{folder}/nowhere"], f"@{folder}/notify", environment=settings)
        daemon.wait_for("STATUS=opening the path directory")
        if f"{folder}/nowhere" not in daemon.heard[-1] or daemon.process.wait(30) != 78:
            node.fail(f"a start that failed: {daemon.heard} {daemon.process.returncode}")

        for wrong in ("relative", f"{folder}/nobody-listens", "/" + 200 * "x"):
            daemon = node.Service(command, notify, environment={**settings, "NOTIFY_SOCKET": wrong})
            node.wait_until("ready", lambda: "event=ready" in daemon.log())
            daemon.stop()
            if "service_manager" not in daemon.log():
                node.fail(f"NOTIFY_SOCKET={wrong} without a word: {daemon.log()}")
    print("the watchdog is fed by progress, and only by that")


if __name__ == "__main__":
    main()
