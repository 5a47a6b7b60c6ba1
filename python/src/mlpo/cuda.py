"""Gradients from a GPU into slots, and parameters from slots to a GPU, in stream order, without blocking Python.

    side = mlpo.cuda.attach(client)              # pins the client's shared memory
    slot = side.slot(subgroup)
    info = slot.copy_grad(gradient).result()     # a CUDA tensor; the copy is on the current stream
    update = subgroup.submit_update(lr=1e-3)
    slot.copy_param(parameters)                  # the stream waits for the update; Python does not
    update.result()                              # raises if it failed; nothing was copied then

A tensor is torch's, or anything with ``data_ptr()``, ``numel()``, ``dtype``, ``is_contiguous()`` and ``is_cuda``. Those
of a slot are on the device of its side, those of pack() and norm() on one. A stream is torch's, a handle as an int, or
None: torch's current stream of that device, the default one without torch.

A gradient that comes in parts, or is added up over several passes, is written first and then submitted:

    slot.write_grad(part, first)                 # as often as need be
    info = slot.copy_grad([(0, subgroup.numel, mlpo.cuda.IN_SLOT)]).result()

Built where the CUDA toolkit is (nvcc) when the package is installed; else ``available()`` is False, ``why_not()`` says
why, and everything else raises mlpo.NotOfferedError.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import importlib
import sys
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterable, Optional, Sequence, Union

from ._blocking import interruptible, nanoseconds
from ._errors import MlpoError, NotOfferedError, error_of
from ._native import ffi as client_ffi
from ._request import GradInfo, Request
from ._subgroup import Kind, Subgroup, _grad_info
from ._views import DTYPES, dtype_of

if TYPE_CHECKING:
    from ._client import Client

__all__ = ["IN_SLOT", "CudaSide", "Info", "Slot", "attach", "available", "norm", "pack", "why_not"]

CLOSE_TIMEOUT_S = 60.0


class _InSlot(enum.Enum):
    IN_SLOT = "the piece was put into the slot by write_grad()"


IN_SLOT = _InSlot.IN_SLOT

_native: Any = None
_reason = ""
# What could not be closed in time: copies are in flight, so its memory must stay.
_in_flight: list[Any] = []


def _load() -> None:
    global _native, _reason
    if _native is not None or _reason:
        return
    try:
        try:
            found = importlib.import_module("mlpo._cuda_native")
        except ImportError as error:
            if "libcudart" not in str(error):
                raise
            try:
                importlib.import_module("torch")  # brings the CUDA runtime
            except ModuleNotFoundError:
                raise error from None
            found = importlib.import_module("mlpo._cuda_native")
    except ModuleNotFoundError:
        _reason = "mlpo was installed without the CUDA side: install it again where the CUDA toolkit (nvcc) is"
    except ImportError as error:
        _reason = f"the CUDA side cannot be loaded: {error}"
    else:
        _native = found


def available() -> bool:
    """Whether this package has the CUDA side and a CUDA runtime to load. Whether there is a GPU is attach's to say."""
    _load()
    return _native is not None


def why_not() -> str:
    """Why available() is False; "" if it is True."""
    _load()
    return _reason


def _module() -> Any:
    if not available():
        raise NotOfferedError(-errno.EOPNOTSUPP, f"{_reason}; or copy through subgroup.grad and subgroup.param")
    return _native


def _check(code: int) -> None:
    # The module's own copy of the client library has the text.
    if code < 0:
        raise error_of(code, _native.ffi.string(_native.lib.mlpo_last_error()).decode("utf-8", "replace"))


def _pointer(kind: str, of_client: Any) -> Any:
    """A pointer of mlpo._native as this module's."""
    return _native.ffi.cast(kind, int(client_ffi.cast("uintptr_t", of_client)))


def _stream(stream: Any, device: Optional[int]) -> Any:
    if stream is None:
        torch = sys.modules.get("torch")
        stream = torch.cuda.current_stream(device).cuda_stream if torch is not None else 0
    handle = getattr(stream, "cuda_stream", stream)
    return _native.ffi.cast("mlpo_cuda_stream", handle)


def _device(tensor: Any) -> Optional[int]:
    """The number of a tensor's device; None if it does not say."""
    index: Optional[int] = getattr(getattr(tensor, "device", None), "index", None)
    return index


