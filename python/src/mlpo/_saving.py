"""Checkpoints by the daemon: a save that goes on beside training, and restoring."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pathlib
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

from . import _parts, _rests
from ._blocking import Deadline, interruptible, nanoseconds
from ._errors import MlpoError, TimeoutError, check
from ._native import ffi, lib
from ._own_files import PartFiles, as_mlpo_error, is_complete, open_checkpoint
from ._request import Request
from ._subgroup import SUBMIT_TIMEOUT_S, Subgroup, _submit_in_slices

if TYPE_CHECKING:
    from ._client import Client


BEGIN_TIMEOUT_S = 300.0
_UNDO_S = 60.0  # how long giving something up may take
_TIDY_S = 10.0  # how long a save looks for what others have left; one tag may take it past that
_STILL_S = 300.0  # a save that comes no further for so long hangs


@dataclass(frozen=True)
class Restored:
    """The checkpoint that was restored."""

    tag: str
    step: int  #: as it was saved with; the steps of each tensor are in its state
    world_size: int  #: of those who saved it
    attempt: bytes  #: which save under this tag it is; with tag= and attempt= other ranks restore the same one


class Saved:
    """A checkpoint that this rank has begun. Thread-safe.

    ``snapshot`` is a request that ends when the state is as it will be saved: its result is the bytes that are being
    copied. Training goes on at once; what is submitted after the checkpoint is not in it.
    """

    snapshot: Request[int]
    _end: Request[bool]

    def __init__(
        self, client: Client, info: Any, directory: str, tag: str, step: int, files: Optional[PartFiles] = None
    ) -> None:
        self._client = client
        self._files = files  # with a daemon of another user: ours, to be given their names
        self._handle = int(info.handle)
        self._directory = directory
        self.tag, self.step = tag, step
        self.attempt = bytes(ffi.buffer(info.attempt))  #: of all ranks' parts
        self._taken = False

    def _take(self) -> None:
        """What is submitted from here on is not in it."""
        self.snapshot = self._submit(lib.mlpo_checkpoint_take, lambda result: int(result.value))
        self._end = self._submit_saved()
        self._taken = True
        self._client._last_save = (self.tag, self.snapshot, self._end)
        if self._files is not None:
            self._client._unfinished.add(self)

    def _submit_saved(self) -> Request[bool]:
        return self._submit(lib.mlpo_checkpoint_saved, lambda result: bool(result.value))

    def _submit(self, function: Callable[..., Any], convert: Callable[[Any], Any]) -> Request[Any]:
        request = ffi.new("mlpo_request **")
        session = self._client._session
        _submit_in_slices(
            lambda timeout_ns: int(function(session.pointer, self._handle, timeout_ns, request)), SUBMIT_TIMEOUT_S
        )
        return Request(session, self._client._waiter, request[0], convert)

    def done(self) -> bool:
        """Whether it has ended: this rank's part is durable, or it has failed."""
        return _has_ended(self.snapshot, self._end)

    def result(self, timeout: Optional[float] = None) -> bool:
        """Waits until this rank's part is durable. True on the rank that is done last, if all ranks' parts are there.

        False is no error. It may be False on all ranks, where two are done at the same moment, or on NFS. To know: let
        all ranks wait here and meet (torch.distributed.barrier()), then ask is_complete() on one of them.

        Raises what it failed with; training is not touched by it. mlpo.TimeoutError when `timeout` seconds have passed:
        it goes on. With a daemon of another user the part gets its name here, or when the client is closed.
        """
        deadline = Deadline(timeout)
        failed = self.snapshot.exception(timeout)
        if failed is not None:
            with contextlib.suppress(MlpoError):
                self.abandon()
            raise failed
        try:
            complete = self._end.result(deadline.remaining())
            if self._files is not None:
                complete = self._files.commit(self.attempt)
        except OSError as error:
            if not isinstance(error, TimeoutError) or self._end.done():
                self._finish()
            raise
        self._finish()
        return complete

    def is_complete(self) -> bool:
        """Whether the parts of all ranks are there now, durably. It looks into the directory, anew with each call."""
        try:
            return is_complete(self._directory, self.tag, self.attempt, self._client.world_size)
        except OSError as error:
            raise as_mlpo_error(error) from error

    def _wait_while_it_moves(self) -> None:
        """result(), but raises mlpo.TimeoutError when it comes no further."""
        before: Any = None
        while True:
            try:
                self.result(_STILL_S)
                return
            except TimeoutError:
                now = self._progress()
                if self._end.done() or now == before:
                    raise
                before = now

    def _progress(self) -> Any:
        """What the daemon's status says of it, whatever that is; None if it says nothing."""
        try:
            running = self._client.status(timeout=30.0)["checkpoints"]["running"]
        except OSError:
            return None
        mine = (self._client.job, self._client.rank, self.tag)
        return [(e["phase"], e["copied_bytes"]) for e in running if (e["job"], e["rank"], e["tag"]) == mine] or None

    def _finish(self) -> None:
        if self._files is not None:
            self._client._unfinished.discard(self)
            self._files.close()

    def abandon(self, *, timeout: Optional[float] = 60.0) -> None:
        """Gives it up: nothing of this rank's part is there any more when this returns, unless it was durable before.

        Raises MlpoError: EALREADY if all of it has been copied and is just being made durable.
        """
        client, deadline = self._client, Deadline(timeout)
        limit = nanoseconds(timeout)
        try:
            interruptible(lambda: check(lib.mlpo_checkpoint_abandon(client._session.pointer, self._handle, limit)))
        except MlpoError as error:
            # It has ended; or the daemon has only its files to finish, which never get their names.
            if error.errno != errno.EBADF and (error.errno != errno.EALREADY or self._files is None):
                raise
        finally:
            self._finish()
        end = self._end if self._taken else self._submit_saved()
        end.exception(deadline.remaining())  # then its files are gone


