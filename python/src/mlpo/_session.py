"""The C client and the lifetimes of what hangs on it.

mlpo_client_free unmaps the slots and wants all subgroups and requests freed before, while Python's garbage collector
frees in any order. So every subgroup, request and view retains the session, and whoever releases it last frees it.
In a forked child nothing is freed: the memory is the parent's business, and its locks may be held by threads that do
not exist here.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Callable

from ._errors import check, error_of
from ._native import ffi, lib


class Session:
    """Counts the users of one mlpo_client. Thread-safe."""

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self._pid = os.getpid()
        self._uses = 0
        # Reentrant: a finalizer may run in the middle of this class's own methods.
        self._lock = threading.RLock()

    def check_not_forked(self) -> None:
        if self.forked():
            raise error_of(
                lib.MLPO_ERR_FORKED,
                f"the client was made by process {self._pid}, this is process {os.getpid()}, forked from it: "
                "a child must connect by itself",
            )

    def forked(self) -> bool:
        return os.getpid() != self._pid

    def retain(self) -> None:
        with self._lock:
            self._uses += 1

    def release(self) -> None:
        if self.forked():
            return
        with self._lock:
            self._uses -= 1
            last = self._uses == 0
        if last:
            lib.mlpo_client_free(self.pointer)

    def adopt(self, owner: object, pointer: Any = None, free: Callable[[Any], None] | None = None) -> None:
        """Lets `owner` live on this session: when it is collected, frees its C object and releases the session."""
        self.retain()
        finalizer = weakref.finalize(owner, _drop, self, pointer, free)
        # At exit views may still be in use; the clients are closed then (_client.py) and the process ends.
        finalizer.atexit = False

    def memory(self, address: Any, nbytes: int) -> Any:
        """A writable buffer on mapped memory that keeps the mapping alive."""
        self.retain()
        kept = ffi.gc(ffi.cast("char *", address), lambda _: self.release())
        return ffi.buffer(kept, nbytes)

    def alive(self) -> None:
        """Raises why the session has ended, if it has."""
        self.check_not_forked()
        check(lib.mlpo_client_alive(self.pointer))


def _drop(session: Session, pointer: Any, free: Callable[[Any], None] | None) -> None:
    if session.forked():
        return
    if free is not None:
        free(pointer)
    session.release()