def _one_device(tensors: Sequence[Any]) -> Optional[int]:
    """The number of the device that all tensors are on; None if none says."""
    devices = {device for device in map(_device, tensors) if device is not None}
    if len(devices) > 1:
        raise ValueError(f"the tensors are on CUDA devices {sorted(devices)}: one is needed")
    return devices.pop() if devices else None


def _current(device: Optional[int]) -> contextlib.AbstractContextManager[Any]:
    """Makes a device the thread's, as kernels need it on a stream of that device."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None or device is None else torch.cuda.device(device)


def _check_tensor(tensor: Any, what: str, dtype: Optional[str] = None, device: Optional[int] = None) -> str:
    if not tensor.is_cuda:
        raise ValueError(f"{what} is not on a CUDA device")
    if device is not None and _device(tensor) not in (None, device):
        raise ValueError(f"{what} is on CUDA device {_device(tensor)}, the slot's copies are of device {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} has gaps: make it contiguous() first")
    found = dtype_of(tensor.dtype)
    if dtype is not None and found != dtype:
        raise TypeError(f"{what} is {found}, the slot has {dtype}: cast it first, for example by mlpo.cuda.pack")
    return found


def _used_by(tensor: Any, stream: Any) -> None:
    """Keeps torch from giving the memory away before another stream than the current one is done with it."""
    if hasattr(stream, "cuda_stream") and hasattr(tensor, "record_stream"):
        tensor.record_stream(stream)


@dataclass(frozen=True)
class Info:
    """What of a client's shared memory is pinned, and how streams wait."""

    device: int
    arena_bytes: int
    pinned_bytes: int
    stream_waits: bool  #: streams wait for updates by themselves; else the calling thread does
    pin_error: str  #: why not all is pinned, and what to do; "" if nothing failed


def attach(client: Client, device: Optional[int] = None, *, pin: bool = True) -> CudaSide:
    """The CUDA side of a client: pins its shared memory for `device` (None: the current one).

    Where pinning fails everything works without, with copies that block; a warning says so, and info() why.
    Raises NotOfferedError without the CUDA side, MlpoError with ENODEV without a GPU.
    """
    return CudaSide(client, device, pin)


