"""Checkpoints without a daemon: what is in them, and their way to and from other formats.

    with mlpo.checkpoints.Checkpoint("/lustre/run1") as checkpoint:   # the newest complete one
        master = checkpoint.read("decoder.weight", "master")          # float32, all of it; or a range of its elements
        mlpo.checkpoints.export_safetensors(checkpoint, "state.safetensors")
        mlpo.checkpoints.export_torch(checkpoint, "state.pt")         # torch.load() reads it
    mlpo.checkpoints.import_safetensors(["model.safetensors"], "/lustre/run2", "start")

However the ranks had cut a tensor, it comes out whole. Whatever the sizes, a few MiB of memory are enough: tensors are
moved in pieces. Blocks are compared with their hashes when they are first read.

The newest is the one of the highest step. Under one tag there may be several saves, of which the one that began last
counts: find() lists them all.

    python -m mlpo.checkpoints list DIR
    python -m mlpo.checkpoints export DIR FILE [--tag TAG] [--format safetensors|torch] [--states master,...]
    python -m mlpo.checkpoints import DIR TAG FILE... [--format safetensors|torch]
    python -m mlpo.checkpoints gc DIR
"""

from __future__ import annotations

import bisect
import collections
import errno
import functools
import json
import math
import os
import pathlib
import secrets
import struct
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Callable, Iterable, Iterator, Mapping, Optional, Sequence, Union

import numpy as np
import numpy.typing as npt

from . import _parts, _rests, _torch_file
from ._errors import MlpoError
from ._new_files import NewFile
from ._own_files import PartFiles
from ._parts import STATES, CheckpointError

__all__ = [
    "STATES",
    "Checkpoint",
    "CheckpointError",
    "Found",
    "Tensor",
    "export_safetensors",
    "export_torch",
    "find",
    "import_safetensors",
    "import_torch",
]

_Floats = npt.NDArray[np.float32]
_Path = Union[str, "os.PathLike[str]"]

PIECE = 1 << 20  # elements that are moved at a time: 4 MiB


@dataclass(frozen=True)
class Found:
    """A checkpoint, or what there is of one."""

    tag: str
    step: int
    job: str
    world_size: int
    ranks: int  # whose parts are there
    attempt: str
    complete: bool


def find(directory: _Path) -> list[Found]:
    """The checkpoints in a directory, the newest last; incomplete ones, too."""
    found = []
    for folder in pathlib.Path(directory).iterdir():
        if _parts.is_tag(folder.name) and folder.is_dir() and not folder.is_symlink():
            found += _parts.attempts(folder)
    found.sort(key=lambda attempt: (attempt.head.step, attempt.head.started_unix_ns, attempt.id))
    return [
        Found(a.head.tag, a.head.step, a.head.job, a.head.world_size, len(a.heads), a.id, a.complete) for a in found
    ]


