"""count_results.py counts what Catch2 (v2 and v3), ctest and pytest report, and no failure gets lost."""

from __future__ import annotations

import contextlib
import io
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.dont_write_bytecode = True

import count_results  # noqa: E402

RULE = "-" * 79


def warning(case: str, text: str) -> str:
    dots = "." * 79
    return f"{RULE}\n{case}\n{RULE}\nx_test.cc:7\n{dots}\n\nx_test.cc:9: warning:\n  {text}\n\n"


def junit(*tests: str) -> str:
    return f"<testsuite>{''.join(tests)}</testsuite>"


def ctest(name: str, status: str, output: str, inside: str = "") -> str:
    return f'<testcase name="{name}" status="{status}">{inside}<system-out>{output}</system-out></testcase>'


class Programs(unittest.TestCase):
    def counts(self, output: str, succeeded: bool = True) -> tuple[int, int, int]:
        results = count_results.of_program("x_test", output, succeeded)
        return results.passed, results.failed, len(results.skips)

    def test_all_passed(self) -> None:
        self.assertEqual(self.counts("All tests passed (170 assertions in 12 test cases)\n"), (12, 0, 0))
        self.assertEqual(self.counts("All tests passed (1 assertion in 1 test case)\n"), (1, 0, 0))

    def test_some_failed(self) -> None:
        output = "test cases:  5 |  3 passed | 2 failed\nassertions: 20 | 18 passed | 2 failed\n"
        self.assertEqual(self.counts(output, succeeded=False), (3, 2, 0))
        output = "test cases: 4 | 2 passed | 1 failed | 1 failed as expected\nassertions: 9 | 9 passed\n"
        self.assertEqual(self.counts(output, succeeded=False), (3, 1, 0))
        self.assertEqual(self.counts("test cases: 2 | 2 failed\nassertions: 2 | 2 failed\n", False), (0, 2, 0))

    def test_skips_of_catch2_v3(self) -> None:
        output = "test cases: 6 | 4 passed | 1 failed | 1 skipped\nassertions: 20 | 19 passed | 1 failed\n"
        self.assertEqual(self.counts(output, succeeded=False), (4, 1, 1))

    def test_a_skipped_case_is_counted_once_with_its_reason(self) -> None:
        output = (
            warning("Path.Mounts", "skipped: mounting needs root")
            + warning("Path.Loops", "skipped: no loop device")
            + f"{RULE}\nPath.Loops\n  a section\n{RULE}\nx_test.cc:7\n\nx_test.cc:9: warning:\n  skipped: no device\n"
            + "All tests passed (3 assertions in 9 test cases)\n"
        )
        results = count_results.of_program("x_test", output, True)
        self.assertEqual((results.passed, results.failed), (7, 0))
        expected = [("x_test: Path.Mounts", "mounting needs root"), ("x_test: Path.Loops", "no loop device")]
        self.assertEqual(results.skips, expected)

    def test_a_case_skipped_in_part_has_passed(self) -> None:
        output = warning("Workers.Cores", "skipped the rest: one CPU only") + "All tests passed (3 assertions in 2 test cases)\n"
        self.assertEqual(self.counts(output), (2, 0, 0))

    def test_a_program_without_summary_is_one(self) -> None:
        self.assertEqual(self.counts("instructions in AVX2 functions: 12\n"), (1, 0, 0))
        self.assertEqual(self.counts("Segmentation fault\n", succeeded=False), (0, 1, 0))

    def test_a_failure_after_the_summary_is_seen(self) -> None:
        output = "All tests passed (3 assertions in 2 test cases)\nERROR: LeakSanitizer: detected memory leaks\n"
        self.assertEqual(self.counts(output, succeeded=False), (2, 1, 0))


class Folders(unittest.TestCase):
    def run_on(self, files: dict[str, str]) -> tuple[int, list[str]]:
        with tempfile.TemporaryDirectory() as name:
            for file, text in files.items():
                (pathlib.Path(name) / file).write_text(text)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                code = count_results.main(name)
        return code, output.getvalue().splitlines()

    def test_ctest_and_pytest_are_summed(self) -> None:
        code, lines = self.run_on({
            "ctest.xml": junit(
                ctest("a_test", "run", "All tests passed (9 assertions in 4 test cases)"),
                ctest("b_test", "fail", "test cases: 3 | 2 passed | 1 failed", "<failure/>"),
                ctest("c_test", "fail", "no summary: it crashed", "<failure/>"),
                ctest("d_test", "notrun", "skipped: not an x86-64", '<skipped message="SKIP_RETURN_CODE=77"/>'),
            ),
            "pytest.xml": junit(
                '<testcase classname="t" name="good"/>',
                '<testcase classname="t" name="bad"><failure/></testcase>',
                '<testcase classname="t" name="broken"><error/></testcase>',
                '<testcase classname="t" name="left"><skipped message="this CPU lacks avx512f"/></testcase>',
            ),
            "e_test.txt": "All tests passed (9 assertions in 10 test cases)\n",
        })  # fmt: skip
        self.assertEqual(lines[-1], "17 passed, 4 failed, 2 skipped")
        self.assertEqual(code, 1)
        self.assertIn("skipped: d_test: not an x86-64", lines)
        self.assertIn("skipped: t.left: this CPU lacks avx512f", lines)

    def test_a_module_that_pytest_skips_has_its_reason(self) -> None:
        longrepr = "('/repo/tests/trainers/test_a.py', 9, 'Skipped: skipped: a is not installed')"
        skipped = f'<skipped message="collection skipped">{longrepr}</skipped>'
        case = f'<testcase classname="" name="tests.trainers.test_a">{skipped}</testcase>'
        code, lines = self.run_on({"pytest.xml": junit('<testcase classname="t" name="good"/>', case)})
        self.assertEqual((code, lines[-1]), (0, "1 passed, 0 failed, 1 skipped"))
        self.assertIn("skipped: .tests.trainers.test_a: skipped: a is not installed", lines)

    def test_a_program_that_is_missing_has_failed(self) -> None:
        missing = ctest("a_test", "notrun", "", '<skipped message="Unable to find executable"/>')
        code, lines = self.run_on({"ctest.xml": junit(missing)})
        self.assertEqual((code, lines[-1]), (1, "0 passed, 1 failed, 0 skipped"))

    def test_a_program_run_by_itself_that_failed(self) -> None:
        code, lines = self.run_on({"a_test.txt": "terminate called\nexit code not 0\n"})
        self.assertEqual((code, lines[-1]), (1, "0 passed, 1 failed, 0 skipped"))

    def test_all_passed_is_0(self) -> None:
        code, lines = self.run_on({"pytest.xml": junit('<testcase classname="t" name="good"/>')})
        self.assertEqual((code, lines[-1]), (0, "1 passed, 0 failed, 0 skipped"))

    def test_nothing_run_is_a_failure(self) -> None:
        code, lines = self.run_on({"ctest.xml": junit(), "pytest.xml": junit()})
        self.assertEqual((code, lines[-1]), (1, "0 passed, 0 failed, 0 skipped"))


if __name__ == "__main__":
    unittest.main()
