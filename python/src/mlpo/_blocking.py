"""Waiting so that Ctrl-C is answered at once and deadlines are kept.

A C call cannot be interrupted: a signal's Python handler runs in the main thread once the call has returned. Calls
that can be repeated wait in slices (SLICE_S); those that cannot run in a thread of their own while the main thread
waits for it in Python. An interrupted call goes on there and what it made is dropped when it ends: by the garbage
collector, or by the call's `undo` where that is not enough.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Optional, TypeVar

from ._native import lib

T = TypeVar("T")

SLICE_S = 0.2


def nanoseconds(timeout: Optional[float]) -> int:
    """A timeout in seconds as the C API takes it; None waits as long as the daemon lives."""
    if timeout is None:
        return int(lib.MLPO_FOREVER)
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout!r}; it must be None or a number of seconds that is not negative")
    return min(int(timeout * 1e9), int(lib.MLPO_FOREVER) - 1)


class Deadline:
    """A point in time, from a timeout in seconds; None is never."""

    def __init__(self, timeout: Optional[float]) -> None:
        nanoseconds(timeout)
        self._end = None if timeout is None else time.monotonic() + timeout

    def remaining(self) -> Optional[float]:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def slice_ns(self, longest_s: float = SLICE_S) -> int:
        """How long the next wait in C may take."""
        rest = self.remaining()
        return int((longest_s if rest is None else min(longest_s, rest)) * 1e9)


def interruptible(call: Callable[[], T], undo: Optional[Callable[[], None]] = None) -> T:
    """Runs a blocking call; a signal in the main thread raises from here although the call still blocks.

    `undo` runs once the call has ended, if what it returned comes to nobody: because it raised, or because the caller
    was interrupted. It gives up what the call may have made, and frees what it needed until its end.
    """
    if threading.current_thread() is not threading.main_thread():
        return _undone(call, undo)
    ended = threading.Event()
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = _undone(call, undo)
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            outcome["error"] = error
        finally:
            ended.set()

    def drop(undo: Callable[[], None]) -> None:
        ended.wait()
        if "value" in outcome:
            undo()

    started = True
    try:
        try:
            threading.Thread(target=run, name="mlpo-call", daemon=True).start()
        except RuntimeError:  # none is to be had any more, as at the interpreter's end
            started = False
        if started:
            ended.wait()
            if "error" not in outcome:
                value: T = outcome["value"]
                return value
    except BaseException:  # a signal: the call goes on
        if undo is not None:
            threading.Thread(target=drop, args=(undo,), name="mlpo-drop", daemon=True).start()
        raise
    if not started:
        return _undone(call, undo)
    raise outcome["error"]


def _undone(call: Callable[[], T], undo: Optional[Callable[[], None]]) -> T:
    try:
        return call()
    except BaseException:
        if undo is not None:
            undo()
        raise
