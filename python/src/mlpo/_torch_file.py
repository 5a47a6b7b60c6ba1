"""Files that torch.load() reads, with mmap=True too, whose tensors are written as they come: whatever their size, a
piece of them is in memory at a time."""

from __future__ import annotations

import collections
import io
import math
import pickle
import struct
import zipfile
from typing import IO, Any, Callable, Iterable

import numpy as np
import numpy.typing as npt


class Streamed:
    """A float32 tensor that is still to come: what it is unpickled as. `pieces` is called when it is written, and gives
    its elements in row-major order."""

    def __init__(self, shape: Iterable[int], pieces: Callable[[], Iterable[npt.NDArray[np.float32]]]) -> None:
        self._shape = tuple(shape)
        self._storage = _Storage("FloatStorage", math.prod(self._shape), lambda: map(_bytes, pieces()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt(self._storage, self._shape)


class _Storage:
    """What a tensor in the file refers to: the record "data/<key>"."""

    def __init__(self, kind: str, numel: int, content: Callable[[], Iterable[memoryview]]) -> None:
        self.kind, self.numel, self.content = kind, numel, content


def write(out: IO[bytes], content: Any) -> None:
    """Writes `content` as torch.save() does, with each Streamed in it as a tensor. Tensors that it has besides should
    be small: they come out contiguous, on the CPU, each with elements of its own."""
    import torch

    records: dict[_Storage, str] = {}

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return _of_tensor(value) if isinstance(value, torch.Tensor) else NotImplemented

        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, _Storage):
                return None
            key = records.setdefault(value, str(len(records)))
            return "storage", getattr(torch, value.kind), key, "cpu", value.numel

    pickled = io.BytesIO()
    Pickler(pickled, protocol=2).dump(content)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "data.pkl", [pickled.getvalue()])
        _add(archive, "byteorder", [b"little"])
        for storage, key in records.items():
            _add(archive, f"data/{key}", storage.content())
        _add(archive, "version", [b"3\n"])


def _rebuilt(storage: _Storage, shape: tuple[int, ...]) -> tuple[Any, ...]:
    import torch

    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return torch._utils._rebuild_tensor_v2, (storage, 0, shape, tuple(strides), False, collections.OrderedDict())


def _of_tensor(tensor: Any) -> tuple[Any, ...]:
    import torch

    kind = torch.storage._dtype_to_storage_type_map().get(tensor.dtype)
    if kind is None or tensor.layout != torch.strided:
        raise TypeError(f"a tensor of type {tensor.dtype} and layout {tensor.layout} cannot be written")
    flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
    return _rebuilt(_Storage(kind, flat.numel(), lambda: [_bytes(flat.view(torch.uint8).numpy())]), tuple(tensor.shape))


def _bytes(values: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _add(archive: zipfile.ZipFile, name: str, content: Iterable[Any]) -> None:
    """A record that begins at a multiple of 64 bytes, as torch's do, so that it can be mapped."""
    info = zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))
    header = 30 + len(info.filename) + 20  # and 20 for sizes of 64 bits
    padding = -(archive.start_dir + header + 4) % 64
    info.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=True) as record:
        for each in content:
            record.write(each)
