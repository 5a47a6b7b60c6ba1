"""mlpo-ctl doctor, metrics, top, trace and the counters, with real daemons. Arguments: the folder of the programs,
and which tests, if not all.

What is compared with what: metrics (read by prometheus_client's parser) with status; the counters file (read by the layout
of FORMAT.md) with status; the doctor's findings with what this test does to the machine that the daemon sees.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pathlib
import pty
import re
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest
import urllib.request
from typing import Callable, Iterator

BIN = pathlib.Path(sys.argv[1])
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("MLPO_")}
DEADLINE = 60
libc = ctypes.CDLL(None, use_errno=True)

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


def ctl(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "mlpo-ctl"), *arguments]
    return subprocess.run(command, env=CLEAN, timeout=DEADLINE, capture_output=True, text=True, **options)  # type: ignore


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("it did not come true in time")
        time.sleep(0.02)


def read_counters(file: str) -> dict[str, object]:
    data = pathlib.Path(file).read_bytes()
    header = dict(zip(HEADER_FIELDS, HEADER.unpack_from(data)))
    header["path_records"] = [
        dict(zip(PATH_FIELDS, PATH.unpack_from(data, HEADER.size + i * PATH.size))) for i in range(header["paths"])
    ]
    header["length"] = len(data)
    return header


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


class Bench(Case):
    """mlpo-ctl bench, and what becomes of its result."""

    def bench(self, daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
        return ctl("bench", "--json", "--socket", daemon.socket, *arguments)

    def model(self, daemon: Daemon) -> list[dict[str, object]]:
        paths = json.loads(ctl("paths", "--json", "--socket", daemon.socket).stdout)["paths"]
        return [{**path["model"], "lifetime": path["lifetime_written_bytes"]} for path in paths]

    def record(self, daemon: Daemon, path: int) -> pathlib.Path:
        (file,) = daemon.paths[path].glob("mlpo/*/*/record.json")
        return file

    def test_is_measured_saved_and_gone_by(self) -> None:
        daemon = self.daemon()
        self.assertEqual([model["from"] for model in self.model(daemon)], ["default", "default"])
        shown = self.bench(daemon, "--seconds", "0.05")
        self.assertEqual(shown.returncode, 0, shown.stderr)
        results = json.loads(shown.stdout)["paths"]
        self.assertEqual([result["name"] for result in results], ["one", "two"])
        for result, model in zip(results, self.model(daemon), strict=True):
            self.assertEqual((result["from"], model["from"], result["not_saved"]), ("calibrated", "calibrated", ""))
            self.assertGreater(result["read_bytes_per_s"], 1e6)
            self.assertGreater(result["write_bytes_per_s"], 1e6)
            self.assertTrue(0.5 <= result["duplex"] <= 2)
            # The two are folders of one device: together they have less than each had alone, and both are told so.
            share = min(1, result["together_bytes_per_s"] / result["mixed_bytes_per_s"])
            if share < 0.9:
                self.assertAlmostEqual(model["read_bytes_per_s"] / result["read_bytes_per_s"], share, 6)
            else:
                self.assertEqual(model["read_bytes_per_s"], result["read_bytes_per_s"])
        before = self.model(daemon)
        names = sorted(file.name for path in daemon.paths for file in path.glob("mlpo/*/*/*"))
        self.assertEqual(names, ["lock", "lock", "record.json", "record.json"])
        self.train(daemon)
        self.assertEqual(daemon.end(), 0)
        daemon.log.unlink()
        # The next daemon knows, and counts on.
        again = self.daemon(config="[scheduler]\nlearn = false\n")
        for was, model in zip(before, self.model(again), strict=True):
            self.assertEqual(model["from"], "calibrated")
            self.assertEqual(model["read_bytes_per_s"], was["read_bytes_per_s"])
            self.assertGreaterEqual(model["lifetime"], 2_000_000 * 12 // 4)
        self.assertEqual(again.end(), 0)

    def test_what_is_declared_stays(self) -> None:
        one, two = self.folder / "one", self.folder / "two"
        config = f'[[path]]\ndirectory = "{one}"\nread_limit = "3GB/s"\nwrite_limit = "2GB/s"\nduplex = 0.5\n'
        daemon = self.daemon(config=config + f'[[path]]\ndirectory = "{two}"\nwrite_budget = "1TB/day"\n')
        shown = self.bench(daemon, "--seconds", "0.02", "one")
        self.assertEqual(shown.returncode, 0, shown.stderr)
        self.assertEqual([result["from"] for result in json.loads(shown.stdout)["paths"]], ["declared"])
        model, other = self.model(daemon)
        self.assertEqual((model["from"], model["read_bytes_per_s"]), ("declared", 3e9))
        self.assertAlmostEqual(model["worth_bytes_per_s"] / 2e9, 1, 6)
        self.assertEqual(other["from"], "default")
        self.assertIn("calibration", json.loads(self.record(daemon, 0).read_text()))

    def test_is_refused_or_ended_for_sessions(self) -> None:
        daemon = self.daemon()
        unknown = self.bench(daemon, "nowhere")
        self.assertEqual(unknown.returncode, 1)
        self.assertIn("no path 'nowhere'; there are: one, two", unknown.stderr)
        command = [BIN / "mlpo-bench", "train", "--params", "2M", "--steps", "100000", "--socket", daemon.socket]
        sessions = lambda: json.loads(ctl("status", "--json", "--socket", daemon.socket).stdout)["sessions"]  # noqa: E731
        long = [BIN / "mlpo-ctl", "bench", "--seconds", "60", "--socket", daemon.socket]
        requests = lambda: daemon.log.read_bytes().count(b"event=bench_requested")  # noqa: E731
        before = requests()
        with subprocess.Popen(long, env=CLEAN, stderr=subprocess.PIPE, text=True) as asking:
            eventually(lambda: requests() > before)
            eventually(lambda: "under way" in self.bench(daemon).stderr)
            with subprocess.Popen(command, env=CLEAN, stdout=subprocess.DEVNULL) as training:
                self.addCleanup(training.kill)
                _, said = asking.communicate(timeout=DEADLINE)
                self.assertIn("a session has connected", said)
                self.assertEqual(asking.returncode, 1)
                eventually(sessions)
                refused = self.bench(daemon)
                self.assertEqual(refused.returncode, 1)
                self.assertIn("sessions are connected (1)", refused.stderr)
                training.terminate()
        # Who goes away ends it: then there is place for the next.
        eventually(lambda: not sessions())
        before = requests()
        with subprocess.Popen(long, env=CLEAN, stderr=subprocess.DEVNULL) as asking:
            eventually(lambda: requests() > before)
            asking.kill()
        eventually(lambda: self.bench(daemon, "--seconds", "0.02", "two").returncode == 0)
        self.assertEqual(daemon.end(), 0)

    def test_what_has_ended_it_is_told(self) -> None:
        daemon = self.daemon()
        # Housekeeping makes its files and fills its buffers: held up, so that the daemon is told to stop before that.
        with contextlib.ExitStack() as held:
            for thread in pathlib.Path(f"/proc/{daemon.process.pid}/task").iterdir():
                try:
                    name = (thread / "comm").read_text().strip()
                except OSError:  # it has ended
                    continue
                if name == "mlpo-daemon" and int(thread.name) != daemon.process.pid:
                    held.enter_context(stopped_thread(int(thread.name)))
            command = [BIN / "mlpo-ctl", "bench", "--socket", daemon.socket]
            asking = subprocess.Popen(command, env=CLEAN, stderr=subprocess.PIPE, text=True)
            self.addCleanup(asking.wait)
            self.addCleanup(asking.kill)
            eventually(lambda: b"event=bench_requested" in daemon.log.read_bytes())
            daemon.process.send_signal(signal.SIGTERM)
            eventually(lambda: b"event=drain " in daemon.log.read_bytes())
        _, said = asking.communicate(timeout=DEADLINE)
        self.assertIn("the daemon is stopping", said)
        self.assertEqual(asking.returncode, 1)
        self.assertEqual(daemon.process.wait(DEADLINE), 0)

    def test_a_bad_record_is_no_failed_start(self) -> None:
        daemon = self.daemon()
        self.train(daemon)
        self.assertEqual(daemon.end(), 0)
        daemon.log.unlink()
        good = self.record(daemon, 0).read_text()
        self.record(daemon, 0).write_text(good.replace("}", ',"calibration":{"read_bytes_per_s":-1}}'))
        self.record(daemon, 1).unlink()
        (self.folder / "two/mlpo" / str(os.getuid()) / os.uname().nodename / "record.json").symlink_to("/etc/passwd")
        again = self.daemon()
        self.assertEqual([model["from"] for model in self.model(again)], ["default", "default"])
        self.assertEqual(again.log.read_bytes().count(b"event=record_ignored"), 2)


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


def parse(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    sys.path.append("/usr/lib/python3/dist-packages")  # where Debian has it, whichever Python runs this
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise unittest.SkipTest("python3-prometheus-client is not installed") from None
    finally:
        sys.path.pop()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def sample(metrics: dict, name: str, **labels: str) -> float:
    return metrics[name, tuple(sorted(labels.items()))]


class Metrics(Case):
    def compare(self, metrics: dict, status: dict) -> None:
        self.assertEqual(sample(metrics, "mlpo_pool_bytes"), status["pool"]["bytes"])
        self.assertEqual(sample(metrics, "mlpo_pool_free_blocks"), status["pool"]["free_blocks"])
        self.assertEqual(sample(metrics, "mlpo_sessions"), status["totals"]["sessions"])
        self.assertEqual(sample(metrics, "mlpo_arenas_limit_bytes"), status["arenas_limit_bytes"])
        self.assertEqual(sample(metrics, "mlpo_state", state=status["state"]), 1)
        states = [value for (name, _), value in metrics.items() if name == "mlpo_state"]
        self.assertEqual((len(states), sum(states)), (4, 1))
        for path in status["paths"]:
            for direction, key, errors in (("read", "read_bytes", "read_errors"), ("write", "written_bytes", "write_errors")):
                of_path = {"path": path["name"], "direction": direction}
                self.assertEqual(sample(metrics, "mlpo_path_bytes_total", **of_path), path[key])
                self.assertEqual(sample(metrics, "mlpo_path_errors_total", **of_path), path[errors])
            for key in ("checksum_mismatches", "checksum_errors"):
                self.assertEqual((path[key], sample(metrics, f"mlpo_path_{key}_total", path=path["name"])), (0, 0))
            self.assertEqual(sample(metrics, "mlpo_path_state", path=path["name"], state=path["state"]), 1)
            info = {"path": path["name"], "directory": path["directory"], "engine": path["engine"]}
            self.assertEqual(sample(metrics, "mlpo_path_info", **info), 1)

    def test_text_file_and_http(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        file = self.folder / "metrics.prom"
        daemon = self.daemon(
            config=f'[daemon]\nmetrics_file = "{file}"\nmetrics_interval = 1\nmetrics_listen = "127.0.0.1:{port}"\n'
        )
        self.train(daemon)
        eventually(lambda: not json.loads(ctl("status", "--json", "--socket", daemon.socket).stdout)["sessions"])
        status = json.loads(ctl("status", "--json", "--socket", daemon.socket).stdout)
        self.assertGreater(status["paths"][0]["written_bytes"], 0)
        self.compare(parse(ctl("metrics", "--socket", daemon.socket).stdout), status)
        as_json = json.loads(ctl("metrics", "--json", "--socket", daemon.socket).stdout)
        self.compare(parse(as_json["text"]), status)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE) as answer:
            over_http = parse(answer.read().decode())
        self.compare(over_http, status)
        self.assertLess(sample(over_http, "mlpo_thread_beat_age_seconds", thread="data"), 5)
        written = sample(parse(as_json["text"]), "mlpo_path_bytes_total", path="one", direction="write")
        in_file = lambda: parse(file.read_text()).get(  # noqa: E731
            ("mlpo_path_bytes_total", (("direction", "write"), ("path", "one")))
        )
        eventually(lambda: in_file() == written)
        self.compare(parse(file.read_text()), status)
        self.assertEqual(stat.S_IMODE(file.stat().st_mode), 0o644)
        self.assertEqual(daemon.end(), 0)
        self.assertFalse(file.exists())
        self.assertEqual([entry.name for entry in self.folder.iterdir() if "metrics" in entry.name], [])

    def test_sessions_are_for_who_may_see_them(self) -> None:
        daemon = self.daemon()
        script = (
            f"{BIN}/mlpo-ctl metrics --socket {daemon.socket} > {self.folder}/during;"
            f"{BIN}/mlpo-ctl status --json --socket {daemon.socket} > {self.folder}/status"
        )
        # A session that lives while its metrics are asked for.
        command = [BIN / "mlpo-bench", "train", "--params", "8M", "--steps", "100000", "--socket", daemon.socket]
        trainer = subprocess.Popen(command, env=CLEAN, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            first_update = lambda text: any(  # noqa: E731
                name == "mlpo_session_epoch" and epoch > 0 for (name, _), epoch in parse(text).items()
            )
            eventually(lambda: first_update(ctl("metrics", "--socket", daemon.socket).stdout))
            subprocess.run(["bash", "-c", script], env=CLEAN, timeout=DEADLINE, check=True)
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)
            trainer.wait()
        metrics = parse((self.folder / "during").read_text())
        session = json.loads((self.folder / "status").read_text())["sessions"][0]
        labels = {"job": session["job"], "rank": str(session["rank"]), "uid": str(os.geteuid())}
        self.assertEqual(sample(metrics, "mlpo_session_parameters", **labels), session["parameters"])
        self.assertLessEqual(sample(metrics, "mlpo_session_epoch", **labels), session["epoch"])
        self.assertGreater(sample(metrics, "mlpo_session_submissions_total", **labels), 0)

    def test_only_this_host_may_listen(self) -> None:
        for address in ("0.0.0.0:9464", "9464", "10.1.2.3:9464", "127.0.0.1:0", "127.0.0.1:65536", "localhost:1", "[::]:9"):
            config = self.folder / "listen.toml"
            config.write_text(f'[daemon]\nmetrics_listen = "{address}"\n[[path]]\ndirectory = "/tmp"\n')
            command = [BIN / "mlpo-daemon", "--config", config, "--check-config"]
            checked = subprocess.run(command, env=CLEAN, timeout=DEADLINE, capture_output=True, text=True)
            self.assertEqual(checked.returncode, 78, address)
            self.assertIn("127.0.0.1:PORT", checked.stderr)


class Trace(Case):
    def record(self, daemon: Daemon, **options: object) -> tuple[subprocess.Popen[str], pathlib.Path]:
        """A recording that has begun; SIGINT ends it."""
        file = self.folder / "trace.json"
        command = [BIN / "mlpo-ctl", "trace", "--seconds", "60", "--output", file, "--socket", daemon.socket]
        before = len(list(self.folder.glob("trace.json.*")))
        recorder = subprocess.Popen(command, env=CLEAN, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)  # type: ignore
        self.addCleanup(recorder.wait)
        self.addCleanup(recorder.kill)
        eventually(lambda: len(list(self.folder.glob("trace.json.*"))) > before or recorder.poll() is not None)
        time.sleep(0.5)  # for the daemon to have been asked
        return recorder, file

    def spans(self, trace: dict[str, object]) -> dict[tuple[int, int], list[dict[str, object]]]:
        """Events with a duration by track, well-formed and none over another; every begin has its end."""
        tracks: dict[tuple[int, int], list[dict[str, object]]] = {}
        open_events: dict[tuple[object, ...], float] = {}
        for event in sorted(trace["traceEvents"], key=lambda e: (e.get("ts", -1), e["ph"] == "e")):
            self.assertIn(event["ph"], ("X", "M", "C", "b", "e"))
            self.assertIsInstance(event["name"], str)
            self.assertIsInstance(event["pid"], int)
            if event["ph"] != "M":
                self.assertGreaterEqual(event["ts"], 0)
            if event["ph"] == "X":
                self.assertGreaterEqual(event["dur"], 0)
                tracks.setdefault((event["pid"], event["tid"]), []).append(event)
            key = (event.get("cat"), event.get("id"), event["pid"])
            if event["ph"] == "b":
                self.assertNotIn(key, open_events)
                open_events[key] = event["ts"]
            if event["ph"] == "e":
                self.assertLessEqual(open_events.pop(key), event["ts"])
        self.assertEqual(open_events, {})
        for track in tracks.values():
            end = 0.0
            for event in track:
                self.assertGreaterEqual(event["ts"], end - 0.002, event)  # rounded to ns
                end = event["ts"] + event["dur"]
        return tracks

    def test_it_says_what_happened(self) -> None:
        daemon = self.daemon()
        recorder, file = self.record(daemon)
        self.train(daemon)
        status = lambda: json.loads(ctl("status", "--json", "--socket", daemon.socket).stdout)  # noqa: E731
        eventually(lambda: not status()["sessions"] and not any(path["in_flight"] for path in status()["paths"]))
        recorder.send_signal(signal.SIGINT)
        out, error = recorder.communicate(timeout=DEADLINE)
        self.assertEqual(recorder.returncode, 0, error)
        self.assertIn("ui.perfetto.dev", out)
        trace = json.loads(file.read_text())
        self.assertEqual(trace["otherData"]["dropped_records"], 0)
        names = {
            (e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"
        }
        processes = {pid: name for (what, pid, _), name in names.items() if what == "process_name"}
        tracks = self.spans(trace)

        # Transfers: what the paths counted since the start.
        self.assertEqual(sorted(name for name in processes.values() if name.startswith("path ")), ["path one", "path two"])
        for path in status()["paths"]:
            pid = next(pid for pid, name in processes.items() if name == f"path {path['name']}")
            moved = {"read": 0, "write": 0}
            for (process, tid), events in tracks.items():
                if process != pid:
                    continue
                direction = names["thread_name", pid, tid].split()[0]
                moved[direction] += sum(e["args"]["bytes"] for e in events)
                self.assertTrue(all(re.fullmatch(r"\S+/0 \S.* #\d+", e["name"]) for e in events), events[0])
            self.assertEqual(moved, {"read": path["read_bytes"], "write": path["written_bytes"]})

        # Steps, and in them one UPDATE and one window a subgroup.
        sessions = [pid for pid, name in processes.items() if name.startswith("session ")]
        self.assertEqual(len(sessions), 1)
        steps = tracks[sessions[0], 0]
        self.assertEqual([e["name"] for e in steps], ["step 1", "step 2", "step 3"])
        for step in steps:
            parts = sum(value for name, value in step["args"].items() if name.endswith("_s"))
            self.assertAlmostEqual(parts, step["dur"] / 1e6, places=6)
        begun = [e for e in trace["traceEvents"] if e["ph"] == "b"]
        for category in ("updates", "gradients"):
            self.assertEqual(sum(e["cat"] == category for e in begun), status()["steps"]["updates"], category)

        # Workers: each block that an update wanted was worked on.
        work = [e for (pid, _), events in tracks.items() if processes[pid] == "workers" for e in events]
        blocks = {(e["name"], e["args"]["block"]) for e in work if e["name"].startswith("Adam ")}
        self.assertEqual(3 * len(blocks), status()["steps"]["blocks"])
        self.assertTrue(any(e["name"].startswith("statistics ") for e in work))

        pool = [e["args"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"] == "blocks"]
        buffers = status()["pool"]["buffers"]
        self.assertTrue(pool)
        for counts in pool:
            self.assertEqual(counts["free"] + counts["clean"] + counts["dirty"], buffers)

    def test_one_at_a_time_and_wrong_times(self) -> None:
        daemon = self.daemon()
        recorder, file = self.record(daemon)
        second = ctl("trace", "--seconds", "1", "--output", str(self.folder / "other"), "--socket", daemon.socket)
        self.assertEqual(second.returncode, 1)
        self.assertIn("another trace", second.stderr)
        recorder.send_signal(signal.SIGINT)
        self.assertEqual(recorder.wait(DEADLINE), 0)
        self.assertEqual(ctl("trace", "--seconds", "61", "--socket", daemon.socket).returncode, 64)
        short = ctl("trace", "--seconds", "0.5", "--json", "--output", str(file), "--socket", daemon.socket)
        self.assertEqual(short.returncode, 0, short.stderr)
        # The data thread begins a moment after the timer that ends the recording.
        self.assertGreater(json.loads(short.stdout)["seconds"], 0.1)
        self.assertEqual(self.spans(json.loads(file.read_text())), {})
        nowhere = ctl("trace", "--seconds", "0.05", "--output", "/no/such/folder/t", "--socket", daemon.socket)
        self.assertEqual(nowhere.returncode, 1)
        self.assertIn("/no/such/folder/t", nowhere.stderr)
        recorder, file = self.record(daemon)
        daemon.end()
        recorder.send_signal(signal.SIGINT)
        self.assertEqual(recorder.wait(DEADLINE), 69)
        self.assertEqual(list(self.folder.glob("trace.json.*")), [])  # nothing half-done is left

    def test_what_is_no_file_stays_what_it_is(self) -> None:
        daemon = self.daemon()
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        link = self.folder / "link"
        link.symlink_to("target")
        for output in pipe, link:
            shown = ctl("trace", "--seconds", "0.05", "--output", str(output), "--socket", daemon.socket)
            self.assertEqual(shown.returncode, 0, shown.stderr)
        self.assertTrue(stat.S_ISFIFO(pipe.lstat().st_mode))
        self.assertIn("traceEvents", json.loads(os.read(reader, 1 << 16)))
        self.assertTrue(link.is_symlink())
        before = (self.folder / "target").read_text()
        self.assertIn("traceEvents", json.loads(before))
        daemon.end()
        self.assertEqual(ctl("trace", "--output", str(link), "--socket", daemon.socket).returncode, 69)
        self.assertEqual((self.folder / "target").read_text(), before)
        self.assertTrue(link.is_symlink())

    def test_a_signal_leaves_nothing_half_done(self) -> None:
        recorder, _ = self.record(self.daemon("a"))
        recorder.send_signal(signal.SIGHUP)
        self.assertEqual(recorder.wait(DEADLINE), -signal.SIGHUP)
        for second in signal.SIGINT, signal.SIGTERM:
            daemon = self.daemon(second.name)
            recorder, _ = self.record(daemon)
            daemon.process.send_signal(signal.SIGSTOP)
            recorder.send_signal(signal.SIGINT)
            time.sleep(0.1)  # it asks the daemon to end the recording, in vain
            self.assertIsNone(recorder.poll())
            eventually(lambda: recorder.send_signal(second) or recorder.poll() is not None)  # noqa: B023
            self.assertEqual(recorder.returncode, -second)
        self.assertEqual(list(self.folder.glob("trace.json.*")), [])

    @unittest.skipIf(os.geteuid() != 0, "skipped: a peer of another uid needs root")
    def test_another_user_sees_no_names(self) -> None:
        daemon = self.daemon()
        self.folder.chmod(0o777)
        recorder, file = self.record(daemon, user=65534, extra_groups=[])
        self.train(daemon)
        recorder.send_signal(signal.SIGINT)
        _, error = recorder.communicate(timeout=DEADLINE)
        self.assertEqual(recorder.returncode, 0, error)
        text = file.read_text()
        self.assertNotIn("bench", text)
        tracks = self.spans(json.loads(text))
        self.assertTrue(any(event["name"] == "another session" for events in tracks.values() for event in events))
        self.assertTrue(all("session" not in e["args"] for events in tracks.values() for e in events))


class Top(Case):
    def test_frames(self) -> None:
        daemon = self.daemon()
        self.train(daemon)
        shown = ctl("top", "--once", "--socket", daemon.socket)
        self.assertEqual(shown.returncode, 0, shown.stderr)
        self.assertNotIn("\033", shown.stdout)
        for word in ("pool:", "PATH", "one", "two", "sessions: 0 of 0"):
            self.assertIn(word, shown.stdout)
        told = json.loads(ctl("top", "--once", "--json", "--socket", daemon.socket).stdout)
        self.assertEqual(told["steps"]["ended"], 3)
        self.assertEqual([path["name"] for path in told["paths"]], ["one", "two"])
        gone = ctl("top", "--once", "--socket", str(self.folder / "none"))
        self.assertEqual(gone.returncode, 69)

    def live(self, daemon: Daemon, term: str) -> tuple[subprocess.Popen[bytes], int, list[object]]:
        ours, theirs = pty.openpty()
        self.addCleanup(os.close, ours)
        before = termios.tcgetattr(ours)
        command = [BIN / "mlpo-ctl", "top", "--interval", "0.1", "--socket", daemon.socket]
        top = subprocess.Popen(
            command, env=CLEAN | {"TERM": term}, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.addCleanup(top.wait)
        self.addCleanup(top.kill)
        return top, ours, before

    def until(self, terminal: int, text: bytes) -> bytes:
        shown = b""
        end = time.monotonic() + DEADLINE
        while text not in shown:
            if not select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} did not come in time: {shown!r}")
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
        self.assertIn(text, shown)
        return shown

    def test_the_terminal_is_given_back(self) -> None:
        daemon = self.daemon()
        for way in ("interrupt", "q", "the daemon goes"):
            with self.subTest(way):
                top, terminal, before = self.live(daemon, "xterm")
                self.until(terminal, b"\033[?1049h")
                fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 30, 0, 0))
                top.send_signal(signal.SIGWINCH)
                self.until(terminal, b"\033[J")
                for line in re.split(rb"[\r\n]+", self.until(terminal, b"\033[J").split(b"\033[H")[-1]):
                    self.assertLessEqual(len(re.sub(rb"\033\[[0-9;?]*[A-Za-z]", b"", line)), 30)
                if way == "interrupt":
                    top.send_signal(signal.SIGINT)
                elif way == "q":
                    os.write(terminal, b"q")
                else:
                    daemon.end()
                shown = self.until(terminal, b"\033[?1049l" if way != "the daemon goes" else b"the daemon has gone")
                self.assertIn(b"\033[?25h", shown)
                self.assertEqual(top.wait(DEADLINE), 69 if way == "the daemon goes" else 0)
                self.assertEqual(termios.tcgetattr(terminal)[:4], before[:4])

    def test_a_stuck_daemon_is_not_waited_for(self) -> None:
        daemon = self.daemon()
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
            with self.subTest(number.name):
                top, terminal, before = self.live(daemon, "xterm")
                self.until(terminal, b"\033[J")
                self.assertNotEqual(termios.tcgetattr(terminal)[:4], before[:4])
                daemon.process.send_signal(signal.SIGSTOP)
                try:
                    time.sleep(0.3)  # it asks for the next frame, in vain
                    top.send_signal(number)
                    self.assertEqual(top.wait(5), 0)  # of the 15 s that it waits for an answer
                    self.until(terminal, b"\033[?25h\033[?1049l")
                    self.assertEqual(termios.tcgetattr(terminal)[:4], before[:4])
                finally:
                    daemon.process.send_signal(signal.SIGCONT)

    def test_a_dumb_terminal(self) -> None:
        daemon = self.daemon()
        top, terminal, _ = self.live(daemon, "dumb")
        shown = self.until(terminal, b"sessions:")
        shown += self.until(terminal, b"sessions:")  # the next frame
        self.assertNotIn(b"\033", shown)
        top.send_signal(signal.SIGINT)
        self.assertEqual(top.wait(DEADLINE), 0)


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
