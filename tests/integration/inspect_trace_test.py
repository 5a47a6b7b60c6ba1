"""mlpo-ctl trace, with real daemons. Arguments: the folder of the programs, and which tests, if not all."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import time
import unittest

from inspected import BIN, CLEAN, DEADLINE, Case, Daemon, ctl, eventually


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


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[2:])
