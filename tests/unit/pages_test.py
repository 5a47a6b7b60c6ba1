"""The pages of python/docs, and README.md: their commands are the programs' own, the lines to change are the examples',
the tables are what `mlpo-ctl plan` says, and what they point to is there.

Arguments: the folder of the programs, the repository. Examples are run by tests/trainers.
"""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
from typing import Iterator

sys.dont_write_bytecode = True

from documents_test import BIN, CLEAN, REPO, flags_in_help, help_of, subcommands  # noqa: E402

FOLDER = REPO / "python" / "docs"
PAGES = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# Pages about a framework.
FRAMEWORKS = set(PAGES) - {"README.md", "node.md"}


def blocks(page: str, language: str) -> list[str]:
    return [text for name, text in FENCED.findall(page) if name == language]


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command line of ours; without variables, "&" and comments."""
    for line in re.findall(r"^    (?:[A-Z_]+=\S* )*(mlpo-(?:ctl|daemon) .*)$", FENCED.sub("", page), re.M):
        yield [word for word in shlex.split(line, comments=True) if word != "&"]


def plan(*arguments: str) -> dict:
    command = [BIN / "mlpo-ctl", "plan", *arguments, "--json"]
    done = subprocess.run(command, env=CLEAN, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout)


def bare(source: str) -> str:
    """Without comments and blanks."""
    return "".join(re.sub(r"#.*", "", source).split())


class Pages(unittest.TestCase):
    def test_there_are_pages(self) -> None:
        self.assertGreaterEqual(len(FRAMEWORKS), 6)
        for page in {*FRAMEWORKS, "node.md"}:
            self.assertIn(f"({page})", PAGES["README.md"])
        for page in ("python/docs/README.md", "python/docs/node.md"):
            self.assertIn(page, (REPO / "README.md").read_text())

    def test_each_says_how_to_start_change_and_check(self) -> None:
        for page in FRAMEWORKS:
            with self.subTest(page):
                headings = re.findall(r"^## (.*)$", PAGES[page], re.M)
                self.assertEqual(headings[:3], ["Start the daemon", "Change these lines", "Check"])
                used = {tuple(words[:2]) for words in commands(PAGES[page])}
                self.assertIn(("mlpo-daemon", "--config"), used)
                self.assertIn(("mlpo-ctl", "sessions"), used)

    def test_commands_and_flags_are_the_programs(self) -> None:
        daemon = flags_in_help(help_of("mlpo-daemon"))
        own = flags_in_help(help_of("mlpo-ctl"))
        known = set(subcommands("mlpo-ctl"))
        for page, text in PAGES.items():
            for words in commands(text):
                with self.subTest(page=page, command=words):
                    ours = words[: words.index("--")] if "--" in words else words
                    flags = {word.partition("=")[0] for word in ours if word.startswith("--")}
                    allowed = daemon
                    if words[0] == "mlpo-ctl":
                        self.assertIn(words[1], known)
                        allowed = flags_in_help(help_of("mlpo-ctl", words[1]))
                        allowed |= daemon if words[1] in ("run", "doctor", "gc") else own
                    self.assertLessEqual(flags, allowed)

    def test_configurations_are_accepted(self) -> None:
        found = [text for page in PAGES.values() for text in blocks(page, "toml")]
        self.assertTrue(found)
        for text in found:
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write(text)
                file.flush()
                command = [BIN / "mlpo-daemon", "--config", file.name, "--check-config"]
                checked = subprocess.run(command, env=CLEAN, timeout=60, capture_output=True, text=True)
            self.assertEqual(checked.returncode, 0, checked.stderr)
        for page in PAGES.values():
            for text in blocks(page, "json"):
                json.loads(text)

    def test_lines_to_change_are_those_of_the_examples(self) -> None:
        for page in FRAMEWORKS:
            text = PAGES[page]
            scripts = set(re.findall(r"`examples/(\w+\.py)`", text))
            self.assertTrue(scripts, page)
            sources = [bare((REPO / "python" / "examples" / script).read_text()) for script in scripts]
            added: list[str] = []
            for block in blocks(text, "diff"):
                # Lines that follow one another do so in the example.
                added += re.findall(r"(?:^\+.*\n)+", block, re.M)
            pieces = [bare(re.sub(r"^\+", "", piece, flags=re.M)) for piece in added]
            pieces += [bare(line) for block in blocks(text, "python") for line in block.splitlines()]
            self.assertTrue(pieces, page)
            for piece in pieces:
                with self.subTest(page=page, lines=piece):
                    self.assertTrue(any(piece in source for source in sources))

    def test_what_they_point_to_is_there(self) -> None:
        for page, text in PAGES.items():
            for target in re.findall(r"\]\(([^)]+)\)", text):
                self.assertTrue((FOLDER / target).exists(), (page, target))
            for target in re.findall(r"`(\.\./[\w./-]+)`", text):
                self.assertTrue((FOLDER / target).exists(), (page, target))
            for script in re.findall(r"`(examples/\w+\.py)`", text):
                self.assertTrue((REPO / "python" / script).exists(), (page, script))
            for target, heading in re.findall(r"`(\.\./[\w./-]+\.md)`, \"([^\"]+)\"", text):
                headings = re.findall(r"^#+ (.*)$", (FOLDER / target).read_text(), re.M)
                self.assertIn(heading, headings, (page, target))


class Plans(unittest.TestCase):
    def test_commands_are_plans_that_fit(self) -> None:
        found = 0
        for text in (*PAGES.values(), (REPO / "README.md").read_text()):
            for words in commands(text):
                if words[:2] == ["mlpo-ctl", "plan"]:
                    plan(*words[2:])
                    found += 1
        self.assertGreaterEqual(found, 2)

    def test_tables(self) -> None:
        tables = re.findall(r"\(`(--ranks [^`]*)`\):\n\n\|.*\n\|[-|]*\n((?:\|.*\n)+)", PAGES["node.md"])
        self.assertEqual(len(tables), 2)
        for flags, rows in tables:
            for row in rows.splitlines():
                params, memory, *figures = [cell.strip() for cell in row.strip("|").split("|")]
                with self.subTest(params=params, flags=flags):
                    found = plan("--params", params, "--memory", memory, *flags.split())
                    self.assertEqual(
                        figures,
                        [
                            f"{found['memory']['arena_bytes'] / 2**30:.0f} GiB",
                            f"{found['storage']['state_bytes'] / 2**30:.0f} GiB",
                            f"{100 * found['step']['cached_share']:.0f} %",
                            f"{found['step']['ideal_s']:.1f} s",
                        ],
                    )


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