@dataclass(frozen=True)
class Tensor:
    """A whole tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    step: int  #: updates that it has had
    moments: bool  #: whether any of its moments is stored; else they are zero

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Source:
    part: int
    subgroup: int
    tensor: _parts.PartTensor


class Checkpoint:
    """A complete checkpoint, for reading. A context manager that closes it. Not thread-safe."""

    def __init__(
        self, directory: _Path, tag: Optional[str] = None, *, attempt: Optional[str] = None, verify: bool = True
    ) -> None:
        """tag: default the newest that is complete: that of the highest step. attempt: of several complete saves under
        the tag this one (Found.attempt); default the one that began last. verify: compare what is read with its hashes;
        needs xxhash where there are any.

        Taken is what the reader, root or the directory's owner have saved. Raises CheckpointError if there is none that
        is complete, or its parts do not make up whole tensors.
        """
        if attempt is not None and tag is None:
            raise ValueError("an attempt is one of a tag: pass the tag, too")
        chosen = _parts.choose(pathlib.Path(directory), tag, attempt)
        self.tag, self.step = chosen.head.tag, chosen.head.step
        self.job, self.world_size, self.attempt = chosen.head.job, chosen.head.world_size, chosen.id
        self._believed = _parts.believed(chosen.folder.parent)
        self._parts = [
            _parts.read_part(chosen.folder / f"part-{rank}", chosen.id) for rank in range(chosen.head.world_size)
        ]
        self._verify = verify and any(part.hashed for part in self._parts)
        if self._verify and _parts.hashing() is None:
            raise ImportError("comparing hashes needs the package xxhash: install it, or say verify=False")
        self._verified: set[tuple[int, int, int]] = set()  # part, subgroup, block
        self._files: collections.OrderedDict[tuple[int, int], Any] = collections.OrderedDict()
        self._starts = {
            (p, s): [block.first for block in subgroup.blocks]
            for p, part in enumerate(self._parts)
            for s, subgroup in enumerate(part.subgroups)
        }
        self._sources = _gather(self._parts)
        self.tensors: dict[str, Tensor] = {
            name: self._tensor(name, sources) for name, sources in sorted(self._sources.items())
        }

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def read(self, name: str, state: str = "master", first: int = 0, count: Optional[int] = None) -> _Floats:
        """Elements [first, first + count) of a tensor in row-major order; all of it comes in its shape."""
        if state not in STATES:
            raise ValueError(f"state is {state!r}; it is one of {', '.join(STATES)}")
        tensor = self.tensors[name]
        part = tensor.numel - first if count is None else count
        if first < 0 or part < 0 or first + part > tensor.numel:
            raise IndexError(f"elements [{first}, {first + part}) are not inside tensor {name!r} of {tensor.numel}")
        out = np.zeros(part, np.float32)
        for begin in range(0, part, PIECE):
            self._fill(out[begin : begin + PIECE], tensor, STATES.index(state), first + begin)
        return out.reshape(tensor.shape) if count is None and first == 0 else out

    def pieces(self, name: str, state: str) -> Iterator[_Floats]:
        """All elements of a tensor in row-major order, some at a time."""
        numel = self.tensors[name].numel
        for first in range(0, numel, PIECE):
            yield self.read(name, state, first, min(PIECE, numel - first))

    def verify(self) -> None:
        """Reads everything. Raises CheckpointError at the first file that is cut, or block whose hash is another."""
        for p, part in enumerate(self._parts):
            for index in range(len(part.files)):
                self._file(p, index)
            for s, subgroup in enumerate(part.subgroups):
                for b in range(len(subgroup.blocks)):
                    self._check(p, s, b)

    def _tensor(self, name: str, sources: Sequence[_Source]) -> Tensor:
        moments = False
        for source in sources:
            first, count = source.tensor.first, source.tensor.shard.count
            for block in self._parts[source.part].subgroups[source.subgroup].blocks:
                inside = block.first < first + count and first < block.first + block.count
                moments |= inside and block.stored == _parts.STORED_ALL
        return Tensor(name, sources[0].tensor.shard.global_shape, sources[0].tensor.step, moments)

    def _fill(self, out: _Floats, tensor: Tensor, array: int, first: int) -> None:
        """Elements [first, first + out.size) of a whole tensor; `out` is zero before."""
        target = _parts.whole(tensor.shape)
        for source in self._sources[tensor.name]:
            subgroup = self._parts[source.part].subgroups[source.subgroup]
            starts = self._starts[source.part, source.subgroup]
            for to, place, count in _parts.runs(target, first, first + out.size, source.tensor.shard):
                at = source.tensor.first + place
                index = bisect.bisect_right(starts, at) - 1
                while count > 0:
                    block = subgroup.blocks[index]
                    some = min(count, block.first + block.count - at)
                    if array < block.stored:
                        self._check(source.part, source.subgroup, index)
                        offset = block.offset + array * _parts.padded(block.count) + (at - block.first) * 4
                        self._pread(source.part, block.file, offset, out[to - first : to - first + some])
                    at, to, count, index = at + some, to + some, count - some, index + 1

    def _check(self, p: int, s: int, b: int) -> None:
        """Compares a block with its hash, once."""
        part = self._parts[p]
        block = part.subgroups[s].blocks[b]
        if not self._verify or not part.hashed or block.stored == 0 or (p, s, b) in self._verified:
            return
        xxhash = _parts.hashing()
        digests = []
        array_bytes = _parts.padded(block.count)
        for at in range(0, array_bytes, _parts.HASH_PIECE_BYTES):
            piece = np.empty(min(_parts.HASH_PIECE_BYTES, array_bytes - at), np.uint8)
            for array in range(block.stored):
                self._pread(p, block.file, block.offset + array * array_bytes + at, piece)
                digests.append(xxhash.xxh3_64_intdigest(piece))
        if _parts.hash_of_pieces(digests) != block.hash:
            raise CheckpointError(
                f"{part.folder / part.files[block.file].name} is damaged: block {b} of subgroup "
                f"{part.subgroups[s].key!r}, {block.stored * array_bytes} bytes at {block.offset}, has another hash "
                "than the manifest says"
            )
        self._verified.add((p, s, b))

    def _file(self, p: int, index: int) -> Any:
        """Opened once; at most a few are open together."""
        file = self._files.get((p, index))
        if file is None:
            part = self._parts[p]
            name, size, _ = part.files[index]
            file = _parts.open_regular(part.folder / name, self._believed)
            if os.fstat(file.fileno()).st_size < size:
                file.close()
                raise CheckpointError(f"{part.folder / name} is shorter than the {size} bytes that it should have")
            if len(self._files) >= 64:
                self._files.popitem(last=False)[1].close()
            self._files[p, index] = file
        return file

    def _pread(self, p: int, index: int, offset: int, out: npt.NDArray[Any]) -> None:
        fd = self._file(p, index).fileno()
        view = memoryview(out).cast("B")
        while view.nbytes:
            got = os.preadv(fd, [view], offset)
            if got == 0:
                raise CheckpointError(f"{self._parts[p].folder / self._parts[p].files[index].name} ends at {offset}")
            view, offset = view[got:], offset + got


def _gather(parts: Sequence[_parts.Part]) -> dict[str, list[_Source]]:
    """The shards that make up each tensor, without copies."""
    sources: dict[str, list[_Source]] = {}
    for p, part in enumerate(parts):
        for s, subgroup in enumerate(part.subgroups):
            for tensor in subgroup.tensors:
                found = sources.setdefault(tensor.name, [])
                copies = [other for other in found if other.tensor.shard == tensor.shard]
                if any(other.part == p for other in copies):
                    raise CheckpointError(f"tensor {tensor.name!r} is twice in the part of rank {p}")
                if any(other.tensor.step != tensor.step for other in found):
                    raise CheckpointError(f"tensor {tensor.name!r} has had different numbers of updates on its ranks")
                source = _Source(p, s, tensor)
                if any(_differ(parts, source, other) for other in copies):
                    raise CheckpointError(
                        f"tensor {tensor.name!r}: ranks {copies[0].part} and {p} both hold all of the same elements, "
                        "and they differ: they are no copies of each other"
                    )
                if not copies:
                    found.append(source)
    for name, found in sources.items():
        shape = found[0].tensor.shard.global_shape
        held = sum(source.tensor.shard.count for source in found)
        if any(source.tensor.shard.global_shape != shape for source in found):
            raise CheckpointError(f"tensor {name!r} has different shapes on its ranks")
        for i, source in enumerate(found):
            for other in found[:i]:
                if _parts.common_elements(source.tensor.shard, other.tensor.shard):
                    ranks = f"ranks {other.part} and {source.part}"
                    raise CheckpointError(f"tensor {name!r} is held twice in part, by {ranks}")
        if held != math.prod(shape):
            raise CheckpointError(f"of tensor {name!r} of {math.prod(shape)} elements the parts hold {held}")
    return sources


def _differ(parts: Sequence[_parts.Part], a: _Source, b: _Source) -> bool:
    """Whether equal shards have different contents, as far as hashes of blocks that are theirs alone tell."""
    blocks = [parts[x.part].subgroups[x.subgroup].blocks for x in (a, b)]
    alike = a.tensor.first == b.tensor.first and [x.count for x in blocks[0]] == [x.count for x in blocks[1]]
    if not (alike and parts[a.part].hashed and parts[b.part].hashed):
        return False
    first, end = a.tensor.first, a.tensor.first + a.tensor.shard.count
    return any(
        x.first >= first and x.first + x.count <= end and (x.stored, x.hash) != (y.stored, y.hash)
        for x, y in zip(*blocks)
    )


# ---- Export ----


def _wanted(checkpoint: Checkpoint, states: Iterable[str]) -> list[tuple[Tensor, str]]:
    chosen = list(states)
    for state in chosen:
        if state not in STATES:
            raise ValueError(f"state {state!r} is none of {', '.join(STATES)}")
    return [(tensor, state) for tensor in checkpoint.tensors.values() for state in chosen]


def export_safetensors(
    checkpoint: Checkpoint, file: _Path, *, states: Sequence[str] = STATES, names: str = "{name}.{state}"
) -> None:
    """Writes whole FP32 tensors called `names`, and the number of updates of each, as "step" (int64), if that has
    "{state}" in it. With states=("master",), names="{name}" it is a file of the model's weights."""
    about = {"format": "pt", "mlpo_tag": checkpoint.tag, "mlpo_step": str(checkpoint.step)}
    header: dict[str, Any] = {"__metadata__": about}
    wanted = _wanted(checkpoint, states)
    at = 0
    for tensor, state in wanted:
        key = names.format(name=tensor.name, state=state)
        if key in header:
            raise ValueError(f"names={names!r} calls two tensors {key!r}")
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + 4 * tensor.numel]}
        at += 4 * tensor.numel
    stepped = list(checkpoint.tensors.values()) if "{state}" in names else []
    for tensor in stepped:
        header[names.format(name=tensor.name, state="step")] = {
            "dtype": "I64", "shape": [], "data_offsets": [at, at + 8],
        }  # fmt: skip
        at += 8
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with NewFile(file) as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor, state in wanted:
            for piece in checkpoint.pieces(tensor.name, state):
                out.write(memoryview(piece).cast("B"))
        for tensor in stepped:
            out.write(struct.pack("<q", tensor.step))


