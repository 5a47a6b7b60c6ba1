"""Man pages, bash completion and the example configuration say what the programs say: nothing missing, nothing extra. The
runbook has each warning of the daemon's log and each alert.

Arguments: the folder of the programs, the repository. Flags and subcommands are taken from --help, keys and defaults from
mlpo-daemon --print-config, events from the sources.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import unittest

BIN, REPO = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("MLPO_")}
PAGES = {"mlpo-daemon": 8, "mlpo-ctl": 1, "mlpo-bench": 1}


def run(*command: str) -> str:
    return subprocess.run(
        command, env=CLEAN, check=True, timeout=60, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ).stdout


def help_of(program: str, *subcommand: str) -> str:
    return run(str(BIN / program), *subcommand, "--help")


def flags_in_help(text: str) -> set[str]:
    return set(re.findall(r"^ +(?:-\w,)?(--[a-z][a-z-]*)", text, re.M)) - {"--help"}


def subcommands(program: str) -> list[str]:
    _, _, listed = help_of(program).partition("Subcommands:\n")
    return re.findall(r"^  ([a-z][a-z-]*) ", listed, re.M)


def sections(page: str) -> dict[str, str]:
    """Heading ("OPTIONS", "run", "[memory]") -> what stands below it, up to the next heading of any level."""
    text = (REPO / "deploy" / "man" / f"{page}.scd").read_text()
    parts = re.split(r"^##? +(.*)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def flags_in_page(text: str) -> set[str]:
    return set(re.findall(r"^(?:\*-\w\*, )?\*(--[a-z-]+)\*", text, re.M)) - {"--help"}


def settings() -> dict[str, dict[str, object]]:
    """Section -> key -> default, as the daemon prints them."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as empty:
        printed = run(str(BIN / "mlpo-daemon"), "--config", empty.name, "--path", "/var/lib/mlpo", "--print-config")
    config = tomllib.loads(printed)
    paths = config.pop("path")
    assert len(paths) == 1
    path: dict[str, object] = {}
    for key, value in paths[0].items():  # turn.blocks is printed so, and read as a table
        path |= {f"{key}.{part}": of for part, of in value.items()} if isinstance(value, dict) else {key: value}
    return {**{f"[{name}]": keys for name, keys in config.items()}, "[[path]]": path}


def completions(*words: str) -> set[str]:
    """What bash offers for the last of the words."""
    script = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        '_mlpo "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    program = str(BIN / words[0])
    out = run("bash", "-c", script, "bash", str(REPO / "deploy" / "completion" / "mlpo"), program, *words[1:])
    return set(out.split())


class Programs(unittest.TestCase):
    def test_help_is_read(self) -> None:
        self.assertIn("--memory", flags_in_help(help_of("mlpo-daemon")))
        self.assertIn("status", subcommands("mlpo-ctl"))
        self.assertIn("--ready-timeout", flags_in_help(help_of("mlpo-ctl", "run")))

    def test_flags_of_pages(self) -> None:
        for program, section in PAGES.items():
            with self.subTest(program):
                found = flags_in_page(sections(f"{program}.{section}")["OPTIONS"])
                self.assertEqual(found, flags_in_help(help_of(program)))

    def test_subcommands_of_pages(self) -> None:
        for program in ("mlpo-ctl", "mlpo-bench"):
            page = sections(f"{program}.{PAGES[program]}")
            in_page = {name for name in page if name.islower()}
            self.assertEqual(in_page, set(subcommands(program)))
            for name in subcommands(program):
                with self.subTest(f"{program} {name}"):
                    self.assertEqual(flags_in_page(page[name]), flags_in_help(help_of(program, name)))

    def test_completion(self) -> None:
        daemon = flags_in_help(help_of("mlpo-daemon"))
        self.assertEqual(completions("mlpo-daemon", "--") - {"--help"}, daemon)
        own = flags_in_help(help_of("mlpo-ctl"))
        others = {"--check-config", "--print-config", "--doctor", "--gc", "--gc-node", "--dry-run", "--version"}
        to_run = daemon - others - {"--socket"}
        for program in ("mlpo-ctl", "mlpo-bench"):
            self.assertEqual(completions(program, ""), set(subcommands(program)))
            for name in subcommands(program):
                with self.subTest(f"{program} {name}"):
                    expected = flags_in_help(help_of(program, name))
                    if program == "mlpo-ctl" and name != "plan":
                        expected |= to_run if name in ("run", "doctor", "gc") else own
                    self.assertEqual(completions(program, name, "--") - {"--help"}, expected)
        self.assertEqual(completions("mlpo-ctl", "--socket", "run", "--timeout", "5", "sta"), {"status"})
        self.assertEqual(completions("mlpo-ctl", "paths", ""), {"disable", "enable", "evacuate"})
        self.assertEqual(completions("mlpo-ctl", "paths", "evacuate", "x", "--"), {"--help", "--wait"} | own)
        self.assertEqual(completions("mlpo-ctl", "checkpoint", "r"), {"remove", "request"})
        self.assertEqual(completions("mlpo-bench", "train", "--grad", "b"), {"bfloat16"})
        self.assertEqual(completions("mlpo-ctl", "plan", "--dtype", "b"), {"bfloat16"})
        self.assertEqual(completions("mlpo-ctl", "plan", "--path", ""), set())
        folder = str(REPO / "deploy")
        self.assertIn(f"{folder}/man", completions("mlpo-daemon", "--path", f"{folder}/"))
        self.assertNotIn(f"{folder}/setup.sh", completions("mlpo-daemon", "--path", f"{folder}/"))
        self.assertIn(f"{folder}/setup.sh", completions("mlpo-daemon", "--config", f"{folder}/"))
        self.assertIn("bash", completions("mlpo-ctl", "run", "--path", "/x", "--", "bas"))


