"""Waiting so that Ctrl-C is answered at once and deadlines are kept.

A C call cannot be interrupted: a signal's Python handler runs in the main thread once the call has returned. Calls
that can be repeated wait in slices (SLICE_S); those that cannot run in a thread of their own while the main thread
waits for it in Python. An interrupted call goes on there and what it made is dropped when it ends.
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


def interruptible(call: Callable[[], T]) -> T:
    """Runs a blocking call; a signal in the main thread raises from here although the call still blocks."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    ended = threading.Event()
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            outcome["error"] = error
        finally:
            ended.set()

    threading.Thread(target=run, name="mlpo-call", daemon=True).start()
    ended.wait()
    if "error" in outcome:
        raise outcome["error"]
    value: T = outcome["value"]
    return value
