"""Counts the results that tests/run left in a folder, and prints "N passed, N failed, N skipped" as its last line.

    count_results.py FOLDER

ctest.xml and pytest.xml are JUnit files; NAME.txt is the output of a Catch2 program that was run by itself. A Catch2
program counts as its test cases, by the summary at the end of its output; a test case that printed the warning
"skipped: REASON" counts as skipped. A program without a summary (a crash, a time-out, a script) counts as one.
Prints each skip with its reason. Exit code: 1 if something failed or nothing was run.
"""

from __future__ import annotations

import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field

_ALL_PASSED = re.compile(r"^All tests passed \(.*?(\d+) test cases?\)", re.M)
_SOME = re.compile(r"^test cases:\s*(\d+)\s*((?:\|\s*\d+ [a-z ]+?\s*)+)$", re.M)
_PART = re.compile(r"\|\s*(\d+) ([a-z ]+?)\s*(?=\||$)")
# The head of a test case, between two rules: its name, then its sections, indented.
_CASE_OR_SKIP = re.compile(r"^-{79}\n(?P<case>\S.*)\n(?:  .*\n)*-{79}$|^\s*skipped: (?P<reason>.*)$", re.M)


@dataclass
class Results:
    passed: int = 0
    failed: int = 0
    skips: list[tuple[str, str]] = field(default_factory=list)  # what, why

    def add(self, other: Results) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skips += other.skips

    @property
    def ran(self) -> int:
        return self.passed + self.failed + len(self.skips)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {len(self.skips)} skipped"


def skipped_cases(output: str) -> dict[str, str]:
    """Test cases that said they were skipped, with the first reason."""
    found: dict[str, str] = {}
    case = "?"
    for match in _CASE_OR_SKIP.finditer(output):
        if match["case"] is not None:
            case = match["case"]
        else:
            found.setdefault(case, match["reason"])
    return found


def of_program(name: str, output: str, succeeded: bool) -> Results:
    """Of one program, by what it printed and whether its exit code was 0."""
    passed = failed = by_framework = 0
    all_passed = _ALL_PASSED.findall(output)
    some = _SOME.findall(output)
    if all_passed:
        passed = int(all_passed[-1])
    elif some:
        counts = {kind: int(number) for number, kind in _PART.findall(some[-1][1])}
        passed = counts.get("passed", 0) + counts.get("failed as expected", 0)
        failed = counts.get("failed", 0)
        by_framework = counts.get("skipped", 0)
    if passed + failed + by_framework == 0:
        return Results(int(succeeded), int(not succeeded))
    if not succeeded and failed == 0:
        failed = 1  # after its last test case: a leak, a crash at exit
    skips = [(f"{name}: {case}", reason) for case, reason in skipped_cases(output).items()]
    # A case that says it is skipped and fails is a failure.
    skips = skips[:passed]
    passed -= len(skips)
    skips += [(f"{name}: a test case", "see its output")] * by_framework
    return Results(passed, failed, skips)


def of_ctest(path: pathlib.Path) -> Results:
    results = Results()
    for test in ElementTree.parse(path).getroot().iter("testcase"):
        name, output = test.get("name", "?"), test.findtext("system-out") or ""
        status = test.get("status")
        if test.find("skipped") is not None and status != "fail":
            reasons = [line for line in output.splitlines() if line.startswith("skipped: ")]
            reason = reasons[0].removeprefix("skipped: ") if reasons else test.find("skipped").get("message", "?")
            # A test that could not be run (its program is missing) is a skip to ctest's file, and a failure to us.
            results.add(Results(0, 0, [(name, reason)]) if reasons else Results(0, 1))
        else:
            results.add(of_program(name, output, status == "run"))
    return results


def _reason(skipped: ElementTree.Element) -> str:
    """Of a whole module pytest has the reason only in the text: ('FILE', LINE, 'Skipped: REASON')."""
    of_module = re.search(r"""['"]Skipped: (.*)['"]\)\s*$""", skipped.text or "", re.S)
    return of_module[1] if of_module else skipped.get("message", "no reason")


def of_pytest(path: pathlib.Path) -> Results:
    results = Results()
    for test in ElementTree.parse(path).getroot().iter("testcase"):
        skipped = test.find("skipped")
        if test.find("failure") is not None or test.find("error") is not None:
            results.failed += 1
        elif skipped is not None:
            name = f"{test.get('classname', '')}.{test.get('name', '?')}"
            results.skips.append((name, _reason(skipped)))
        else:
            results.passed += 1
    return results


def of_folder(folder: pathlib.Path) -> Results:
    results = Results()
    for path in sorted(folder.iterdir()):
        if path.name == "ctest.xml":
            results.add(of_ctest(path))
        elif path.name == "pytest.xml":
            results.add(of_pytest(path))
        elif path.suffix == ".txt":
            output = path.read_text(errors="replace")
            results.add(of_program(path.stem, output, "exit code not 0\n" not in output))
    return results


def main(folder: str) -> int:
    results = of_folder(pathlib.Path(folder))
    for what, why in results.skips:
        print(f"skipped: {what}: {why}")
    if not results.ran:
        print("no test ran: none has that name")
    print(results)
    return int(results.failed > 0 or results.ran == 0)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