def export_torch(checkpoint: Checkpoint, file: _Path, *, states: Sequence[str] = STATES) -> None:
    """Writes a file that torch.load(weights_only=True) reads: {"tag", "step", "state": {name: {"step", "master",
    "exp_avg", "exp_avg_sq"}}}, as torch's optimizers keep their state, by name."""
    content: dict[str, dict[str, Any]] = {t.name: {"step": t.step} for t in checkpoint.tensors.values()}
    for tensor, state in _wanted(checkpoint, states):
        values = functools.partial(checkpoint.pieces, tensor.name, state)
        content[tensor.name][state] = _torch_file.Streamed(tensor.shape, values)
    with NewFile(file) as out:
        _torch_file.write(out, {"tag": checkpoint.tag, "step": checkpoint.step, "state": content})


# ---- Import ----


@dataclass(frozen=True)
class _Given:
    """A tensor to be taken in: read(state, first, count) gives FP32 values; states that are not there are zero."""

    name: str
    shape: tuple[int, ...]
    step: int
    states: frozenset[str]
    read: Callable[[str, int, int], _Floats]


_SUFFIXES = (*STATES, "step")


def _split(key: str) -> tuple[str, str]:
    """(name, state) of a tensor in a file: without one of ours behind its name it is a master parameter."""
    name, dot, state = key.rpartition(".")
    return (name, state) if dot and name and state in _SUFFIXES else (key, "master")