class CudaSide:
    """A client's CUDA side, made by attach(). Thread-safe. close() it before its client's memory is to go."""

    def __init__(self, client: Client, device: Optional[int], pin: bool) -> None:
        native = _module()
        client._session.check_not_forked()
        options = native.ffi.new("struct mlpo_cuda_options *")
        options.struct_size = native.ffi.sizeof("struct mlpo_cuda_options")
        options.device = -1 if device is None else device
        options.no_pin = not pin
        made = native.ffi.new("mlpo_cuda **")
        _check(native.lib.mlpo_cuda_attach(_pointer("mlpo_client *", client._session.pointer), options, made))
        self._client = client
        self._pointer = made[0]
        # Holds the client until then.
        self._finalizer = weakref.finalize(self, _detach, self._pointer, client)
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        about = self.info()
        self._device = about.device
        if about.pin_error:
            warnings.warn(about.pin_error, RuntimeWarning, stacklevel=3)

    def info(self) -> Info:
        """What is pinned and how streams wait."""
        info = _native.ffi.new("struct mlpo_cuda_info *")
        info.struct_size = _native.ffi.sizeof("struct mlpo_cuda_info")
        _check(_native.lib.mlpo_cuda_info(self._open(), info))
        text = _native.ffi.string(info.pin_text).decode("utf-8", "replace")
        return Info(info.device, info.arena_bytes, info.pinned_bytes, bool(info.stream_waits), text)

    def pin(self) -> None:
        """Pins what has been registered since, and what failed before; raises if not all of it is pinned now."""
        pointer = self._open()
        interruptible(lambda: _check(_native.lib.mlpo_cuda_pin(pointer)))

    def slot(self, subgroup: Subgroup) -> Slot:
        """The slot of a subgroup of this client."""
        if subgroup._session is not self._client._session:
            raise ValueError(f"{subgroup!r} is of another client")
        slot = Slot(self, subgroup)
        self._slots.add(slot)
        return slot

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Closes its slots, waiting for copies in flight, and unpins. Raises mlpo.TimeoutError if they do not end."""
        for slot in list(self._slots):
            slot.close(timeout)
        if self._finalizer.alive:
            _check(_native.lib.mlpo_cuda_detach(self._pointer))
            self._finalizer.detach()

    def __enter__(self) -> CudaSide:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Any:
        if not self._finalizer.alive:
            raise MlpoError(_native.lib.MLPO_ERR_CLOSED, "the CUDA side was closed")
        return self._pointer


class Slot:
    """A subgroup's slot for copies in stream order; made by CudaSide.slot()."""

    def __init__(self, side: CudaSide, subgroup: Subgroup) -> None:
        made = _native.ffi.new("mlpo_cuda_slot **")
        pointer = _pointer("mlpo_subgroup *", subgroup._pointer)
        interruptible(lambda: _check(_native.lib.mlpo_cuda_slot_open(side._open(), pointer, made)))
        self.subgroup = subgroup
        self._device = side._device
        self._pointer = made[0]
        # Holds both until then, whatever order the garbage collector takes.
        self._finalizer = weakref.finalize(self, _close_slot, self._pointer, subgroup, side)

    def copy_grad(
        self, gradient: Union[Any, Iterable[tuple[int, int, Any]]], *, stream: Any = None
    ) -> Request[GradInfo]:
        """Copies a gradient into the slot on `stream` and has it submitted when the stream gets there.

        gradient: a CUDA tensor of the whole, or pieces of it as (first, count, what): a tensor, IN_SLOT for what
        write_grad() has put there, on whichever stream, Kind.ZERO or Kind.SKIP. Raises EBUSY while an update runs.
        """
        whole = hasattr(gradient, "data_ptr")
        pieces: list[tuple[int, int, Any]] = [(0, self.subgroup.numel, gradient)] if whole else list(gradient)
        array = _native.ffi.new("struct mlpo_cuda_piece[]", max(1, len(pieces)))
        for item, (first, count, what) in zip(array, pieces):
            item.first, item.count = first, count
            if hasattr(what, "data_ptr"):
                _check_tensor(what, f"the gradient of [{first}, +{count})", self.subgroup.grad_dtype, self._device)
                if what.numel() != count:
                    raise ValueError(f"the gradient of [{first}, +{count}) has {what.numel()} elements")
                item.kind, item.device = Kind.VALUE, _native.ffi.cast("void *", what.data_ptr())
            elif what is IN_SLOT:
                item.kind, item.flags = Kind.VALUE, _native.lib.MLPO_CUDA_IN_SLOT
            else:
                item.kind = Kind(what)
                if item.kind == Kind.VALUE:
                    raise ValueError(f"[{first}, +{count}) has no tensor")
        made = _native.ffi.new("mlpo_request **")
        handle = _stream(stream, self._device)
        _check(_native.lib.mlpo_cuda_copy_grad(self._open(), array, len(pieces), handle, made))
        for _, _, what in pieces:
            _used_by(what, stream)
        request = client_ffi.cast("mlpo_request *", int(_native.ffi.cast("uintptr_t", made[0])))
        return Request(self.subgroup._session, self.subgroup._waiter, request, _grad_info)

    def write_grad(self, gradient: Any, first: int = 0, *, stream: Any = None) -> None:
        """Copies elements [first, first + gradient.numel()) of a gradient into the slot on `stream`, to be submitted by
        copy_grad() with IN_SLOT. Follows what reads the slot's parameters, which may be gone from here on, and the
        writes before. Raises EBUSY while an update runs.
        """
        _check_tensor(gradient, "the gradient", self.subgroup.grad_dtype, self._device)
        count, device = gradient.numel(), _native.ffi.cast("void *", gradient.data_ptr())
        handle = _stream(stream, self._device)
        _check(_native.lib.mlpo_cuda_write_grad(self._open(), first, count, device, handle))
        _used_by(gradient, stream)

    def read_grad(self, out: Any, first: int = 0, *, stream: Any = None) -> None:
        """Copies elements [first, first + out.numel()) of what write_grad() has put there, on `stream`."""
        _check_tensor(out, "the tensor", self.subgroup.grad_dtype, self._device)
        count, device = out.numel(), _native.ffi.cast("void *", out.data_ptr())
        _check(_native.lib.mlpo_cuda_read_grad(self._open(), first, count, device, _stream(stream, self._device)))
        _used_by(out, stream)

    def copy_param(
        self, parameters: Any, first: int = 0, *, stream: Any = None, timeout: float = CLOSE_TIMEOUT_S
    ) -> None:
        """Copies elements [first, first + parameters.numel()) to a CUDA tensor on `stream`.

        After the update that is outstanding now, if there is one; if that fails nothing is copied. Where streams cannot
        wait this thread does, at most `timeout` seconds. Raises ENODATA if the slot holds no parameters.
        """
        _check_tensor(parameters, "the tensor", self.subgroup.dtype, self._device)
        count, device = parameters.numel(), _native.ffi.cast("void *", parameters.data_ptr())
        pointer, handle, limit = self._open(), _stream(stream, self._device), nanoseconds(timeout)
        _check(_native.lib.mlpo_cuda_copy_param(pointer, first, count, device, handle, limit))
        _used_by(parameters, stream)

    def wait(self, *, stream: Any = None, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Lets `stream` wait until the update that is outstanding now has ended, whatever with."""
        _check(_native.lib.mlpo_cuda_wait(self._open(), _stream(stream, self._device), nanoseconds(timeout)))

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Waits until its copies have ended, and frees it. Raises mlpo.TimeoutError and stays open if they do not."""
        if self._finalizer.alive:
            limit = nanoseconds(timeout)
            interruptible(lambda: _check(_native.lib.mlpo_cuda_slot_close(self._pointer, limit)))
            self._finalizer.detach()

    def _open(self) -> Any:
        self.subgroup._session.check_not_forked()
        if not self._finalizer.alive:
            raise MlpoError(_native.lib.MLPO_ERR_CLOSED, "the slot was closed")
        return self._pointer


def pack(tensors: Sequence[Any], out: Any, scale: float = 1.0, *, stream: Any = None) -> None:
    """Writes CUDA tensors one after another to `out`, scaled in float32 and rounded to nearest even in out's dtype."""
    native = _module()
    array, elements = _tensor_array(tensors)
    dtype = DTYPES[_check_tensor(out, "out")][0]
    if out.numel() != elements:
        raise ValueError(f"out has {out.numel()} elements, the tensors {elements}")
    device = _one_device([*tensors, out])
    if elements:
        data = native.ffi.cast("void *", out.data_ptr())
        with _current(device):
            _check(native.lib.mlpo_cuda_pack(array, len(tensors), data, dtype, scale, _stream(stream, device)))


def norm(tensors: Sequence[Any], sum_of_squares: Any, all_finite: Any, *, stream: Any = None) -> None:
    """Stores the sum of squares (a float64 CUDA tensor of one element) and finiteness (int32) of CUDA tensors.

    To the bit what the daemon finds in a gradient of these tensors.
    """
    native = _module()
    array, _ = _tensor_array(tensors)
    pointers = []
    for tensor, kind, name in ((sum_of_squares, "double", "float64"), (all_finite, "int32_t", "int32")):
        if not tensor.is_cuda or tensor.numel() != 1 or not str(tensor.dtype).endswith(name):
            raise ValueError(f"a CUDA tensor of one {name} is needed for the result")
        pointers.append(native.ffi.cast(f"{kind} *", tensor.data_ptr()))
    device = _one_device([*tensors, sum_of_squares, all_finite])
    with _current(device):
        _check(native.lib.mlpo_cuda_norm(array, len(tensors), *pointers, _stream(stream, device)))


def _tensor_array(tensors: Sequence[Any]) -> tuple[Any, int]:
    array = _native.ffi.new("struct mlpo_cuda_tensor[]", max(1, len(tensors)))
    for index, (item, tensor) in enumerate(zip(array, tensors)):
        item.dtype = DTYPES[_check_tensor(tensor, f"tensors[{index}]")][0]
        item.data, item.numel = _native.ffi.cast("void *", tensor.data_ptr()), tensor.numel()
    return array, sum(item.numel for item in array)


def _close_slot(pointer: Any, subgroup: Subgroup, side: CudaSide) -> None:
    if subgroup._session.forked():
        return
    if _native.lib.mlpo_cuda_slot_close(pointer, nanoseconds(CLOSE_TIMEOUT_S)) != 0:
        _in_flight.append((subgroup, side))


def _detach(pointer: Any, client: Client) -> None:
    if client._session.forked():
        return
    if _native.lib.mlpo_cuda_detach(pointer) != 0:
        _in_flight.append(client)
