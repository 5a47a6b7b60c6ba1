"""What mlpo.cuda and mlpo._device need of torch, on the stand-in for the CUDA runtime, which must be preloaded: tensors
in what that takes for device memory, streams and events. Arithmetic is done by the current stream, late, as torch's."""

from __future__ import annotations

import contextlib
import ctypes
import time
import types
from typing import Any, Callable, Iterator, Optional

import numpy as np

fake = ctypes.CDLL(None)
fake.fake_cuda_last_violation.restype = ctypes.c_char_p
fake.fake_cuda_registered_bytes.restype = ctypes.c_uint64

_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_NOT_READY = 600  # cudaErrorNotReady
_TYPES = {"float32": np.float32, "float16": np.float16}
_kept: list[Any] = []  # what streams may still call
failures: list[BaseException] = []  # of what streams did


class Event:
    """As torch's."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        assert fake.cudaEventCreateWithFlags(ctypes.byref(self._handle), 2) == 0

    def record(self, stream: Stream) -> None:
        assert fake.cudaEventRecord(self._handle, ctypes.c_void_p(stream.cuda_stream)) == 0

    def query(self) -> bool:
        code = fake.cudaEventQuery(self._handle)
        assert code in (0, _NOT_READY)
        return bool(code == 0)

    def synchronize(self) -> None:
        deadline = time.monotonic() + 30
        while not self.query():
            assert time.monotonic() < deadline, "an event does not come"
            time.sleep(1e-4)


class Stream:
    """As torch's: a handle in cuda_stream."""

    def __init__(self, device: int = 0, priority: int = 0) -> None:
        handle = ctypes.c_void_p()
        assert fake.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
        self.cuda_stream = handle.value

    def synchronize(self) -> None:
        assert fake.cudaStreamSynchronize(ctypes.c_void_p(self.cuda_stream)) == 0

    def wait_event(self, event: Event) -> None:
        assert fake.cudaStreamWaitEvent(ctypes.c_void_p(self.cuda_stream), event._handle, 0) == 0

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def enqueue(self, work: Callable[[], Any]) -> None:
        """Has it called by the stream, as a kernel would be."""

        def run(_: Any) -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - for the test to show
                failures.append(error)

        call = _WORK(run)
        _kept.append(call)
        fake.fake_cuda_enqueue(ctypes.c_void_p(self.cuda_stream), call, None)


_current: Optional[Stream] = None


def current_stream(device: Optional[int] = None) -> Stream:
    global _current
    if _current is None:
        _current = Stream()
    return _current


@contextlib.contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    global _current
    before, _current = current_stream(), chosen
    try:
        yield
    finally:
        _current = before


class Tensor:
    """A flat tensor in device memory; `every`: of one element in so many."""

    is_cuda = True

    def __init__(self, values: Any, dtype: str = "float32", every: int = 1) -> None:
        values = np.asarray(values)
        self.dtype = f"torch.{dtype}"
        self.device = types.SimpleNamespace(index=0)
        self._every = every
        self._pointer = ctypes.c_void_p()
        nbytes = values.nbytes * every
        assert fake.cudaMalloc(ctypes.byref(self._pointer), ctypes.c_size_t(max(1, nbytes))) == 0
        memory = (ctypes.c_char * nbytes).from_address(self._pointer.value or 0)
        self.array = np.frombuffer(memory, values.dtype)[::every]
        self.array[:] = values
        self.recorded: list[Any] = []  # streams that record_stream() was called with

    def data_ptr(self) -> int:
        return self._pointer.value or 0

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def is_contiguous(self) -> bool:
        return self._every == 1

    def record_stream(self, on: Stream) -> None:
        self.recorded.append(on)

    def detach(self) -> Tensor:
        return self

    def reshape(self, shape: int) -> Tensor:
        return self.contiguous()

    def contiguous(self) -> Tensor:
        return self if self.is_contiguous() else self._as(self.dtype)

    def to(self, dtype: str) -> Tensor:
        return self if dtype == self.dtype else self._as(dtype)

    def add_(self, other: Tensor) -> Tensor:
        current_stream().enqueue(lambda: np.add(self.array, other.array, out=self.array, casting="same_kind"))
        return self

    def copy_(self, other: Tensor) -> Tensor:
        current_stream().enqueue(lambda: np.copyto(self.array, other.array, casting="same_kind"))
        return self

    def fill_(self, values: Any) -> Tensor:
        current_stream().enqueue(lambda: np.copyto(self.array, values, casting="same_kind"))
        return self

    def _as(self, dtype: str) -> Tensor:
        return empty(self.numel(), dtype=dtype).copy_(self)


def empty(numel: int, *, dtype: str, device: Any = None) -> Tensor:
    """Has values that nothing should depend on."""
    name = dtype[len("torch.") :]
    return Tensor(np.full(numel, 77, _TYPES[name]), name)


def module() -> Any:
    """To be put into sys.modules as torch."""
    cuda = types.SimpleNamespace(Stream=Stream, Event=Event, stream=stream, current_stream=current_stream,
                                 device=lambda index: contextlib.nullcontext())  # fmt: skip
    torch: Any = types.ModuleType("torch")
    torch.cuda, torch.empty = cuda, empty
    torch.float32, torch.float16 = "torch.float32", "torch.float16"
    return torch
