"""The counters file, with real daemons: read by the layout of FORMAT.md, it says what status says; and what mlpo-ctl makes
of it when the daemon does not answer. Arguments: the folder of the programs, and which tests, if not all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import socket
import stat
import struct
import sys
import time
import unittest
from typing import Iterator

from inspected import Case, ctl, eventually, stopped_thread

HEADER = struct.Struct("<QIIQiIqqqqII11Q32s136s")  # FORMAT.md, section 9
HEADER_FIELDS = (
    "magic version bytes sequence pid paths started_ns written_ns main_beat_ns data_beat_ns state adam_workers sessions "
    "parameters protocol_errors lost_wakeups arenas_bytes arenas_limit_bytes pool_bytes pool_buffer_bytes cached_blocks "
    "dirty_blocks free_blocks daemon_version node"
).split()
PATH = struct.Struct("<136s256sIIII8Q")
PATH_FIELDS = (
    "name directory state engine direct_io in_flight read_bytes written_bytes read_bytes_per_s write_bytes_per_s "
    "scratch_bytes checkpoint_bytes read_errors write_errors"
).split()


def read_counters(file: str) -> dict[str, object]:
    data = pathlib.Path(file).read_bytes()
    header = dict(zip(HEADER_FIELDS, HEADER.unpack_from(data)))
    header["path_records"] = [
        dict(zip(PATH_FIELDS, PATH.unpack_from(data, HEADER.size + i * PATH.size))) for i in range(header["paths"])
    ]
    header["length"] = len(data)
    return header


class Counters(Case):
    def test_they_say_what_status_says(self) -> None:
        daemon = self.daemon()
        self.train(daemon)
        file = daemon.socket + ".counters"
        self.assertEqual(stat.S_IMODE(os.stat(file).st_mode), 0o644)
        status = json.loads(ctl("status", "--json", "--socket", daemon.socket).stdout)
        self.assertGreater(status["paths"][0]["written_bytes"], 0)
        eventually(lambda: read_counters(file)["path_records"][0]["written_bytes"] == status["paths"][0]["written_bytes"])
        eventually(lambda: read_counters(file)["sessions"] == 0)
        counters = read_counters(file)
        self.assertEqual(counters["length"], counters["bytes"])
        self.assertEqual((counters["magic"], counters["version"]), (0x52544E434F504C4D, 1))
        self.assertEqual(counters["pid"], daemon.process.pid)
        self.assertEqual(counters["pool_bytes"], status["pool"]["bytes"])
        self.assertEqual(counters["node"].rstrip(b"\0").decode(), status["node"])
        for record, path in zip(counters["path_records"], status["paths"], strict=True):
            for key in ("read_bytes", "written_bytes", "scratch_bytes", "read_errors", "write_errors"):
                self.assertEqual(record[key], path[key], key)
            self.assertEqual(record["directory"].rstrip(b"\0").decode(), path["directory"])
        now = time.monotonic_ns()
        for beat in ("written_ns", "main_beat_ns", "data_beat_ns"):
            self.assertLess(abs(now - counters[beat]), 5e9, beat)
        self.assertEqual(daemon.end(), 0)
        self.assertFalse(os.path.exists(file))

    def test_nobody_is_named(self) -> None:
        daemon = self.daemon()
        self.train(daemon)
        self.assertNotIn(b"bench", pathlib.Path(daemon.socket + ".counters").read_bytes())

    def test_a_stuck_thread(self) -> None:
        one, two = self.daemon("a"), self.daemon("b")  # at once: each takes until the thread counts as stuck
        beat = lambda daemon, name: read_counters(daemon.socket + ".counters")[name]  # noqa: E731
        with stopped_thread(one.process.pid), stopped_thread(two.thread("mlpo-data")):
            eventually(lambda: time.monotonic_ns() - beat(one, "main_beat_ns") > 5.2e9)
            eventually(lambda: time.monotonic_ns() - beat(two, "data_beat_ns") > 5.2e9)
            shown = ctl("status", "--json", "--timeout", "0.5", "--socket", one.socket)
            self.assertEqual(shown.returncode, 2, shown.stderr)
            status = json.loads(shown.stdout)
            self.assertEqual(status["counters"]["not_answering"], ["main"])
            self.assertGreater(status["counters"]["main_s"], 5)
            self.assertLess(status["counters"]["data_s"], 5)
            self.assertEqual([path["name"] for path in status["paths"]], ["one", "two"])
            text = ctl("paths", "--timeout", "0.5", "--socket", one.socket).stdout
            self.assertIn("its main thread has not gone round its loop for", text)
            self.assertIn(str(one.paths[1]), text)
            shown = ctl("status", "--json", "--timeout", "0.5", "--socket", two.socket)
            self.assertEqual(shown.returncode, 1, shown.stderr)
            self.assertEqual(json.loads(shown.stdout)["counters"]["not_answering"], ["data"])
        for daemon in one, two:
            eventually(lambda daemon=daemon: ctl("status", "--socket", daemon.socket).returncode == 0)

    def test_a_stopped_daemon_and_a_dead_one(self) -> None:
        daemon = self.daemon()
        daemon.process.send_signal(signal.SIGSTOP)
        shown = ctl("status", "--socket", daemon.socket)
        self.assertIn("does not answer", shown.stdout)
        self.assertIn(str(daemon.paths[0]), shown.stdout)
        daemon.end(signal.SIGKILL)
        file = daemon.socket + ".counters"
        self.assertTrue(os.path.exists(file))
        with listening(daemon.socket + ".ctl"):
            shown = ctl("status", "--timeout", "0.2", "--socket", daemon.socket)
            self.assertEqual(shown.returncode, 69)
            self.assertIn("the daemon that wrote it has died", shown.stderr)
        os.unlink(daemon.socket + ".ctl")
        before = read_counters(file)["started_ns"]
        daemon.log.write_bytes(b"")
        again = self.daemon()
        self.assertGreater(read_counters(file)["started_ns"], before)
        self.assertEqual(again.end(), 0)

    def test_what_is_no_counters_file(self) -> None:
        daemon = self.daemon()
        good = pathlib.Path(daemon.socket + ".counters").read_bytes()
        daemon.end()
        name = self.folder / "other.sock"
        file = self.folder / "other.sock.counters"
        bad = {
            "cut short": [b"", good[:100], good[:327]],
            "does not begin": [b"X" + good[1:], bytes(len(good))],
            "its layout is version 2": [good[:8] + struct.pack("<I", 2) + good[12:]],
            "bytes, and says": [good[:-1], good + b"x", good[:28] + struct.pack("<I", 0xFFFFFFFF) + good[32:],
                                good[:12] + struct.pack("<I", 0xFFFFFFFF) + good[16:]],
            "which is too many": [good + bytes(2 << 20)],
        }  # fmt: skip
        with listening(f"{name}.ctl"):
            for expected, contents in bad.items():
                for content in contents:
                    file.write_bytes(content)
                    with self.subTest(expected, bytes=len(content)), locked(file):
                        shown = ctl("status", "--timeout", "0.1", "--socket", str(name))
                        self.assertEqual((shown.returncode, shown.stdout), (69, ""))
                        self.assertIn(expected, shown.stderr)
            # States, engines and texts without an end are shown, not trusted. It is odd: as if being written for ever.
            wild = bytearray(good)
            wild[16:24] = struct.pack("<Q", 7)
            wild[64:68] = b"\xff\xff\xff\xff"
            wild[192:] = b"\xff" * (len(wild) - 192)
            file.write_bytes(wild)
            with locked(file):
                shown = ctl("status", "--json", "--timeout", "0.1", "--socket", str(name))
                self.assertEqual(json.loads(shown.stdout)["state"], "?")
            for make in (lambda: file.symlink_to(self.folder / "mlpo.toml"), lambda: os.mkfifo(file), file.mkdir):
                file.unlink()
                make()
                shown = ctl("status", "--timeout", "0.1", "--socket", str(name))
                self.assertEqual((shown.returncode, shown.stdout), (69, ""))
                if file.is_dir():
                    file.rmdir()
                    file.touch()

    def test_a_foreign_thing_in_its_place_is_a_start_error(self) -> None:
        (self.folder / "mlpo.sock.counters").mkdir()
        with self.assertRaisesRegex(AssertionError, "mlpo.sock.counters is not a regular file: remove it"):
            self.daemon()


@contextlib.contextmanager
def listening(name: str) -> Iterator[None]:
    """A socket that accepts and never answers."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(name)
        silent.listen(100)
        yield


@contextlib.contextmanager
def locked(file: pathlib.Path) -> Iterator[None]:
    with file.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
