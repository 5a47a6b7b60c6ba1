"""Named objects: what flush() and fetch() return, and the thread that carries them out.

The C calls block and share one staging area, so one thread of the client makes them, in the order in which they were
asked for. It lives while there are any.
"""

from __future__ import annotations

import collections
import sys
import threading
from typing import Any, Callable, Optional

from ._errors import MlpoError
from ._native import ffi
from ._request import Request, Waiter
from ._session import Session


class ObjectRequest(Request[int]):
    """A flush or fetch; result() is the object's size in bytes. Keeps the caller's buffer until it has ended."""

    def __init__(self, session: Session, waiter: Waiter, call: Callable[[], int]) -> None:
        super().__init__(session, waiter, ffi.NULL, int)
        self._call: Optional[Callable[[], int]] = call
        self._ended = threading.Event()

    def _is_done(self) -> bool:
        return self._ended.is_set()

    def _wait(self, timeout_ns: int) -> bool:
        return self._ended.wait(timeout_ns / 1e9)

    def _watch(self) -> None:
        pass  # run() calls them

    def run(self) -> None:
        assert self._call is not None
        try:
            self._settle((self._call(), None))
        except MlpoError as error:
            self._settle((None, error))
        self._call = None  # and with it the caller's buffer
        self._ended.set()
        self._run_callbacks()


class Worker:
    """Runs requests one after another. Thread-safe."""

    _IDLE_S = 1.0

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: collections.deque[ObjectRequest] = collections.deque()
        self._running = False

    def submit(self, request: ObjectRequest) -> None:
        with self._changed:
            self._waiting.append(request)
            self._changed.notify()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="mlpo-objects", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._changed.wait_for(lambda: self._waiting, self._IDLE_S):
                    self._running = False
                    return
                request = self._waiting.popleft()
            request.run()
            del request


def name_of(name: Any) -> Any:
    """A name as the C API takes it: str goes as UTF-8, bytes as they are."""
    encoded = name.encode() if isinstance(name, str) else bytes(name)
    if b"\0" in encoded:
        raise ValueError(f"the object's name {name!r} contains a zero byte")
    return ffi.new("char[]", encoded)


def memory_of(buffer: Any, writable: bool) -> tuple[Any, int]:
    """The memory of a contiguous buffer or CPU tensor, kept by what is returned, and its bytes."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ValueError("the tensor must be contiguous and on the CPU")
        buffer = buffer.detach().reshape(-1).view(torch.uint8).numpy()
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("the buffer must be contiguous")
    if view.nbytes == 0:
        return ffi.NULL, 0
    return ffi.from_buffer("char[]", view, require_writable=writable), view.nbytes
