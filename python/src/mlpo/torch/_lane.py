"""A thread that copies gradients, so that the backward pass does not wait for it."""

from __future__ import annotations

import collections
import threading
from typing import Any, Callable, Optional

import torch


class Lane:
    """Does what it is given, one after another, in a thread that lives while there is work. Thread-safe.

    put() blocks while more than _MOST_BYTES wait, so that memory stays bounded where copying is slower than the
    backward pass. What is put must end by itself. After a failure nothing more is done until clear(), so that no
    gradient is sent that was not copied.
    """

    _MOST_BYTES = 128 << 20
    _IDLE_S = 1.0

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._work: collections.deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = collections.deque()
        self._bytes = 0  # of the work that has not ended
        self._busy = False
        self._thread: Optional[threading.Thread] = None
        self._failure: Optional[BaseException] = None

    def put(self, nbytes: int, call: Callable[..., None], *args: Any) -> None:
        """Hands over call(*args), which keeps `nbytes` of memory until it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes <= self._MOST_BYTES)
            if self._thread is None:  # first, so that nobody waits for work that no thread does
                self._start()
            self._work.append((nbytes, call, args))
            self._bytes += nbytes
            self._changed.notify_all()

    def settle(self) -> None:
        """Returns when everything has ended, well or not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._work and not self._busy)

    def drain(self) -> None:
        """As settle(), and raises the failure if there was one."""
        self.settle()
        failure = self._failure
        if failure is not None:
            raise failure

    def clear(self) -> None:
        """As settle(), and forgets a failure: what it was about is dropped."""
        self.settle()
        self._failure = None

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="mlpo-gradients", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._thread = None  # if an interrupt came after its start, it ends by itself
            raise

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            with self._changed:
                if self._thread is not threading.current_thread():
                    return
                if not self._changed.wait_for(lambda: self._work, self._IDLE_S):
                    self._thread = None
                    return
                nbytes, call, args = self._work.popleft()
                self._busy = True
                failure = self._failure
            try:
                if failure is None:
                    call(*args)
            except BaseException as error:  # noqa: BLE001 - for drain() to raise
                failure = error
            del call, args  # the gradient's memory
            with self._changed:
                self._busy = False
                self._bytes -= nbytes
                self._failure = failure
                self._changed.notify_all()
