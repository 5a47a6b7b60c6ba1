"""Checkpoints by the daemon: a save that goes on beside training, and restoring."""

from __future__ import annotations

import errno
import os
import pathlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

from . import _parts
from ._blocking import Deadline, interruptible, nanoseconds
from ._errors import MlpoError, check
from ._native import ffi, lib
from ._own_files import PartFiles, open_checkpoint
from ._request import Request
from ._subgroup import SUBMIT_TIMEOUT_S, Subgroup, _submit_in_slices

if TYPE_CHECKING:
    from ._client import Client


@dataclass(frozen=True)
class Restored:
    """The checkpoint that was restored."""

    tag: str
    step: int
    world_size: int  #: of those who saved it
    attempt: bytes


class Saved:
    """A checkpoint that this rank has begun. Thread-safe.

    ``snapshot`` is a request that ends when the state is as it will be saved: its result is the bytes that are being
    copied. Training goes on at once; what is submitted after the checkpoint is not in it.
    """

    def __init__(self, client: Client, info: Any, tag: str, step: int, files: Optional[PartFiles] = None) -> None:
        self._client = client
        self._files = files  # with a daemon of another user: ours, to be given their names
        self._handle = int(info.handle)
        self.tag, self.step = tag, step
        self.attempt = bytes(ffi.buffer(info.attempt))  #: of all ranks' parts
        self.snapshot: Request[int] = self._submit(lib.mlpo_checkpoint_take, lambda result: int(result.value))
        self._end: Request[bool] = self._submit(lib.mlpo_checkpoint_saved, lambda result: bool(result.value))
        if files is not None:
            client._unfinished.append(self)

    def _submit(self, function: Callable[..., Any], convert: Callable[[Any], Any]) -> Request[Any]:
        request = ffi.new("mlpo_request **")
        session = self._client._session
        _submit_in_slices(
            lambda timeout_ns: int(function(session.pointer, self._handle, timeout_ns, request)), SUBMIT_TIMEOUT_S
        )
        return Request(session, self._client._waiter, request[0], convert)

    def done(self) -> bool:
        """Whether it has ended: this rank's part is durable, or it has failed."""
        return self._end.done() or (self.snapshot.done() and self.snapshot.exception(0) is not None)

    def result(self, timeout: Optional[float] = None) -> bool:
        """Waits until this rank's part is durable. Whether those of all ranks are, as seen from here.

        Raises what it failed with; training is not touched by it. mlpo.TimeoutError when `timeout` seconds have passed:
        it goes on. With a daemon of another user the part gets its name here, or when the client is closed.
        """
        deadline = Deadline(timeout)
        failed = self.snapshot.exception(timeout)
        if failed is not None:
            self.abandon()
            raise failed
        try:
            complete = self._end.result(deadline.remaining())
            if self._files is not None:
                complete = self._files.commit(self.attempt)
        except TimeoutError:
            raise
        except OSError:
            self._finish()
            raise
        self._finish()
        return complete

    def _finish(self) -> None:
        if self._files is not None and self in self._client._unfinished:
            self._client._unfinished.remove(self)
            self._files.close()

    def abandon(self, *, timeout: Optional[float] = 60.0) -> None:
        """Gives it up, if it has not ended: nothing of this rank's part is there any more when this returns."""
        client, deadline = self._client, Deadline(timeout)
        limit = nanoseconds(timeout)
        try:
            interruptible(lambda: check(lib.mlpo_checkpoint_abandon(client._session.pointer, self._handle, limit)))
        except MlpoError as error:
            if error.errno != errno.EBADF:  # it has ended
                raise
        finally:
            self._finish()
        self._end.exception(deadline.remaining())


def begin_save(
    client: Client, directory: str, tag: str, step: int, attempt: Optional[bytes], overwrite: bool, timeout: float
) -> Saved:
    if attempt is not None and len(attempt) != 16:
        what = f"attempt has {len(attempt)} bytes; it has 16"
        raise ValueError(f"{what}, those of rank 0 on all ranks: uuid.uuid4().bytes")
    options = ffi.new("struct mlpo_checkpoint_options *")
    options.struct_size = ffi.sizeof("struct mlpo_checkpoint_options")
    kept = [ffi.new("char []", tag.encode())]
    options.tag = kept[0]
    files: Optional[PartFiles] = None
    if client.daemon_uid == os.geteuid():
        kept.append(ffi.new("char []", os.fsencode(os.path.abspath(directory))))
        options.directory = kept[-1]
    else:
        files = PartFiles(directory, tag, client.rank, overwrite)
        kept.append(ffi.new("int []", files.descriptors))
        options.files = kept[-1]
    options.step, options.overwrite = step, overwrite
    if attempt is not None:
        kept.append(ffi.new("uint8_t []", attempt))
        options.attempt = kept[-1]
    info = ffi.new("struct mlpo_checkpoint_info *")
    info.struct_size = ffi.sizeof("struct mlpo_checkpoint_info")
    limit = nanoseconds(timeout)

    def call() -> None:
        check(lib.mlpo_checkpoint_begin(client._session.pointer, options, limit, info))
        kept.clear()  # needed until here, also if the caller was interrupted

    try:
        interruptible(call)
        return Saved(client, info, tag, step, files)
    except BaseException:
        if files is not None:
            files.close()
        raise


def restore(
    client: Client, subgroups: Sequence[Subgroup], directory: str, tag: Optional[str], timeout: Optional[float]
) -> Restored:
    info = ffi.new("struct mlpo_restore_info *")
    info.struct_size = ffi.sizeof("struct mlpo_restore_info")
    deadline = Deadline(timeout)
    pointer, limit = client._session.pointer, nanoseconds(timeout)
    if client.daemon_uid == os.geteuid():
        kept = [ffi.new("char []", os.fsencode(os.path.abspath(directory)))]
        kept.append(ffi.NULL if tag is None else ffi.new("char []", tag.encode()))
        interruptible(lambda: check(lib.mlpo_restore_begin(pointer, kept[0], kept[1], ffi.NULL, limit, info)))
    else:
        try:
            fds = open_checkpoint(_parts.choose(pathlib.Path(os.path.abspath(directory)), tag))
        except _parts.CheckpointError as error:
            raise MlpoError(-errno.ENOENT, str(error)) from error
        array = ffi.new("int []", fds)
        try:
            interruptible(
                lambda: check(lib.mlpo_restore_begin_files(pointer, array, len(array), limit, info))
            )
        finally:
            for fd in fds:
                os.close(fd)
    handle = int(info.handle)
    try:
        requests = [subgroup.submit_restore(handle) for subgroup in subgroups]
        failed: Optional[MlpoError] = None
        for request in requests:  # all of them end before what they read from goes
            error = request.exception(deadline.remaining())
            failed = failed or error
        if failed is not None:
            raise failed
    finally:
        interruptible(lambda: check(lib.mlpo_restore_end(pointer, handle, nanoseconds(60.0))))
    attempt = bytes(ffi.buffer(info.attempt))
    return Restored(ffi.string(info.tag).decode(), int(info.step), int(info.world_size), attempt)
