"""Subgroups: what a trainer updates as a unit."""

from __future__ import annotations

import bisect
import enum
import errno
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterable, Optional, Sequence, TypedDict, Union

import numpy as np
import numpy.typing as npt

from ._blocking import Deadline, interruptible, nanoseconds
from ._errors import check
from ._native import ffi, lib
from ._request import GradInfo, Request
from ._views import View

if TYPE_CHECKING:
    from ._client import Client

_FloatArray = npt.NDArray[np.float32]
_Steps = Union[int, npt.NDArray[np.int64]]

SUBMIT_TIMEOUT_S = 60.0


class Kind(enum.IntEnum):
    """What a piece of a gradient is."""

    VALUE = lib.MLPO_GRAD_VALUE  #: its bytes are in the slot
    ZERO = lib.MLPO_GRAD_ZERO  #: the gradient is 0; bytes are not read
    SKIP = lib.MLPO_GRAD_SKIP  #: whole tensors: state and step stay as they are


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a subgroup: a rank's box [offsets, offsets + shape) of a tensor of `global_shape`.

    With `flat_range` = (first, count) the rank holds these elements of the row-major tensor of `shape` instead.
    """

    name: str
    shape: Sequence[int]
    global_shape: Optional[Sequence[int]] = None
    offsets: Optional[Sequence[int]] = None
    flat_range: Optional[tuple[int, int]] = None

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return self.flat_range[1] if self.flat_range is not None else math.prod(self.shape)


class State(TypedDict):
    """FP32 state as read_state returns it."""

    step: _Steps
    master: _FloatArray
    exp_avg: _FloatArray
    exp_avg_sq: _FloatArray


class Subgroup:
    """A registered subgroup and its slot. Made by Client.subgroup. Thread-safe; one window at a time.

    A window: write ``grad``, submit_grad, submit_update; when that has ended ``param`` holds the new parameters, until
    the next write to ``grad`` (the two share their bytes where their types have one size).

    With ``keep=True``: lend(), write ``grad``, submit_grad; the slot goes back by itself once all of the gradient has
    been taken. submit_update takes a slot for ``param``; give_back() when that has been read.
    """

    def __init__(self, client: Client, pointer: Any, key: str, tensors: Sequence[TensorSpec], dtypes: tuple[str, str]):
        self._session = client._session
        self._waiter = client._waiter
        self._ring_entries = client.ring_entries
        self._pointer = pointer
        self._session.adopt(self, pointer, lib.mlpo_subgroup_free)
        self.key = key
        self.tensors = tuple(tensors)
        self.dtype, self.grad_dtype = dtypes
        starts = [0]
        for tensor in self.tensors:
            starts.append(starts[-1] + tensor.numel)
        self._starts = starts
        info = self._info()
        self._fixed = None
        if not info.keep:  # else it is lent a slot, now this one, now that
            self._fixed = (self._view(info.grad, self.grad_dtype), self._view(info.param, self.dtype))

    def __repr__(self) -> str:
        return f"<mlpo.Subgroup {self.key!r}: {self.numel} x {self.dtype}, {len(self.tensors)} tensor(s)>"

    @property
    def numel(self) -> int:
        """Elements of all tensors together."""
        return self._starts[-1]

    @property
    def grad(self) -> View:
        """The slot's gradient, to be written before submit_grad."""
        self._session.check_not_forked()
        return self._fixed[0] if self._fixed else self._view(self._lent().grad, self.grad_dtype)

    @property
    def param(self) -> View:
        """The slot's parameters, to be read after an update."""
        self._session.check_not_forked()
        return self._fixed[1] if self._fixed else self._view(self._lent().param, self.dtype)

    @property
    def epoch(self) -> int:
        """Updates completed in this session."""
        return int(self._info().epoch)

    def lend(self, *, timeout: float = SUBMIT_TIMEOUT_S) -> View:
        """Lends it a slot unless it has one, and returns ``grad``.

        Waits while others have all slots; ETIMEDOUT then says how much they hold.
        """
        self._session.check_not_forked()
        _submit_in_slices(lambda timeout_ns: int(lib.mlpo_slot_lend(self._pointer, timeout_ns)), timeout)
        return self.grad

    def give_back(self) -> None:
        """Gives a lent slot back: ``grad`` and ``param`` are others' from now on. EBUSY while a window is open."""
        self._session.check_not_forked()
        check(lib.mlpo_slot_give_back(self._pointer))

    def submit_grad(
        self, pieces: Optional[Iterable[tuple[int, int, int]]] = None, *, timeout: float = SUBMIT_TIMEOUT_S
    ) -> Request[GradInfo]:
        """Says that the gradient, or pieces of it as (first, count, Kind), are in the slot.

        Blocks only while the ring is full, at most `timeout` seconds. Raises EBUSY while an update of it runs.
        """
        self._session.check_not_forked()
        listed = None if pieces is None else list(pieces)
        array = ffi.NULL if listed is None else ffi.new("struct mlpo_grad_piece[]", max(1, len(listed)))
        for index, (first, count, kind) in enumerate(listed or ()):
            array[index].first, array[index].count, array[index].kind = first, count, Kind(kind)
        request = ffi.new("mlpo_request **")
        count = 0 if listed is None else len(listed)

        def submit(timeout_ns: int) -> int:
            return int(lib.mlpo_submit_grad(self._pointer, array, count, timeout_ns, request))

        if count <= self._ring_entries:
            _submit_in_slices(submit, timeout)
        else:  # goes in batches, and a passed deadline fails the request after the first
            interruptible(lambda: check(submit(nanoseconds(timeout))))
        return Request(self._session, self._waiter, request[0], _grad_info)

    def submit_update(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        grad_scale: float = 1.0,
        *,
        mode: str = "adamw",
        bias_correction: bool = True,
        apply_nonfinite: bool = False,
        priority: int = 0,
        timeout: float = SUBMIT_TIMEOUT_S,
    ) -> Request[int]:
        """Applies one optimizer step; the result is the new epoch.

        `grad_scale` multiplies the gradient. `mode` is "adamw" or "adam" (weight decay added to the gradient). A lower
        `priority` goes first, 0 is the order of submission. Raises EINVAL for hyper-parameters out of range.
        """
        self._session.check_not_forked()
        modes = {"adamw": lib.MLPO_OPTIMIZER_ADAMW, "adam": lib.MLPO_OPTIMIZER_ADAM}
        if mode not in modes:
            raise ValueError(f"mode is {mode!r}; offered are {', '.join(modes)}")
        options = ffi.new("struct mlpo_update_options *")
        options.struct_size = ffi.sizeof("struct mlpo_update_options")
        options.lr, options.eps, options.weight_decay, options.grad_scale = lr, eps, weight_decay, grad_scale
        options.beta1, options.beta2 = betas
        options.mode = modes[mode]
        options.no_bias_correction = not bias_correction
        options.apply_nonfinite = apply_nonfinite
        options.priority = priority
        request = ffi.new("mlpo_request **")
        _submit_in_slices(
            lambda timeout_ns: int(lib.mlpo_submit_update(self._pointer, options, timeout_ns, request)), timeout
        )
        return Request(self._session, self._waiter, request[0], lambda result: int(result.value))

    def submit_restore(self, handle: int, *, timeout: float = SUBMIT_TIMEOUT_S) -> Request[int]:
        """For Client.restore(): fills the subgroup from what mlpo_restore_begin has found. The epoch is its result."""
        self._session.check_not_forked()
        request = ffi.new("mlpo_request **")
        _submit_in_slices(
            lambda timeout_ns: int(lib.mlpo_submit_restore(self._pointer, handle, timeout_ns, request)), timeout
        )
        return Request(self._session, self._waiter, request[0], lambda result: int(result.value))

    def discard(self, reason: str = "user", *, timeout: Optional[float] = None) -> None:
        """Ends the open window without an update; "overflow" counts a skipped step of the session."""
        self._session.check_not_forked()
        overflow = is_overflow(reason)
        interruptible(lambda: check(lib.mlpo_subgroup_discard(self._pointer, overflow, nanoseconds(timeout))))

    def read_state(
        self,
        tensor: Union[int, str, None] = None,
        first: int = 0,
        count: Optional[int] = None,
        *,
        timeout: Optional[float] = None,
    ) -> State:
        """The FP32 state of the subgroup, of one tensor (index or name), or of `count` elements from `first` of either.

        "step" is an int for one tensor, an int64 array in tensor order for several (those that the range touches).
        """
        start, length, tensors = self._range(tensor, first, count)
        arrays = [np.empty(length, np.float32) for _ in range(3)]
        steps = np.empty(len(tensors), np.int64)
        limit = nanoseconds(timeout)

        def read() -> None:
            self._session.alive()
            check(lib.mlpo_read_state(self._pointer, start, length, *map(_floats, arrays), limit))
            pointer = ffi.cast("int64_t *", steps.ctypes.data)
            check(lib.mlpo_read_steps(self._pointer, tensors.start, len(tensors), pointer, limit))

        interruptible(read)
        step: _Steps = int(steps[0]) if len(tensors) == 1 else steps
        return {"step": step, "master": arrays[0], "exp_avg": arrays[1], "exp_avg_sq": arrays[2]}

    def write_state(
        self,
        step: Union[_Steps, Sequence[int], None] = None,
        master: Any = None,
        exp_avg: Any = None,
        exp_avg_sq: Any = None,
        *,
        tensor: Union[int, str, None] = None,
        first: int = 0,
        count: Optional[int] = None,
        timeout: Optional[float] = None,
    ) -> None:
        """Replaces state of what read_state with the same arguments returns; None leaves a part as it is.

        Makes a torn subgroup whole once every element was written since.
        """
        start, length, tensors = self._range(tensor, first, count)
        parts = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        arrays = [None if part is None else float_array(part, length, name) for name, part in parts.items()]
        steps = None if step is None else self._steps_array(step, len(tensors))
        limit = nanoseconds(timeout)

        def write() -> None:
            self._session.alive()
            if any(array is not None for array in arrays):
                check(lib.mlpo_write_state(self._pointer, start, length, *map(_floats, arrays), limit))
            if steps is not None:
                pointer = ffi.cast("int64_t *", steps.ctypes.data)
                check(lib.mlpo_write_steps(self._pointer, tensors.start, len(tensors), pointer, limit))

        interruptible(write)

    def _info(self) -> Any:
        self._session.check_not_forked()
        info = ffi.new("struct mlpo_subgroup_info *")
        info.struct_size = ffi.sizeof("struct mlpo_subgroup_info")
        check(lib.mlpo_subgroup_info(self._pointer, info))
        return info

    def _lent(self) -> Any:
        info = self._info()
        if info.grad == ffi.NULL:
            raise RuntimeError(f"subgroup {self.key!r} has no slot now: lend() gives it one, and an update's end")
        return info

    def _view(self, address: Any, dtype: str) -> View:
        from ._views import DTYPES

        nbytes = self.numel * DTYPES[dtype][1].itemsize
        return View.on(self._session.memory(address, nbytes) if nbytes else b"", dtype, self.numel)

    def _range(self, tensor: Union[int, str, None], first: int, count: Optional[int]) -> tuple[int, int, range]:
        """(first element, elements, tensors) of a read or write; elements count from the subgroup's start."""
        self._session.check_not_forked()
        begin, end = 0, self.numel
        index: Optional[int] = None
        if tensor is not None:
            index = self._index(tensor)
            begin, end = self._starts[index], self._starts[index + 1]
        if count is None:
            count = end - begin - first
        if first < 0 or count < 0 or begin + first + count > end:
            of = "the subgroup" if index is None else f"tensor {self.tensors[index].name!r}"
            raise IndexError(f"elements [{first}, {first + count}) are not inside {of} of {end - begin} elements")
        start = begin + first
        if index is not None:
            return start, count, range(index, index + 1)
        if (start, count) == (0, self.numel):
            return start, count, range(len(self.tensors))
        low = bisect.bisect_right(self._starts, start) - 1
        high = bisect.bisect_left(self._starts, start + count)
        return start, count, range(low, max(low, min(high, len(self.tensors))))

    def _index(self, tensor: Union[int, str]) -> int:
        if isinstance(tensor, int):
            if not 0 <= tensor < len(self.tensors):
                raise IndexError(f"there is no tensor {tensor} among {len(self.tensors)} of subgroup {self.key!r}")
            return tensor
        for index, spec in enumerate(self.tensors):
            if spec.name == tensor:
                return index
        raise KeyError(f"subgroup {self.key!r} has no tensor {tensor!r}")

    @staticmethod
    def _steps_array(step: Any, tensors: int) -> npt.NDArray[np.int64]:
        given = np.asarray(step)
        if given.dtype.kind not in "ui":
            raise TypeError(f"step is of type {given.dtype}; step counts are integers")
        if given.ndim > 1 or (given.ndim == 1 and given.size != tensors):
            raise ValueError(f"step has shape {given.shape}; here it is an integer or {tensors} of them")
        return np.ascontiguousarray(np.broadcast_to(given, (tensors,)), dtype=np.int64)