class _SafetensorsFile:
    """One safetensors file, whose tensors are read in pieces."""

    TYPES = {"F32": ("<f4", 4), "F16": ("<f2", 2), "BF16": ("<u2", 2), "I64": ("<i8", 8)}

    def __init__(self, name: _Path) -> None:
        self.name = str(name)
        self._stream = open(name, "rb", buffering=0)
        try:
            self._read_header()
        except BaseException:
            self._stream.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._stream.fileno()).st_size
        start = self._stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, 100 << 20):
            raise ValueError(f"{self.name} is no safetensors file")
        try:
            self.header: dict[str, Any] = json.loads(self._stream.read(length))
            self.header.pop("__metadata__", None)
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{self.name} is no safetensors file: {error}") from error
        self._data = 8 + length
        for key, entry in self.header.items():
            kind = self.TYPES.get(entry.get("dtype"))
            if kind is None:
                raise TypeError(f"{self.name}: {key!r} is of type {entry.get('dtype')}; F32, F16 and BF16 are taken")
            first, end = entry["data_offsets"]
            if end - first != math.prod(entry["shape"]) * kind[1] or first < 0 or self._data + end > size:
                raise ValueError(f"{self.name}: {key!r} lies outside the file, or has another size than its shape")

    def close(self) -> None:
        self._stream.close()

    def raw(self, key: str, first: int, count: int) -> npt.NDArray[Any]:
        entry = self.header[key]
        dtype, width = self.TYPES[entry["dtype"]]
        out = np.empty(count, dtype)
        view, offset = memoryview(out).cast("B"), self._data + entry["data_offsets"][0] + first * width
        while view.nbytes:
            got = os.preadv(self._stream.fileno(), [view], offset)
            if got == 0:
                raise ValueError(f"{self.name} ends within {key!r}")
            view, offset = view[got:], offset + got
        return out

    def floats(self, key: str, first: int, count: int) -> _Floats:
        values = self.raw(key, first, count)
        if self.header[key]["dtype"] == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


