"""tests/CASES.md against the tests: each kind of fault has a row, each test that a row names is there, and each test with an id
is named in the row of that id.
"""

from __future__ import annotations

import pathlib
import re
import unittest

REPO = pathlib.Path(__file__).resolve().parents[2]
KINDS = 33
_ROW = re.compile(r"^\| (C\d\d) \| [^|]+ \| ([^|]*)\|$", re.M)
_NAMED = re.compile(r"`([cC]\d\d_[^`]+)`")
_CPP = re.compile(r'^TEST_CASE\("(C\d\d_[^"]+)"', re.M)
_PYTHON = re.compile(r"^ *def test_([cC]\d\d_\w+)\(", re.M)


def listed() -> dict[str, set[str]]:
    """Id -> names of the tests in its row."""
    return {case: set(_NAMED.findall(tests)) for case, tests in _ROW.findall((REPO / "tests" / "CASES.md").read_text())}


def tests() -> set[str]:
    """Names of all tests that have an id."""
    found: set[str] = set()
    for path in (REPO / "tests").rglob("*"):
        if path.suffix in (".cc", ".cu"):
            found |= set(_CPP.findall(path.read_text()))
        elif path.suffix == ".py":
            found |= set(_PYTHON.findall(path.read_text()))
    return found


class Cases(unittest.TestCase):
    def test_each_kind_has_a_row(self) -> None:
        self.assertEqual(sorted(listed()), [f"C{number:02}" for number in range(1, KINDS + 1)])

    def test_each_test_that_is_named_is_there(self) -> None:
        self.assertEqual({name for names in listed().values() for name in names} - tests(), set())

    def test_each_test_with_an_id_is_named_in_its_row(self) -> None:
        rows = listed()
        found = tests()
        self.assertGreater(len(found), 80)
        for name in sorted(found):
            for case in re.findall(r"[cC]\d\d(?=_)", name):
                self.assertIn(name, rows[case.upper()], f"tests/CASES.md, {case.upper()}")


if __name__ == "__main__":
    unittest.main()