class Configuration(unittest.TestCase):
    def test_keys_and_defaults_of_the_page(self) -> None:
        page = sections("mlpo.toml.5")
        known = settings()
        self.assertEqual({name for name in page if name.startswith("[")}, set(known))
        for section, keys in known.items():
            described = re.findall(r"^\*([\w.]+)\* \((\w+); (?:default )?([^)]*)\)\n\t\S", page[section], re.M)
            with self.subTest(section):
                self.assertEqual([key for key, _, _ in described], list(keys))
            for key, _, default in described:
                if f"{section}{key}" in ("[daemon]node", "[[path]]name", "[[path]]directory"):
                    self.assertIn(" ", default)  # in words
                    continue
                with self.subTest(f"{section} {key}"):
                    self.assertEqual(tomllib.loads(f"value = {default}")["value"], keys[key])

    def test_keys_of_the_example(self) -> None:
        example = (REPO / "deploy" / "config" / "mlpo.toml").read_text()
        found: dict[str, list[str]] = {}
        section = ""
        for line in example.splitlines():
            if heading := re.match(r"(?:# ?)?(\[\[?\w+\]\]?)\s*(#.*)?$", line):
                section = heading[1]
            elif key := re.match(r"(?:# ?)?([a-z_.]+) = ", line):
                found.setdefault(section, []).append(key[1])
        for name, keys in settings().items():
            with self.subTest(name):
                self.assertEqual(set(found.pop(name, ())), set(keys))
        self.assertEqual(found, {})

    def test_the_example_is_accepted_with_every_key(self) -> None:
        example = (REPO / "deploy" / "config" / "mlpo.toml").read_text()
        every = re.sub(r"^# ?([\w.]+ = |\[\[path\]\])", r"\1", example, flags=re.M)
        for text in (example, every):
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write(text)
                file.flush()
                command = [BIN / "mlpo-daemon", "--config", file.name, "--check-config"]
                checked = subprocess.run(command, env=CLEAN, timeout=60, capture_output=True, text=True)
            self.assertEqual(checked.returncode, 0, checked.stderr)


class Runbook(unittest.TestCase):
    page = (REPO / "deploy" / "README.md").read_text()

    def test_it_has_each_warning_and_no_event_that_there_is_not(self) -> None:
        sources = "".join(path.read_text() for path in sorted((REPO / "daemon").rglob("*.cc")))
        warnings = set(re.findall(r'spdlog::(?:warn|error|critical)\(\s*"event=(\w+)', sources))
        named = set(re.findall(r"event=(\w+)", self.page))
        self.assertGreater(len(warnings), 50)
        self.assertEqual(warnings - named, set())
        # Some names are chosen where they are logged.
        self.assertEqual({name for name in named if not re.search(rf"\b{name}\b", sources)}, set())

    def test_it_has_each_alert_and_none_that_there_is_not(self) -> None:
        rules = (REPO / "deploy" / "prometheus" / "mlpo.rules.yml").read_text()
        alerts = re.findall(r"^ +- alert: (\w+)$", rules, re.M)
        self.assertEqual(len(alerts), len(set(alerts)))
        self.assertEqual(set(re.findall(r"\bMlpo[A-Z]\w+", self.page)), set(alerts))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