def import_safetensors(
    files: Sequence[_Path], directory: _Path, tag: str, *, step: int = 0, job: str = "import"
) -> None:
    """Makes a checkpoint of what is in safetensors files, for restore() with any number of ranks.

    A tensor called "X.master", "X.exp_avg", "X.exp_avg_sq" or "X.step" is that state of X; with any other name it is a
    master parameter. 16-bit values become FP32. States that are not there are zero.
    """
    opened = []
    try:
        found: dict[str, dict[str, tuple[_SafetensorsFile, str]]] = {}
        for name in files:
            opened.append(_SafetensorsFile(name))
            for key in opened[-1].header:
                tensor, state = _split(key)
                if state in found.setdefault(tensor, {}):
                    raise ValueError(f"{opened[-1].name}: {key!r} is there twice")
                found[tensor][state] = opened[-1], key
        _write(directory, tag, step, job, [_from_safetensors(name, states) for name, states in sorted(found.items())])
    finally:
        for file in opened:
            file.close()


def _from_safetensors(name: str, states: Mapping[str, tuple[_SafetensorsFile, str]]) -> _Given:
    if "master" not in states:
        raise ValueError(f"tensor {name!r} has no master parameters: moments alone are no state")
    shapes = {s: tuple(file.header[key]["shape"]) for s, (file, key) in states.items() if s != "step"}
    for state, (file, key) in states.items():
        if state != "step" and file.header[key]["dtype"] == "I64":
            raise TypeError(f"{file.name}: {key!r} is of type I64; F32, F16 and BF16 are taken")
        if state != "step" and shapes[state] != shapes["master"]:
            raise ValueError(f"{file.name}: {key!r} has another shape than the master parameters")
    steps = 0
    if "step" in states:
        file, key = states["step"]
        if math.prod(file.header[key]["shape"]) != 1:
            raise ValueError(f"{file.name}: {key!r} is no single number")
        steps = int((file.raw if file.header[key]["dtype"] == "I64" else file.floats)(key, 0, 1)[0])

    def read(state: str, first: int, count: int) -> _Floats:
        source, key = states[state]
        return source.floats(key, first, count)

    return _Given(name, shapes["master"], steps, frozenset(shapes), read)


