"""Connecting to the daemon."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import warnings
import weakref
from types import TracebackType
from typing import Any, Callable, Iterator, Optional, Sequence, Union

from ._blocking import interruptible, nanoseconds
from ._errors import TimeoutError, check
from ._native import ffi, lib
from ._objects import ObjectRequest, Worker, memory_of, name_of
from ._request import Request, Waiter
from ._saving import BEGIN_TIMEOUT_S, Restored, Saved, begin_save, restore
from ._session import Session
from ._subgroup import Subgroup, TensorSpec, float_array, is_overflow
from ._views import DTYPES, dtype_of

_GIVE_UP_S = 5.0  # for the daemon's answer, before the session is closed all the same


def connect(
    socket: Optional[str] = None,
    job: Optional[str] = None,
    rank: Optional[int] = None,
    world_size: Optional[int] = None,
    arena: Optional[int] = None,
    *,
    ring_entries: int = 0,
    timeout: float = 30.0,
) -> Client:
    """Makes a session with the node's daemon.

    socket: default $MLPO_SOCKET, /run/mlpo/$UID/mlpo.sock, /run/mlpo/mlpo.sock, $XDG_RUNTIME_DIR/mlpo/mlpo.sock.
    job: default $MLPO_JOB, $TORCHELASTIC_RUN_ID unless "none", $SLURM_JOB_ID.$SLURM_STEP_ID; else it is required.
    rank, world_size: default $RANK and $WORLD_SIZE, else 0 and 1.
    arena: a fixed limit of shared memory in bytes; default: it grows with registrations.
    timeout: seconds for the handshake, and to wait for this rank's previous session to end.

    Raises MlpoError: ENOENT or ECONNREFUSED without a daemon, EADDRINUSE while this rank has a live session.
    """
    kept = [_string(socket), _string(job)]
    options = ffi.new("struct mlpo_connect_options *")
    options.struct_size = ffi.sizeof("struct mlpo_connect_options")
    options.socket, options.job = kept
    options.rank = -1 if rank is None else rank
    options.world_size = -1 if world_size is None else world_size
    options.arena_bytes = arena or 0
    options.ring_entries = ring_entries
    options.connect_timeout_ns = max(1, nanoseconds(timeout))

    def call() -> Client:
        pointer = ffi.new("mlpo_client **")
        check(lib.mlpo_connect(options, pointer))
        return Client(Session(pointer[0]), kept)

    return interruptible(call)


class Client:
    """A session of this rank. Thread-safe; a context manager that closes it. Made by connect()."""

    def __init__(self, session: Session, _kept: Sequence[Any] = ()) -> None:
        self._session = session
        self._waiter = Waiter()
        self._objects = Worker()
        session.adopt(self)
        self._subgroups: weakref.WeakSet[Subgroup] = weakref.WeakSet()  # that restore() fills
        self._names: dict[str, list[str]] = {}  # of all registered tensors, also if nobody has them any more
        info = self._info()
        self.rank = int(info.rank)
        self.world_size = int(info.world_size)
        self.block_elements = int(info.block_elements)  #: parameters in one of the daemon's blocks
        self.ring_entries = int(info.ring_entries)
        self.socket = ffi.string(info.socket).decode()
        self.job = ffi.string(info.job).decode()
        self.daemon_uid = int(info.daemon_uid)  #: whose daemon it is
        self._unfinished: set[Saved] = set()  # whose files have still to get their names
        self._tidying: dict[tuple[str, bool], Iterator[int]] = {}  # directories: see _saving.remove_rests
        self._last_save: Optional[tuple[str, Request[int], Request[bool]]] = None  # tag, snapshot and end
        _open_clients.add(self)

    def __repr__(self) -> str:
        return f"<mlpo.Client of job {self.job!r}, rank {self.rank} of {self.world_size}, at {self.socket}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def close(self, *, timeout: Optional[float] = None) -> None:
        """Ends the session: later calls, and requests that wait, raise with the code MLPO_ERR_CLOSED.

        The daemon drops the session's state. Views stay readable. Closing twice does nothing. A checkpoint that goes on
        does so without the client, but for one by a daemon of another user: that is waited for, `timeout` seconds, by
        default until five minutes bring it no further. It is then given up, with a warning that says so.
        """
        self._session.check_not_forked()
        self._end_saves(timeout)
        interruptible(lambda: check(lib.mlpo_client_close(self._session.pointer)))

    def _end_saves(self, timeout: Optional[float]) -> None:
        """Whatever they end with, the session ends, too."""
        for save in list(self._unfinished):
            try:
                if timeout is None:
                    save._wait_while_it_moves()
                else:
                    save.result(timeout)
            except OSError as error:
                why = "it does not end, and is given up" if isinstance(error, TimeoutError) else error
                warnings.warn(f"checkpoint {save.tag!r} was not saved: {why}", RuntimeWarning, stacklevel=3)
                with contextlib.suppress(OSError):
                    save.abandon(timeout=_GIVE_UP_S)

    def check_alive(self) -> None:
        """Raises why the session has ended, if it has."""
        self._session.alive()

    @property
    def arena_bytes(self) -> int:
        """Shared memory mapped so far."""
        return int(self._info().arena_bytes)

    @property
    def lost_wakeups(self) -> int:
        """Work found by a time-out rather than a wake-up: 0 unless there is a bug."""
        return int(self._info().lost_wakeups)

    def subgroup(
        self,
        key: str,
        numel: Optional[int] = None,
        dtype: Any = "float32",
        grad_dtype: Any = None,
        initial: Any = None,
        *,
        tensors: Optional[Sequence[TensorSpec]] = None,
        keep: bool = False,
        timeout: Optional[float] = None,
    ) -> Subgroup:
        """Registers a subgroup and returns when its slot is there.

        key: unique within this session. numel: elements; may be left out with `tensors`, and alone it means one tensor
        named like the key. dtype: of the parameters handed out, "float32", "float16" or "bfloat16". grad_dtype: default
        as dtype. initial: float32 master values; default zeros. timeout: seconds; None waits while the daemon lives.
        keep: it has no slot of its own, but is lent one (Subgroup.lend) of what connect(arena=) leaves when the first
        such subgroup is registered: for gradients that do not all fit.

        Raises MlpoError: EEXIST if the key is taken, EDQUOT or ENOSPC with figures where memory or storage lack.
        """
        self._session.check_not_forked()
        if tensors is None:
            if numel is None:
                raise TypeError(f"subgroup {key!r} needs numel or tensors")
            specs, explicit = [TensorSpec(key, (numel,))], False
        else:
            specs, explicit = list(tensors), True
        total = sum(spec.numel for spec in specs)
        if numel is not None and numel != total:
            raise ValueError(f"subgroup {key!r}: numel is {numel}, its tensors have {total} elements")
        dtypes = (dtype_of(dtype), dtype_of(dtype if grad_dtype is None else grad_dtype))
        kept: list[Any] = [_string(key)]
        options = ffi.new("struct mlpo_subgroup_options *")
        options.struct_size = ffi.sizeof("struct mlpo_subgroup_options")
        options.key = kept[0]
        options.numel = total
        options.keep = keep
        options.dtype, options.grad_dtype = (DTYPES[name][0] for name in dtypes)
        if explicit:
            array = _tensor_array(specs, kept)
            options.tensors, options.tensor_count = array, len(specs)
        if initial is not None:
            values = float_array(initial, total, "initial")
            kept.append(values)
            options.initial = ffi.cast("float *", values.ctypes.data)
        limit = nanoseconds(timeout)

        def call() -> Subgroup:
            pointer = ffi.new("mlpo_subgroup **")
            check(lib.mlpo_subgroup_register(self._session.pointer, options, limit, pointer))
            del kept[1:]
            subgroup = Subgroup(self, pointer[0], key, specs, dtypes)
            self._subgroups.add(subgroup)
            self._names[key] = [spec.name for spec in specs]
            return subgroup

        return interruptible(call)

    def discard(self, reason: str = "overflow", *, timeout: Optional[float] = None) -> None:
        """Ends every open window of the session without an update; "overflow" counts a skipped step."""
        self._session.check_not_forked()
        overflow = is_overflow(reason)
        interruptible(lambda: check(lib.mlpo_client_discard(self._session.pointer, overflow, nanoseconds(timeout))))

    def status(self, *, timeout: Optional[float] = 30.0) -> dict[str, Any]:
        """The daemon's status, as `mlpo-ctl status --json` prints it."""
        return self._control("status", None, timeout)

    def share_figures(self, *, timeout: Optional[float] = 30.0) -> dict[str, Any]:
        """What this node has to tell the job's other nodes of the paths that they share.

        Under "daemon" a text that is the same for all clients of this daemon and no other; under "paths" for each path
        with ``share = "measured"`` its name, and four numbers: bytes/s that are read and written there at once while it
        is busy, seconds that it was busy (in all), bytes/s that the node's other paths do, bytes that a step reads and
        writes. OffloadAdamW exchanges them every few steps; with loops of one's own gather them over one rank a
        node, and pass what they say to set_path_share().
        """
        return self._control("share_figures", {"job": self.job}, timeout)

    def set_path_share(
        self, path: str, nodes: Sequence[Sequence[float]], me: int, *, timeout: Optional[float] = 30.0
    ) -> dict[str, Any]:
        """Tells the daemon what all nodes see of a path, so that this one takes what makes a step shortest for all.

        path: its name, with ``share = "measured"``. nodes: each node's four numbers of share_figures(), but with the
        seconds since the exchange before; `me`: which is this node's. It holds until the job's last session here ends.
        One rank a node does.

        Raises MlpoError (EPROTO): there is no such path, or sessions of other users are connected.
        """
        params = {"job": self.job, "path": path, "nodes": [list(node) for node in nodes], "me": me}
        return self._control("share", params, timeout)

    def _control(self, method: str, params: Any, timeout: Optional[float]) -> dict[str, Any]:
        self._session.check_not_forked()
        limit = nanoseconds(timeout)
        sent = _string(None if params is None else json.dumps(params))

        def call() -> dict[str, Any]:
            text = ffi.new("char **")
            check(lib.mlpo_control(_string(self.socket), method.encode(), sent, limit, text))
            try:
                answer: dict[str, Any] = json.loads(ffi.string(text[0]).decode())
            finally:
                lib.mlpo_free(text[0])
            return answer

        return interruptible(call)

    def flush(self, name: Union[str, bytes], buffer: Any) -> Request[int]:
        """Stores the bytes of `buffer` as the job's object `name`: all of them, or the object stays as it was.

        buffer: anything contiguous with the buffer protocol, or a CPU tensor; it must stay as it is until the request
        has ended. Every rank of the job sees the object, until it is deleted or the job's last session ends. Requests
        of one client are carried out in their order. result() is the size in bytes.

        Raises MlpoError: ENOSPC where the paths have no room, EDQUOT for too many objects.
        """
        self._session.check_not_forked()
        key = name_of(name)
        memory, size = memory_of(buffer, writable=False)

        def call() -> int:
            check(lib.mlpo_object_flush(self._session.pointer, key, memory, size, lib.MLPO_FOREVER))
            return size

        return self._on_object(call)

    def fetch(self, name: Union[str, bytes], out: Any, offset: int = 0) -> Request[int]:
        """Fills `out` with the object's bytes from `offset` on; the object must have as many.

        out: as for flush(), and writable; its content is undefined until the request has ended. result() is the
        object's size in bytes.

        Raises MlpoError: ENOENT if there is no such object, EINVAL if it is shorter.
        """
        self._session.check_not_forked()
        if offset < 0:
            raise ValueError(f"offset is {offset}")
        key = name_of(name)
        memory, size = memory_of(out, writable=True)

        def call() -> int:
            total = ffi.new("uint64_t *")
            check(
                lib.mlpo_object_fetch(self._session.pointer, key, offset, size, memory, total, lib.MLPO_FOREVER)
            )
            return int(total[0])

        return self._on_object(call)

    def stat(self, name: Union[str, bytes], *, timeout: Optional[float] = None) -> Optional[int]:
        """The object's size in bytes; None if there is no such object."""
        self._session.check_not_forked()
        key, limit = name_of(name), nanoseconds(timeout)

        def call() -> Optional[int]:
            total = ffi.new("uint64_t *")
            code = lib.mlpo_object_size(self._session.pointer, key, total, limit)
            if code == -errno.ENOENT:
                return None
            check(code)
            return int(total[0])

        return interruptible(call)

    def delete(self, name: Union[str, bytes], *, timeout: Optional[float] = None) -> None:
        """Deletes the object. Fetches that have begun have it to its end. Raises MlpoError: ENOENT if there is none."""
        self._session.check_not_forked()
        key, limit = name_of(name), nanoseconds(timeout)
        interruptible(lambda: check(lib.mlpo_object_delete(self._session.pointer, key, limit)))

    def _on_object(self, call: Callable[[], int]) -> Request[int]:
        request = ObjectRequest(self._session, self._waiter, call)
        self._objects.submit(request)
        return request

    def checkpoint(
        self,
        directory: str,
        tag: str,
        step: int,
        *,
        attempt: Optional[bytes] = None,
        overwrite: bool = False,
        timeout: float = BEGIN_TIMEOUT_S,
    ) -> Saved:
        """Saves this rank's part of a checkpoint, beside training; all ranks of the job save under the same tag.

        Call it between an update and the next gradient. It returns when the files have been made and the state of this
        moment is sure to be what is saved; result() of what it returns waits until the part is durable. The checkpoint
        is complete when all ranks' parts are, and only then is ever restored.

        directory: is there already; all ranks see the same one.
        tag: the checkpoint's name in it, of letters, digits and "_.-", for example "step-1000".
        step: restore() without a tag takes the checkpoint of the highest step.
        attempt: 16 bytes that tell this save from others under the tag: new for each, and the same on all ranks.
          Default: the daemon chooses, for which all ranks must be connected to it. On several nodes let rank 0 make
          them (uuid.uuid4().bytes) and tell the others.
        overwrite: replaces a complete checkpoint under the tag, which goes when the new one is complete.
        timeout: seconds for making the files.

        Raises MlpoError: EEXIST if the tag has a complete checkpoint, or the attempt was used before; EBUSY while this
        client's last one has not ended: wait for its result() or abandon() it; ENOSPC with the figures, where there is
        no room in the directory, or on the daemon's paths for a second copy of the state. Training is not touched.

        With a daemon of another user the part has no name before result(): another rank that begins the next one before
        that finds this one cut, and removes its own part of it. (OffloadAdamW.save() asks all ranks first.)
        """
        self._session.check_not_forked()
        return begin_save(self, directory, tag, step, attempt, overwrite, timeout)

    def restore(
        self,
        directory: str,
        tag: Optional[str] = None,
        *,
        attempt: Optional[bytes] = None,
        timeout: Optional[float] = None,
    ) -> Restored:
        """Fills this client's subgroups from a complete checkpoint. Register all of them before.

        Tensors are found by name and global shape, whatever number of ranks saved them and however they were packed.
        The rounded parameters are in the slots (`Subgroup.param`) afterwards.

        tag: default the newest: of this job's complete checkpoints that of the highest step; where it has none, another
          job's, with a warning (of the daemon, in its log).
        attempt: of several saves under the tag this one. With several ranks let rank 0 restore first, and pass tag and
          attempt of what it returns to the others: each call looks by itself, and another checkpoint may become
          complete between two of them. (OffloadAdamW.load() does so.)
        timeout: seconds; None waits while the daemon lives.

        Raises MlpoError: ENOENT if there is no such checkpoint; EINVAL if it is damaged, or naming a tensor that is not
        in it as it is here; MLPO_ERR_SLOT_BUSY, with all states as they were, while any subgroup has a gradient without
        its update, or an update that has not ended: discard() or wait; else what reading failed with. A subgroup whose
        restore has failed has no state: restore() again, or write_state() all of it.
        """
        self._session.check_not_forked()
        return restore(self, list(self._subgroups), directory, tag, attempt, timeout)

    def checkpoint_requested(self) -> bool:
        """Whether somebody has asked for a checkpoint (``mlpo-ctl checkpoint request``) since the last one was begun.

        Never waits. Ranks may hear of it at different steps: let rank 0 decide for all, as with any other decision that
        all must take at the same step.
        """
        self._session.check_not_forked()
        return bool(check(lib.mlpo_checkpoint_requested(self._session.pointer)))

    def _info(self) -> Any:
        self._session.check_not_forked()
        info = ffi.new("struct mlpo_client_info *")
        info.struct_size = ffi.sizeof("struct mlpo_client_info")
        check(lib.mlpo_client_info(self._session.pointer, info))
        return info


