"""The results file: one JSON object a line and run, appended to, never rewritten."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess
import time
from typing import Any

from experiments import Configuration, Run

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MEASURED = ("CMakeLists.txt", "client", "daemon", "proto")  # what the programs are built from


class NoSourceError(Exception):
    """Results belong to a source, and which one this is cannot be told."""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", REPOSITORY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit() -> str:
    return _git("rev-parse", "--short=12", "HEAD") or "unknown"


def source() -> str:
    """What was built, whatever the commit: documents and these scripts change without it."""
    tree = _git("ls-tree", "HEAD", *MEASURED)
    if not tree:
        raise NoSourceError(f"git does not say what {REPOSITORY} has: see git -C {REPOSITORY} status")
    content = tree + _git("diff", "HEAD", "--", *MEASURED)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def stale_program(bin_: pathlib.Path) -> str:
    """A file of the source that is younger than the daemon, or ""."""
    built = (bin_ / "mlpo-daemon").stat().st_mtime
    for name in _git("ls-files", *MEASURED).splitlines():
        file = REPOSITORY / name
        if file.suffix in (".cc", ".h", ".hpp") and "bench" not in file.parts and file.exists() and file.stat().st_mtime > built:
            return name
    return ""


class Results:
    """Those of one source; `of` finds them by configuration."""

    def __init__(self, file: pathlib.Path, source_: str) -> None:
        self.file, self.source = file, source_
        self.lines: list[dict[str, Any]] = []
        if file.exists():
            for number, text in enumerate(file.read_text().splitlines(), 1):
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    # The last line of a run that was killed while it wrote.
                    print(f"{file}:{number}: not JSON, left out")
                    continue
                if line["source"] == source_:
                    self.lines.append(line)

    def has(self, run: Run) -> bool:
        """A void one is as none: it is run again, and the later line of a round is the one that counts."""
        result = self.of(run.configuration).get(run.round)
        return result is not None and not result.get("void")

    def add(self, run: Run, result: dict[str, Any], free_bytes: int) -> None:
        line = {
            "experiment": run.experiment,
            "name": run.name,
            "round": run.round,
            "commit": commit(),
            "source": self.source,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "cores": len(os.sched_getaffinity(0)),
            "free_bytes": free_bytes,
            "configuration": run.configuration,
            "result": result,
        }
        self.lines.append(line)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        broken_off = self.file.exists() and not self.file.read_bytes().endswith(b"\n")
        with self.file.open("a") as file:
            file.write(("\n" if broken_off else "") + json.dumps(line) + "\n")

    def of(self, configuration: Configuration) -> dict[int, dict[str, Any]]:
        """Result by round."""
        return {line["round"]: line["result"] for line in self.lines if line["configuration"] == configuration}