def import_torch(file: _Path, directory: _Path, tag: str, *, step: Optional[int] = None, job: str = "import") -> None:
    """Makes a checkpoint of what export_torch() wrote, or of a model's state_dict: {name: tensor}.

    The file is mapped, so that contiguous tensors need no memory.
    """
    import torch

    loaded = torch.load(os.fspath(file), map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(loaded, dict):
        raise TypeError(f"{file} holds a {type(loaded).__name__}; a dict of tensors by name is taken")
    ours = isinstance(loaded.get("state"), dict)
    content = loaded["state"] if ours else {name: {"master": value} for name, value in loaded.items()}
    given = [_from_torch(str(name), states, str(file)) for name, states in sorted(content.items())]
    number = int(loaded.get("step", 0)) if step is None and ours else step or 0
    _write(directory, tag, number, job, given)


def _from_torch(name: str, states: Any, file: str) -> _Given:
    import torch

    if not isinstance(states, dict) or not isinstance(states.get("master"), torch.Tensor):
        raise TypeError(f"{file}: {name!r} has no tensor of master parameters")
    tensors = {state: states[state] for state in STATES if state in states}
    for state, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"{file}: {state} of {name!r} is of type {tensor.dtype}; FP32, FP16 and BF16 are taken")
        if tensor.shape != tensors["master"].shape:
            raise ValueError(f"{file}: {state} of {name!r} has another shape than the master parameters")
    flat = {state: tensor.detach().contiguous().view(-1) for state, tensor in tensors.items()}

    def read(state: str, first: int, count: int) -> _Floats:
        piece: _Floats = flat[state][first : first + count].to(torch.float32).numpy()
        return piece

    shape = tuple(tensors["master"].shape)
    return _Given(name, shape, int(states.get("step", 0)), frozenset(flat), read)


def _write(directory: _Path, tag: str, step: int, job: str, tensors: Sequence[_Given]) -> None:
    """A complete checkpoint of one rank. The manifest's name makes it one; before that everything is on storage."""
    if not _parts.is_tag(tag) or not _parts.is_tag(job):
        raise ValueError(f"tag {tag!r} and job {job!r} match [A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}")
    for given in tensors:
        if not 1 <= len(given.name.encode("utf-8", "surrogateescape")) <= 256 or len(given.shape) > 8:
            raise ValueError(f"tensor {given.name!r}: names have 1 to 256 bytes, tensors at most 8 dimensions")
    try:
        files = PartFiles(os.fspath(directory), tag, 0, job, overwrite=False)
    except MlpoError as error:
        if error.errno == errno.EEXIST:
            raise FileExistsError(error.errno, f"{error.strerror}") from error
        raise
    try:
        attempt, started = secrets.token_bytes(16), max(time.time_ns(), files.after_ns)
        data, manifest = files.descriptors
        with open(data, "wb", closefd=False) as out:
            header = _parts.PartHeader(attempt.hex(), 0, 1, step, 0, os.geteuid(), started, job, tag)
            out.write(_parts.part_page(header))
            subgroups = [_write_tensor(out, given) for given in tensors]
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
        body = {
            "block_hash": "xxh3-64k",
            "files": [{"name": f"data-{attempt.hex()}-0", "bytes": size, "kind": "part"}],
            "subgroups": subgroups,
        }
        with open(manifest, "wb", closefd=False) as out:
            out.write(_manifest(body, attempt.hex(), step, job, tag, started))
            out.flush()
            os.fsync(out.fileno())
        files.commit(attempt)
    finally:
        files.close()


def _manifest(body: Mapping[str, Any], attempt: str, step: int, job: str, tag: str, started: int) -> bytes:
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    head = {
        "format": "mlpo-part", "version": 1, "job": job, "tag": tag, "step": step, "world_size": 1, "rank": 0,
        "attempt": attempt, "started_unix_ns": started, "body_bytes": len(text), "body_xxh3": _parts.hash_text(text),
    }  # fmt: skip
    whole = json.dumps(head, separators=(",", ":")).encode() + b"\n" + text + b"\n"
    if len(whole) > _parts.MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the manifest would have {len(whole)} bytes, and at most {_parts.MAX_MANIFEST_BYTES} are read: "
            "import fewer tensors"
        )
    return whole


