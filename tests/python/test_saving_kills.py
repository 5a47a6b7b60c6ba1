"""kill -9 of client, daemon or both, at random moments of steps, saves and restores, with a daemon of another user, for
which the client makes the files: the last complete checkpoint is restored to the bit, always, and nothing is left of
those that were cut. 168 kills with MLPO_LONG=1. With the daemon's own user: tests/stress/kills.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Iterator, Optional

import mlpo
import pytest
from mlpo.checkpoints import find
from running_daemon import SMALL_BLOCKS, Daemon
from saved_files import loose_files, verify_all
from saving_process import NO_DAEMON

HERE = pathlib.Path(__file__).parent
KILLS = 168 if os.environ.get("MLPO_LONG") == "1" else 4


class Trainer:
    """The process of saving_process.py, and what it has said so far."""

    def __init__(self, socket: str, place: pathlib.Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "saving_process.py"), socket, str(place), "killed"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill(self, daemon: Daemon, victim: str) -> list[list[str]]:
        """Kills "client", "daemon" or "both"; what the trainer has said, whole lines only. Nothing else ends it."""
        assert self.process.poll() is None, f"the trainer has ended by itself: {self.process.communicate()[1]}"
        if victim != "client":
            daemon.kill()
        if victim != "daemon":
            self.process.kill()
        try:
            out, errors = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        assert not errors, errors
        expected = [-signal.SIGKILL] if victim == "client" else [-signal.SIGKILL, NO_DAEMON]
        assert self.process.returncode in expected
        return [line.split() for line in out.splitlines(keepends=True) if line.endswith("\n")]

    def end(self) -> list[list[str]]:
        """Lets it finish what it saves."""
        self.process.terminate()
        try:
            out, errors = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        assert (self.process.returncode, errors) == (0, "")
        return [line.split() for line in out.splitlines()]


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
            story.add(trainer.kill(daemon, victim))
            if victim != "client":
                daemon = None
                saved = verify_all(place)  # nobody is at work there
                assert story.saved <= max(saved, default=0), f"{story.saved} was saved, and there are {saved}"
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
        # What a killed client has made by itself goes when its rank saves again, not when a daemon starts.
        story.add(trainer.end())
    finally:
        if daemon is not None:
            daemon.kill()
    daemon = restarted(scratch)
    try:
        assert not loose_files(place)
        assert story.saved <= max(verify_all(place))
        client = mlpo.connect(socket=daemon.socket, job="last")
        client.close()
    finally:
        daemon.stop()
    print(f"{KILLS} kills, {story.restores} restores, {len(story.digests)} steps, {number} daemons")
    assert story.saved > 0


def restarted(scratch: pathlib.Path) -> Daemon:
    """A daemon on the same paths as the one before it."""
    again = scratch.exists()
    scratch.mkdir(exist_ok=True)
    return Daemon(scratch, SMALL_BLOCKS, again=again)