def _submit_in_slices(submit: Callable[[int], int], timeout: float) -> None:
    """Submits what goes into the ring as a whole or not at all, so that a wait for a full ring can be interrupted."""
    deadline = Deadline(timeout)
    while True:
        code = submit(deadline.slice_ns())
        if code != -errno.ETIMEDOUT or deadline.passed():
            check(code)
            return


def is_overflow(reason: str) -> int:
    if reason not in ("user", "overflow"):
        raise ValueError(f'reason is {reason!r}; it is "user" or "overflow"')
    return int(reason == "overflow")


def float_array(values: Any, count: int, name: str) -> _FloatArray:
    """`values` as `count` contiguous FP32 values; never converts, since that would lose bits unasked."""
    array = np.asarray(values)
    if array.dtype != np.float32:
        raise TypeError(f"{name} is of type {array.dtype}; state is float32")
    if array.size != count:
        raise ValueError(f"{name} has {array.size} elements; {count} are needed")
    return np.ascontiguousarray(array).reshape(-1)


def _floats(array: Optional[_FloatArray]) -> Any:
    return ffi.NULL if array is None else ffi.cast("float *", array.ctypes.data)


def _grad_info(result: Any) -> GradInfo:
    return GradInfo(float(result.sum_of_squares), bool(result.all_finite), bool(result.window_complete))
