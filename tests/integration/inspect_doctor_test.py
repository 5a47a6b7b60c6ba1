"""mlpo-ctl doctor: its findings are compared with what this test does to the machine that the daemon sees. Arguments: the
folder of the programs, and which tests, if not all.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import resource
import sys
import tempfile
import time
import unittest
from typing import Callable, Iterator

from inspected import BIN, Case, ctl, libc


class Doctor(Case):
    def setUp(self) -> None:
        super().setUp()
        self.config = self.folder / "doctor.toml"
        self.config.write_text("")
        for name in ("one", "two"):
            (self.folder / name).mkdir()

    def findings(self, *flags: str, memory: str = "64MiB", **options: object) -> tuple[int, dict[str, list[dict]]]:
        arguments = ["doctor", "--json", "--socket", str(self.folder / "doctor.sock"), "--config", str(self.config)]
        shown = ctl(*arguments, "--memory", memory, *flags, **options)
        self.assertTrue(shown.stdout, shown.stderr)
        report = json.loads(shown.stdout)
        self.assertEqual(report["examined_by"], "check")
        found: dict[str, list[dict]] = {}
        for finding in report["findings"]:
            self.assertEqual(finding["advice"] == "", finding["level"] == "ok", finding)
            found.setdefault(finding["check"], []).append(finding)
        worst = max(["ok", "warning", "error"].index(finding["level"]) for finding in report["findings"])
        self.assertEqual(shown.returncode, [0, 2, 1][worst])
        self.assertEqual(report["state"], ["fine", "degraded", "failed"][worst])
        return shown.returncode, found

    def level(self, found: dict[str, list[dict]], check: str) -> str:
        self.assertEqual(len(found[check]), 1, found.get(check))
        return found[check][0]["level"]

    def test_a_path_that_is_fine(self) -> None:
        _, found = self.findings("--path", str(self.folder / "one"))
        self.assertEqual(self.level(found, "path"), "ok")
        self.assertEqual(self.level(found, "kernel"), "ok")
        self.assertEqual(self.level(found, "socket"), "ok")
        self.assertEqual(list((self.folder / "one").iterdir()), [])  # nothing is left behind
        self.assertFalse((self.folder / "doctor.sock").exists())

    def test_paths_that_are_not(self) -> None:
        code, found = self.findings("--path", str(self.folder / "missing"))
        self.assertEqual(code, 1)
        self.assertIn("make the directory", found["path"][0]["what"])
        code, found = self.findings()
        self.assertEqual((code, found["path"][0]["level"]), (1, "error"))
        self.assertIn("--path", found["path"][0]["advice"])
        _, found = self.findings("--path", str(self.folder / "one"), "--path", str(self.folder / "two"))
        self.assertEqual(self.level(found, "devices"), "warning")
        self.assertIn("one and two", found["devices"][0]["what"])
        (self.folder / "one" / "inner").mkdir()
        _, found = self.findings("--path", str(self.folder / "one"), "--path", str(self.folder / "one" / "inner"))
        self.assertEqual(self.level(found, "devices"), "error")

    def test_memory_that_is_not_there(self) -> None:
        code, found = self.findings("--path", str(self.folder / "one"), memory="1PiB")
        self.assertEqual((code, self.level(found, "memory")), (1, "error"))

    def test_wrong_configuration(self) -> None:
        self.config.write_text("[memory]\npoool = 1\n")
        code, found = self.findings()
        self.assertEqual(code, 1)
        self.assertIn("doctor.toml:2: unknown key memory.poool", found["configuration"][0]["what"])
        shown = ctl("doctor", "--no-such-flag")
        self.assertEqual(shown.returncode, 64)
        self.assertIn("--no-such-flag", shown.stderr)

    def test_a_socket_folder_for_everybody(self) -> None:
        self.folder.chmod(0o777)
        code, found = self.findings("--path", str(self.folder / "one"))
        self.assertEqual((code, self.level(found, "socket")), (1, "error"))
        self.assertIn("can be written by others", found["socket"][0]["what"])

    def test_tmpfs(self) -> None:
        if not os.access("/dev/shm", os.W_OK):
            self.skipTest("/dev/shm cannot be written")
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mlpo-inspect-") as memory:
            _, found = self.findings("--path", memory)
        self.assertEqual(self.level(found, "direct_io"), "warning")
        self.assertEqual(self.level(found, "file_system"), "warning")
        self.assertIn("is memory", found["file_system"][0]["what"])

    def test_a_low_memlock_limit(self) -> None:
        user = {}
        if os.geteuid() == 0:  # root's CAP_IPC_LOCK goes over the limit
            user = {"user": 65534, "group": 65534, "extra_groups": []}
            for folder in (self.folder, self.folder / "one"):
                os.chown(folder, 65534, 65534)
        if os.geteuid() == 0 and os.stat(BIN).st_mode & 0o005 != 0o005:
            self.skipTest("another user cannot run the programs")
        low = lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))  # noqa: E731
        try:
            _, found = self.findings("--path", str(self.folder / "one"), preexec_fn=low, **user)
        except PermissionError:
            self.skipTest("another user cannot run the programs")
        self.assertEqual(self.level(found, "memlock"), "warning")
        self.assertIn("65536 bytes", found["memlock"][0]["what"])
        self.assertIn("LimitMEMLOCK=infinity", found["memlock"][0]["advice"])

    def test_a_small_memory_cgroup(self) -> None:
        with cgroup("memory", {"memory.limit_in_bytes": "300M"}, {"memory.max": "300M"}) as enter:
            code, found = self.findings("--path", str(self.folder / "one"), memory="400MiB", preexec_fn=enter)
        self.assertEqual((code, self.level(found, "memory")), (1, "error"))
        self.assertIn("the memory cgroup", found["memory"][0]["what"])

    def test_a_small_cpu_quota(self) -> None:
        quota = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
        self.config.write_text("[adam]\nworkers = 4\n")
        with cgroup("cpu", quota, {"cpu.max": "150000 100000"}) as enter:
            _, found = self.findings("--path", str(self.folder / "one"), preexec_fn=enter)
        self.assertEqual(self.level(found, "cpu"), "warning")
        self.assertIn("1.5 CPUs", found["cpu"][0]["what"])
        self.assertIn("[adam] workers = 1", found["cpu"][0]["advice"])

    def test_io_uring_that_a_seccomp_filter_refuses(self) -> None:
        _, found = self.findings("--path", str(self.folder / "one"), preexec_fn=refuse_io_uring)
        self.assertEqual(self.level(found, "io_uring"), "warning")
        self.assertIn("seccomp", found["io_uring"][0]["advice"])
        self.config.write_text(f'[[path]]\ndirectory = "{self.folder}/one"\nengine = "io_uring"\n')
        code, found = self.findings(preexec_fn=refuse_io_uring)
        self.assertEqual((code, self.level(found, "io_uring")), (1, "error"))
        self.config.write_text(f'[[path]]\ndirectory = "{self.folder}/one"\nengine = "threads"\n')
        _, found = self.findings(preexec_fn=refuse_io_uring)
        self.assertEqual(self.level(found, "io_uring"), "ok")

    def test_a_running_daemon_looks_itself(self) -> None:
        daemon = self.daemon()
        shown = ctl("doctor", "--json", "--socket", daemon.socket)
        report = json.loads(shown.stdout)
        self.assertEqual(report["examined_by"], "daemon")
        self.assertIn(shown.returncode, (0, 2))
        self.assertEqual([f["path"] for f in report["findings"] if f["check"] == "path"], ["one", "two"])
        text = ctl("doctor", "--socket", daemon.socket)
        self.assertIn("examined by the running daemon", text.stdout)
        # With flags it is about another daemon, and this one is not asked.
        shown = ctl("doctor", "--json", "--socket", daemon.socket, "--path", str(self.folder / "missing"))
        self.assertEqual(json.loads(shown.stdout)["examined_by"], "check")
        # A folder that was lost since the start.
        (self.folder / "one").rename(self.folder / "lost")
        report = json.loads(ctl("doctor", "--json", "--socket", daemon.socket).stdout)
        self.assertEqual([f["path"] for f in report["findings"] if f["check"] == "path" and f["level"] == "error"], ["one"])
        self.assertEqual(sorted(entry.name for entry in (self.folder / "two").iterdir()), ["mlpo"])


@contextlib.contextmanager
def cgroup(controller: str, v1: dict[str, str], v2: dict[str, str]) -> Iterator[Callable[[], None]]:
    """A cgroup below the root's with these limits; what it yields puts the calling process into it."""
    top = pathlib.Path("/sys/fs/cgroup")
    unified = (top / "cgroup.controllers").exists()
    group = (top if unified else top / controller) / f"mlpo-inspect-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise unittest.SkipTest(f"no cgroup can be made: {error}") from None
    try:
        try:
            for name, value in (v2 if unified else v1).items():
                (group / name).write_text(value)
        except OSError as error:
            raise unittest.SkipTest(f"the cgroup takes no limit: {error}") from None
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        end = time.monotonic() + 10
        while group.exists() and time.monotonic() < end:
            with contextlib.suppress(OSError):  # its last process may not be gone yet
                group.rmdir()


def refuse_io_uring() -> None:
    """In the child: io_uring_setup is EPERM from here on."""

    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]

    load_number, equal, answer = 0x20, 0x15, 0x06
    code = (Instruction * 4)(
        Instruction(load_number, 0, 0, 0),
        Instruction(equal, 0, 1, 425),  # io_uring_setup, on every architecture
        Instruction(answer, 0, 0, 0x00050000 | 1),  # SECCOMP_RET_ERRNO, EPERM
        Instruction(answer, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    )
    program = Program(4, code)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) != 0 or libc.prctl(set_seccomp, filter_mode, ctypes.byref(program)) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
