"""Requests: what a submission returns."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from dataclasses import dataclass
from typing import Any, Callable, Generator, Generic, Optional, Sequence, TypeVar

from ._blocking import Deadline
from ._errors import MlpoError, TimeoutError, check, error_of, last_error
from ._native import ffi, lib
from ._session import Session

T = TypeVar("T")
R = TypeVar("R", bound="Request[Any]")

_log = logging.getLogger("mlpo")


@dataclass(frozen=True)
class GradInfo:
    """What the daemon found in a gradient."""

    sum_of_squares: float  #: of the raw gradient, before grad_scale; of the whole window once `complete`
    all_finite: bool  #: no inf and no NaN
    complete: bool  #: every element is covered and all gradients read: of a window's requests, the last to end


class Request(Generic[T]):
    """Work that the daemon does. It ends exactly once; dropping the object does not stop it. Thread-safe."""

    def __init__(self, session: Session, waiter: Waiter, pointer: Any, convert: Callable[[Any], T]) -> None:
        self._session = session
        self._waiter = waiter
        self._pointer = pointer
        self._convert = convert
        self._outcome: tuple[Optional[T], Optional[MlpoError]] | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Request[T]], None]] = []
        session.adopt(self, pointer, lib.mlpo_request_free)

    def done(self) -> bool:
        """Whether it has ended. Never blocks."""
        self._session.check_not_forked()
        return self._outcome is not None or self._is_done()

    def result(self, timeout: Optional[float] = None) -> T:
        """Waits and returns the result or raises the request's error.

        `timeout` is in seconds; None waits as long as the daemon lives. Raises mlpo.TimeoutError when it passes; the
        request goes on. Releases the GIL and can be interrupted.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._outcome is not None
        value: T = self._outcome[0]  # type: ignore[assignment]
        return value

    def exception(self, timeout: Optional[float] = None) -> Optional[MlpoError]:
        """Waits as result() does and returns the request's error, None if it ended well."""
        self._session.check_not_forked()
        deadline = Deadline(timeout)
        while not self._wait(deadline.slice_ns()):
            if deadline.passed():
                raise TimeoutError(-errno.ETIMEDOUT, f"the request has not ended within {timeout} s and goes on")
        assert self._outcome is not None
        return self._outcome[1]

    def add_done_callback(self, callback: Callable[[Request[T]], None]) -> None:
        """Calls `callback(request)` once it has ended: in a thread of the client, or at once if it ended before.

        An exception of the callback is logged to the logger "mlpo".
        """
        self._session.check_not_forked()
        with self._lock:
            if self._outcome is None:
                self._callbacks.append(callback)
                self._watch()
                return
        _call(callback, self)

    def __await__(self) -> Generator[Any, None, T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def ended() -> None:
            if not future.done():
                future.set_result(None)

        def wake(_: Request[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended)

        self.add_done_callback(wake)
        yield from future.__await__()
        return self.result(0)

    def _watch(self) -> None:
        """Sees to it that the callbacks are called."""
        self._waiter.watch(self)

    def _is_done(self) -> bool:
        return int(lib.mlpo_request_done(self._pointer)) != 0  # misuse counts: result() raises it

    def _wait(self, timeout_ns: int) -> bool:
        """Waits in C; True once the outcome is known."""
        if self._outcome is not None:
            return True
        result = ffi.new("struct mlpo_result *")
        result.struct_size = ffi.sizeof("struct mlpo_result")
        code = lib.mlpo_request_wait(self._pointer, timeout_ns, result)
        if code == -errno.ETIMEDOUT:
            # Its own failure may be ETIMEDOUT too; only the wait's deadline leaves it undone.
            if lib.mlpo_request_done(self._pointer) == 0:
                return False
            code = lib.mlpo_request_wait(self._pointer, 0, result)
        if code < 0:
            self._settle((None, error_of(code, last_error(), result.os_errno)))
        else:
            self._settle((self._convert(result), None))
        return True

    def _settle(self, outcome: tuple[Optional[T], Optional[MlpoError]]) -> None:
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome

    def _run_callbacks(self) -> None:
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback, self)


def wait_any(requests: Sequence[R], timeout: Optional[float] = None) -> list[R]:
    """Waits until one of the requests, all of one client, has ended and returns those that have: at least one.

    `timeout` is in seconds; None waits as long as the daemon lives. Raises mlpo.TimeoutError when it passes, and
    ValueError without requests; what a request ended with is for its result(). Releases the GIL and can be interrupted.
    """
    if not requests:
        raise ValueError("wait_any() needs a request to wait for")
    pointers = ffi.new("mlpo_request *[]", [request._pointer for request in requests])
    index = ffi.new("size_t *")
    deadline = Deadline(timeout)
    in_c = all(request._pointer for request in requests)
    while True:
        requests[0]._session.check_not_forked()
        if in_c:
            code = lib.mlpo_wait_any(pointers, len(requests), deadline.slice_ns(), index)
        else:  # a flush or fetch is among them, which C does not know as one request
            requests[0]._wait(deadline.slice_ns(0.005))
            code = 0 if any(request.done() for request in requests) else -errno.ETIMEDOUT
        if code != -errno.ETIMEDOUT:
            check(code)
            return [request for request in requests if request.done()]
        if deadline.passed():
            raise TimeoutError(code, f"none of {len(requests)} requests has ended within {timeout} s; they go on")


def _call(callback: Callable[[Any], None], request: Any) -> None:
    try:
        callback(request)
    except Exception:  # noqa: BLE001 - there is nobody to raise it to
        _log.exception("a callback of a request failed")


class Waiter:
    """Waits for requests with callbacks: one thread a client, which lives while there are any.

    Owner of nothing but the list; the thread takes requests off it when they have ended.
    """

    _IDLE_S = 1.0
    _TURN_S = 0.005  # how soon a request that comes meanwhile is looked at

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: list[Request[Any]] = []
        self._running = False

    def watch(self, request: Request[Any]) -> None:
        with self._changed:
            if request not in self._watched:
                self._watched.append(request)
            self._changed.notify()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="mlpo-callbacks", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._watched and not self._changed.wait_for(lambda: self._watched, self._IDLE_S):
                    self._running = False
                    return
                watched = list(self._watched)
            try:
                ended = [request for request in wait_any(watched, self._TURN_S) if request._wait(0)]
            except TimeoutError:
                ended = []
            with self._changed:
                self._watched = [request for request in self._watched if request not in ended]
            for request in ended:
                request._run_callbacks()
            del watched, ended
