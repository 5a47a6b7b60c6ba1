"""mlpo-ctl bench, with real daemons, and what becomes of its result. Arguments: the folder of the programs, and which
tests, if not all.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import unittest

from inspected import BIN, CLEAN, DEADLINE, Case, Daemon, ctl, eventually, stopped_thread


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


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
