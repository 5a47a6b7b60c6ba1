"""tests/bench/compare and its neighbours, without measuring: what is run and in which order, what is run again, verdicts and
page from recorded lines. Argument: the repository.

The lines are made by hand, so that each verdict is known from the arithmetic beside it.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree
from typing import Any
from unittest import mock

REPO = pathlib.Path(sys.argv[1])
BENCH = REPO / "tests" / "bench"
sys.path.insert(0, str(BENCH))
sys.dont_write_bytecode = True

import experiments  # noqa: E402
import machine  # noqa: E402
import verdicts  # noqa: E402
from results import Results  # noqa: E402

PLAN = experiments.Plan(experiments.FULL)
LIMITS = {"nvme": [345e6, 265e6, 0.5], "pfs": [180e6, 180e6, 0.5]}
PARAMETERS = 268_435_456


def peer(backward_s: float, step_s: float) -> dict[str, Any]:
    return {"parameters": PARAMETERS, "backward_s": backward_s, "step_s": step_s, "limits": LIMITS, "deepspeed": "0", "torch": "0",
            "device_read_bytes": 16 * PARAMETERS, "device_written_bytes": 16 * PARAMETERS,
            "memory": {"locked_bytes": 1 << 30, "peak_resident_bytes": 1 << 31}}  # fmt: skip


def train(period_s: float, ideal_s: float, void: str | None = None, step_s: list[float] | None = None) -> dict[str, Any]:
    paths = [{"name": name, "read_bytes": 10**9, "written_bytes": 10**9} for name in LIMITS]
    return {"parameters": PARAMETERS, "period_s": period_s, "ideal_s": ideal_s, "transfer_s": ideal_s, "adam_s": 0.2,
            "limit_share": ideal_s / period_s, "void": void, "step_s": step_s or [period_s] * 5, "limits": LIMITS,
            "parameters_per_s": PARAMETERS / period_s, "paths": paths,
            "breakdown": {"adam_s": 0.2, "copy_s": 0, "fetch_wait_s": period_s - 0.5, "flush_wait_s": 0, "grad_s": 0.1, "idle_s": 0.2},
            "memory": {"locked_bytes": None, "peak_resident_bytes": 1 << 28}}  # fmt: skip


class Compare(unittest.TestCase):
    def setUp(self) -> None:
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.results = Results(self.folder / "results.jsonl", "here")

    def add(self, experiment: str, name: str, *found: dict[str, Any]) -> None:
        configuration = PLAN.experiments[experiment].runs[name]
        for round_, result in enumerate(found, 1):
            self.results.add(experiments.Run(experiment, name, configuration, round_), result, 1 << 30)

    def line(self, what: str) -> verdicts.Line:
        (found,) = [line for line in verdicts.all_of(PLAN, self.results) if line.what == what]
        return found

    def program(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-B", BENCH / name, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, timeout=60)  # fmt: skip

    def test_pairs(self) -> None:
        # 16 x 268435456 / 265e6 = 16.208 s are the peer's least. Arithmetic: 1 s.
        self.add("peer-in-memory", "cpu", peer(1, 0.5))
        self.add("pairs", "peer", *[peer(2, 16)] * 5, peer(1, 10), peer(2, 17))
        self.add("pairs", "both paths, 200 MiB", *[train(7, 6.8)] * 6, train(7, 6.8, void="a reason"))
        line = self.line("both paths, 200 MiB")
        self.assertEqual(len(line.values), 6)  # the last one is void
        self.assertAlmostEqual(line.median, 17 / 7)
        self.assertAlmostEqual(min(line.values), 16.208 / 7, 3)  # faster than its bytes: they count
        self.assertEqual(line.verdict, "VOID")
        self.assertTrue(line.broken)
        self.assertIn("pair 7 is void: a reason", line.note)
        self.add("pairs", "nvme alone, 200 MiB", *[train(13, 11.4)] * 7)
        line = self.line("nvme alone, 200 MiB")
        self.assertEqual(line.verdict, "BROKEN")  # 17 / 13 = 1.31
        self.assertTrue(line.broken)

    def test_disturbed_peer(self) -> None:
        self.add("peer-in-memory", "cpu", peer(1, 0.5))
        self.add("pairs", "peer", peer(4, 17), {**peer(2, 16), "device_written_bytes": 12 * PARAMETERS})
        self.add("pairs", "both paths, 200 MiB", *[train(7, 6.8)] * 2)
        of_pairs = [run for run in PLAN.runs() if run.experiment == "pairs"]
        self.assertEqual({run.round for run in of_pairs if verdicts.disturbed(PLAN, self.results, run)}, {1, 2})
        self.assertFalse(any(verdicts.disturbed(PLAN, self.results, run) for run in PLAN.runs() if run.experiment != "pairs"))
        line = self.line("both paths, 200 MiB")
        self.assertEqual(line.verdict, "VOID")
        self.assertEqual(line.values, [])
        self.assertIn("pair 1 is void: the peer was at 0.81 of its own limit", line.note)
        self.assertIn("pair 2 is void: the peer wrote 12.0 bytes a parameter", line.note)

    def test_limits(self) -> None:
        self.add("limits", "paper, 2", train(6, 5.9), train(6, 5.85), train(6, 5.7))
        self.assertEqual(self.line("paper, 2 ranks").verdict, "holds")  # 5.85 / 6 = 0.975
        self.add("limits", "half, 8", *[train(6, 5.6)] * 3)
        self.assertEqual(self.line("half, 8 ranks").verdict, "BROKEN")  # 0.933
        self.add("limits", "half, 1", train(6, 5.9))
        self.assertEqual(self.line("half, 1 ranks").verdict, "1 of 3")
        self.assertEqual(self.line("crossed, 1 ranks").verdict, "-")

    def test_halved(self) -> None:
        # Worth 445 MB/s; with nvme halved 312.5: from step 7 to 9 the limit is 6 x 445 / 312.5 = 8.544 s.
        steps = [6.0] * 4 + [12.0, 9.0] + [8.544 / 0.96] * 3 + [7.0, 6.5] + [6 / 0.9] * 3
        self.add("halved", "nvme", *[train(6, 6, step_s=steps)] * 3)
        self.assertAlmostEqual(self.line("nvme halved, steps 7 to 9").median, 0.96, 4)
        self.assertEqual(self.line("nvme halved, steps 7 to 9").verdict, "holds")
        self.assertAlmostEqual(self.line("nvme restored, steps 12 to 14").median, 0.9, 4)
        self.assertEqual(self.line("nvme restored, steps 12 to 14").verdict, "BROKEN")

    def test_void_runs(self) -> None:
        run = next(run for run in PLAN.runs() if run.experiment == "halved")
        steps = [6.0] * 14
        self.results.add(run, train(6, 6, void="a reason", step_s=steps), 1 << 30)
        line = self.line("nvme halved, steps 7 to 9")
        self.assertEqual((line.values, line.note, line.verdict), ([], "run 1 is void: a reason", "VOID"))
        self.assertFalse(self.results.has(run))
        self.results.add(run, train(6, 6, step_s=steps), 1 << 30)  # the later one counts
        self.assertTrue(self.results.has(run))
        line = self.line("nvme halved, steps 7 to 9")
        self.assertEqual((len(line.values), line.note, line.verdict), (1, "", "1 of 3"))
        self.add("unlimited", "mlpo", train(6, 6), train(6, 6, void="a reason"))
        self.add("unlimited", "peer", *[peer(2, 16)] * 2)
        line = self.line("(DeepSpeed's step / mlpo's) / ratio of the bytes")
        self.assertEqual(len(line.values), 1)
        self.assertIn("run 2 is void: a reason", line.note)

    def test_worth(self) -> None:
        self.assertAlmostEqual(verdicts.worth(LIMITS), 445e6)
        self.assertAlmostEqual(verdicts.worth({"a": [300e6, 150e6, 1]}), 100e6)

    def test_order_and_resumption(self) -> None:
        runs = list(PLAN.runs())
        self.assertEqual(runs[0].experiment, "peer-in-memory")
        pairs = [run.name for run in runs if run.experiment == "pairs"]
        self.assertEqual(pairs[:4], pairs[7:3:-1])  # alternating
        self.assertFalse(self.results.has(runs[3]))
        self.results.add(runs[3], train(6, 5.9), 1 << 30)
        self.assertTrue(Results(self.results.file, "here").has(runs[3]))
        self.assertFalse(Results(self.results.file, "elsewhere").has(runs[3]))
        with self.results.file.open("a") as file:
            file.write('{"source": "here", "ro')  # killed while it wrote
        again = Results(self.results.file, "here")
        again.add(runs[4], train(6, 5.9), 1 << 30)
        self.assertEqual(len(Results(self.results.file, "here").lines), 2)

    def test_report(self) -> None:
        self.test_pairs()
        self.test_limits()
        self.add("ablation", "one path", train(9, 8.9))
        page, pictures = self.folder / "README.md", self.folder / "pictures"
        page.write_text((BENCH / "README.md").read_text())
        done = self.program("compare", "--report", "--results", str(self.results.file), "--source", "here", "--page", str(page),
                            "--pictures", str(pictures))  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout)
        text = page.read_text()
        self.assertIn("| share of the limit | paper, 2 ranks | >= 0.97 | 0.975 | 0.950 - 0.983 | 3 | holds |", text)
        self.assertIn("| one path | 9.00 s | 1.500 |", text)
        self.assertIn("## What the figures mean", text)
        drawn = sorted(pictures.glob("*.svg"))
        self.assertGreaterEqual(len(drawn), 4)
        for picture in drawn:
            xml.etree.ElementTree.parse(picture)
            self.assertIn(f"(pictures/{picture.name})", text)

    def test_processes(self) -> None:
        def python(code: str) -> machine.Process:
            return machine.Process([sys.executable, "-c", code])

        said: list[str] = []
        self.assertEqual(python("print(1); print(2)").lines(said.append), "2")
        self.assertEqual(said, ["1", "2"])
        with self.assertRaisesRegex(machine.RunError, "ended with 3"):
            python("raise SystemExit(3)").lines(said.append)
        with self.assertRaisesRegex(machine.RunError, "not JSON"):
            python("print('{')").lines(json.loads)
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(30)"
        with mock.patch.multiple(machine, RUN_SECONDS=1, END_SECONDS=0.5):
            with self.assertRaisesRegex(machine.RunError, "took more than 1 s"):
                python(deaf).lines(said.append)
            with self.assertRaisesRegex(machine.RunError, "does not end"):
                python("import os, time; os.close(1); time.sleep(30)").lines(said.append)

    def test_peer_that_crashes(self) -> None:
        (self.folder / "python").write_text("#!/bin/sh\nexit 1\n")
        (self.folder / "python").chmod(0o755)
        measuring = machine.Machine(self.folder, self.folder, str(self.folder / "python"), 1)
        with self.assertRaisesRegex(machine.RunError, "0 of 3 kinds"):
            measuring.run({"kind": "adam"})

    def test_limits_after_a_failure(self) -> None:
        calls, codes = self.folder / "calls", self.folder / "codes"
        testbed = self.folder / "testbed.sh"
        testbed.write_text(f"#!/bin/sh\necho $1 >> {calls}\n[ $1 = down ] || printf '/x/%s 1 1 0.5\\n' nvme pfs\n[ ! -e {codes}/$1 ]\n")
        testbed.chmod(0o755)
        measuring = machine.Machine(self.folder, self.folder, "python", 1)
        with mock.patch.object(machine, "TESTBED", testbed):
            measuring._set_up("paper", 20, 2)
            codes.mkdir()
            (codes / "profile").touch()
            with self.assertRaises(machine.RunError):
                measuring._set_up("half", 20, 2)
            (codes / "profile").unlink()
            measuring._set_up("paper", 20, 2)  # not what it was before the failure
            with self.assertRaises((machine.RunError, OSError)):  # no programs; limits may be halved
                measuring.run({**PLAN.experiments["halved"].runs["nvme"]})
            measuring._set_up("paper", 20, 2)
        self.assertEqual(calls.read_text().split(), ["down", "up", "profile", "down", "up", "run", "down", "up"])

    def test_arguments(self) -> None:
        self.assertEqual(self.program("compare", "--only", "nothing").returncode, 64)
        listed = self.program("compare", "--list", "--source", "here", "--results", str(self.results.file))
        self.assertEqual(listed.returncode, 0)
        self.assertRegex(listed.stdout, r"pairs +0 of +28 runs")
        lacking = self.program("compare", "--bin", str(self.folder), "--source", "here", "--results", str(self.results.file))
        self.assertEqual(lacking.returncode, 77)
        self.assertIn("mlpo-bench", lacking.stdout)
        empty = {**os.environ, "GIT_DIR": str(self.folder)}
        unknown = subprocess.run([sys.executable, "-B", BENCH / "compare", "--list"], stdout=subprocess.PIPE, text=True, env=empty)
        self.assertEqual(unknown.returncode, 77)
        self.assertIn("git", unknown.stdout)
        self.assertEqual(self.program("honest", "--bin", str(self.folder)).returncode, 77)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