def _has_ended(snapshot: Request[int], end: Request[bool]) -> bool:
    return end.done() or (snapshot.done() and snapshot.exception(0) is not None)


def settle_last(client: Client) -> None:
    """For all ranks before any of them begins another checkpoint: who begins removes what is incomplete of its own.

    What the client saved last gets its names, if nothing else is left to do. Raises MlpoError: EBUSY while it goes on.
    """
    if client._last_save is not None:
        tag, snapshot, end = client._last_save
        if not _has_ended(snapshot, end):
            raise MlpoError(
                -errno.EBUSY,
                f"checkpoint {tag!r} of rank {client.rank} has not ended: wait for its result(), or abandon() it, "
                "before the next one",
            )
    for saved in list(client._unfinished):
        if saved.done():
            with contextlib.suppress(OSError):  # for who asks for its result()
                saved.result(0)


def remove_rests(client: Client, directory: str, of_all: bool = False) -> None:
    """What killed clients have left in a directory, with a client's first saves there: of this rank, and of those that
    there are no more. `of_all`: of all ranks, and what cut saves of the job have left, too; before any rank begins.
    What takes longer than some seconds, since others wait, goes on with the next save. What cannot be removed has a
    warning."""
    place = os.path.abspath(directory)
    looking = client._tidying.get((place, of_all))
    job, own, ranks = client.job, client.rank, client.world_size
    if looking is None and of_all:
        looking = itertools.chain(_rests.remove_uncommitted(place, job), _rests.remove_cut(place, job))
    elif looking is None:
        looking = _rests.remove_uncommitted(place, job, lambda rank: rank % ranks == own)
    client._tidying[place, of_all] = iter(())  # for who saves meanwhile, and where it fails
    until = time.monotonic() + _TIDY_S
    try:
        for _ in looking:
            if time.monotonic() >= until:
                client._tidying[place, of_all] = looking
                return
    except FileNotFoundError:
        pass  # somebody else removes there, or there is no such directory, which who saves is told
    except OSError as error:
        warnings.warn(f"what earlier saves have left in {place} stays: {error}", RuntimeWarning, stacklevel=3)


def _check_attempt(attempt: Optional[bytes], which: str) -> None:
    if attempt is not None and len(attempt) != 16:
        raise ValueError(f"attempt has {len(attempt)} bytes; it has 16, {which}")


def begin_save(
    client: Client,
    directory: str,
    tag: str,
    step: int,
    attempt: Optional[bytes],
    overwrite: bool,
    timeout: float = BEGIN_TIMEOUT_S,
    take: bool = True,
) -> Saved:
    """`take`: else its _take() is called later, when the others have begun, too."""
    _check_attempt(attempt, "those of rank 0 on all ranks: uuid.uuid4().bytes")
    pointer, limit = client._session.pointer, nanoseconds(timeout)
    options = ffi.new("struct mlpo_checkpoint_options *")
    options.struct_size = ffi.sizeof("struct mlpo_checkpoint_options")
    kept = [ffi.new("char []", tag.encode())]
    options.tag = kept[0]
    files: Optional[PartFiles] = None
    if client.daemon_uid == os.geteuid():
        kept.append(ffi.new("char []", os.fsencode(os.path.abspath(directory))))
        options.directory = kept[-1]
    else:
        remove_rests(client, directory)
        try:
            files = PartFiles(directory, tag, client.rank, client.job, overwrite, attempt)
        except MlpoError:
            raise
        except OSError as error:
            raise as_mlpo_error(error) from error
        kept.append(ffi.new("int []", files.descriptors))
        options.files = kept[-1]
    options.step, options.overwrite = step, overwrite
    if attempt is not None:
        kept.append(ffi.new("uint8_t []", attempt))
        options.attempt = kept[-1]
    info = ffi.new("struct mlpo_checkpoint_info *")
    info.struct_size = ffi.sizeof("struct mlpo_checkpoint_info")

    made: list[Saved] = []  # at most one

    def call() -> Saved:
        check(lib.mlpo_checkpoint_begin(pointer, options, limit, info))
        made.append(Saved(client, info, os.path.abspath(directory), tag, step, files))
        if take:
            made[0]._take()
        kept.clear()  # needed until here, also if the caller was interrupted
        return made[0]

    def undo() -> None:
        """Nobody has it: it must not keep the session from beginning another one."""
        for saved in made:
            with contextlib.suppress(MlpoError):  # what it says helps nobody now
                saved.abandon(timeout=_UNDO_S)
        if files is not None:
            files.close()

    return interruptible(call, undo)