def _string(text: Optional[str]) -> Any:
    if text is None:
        return ffi.NULL
    encoded = text.encode()
    if b"\0" in encoded:
        raise ValueError(f"{text!r} contains a zero byte")
    return ffi.new("char[]", encoded)


def _tensor_array(specs: Sequence[TensorSpec], kept: list[Any]) -> Any:
    """The C array of tensor specs; everything it points to is appended to `kept`, which must outlive it."""

    def numbers(values: Optional[Sequence[int]], spec: TensorSpec) -> Any:
        if values is None:
            return ffi.NULL
        if len(values) != len(spec.shape):
            raise ValueError(
                f"tensor {spec.name!r}: {list(values)} has not as many entries as shape {list(spec.shape)}"
            )
        kept.append(ffi.new("uint64_t[]", list(values)))
        return kept[-1]

    array = ffi.new("struct mlpo_tensor_spec[]", max(1, len(specs)))
    kept.append(array)
    for item, spec in zip(array, specs):
        item.struct_size = ffi.sizeof("struct mlpo_tensor_spec")
        kept.append(_string(spec.name))
        item.name = kept[-1]
        item.numel = spec.numel
        item.ndim = len(spec.shape)
        item.shape = numbers(spec.shape, spec)
        item.global_shape = numbers(spec.shape if spec.flat_range else spec.global_shape, spec)
        item.offsets = numbers(spec.offsets, spec)
        if spec.flat_range is not None:
            item.flat, item.flat_first = 1, spec.flat_range[0]
    return array


_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for client in list(_open_clients):
        if not client._session.forked():
            try:
                client._end_saves(None)
            finally:
                lib.mlpo_client_close(client._session.pointer)