def _write_tensor(out: Any, given: _Given) -> dict[str, Any]:
    """One subgroup of one tensor, in blocks of nearly the same size."""
    shape = given.shape or (1,)
    numel = math.prod(shape)
    moments = bool(given.states & {"exp_avg", "exp_avg_sq"})
    stored = STATES if moments else STATES[:1]
    count = -(-numel // PIECE)
    blocks, first = [], 0
    for index in range(count):
        elements = numel // count + (index < numel % count)
        offset = out.tell()
        digests = [_write_array(out, given, state, first, elements) for state in stored]
        ordered = [digest for piece in zip(*digests) for digest in piece]
        blocks.append([elements, 0, offset, len(stored), _parts.hash_of_pieces(ordered) or ""])
        first += elements
    tensor = {
        "name": _parts.name_json(given.name), "count": numel, "step": given.step, "global_shape": list(shape),
        "shape": list(shape), "offsets": [0] * len(shape),
    }  # fmt: skip
    return {
        "key": _parts.name_json(given.name), "dtype": "float32", "grad_dtype": "float32", "numel": numel,
        "tensors": [tensor], "blocks": blocks,
    }  # fmt: skip


def _write_array(out: Any, given: _Given, state: str, first: int, count: int) -> list[int]:
    """One array of a block with its padding; the hashes of its pieces."""
    values = given.read(state, first, count) if state in given.states else np.zeros(count, np.float32)
    text = np.ascontiguousarray(values, np.float32).tobytes()
    text += bytes(_parts.padded(count) - len(text))
    out.write(text)
    xxhash = _parts.hashing()
    view, size = memoryview(text), _parts.HASH_PIECE_BYTES
    return [xxhash.xxh3_64_intdigest(view[at : at + size]) for at in range(0, len(text), size)]


# ---- The command ----


def _main(arguments: Sequence[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m mlpo.checkpoints", description="Checkpoints without a daemon.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="the checkpoints in a directory")
    listing.add_argument("directory")
    exporting = commands.add_parser("export", help="whole tensors into one file")
    importing = commands.add_parser("import", help="a checkpoint of what is in files")
    collecting = commands.add_parser("gc", help="removes what killed clients and cut saves of this user have left")
    collecting.add_argument("directory")
    exporting.add_argument("directory")
    exporting.add_argument("file")
    exporting.add_argument("--tag", help="default: the newest that is complete")
    exporting.add_argument("--states", default=",".join(STATES))
    importing.add_argument("directory")
    importing.add_argument("tag")
    importing.add_argument("files", nargs="+")
    for each in (exporting, importing):
        each.add_argument("--format", choices=("safetensors", "torch"), help="default: by the file's name")
    options = parser.parse_args(arguments)
    try:
        _carry_out(options)
    except (OSError, ValueError, TypeError, ImportError) as error:
        print(f"mlpo.checkpoints: {error}", file=sys.stderr)
        return 1
    return 0


def _carry_out(options: Any) -> None:
    if options.command == "list":
        for found in find(options.directory):
            state = "complete" if found.complete else f"{found.ranks} of {found.world_size} parts"
            saved = f"{found.tag}  step {found.step}  {found.world_size} ranks  {found.attempt}"
            print(f"{saved}  {state}  job {found.job}")
        return
    if options.command == "gc":
        gone = sum(_rests.remove_uncommitted(options.directory)) + sum(_rests.remove_cut(options.directory))
        print(f"removed {gone} files")
        return
    file = options.file if options.command == "export" else options.files[0]
    kind = options.format or ("safetensors" if str(file).endswith(".safetensors") else "torch")
    if options.command == "export":
        with Checkpoint(options.directory, options.tag) as checkpoint:
            write = export_safetensors if kind == "safetensors" else export_torch
            write(checkpoint, file, states=tuple(options.states.split(",")))
    elif kind == "safetensors":
        import_safetensors(options.files, options.directory, options.tag)
    elif len(options.files) > 1:
        raise ValueError("torch files are imported one at a time")
    else:
        import_torch(file, options.directory, options.tag)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