def begin_restore(
    client: Client, directory: str, tag: Optional[str], attempt: Optional[bytes], timeout: Optional[float]
) -> Restoring:
    """Finds the checkpoint, and where in it the tensors are that are registered now. Without an attempt, the one that
    counts: another rank may find another one a moment later."""
    if attempt is not None and tag is None:
        raise ValueError("an attempt is one of a tag: pass tag=, too, both as the rank that chose has them in Restored")
    _check_attempt(attempt, "those of Restored.attempt of the rank that chose")
    info = ffi.new("struct mlpo_restore_info *")
    info.struct_size = ffi.sizeof("struct mlpo_restore_info")
    pointer, limit = client._session.pointer, nanoseconds(timeout)
    kept: list[Any] = []
    fds: list[int] = []
    if client.daemon_uid == os.geteuid():
        kept = [ffi.new("char []", os.fsencode(os.path.abspath(directory)))]
        kept.append(ffi.NULL if tag is None else ffi.new("char []", tag.encode()))
        kept.append(ffi.NULL if attempt is None else ffi.new("uint8_t []", attempt))
    else:
        fds = _opened(client, pathlib.Path(os.path.abspath(directory)), tag, attempt)
        kept = [ffi.new("int []", fds)]

    def free() -> None:
        while fds:
            os.close(fds.pop())

    def call() -> Restoring:
        if fds:
            check(lib.mlpo_restore_begin_files(pointer, kept[0], len(fds), limit, info))
        else:
            check(lib.mlpo_restore_begin(pointer, kept[0], kept[1], kept[2], limit, info))
        free()
        text = ffi.string(info.tag).decode()
        found = Restored(text, int(info.step), int(info.world_size), bytes(ffi.buffer(info.attempt)))
        return Restoring(client, int(info.handle), found)

    def undo() -> None:
        if info.handle != 0:
            lib.mlpo_restore_end(pointer, info.handle, nanoseconds(_UNDO_S))
        free()

    return interruptible(call, undo)


def _opened(client: Client, directory: pathlib.Path, tag: Optional[str], attempt: Optional[bytes]) -> list[int]:
    """Descriptors of the checkpoint's files. ENOENT says that there is none, and never that one is damaged: who gets it
    begins from nothing."""
    tries_left = 3
    while True:
        try:
            chosen = _parts.choose(directory, tag, None if attempt is None else attempt.hex(), client.job)
        except _parts.CheckpointError as error:
            raise MlpoError(-errno.ENOENT, str(error)) from error
        except OSError as error:
            raise as_mlpo_error(error) from error
        try:
            return open_checkpoint(chosen)
        except FileNotFoundError as error:  # perhaps just replaced by another one
            tries_left -= 1
            if tries_left == 0:
                raise MlpoError(-errno.EINVAL, f"the checkpoint has lost a file: {error}") from error
        except _parts.CheckpointError as error:
            raise MlpoError(-errno.EINVAL, str(error)) from error
        except OSError as error:
            raise as_mlpo_error(error) from error


class Restoring:
    """A checkpoint that was found for a client's subgroups, which are to be filled from it. For one thread."""

    def __init__(self, client: Client, handle: int, found: Restored) -> None:
        self._client, self._handle = client, handle
        self.found = found

    def fill(self, subgroups: Sequence[Subgroup], timeout: Optional[float]) -> Restored:
        """Returns when they all have the checkpoint's state. Ends it, whatever happens."""
        deadline = Deadline(timeout)
        failed: Optional[MlpoError] = None
        try:
            requests = [subgroup.submit_restore(self._handle) for subgroup in subgroups]
            for request in requests:  # all of them end before what they read from goes
                error = request.exception(deadline.remaining())
                failed = failed or error
        finally:
            self.end()
        if failed is not None:
            raise failed
        return self.found

    def end(self) -> None:
        """The daemon forgets where the tensors are; what is being filled yet fails or ends as it would."""
        handle, self._handle = self._handle, 0
        if handle != 0:
            pointer = self._client._session.pointer
            interruptible(lambda: check(lib.mlpo_restore_end(pointer, handle, nanoseconds(_UNDO_S))))


def restore(
    client: Client,
    subgroups: Sequence[Subgroup],
    directory: str,
    tag: Optional[str],
    attempt: Optional[bytes],
    timeout: Optional[float],
) -> Restored:
    deadline = Deadline(timeout)
    found = begin_restore(client, directory, tag, attempt, timeout)
    return found.fill(subgroups, deadline.remaining())
