"""kill -9 of client, daemon or both, at random moments of steps, saves and restores: the last complete checkpoint is
restored to the bit, always, and nothing is left of those that were cut. 500 kills with MLPO_LONG=1."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import time
from typing import Iterator, Optional

import mlpo
import pytest
from mlpo.checkpoints import Checkpoint, find
from running_daemon import Daemon, Layout

HERE = pathlib.Path(__file__).parent
KILLS = 500 if os.environ.get("MLPO_LONG") == "1" else 10
LAYOUT = Layout(block=1024, pool="256KiB")


class Trainer:
    """The process of saving_process.py, and what it has said so far."""

    def __init__(self, socket: str, place: pathlib.Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "saving_process.py"), socket, str(place), "killed"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill(self) -> list[list[str]]:
        """Its lines, whole ones only. A trainer whose daemon has gone has ended by itself."""
        self.process.kill()
        out, err = self.process.communicate(timeout=60)
        self.errors = err
        return [line.split() for line in out.splitlines(keepends=True) if line.endswith("\n")]


class Story:
    """What all trainers have said: each step has one digest, whoever made it; what was saved is there for ever."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}
        self.saved = 0
        self.restores = 0

    def add(self, said: list[list[str]]) -> None:
        for word, *rest in said:
            step = int(rest[0])
            if word == "restored":
                assert step >= self.saved, f"step {step} was restored, though {self.saved} had been saved"
                self.restores += step > 0
            elif word == "step":
                assert self.digests.setdefault(step, rest[1]) == rest[1], f"step {step} has other bits"
            elif word == "saved":
                self.saved = max(self.saved, step)


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    yield directory


def descriptors(daemon: Daemon) -> int:
    """Once they do not change for a while."""
    last, since = -1, time.monotonic()
    while time.monotonic() < since + 0.3:
        now = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
        if now != last:
            last, since = now, time.monotonic()
        time.sleep(0.02)
    return last


def loose_files(place: pathlib.Path) -> list[str]:
    """Data files without their part's manifest, manifests that were being written, and anything that is neither."""
    loose = []
    for folder in place.glob("*/part-*"):
        names = {file.name for file in folder.iterdir()}
        for name in names:
            kind, _, attempt = name.partition("-")
            whole = kind == "manifest" and "." not in name
            if not whole and f"manifest-{attempt[:32]}" not in names:
                loose.append(f"{folder.parent.name}/{folder.name}/{name}")
    return loose


def test_c19_kills_at_any_moment_lose_nothing_that_was_saved(tmp_path: pathlib.Path, place: pathlib.Path) -> None:
    moments = random.Random(6)
    story = Story()
    daemon: Optional[Daemon] = None
    scratch = tmp_path / "daemon"
    number, before = 0, -1
    try:
        for kill in range(KILLS):
            if daemon is None:
                number += 1
                daemon = restarted(scratch)
                before = descriptors(daemon)
            trainer = Trainer(daemon.socket, place)
            time.sleep(0.3 + moments.random() * 1.2)  # python needs most of the first
            victim = ("client", "daemon", "both")[kill % 3]
            if victim != "client":
                daemon.kill()
            story.add(trainer.kill())
            if victim != "client":
                daemon = None
            else:
                assert descriptors(daemon) <= before + 2, "descriptors of a dead client stay open"
        # In the end one runs through all tags again: nothing of the cut ones is left.
        if daemon is None:
            daemon = restarted(scratch)
        target = story.saved + 8
        trainer = Trainer(daemon.socket, place)
        deadline = time.monotonic() + 120
        while not any(found.complete and found.step >= target for found in find(place)):
            assert time.monotonic() < deadline and trainer.process.poll() is None, "the last trainer saves nothing"
            time.sleep(0.05)
        story.add(trainer.kill())
    finally:
        if daemon is not None:
            daemon.kill()
    daemon = restarted(scratch)
    try:
        deadline = time.monotonic() + 30
        while (loose := loose_files(place)) and time.monotonic() < deadline:
            time.sleep(0.05)  # a new daemon cleans up beside its work
        assert not loose
        with Checkpoint(place) as checkpoint:
            checkpoint.verify()
        client = mlpo.connect(socket=daemon.socket, job="last")
        client.close()
        journals = [file for path in daemon.path_directories for file in path.glob("mlpo/*/*/checkpoints/*")]
        assert not journals
    finally:
        daemon.stop()
    print(f"{KILLS} kills, {story.restores} restores, {len(story.digests)} steps, {number} daemons")
    assert story.saved > 0


def restarted(scratch: pathlib.Path) -> Daemon:
    """A daemon on the same paths as the one before it."""
    if not scratch.exists():
        scratch.mkdir()
        return Daemon(scratch, LAYOUT)
    return Daemon(scratch, LAYOUT, again=True)
