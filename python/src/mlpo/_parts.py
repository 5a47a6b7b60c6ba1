"""The files of a checkpoint: manifests, shards, where an element is, which attempts are complete, and whose are taken.
daemon/checkpoint has the same in C++; its README.md has the formats, proto/FORMAT.md ("In a directory of checkpoints")
the rules."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import stat
import struct
import warnings
from dataclasses import dataclass
from typing import Any, Iterator, NamedTuple, Optional, Sequence, Union

ALIGN = 4096
HEADER_BYTES = 4096  # in front of each data file's blocks
HASH_PIECE_BYTES = 65536 * 4  # of one array
STATES = ("master", "exp_avg", "exp_avg_sq")
STORED_NOTHING, STORED_MASTER, STORED_ALL = 0, 1, 3

MAX_MANIFEST_BYTES = 1 << 28  # MLPO_MAX_MANIFEST_BYTES in proto/abi.h

_MAX_HEAD_BYTES = 4096
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_PART = re.compile(r"part-(0|[1-9][0-9]{0,9})")
_MANIFEST = re.compile(r"manifest-([0-9a-f]{32})")
_DATA = re.compile(r"data-([0-9a-f]{32})-(0|[1-9][0-9]{0,9})")


class CheckpointError(ValueError):
    """A checkpoint that is not complete, is damaged, or has not what was asked for; the text names file and tensor."""


def is_tag(name: str) -> bool:
    return _TAG.fullmatch(name) is not None


def padded(elements: int) -> int:
    """Bytes of one array of a block as it is stored."""
    return (elements * 4 + ALIGN - 1) // ALIGN * ALIGN


# ---- Shards ----


@dataclass(frozen=True)
class Shard:
    """Which elements of a whole tensor a part holds: the box [offsets, offsets + shape), or with `flat_first` a range
    of its row-major elements. Their order is row-major within the box, ascending within the range."""

    global_shape: tuple[int, ...]
    count: int
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    flat_first: Optional[int] = None


def whole(shape: Sequence[int]) -> Shard:
    """All of a tensor, as a range."""
    return Shard(tuple(shape), math.prod(shape), flat_first=0)


_Box = tuple[tuple[int, int], ...]  # [first, end) in each dimension


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


def _boxes(shard: Shard, first: int, end: int) -> list[_Box]:
    """The elements [first, end) of the shard's own order: a range of row-major elements is a handful of boxes."""
    flat = shard.flat_first is not None
    shape = shard.global_shape if flat else shard.shape
    offsets = (0,) * len(shape) if flat else shard.offsets
    first, end = (shard.flat_first or 0) + first, (shard.flat_first or 0) + end
    inner = _strides(shape)  # elements behind one step in a dimension
    found: list[_Box] = []
    while first < end:
        # The outermost dimension in which a whole step begins here and ends before `end`.
        dim = next(d for d in range(len(shape)) if first % inner[d] == 0 and end - first >= inner[d])
        box, rest = [], first
        for d, size in enumerate(shape):
            at, rest = divmod(rest, inner[d])
            stop = at + 1 if d < dim else size if d > dim else at + min(size - at, (end - first) // inner[d])
            box.append((at + offsets[d], stop + offsets[d]))
        first += (box[dim][1] - box[dim][0]) * inner[dim]
        found.append(tuple(box))
    return found


def _layout(shard: Shard) -> tuple[list[int], int]:
    """(strides, base): an element's place in the shard is the sum of coordinate times stride, less base."""
    if shard.flat_first is not None:
        return _strides(shard.global_shape), shard.flat_first
    strides = _strides(shard.shape)
    return strides, sum(offset * stride for offset, stride in zip(shard.offsets, strides))


def _common(a: _Box, b: _Box) -> Optional[_Box]:
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b))
    return both if all(first < end for first, end in both) else None


def runs(to: Shard, first: int, end: int, source: Shard) -> Iterator[tuple[int, int, int]]:
    """(place in `to`, place in `source`, count) of elements that follow each other in both, of [first, end) of `to`."""
    to_strides, to_base = _layout(to)
    from_strides, from_base = _layout(source)
    source_boxes = _boxes(source, 0, source.count)
    for box in _boxes(to, first, end):
        for other in source_boxes:
            both = _common(box, other)
            if both is None:
                continue
            outer, run = len(both), 1
            while outer > 0:  # the inner dimensions, of which all elements follow each other in both
                size = both[outer - 1][1] - both[outer - 1][0]
                if size > 1 and (to_strides[outer - 1] != run or from_strides[outer - 1] != run):
                    break
                run *= size
                outer -= 1
            at = [low for low, _ in both]
            while True:
                yield (
                    sum(x * s for x, s in zip(at, to_strides)) - to_base,
                    sum(x * s for x, s in zip(at, from_strides)) - from_base,
                    run,
                )
                dim = outer
                while dim > 0:
                    at[dim - 1] += 1
                    if at[dim - 1] < both[dim - 1][1]:
                        break
                    at[dim - 1] = both[dim - 1][0]
                    dim -= 1
                if dim == 0:
                    break


def common_elements(a: Shard, b: Shard) -> int:
    boxes = _boxes(b, 0, b.count)
    total = 0
    for box in _boxes(a, 0, a.count):
        for other in boxes:
            both = _common(box, other)
            if both is not None:
                total += math.prod(end - first for first, end in both)
    return total


# ---- First pages of data files ----

_PART_PAGE = struct.Struct("<8sII16sIIQIIq136s136s")
_WORKING_PAGE = struct.Struct("<8sIIIIIIQ136s136s")


class PartHeader(NamedTuple):
    """Of the first data file: which part it is of."""

    attempt: str
    rank: int
    world_size: int
    step: int
    index: int
    uid: int  # of who wrote it
    started_unix_ns: int
    job: str
    tag: str


class Origin(NamedTuple):
    """Of a daemon's working file that was handed over: whose it was."""

    node: str
    daemon_uid: int
    client_uid: int
    job: str
    rank: int
    generation: int


def part_page(header: PartHeader) -> bytes:
    page = _PART_PAGE.pack(
        b"MLPOPART", 1, HEADER_BYTES, bytes.fromhex(header.attempt), *header[1:7], header.job.encode(),
        header.tag.encode(),
    )  # fmt: skip
    page += bytes(HEADER_BYTES - 8 - len(page))
    xxhash = hashing()
    if xxhash is None:
        raise ImportError("writing a checkpoint needs the package xxhash")
    return page + struct.pack("<Q", xxhash.xxh3_64_intdigest(page))


def read_page(fd: int, who: str) -> Union[PartHeader, Origin, None]:
    """A data file's first page; None if none has been written yet. Raises CheckpointError for anything else."""
    page = os.pread(fd, HEADER_BYTES, 0)
    if not any(page):
        return None
    magic, version, size = struct.unpack_from("<8sII", page) if len(page) == HEADER_BYTES else (b"", 0, 0)
    if magic not in (b"MLPOPART", b"MLPOSTAT") or version != 1 or size != HEADER_BYTES:
        raise CheckpointError(f"{who} has no header of a data file that this version knows")
    xxhash = hashing()
    if xxhash is not None and page[-8:] != struct.pack("<Q", xxhash.xxh3_64_intdigest(page[:-8])):
        raise CheckpointError(f"{who} has a damaged header: another checksum than it says")
    if magic == b"MLPOPART":
        _, _, _, attempt, *numbers, job, tag = _PART_PAGE.unpack_from(page)
        return PartHeader(attempt.hex(), *numbers, _text(job), _text(tag))
    _, _, _, daemon_uid, client_uid, rank, _, generation, node, job = _WORKING_PAGE.unpack_from(page)
    return Origin(_text(node), daemon_uid, client_uid, _text(job), rank, generation)


def _text(padded_name: bytes) -> str:
    return padded_name.split(b"\0", 1)[0].decode("ascii", "replace")


# ---- Manifests ----


class DataFile(NamedTuple):
    name: str
    bytes: int
    origin: Optional[Origin]  # of one that was handed over


@dataclass(frozen=True)
class Head:
    """The first line of a manifest: whose part it is."""

    job: str
    tag: str
    step: int
    world_size: int
    rank: int
    attempt: str
    started_unix_ns: int
    body_bytes: int
    body_xxh3: str


@dataclass(frozen=True)
class Block:
    first: int  # element of the subgroup
    count: int
    file: int  # place in Part.files
    offset: int
    stored: int  # arrays: 0, 1 or 3
    hash: str


@dataclass(frozen=True)
class PartTensor:
    name: str
    shard: Shard
    step: int
    first: int  # element of the subgroup


@dataclass(frozen=True)
class PartSubgroup:
    key: str
    dtype: str
    tensors: tuple[PartTensor, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Part:
    """What one rank saved."""

    folder: pathlib.Path
    head: Head
    hashed: bool
    files: tuple[DataFile, ...]
    subgroups: tuple[PartSubgroup, ...]


def name_of(value: Any, who: str) -> str:
    """Names are any bytes: a string, or {"hex": ...} of what is no UTF-8, which comes out with surrogates."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and set(value) == {"hex"} and isinstance(value["hex"], str):
        try:
            return bytes.fromhex(value["hex"]).decode("utf-8", "surrogateescape")
        except ValueError:
            pass
    raise CheckpointError(f"{who} has no name")


def name_json(name: str) -> Any:
    try:
        name.encode("utf-8")
        return name
    except UnicodeEncodeError:
        return {"hex": name.encode("utf-8", "surrogateescape").hex()}


def _whole_number(value: Any, who: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or value >= 1 << 64:
        raise CheckpointError(f"{who} is no whole number")
    return value


def parse_head(line: bytes, who: str) -> Head:
    """From the first line of a manifest."""
    try:
        given = json.loads(line)
    except ValueError as error:
        raise CheckpointError(f"{who} has no head: it is no manifest, or was cut") from error
    if not isinstance(given, dict) or given.get("format") != "mlpo-part":
        raise CheckpointError(f"{who} is no manifest of a part")
    if given.get("version") != 1:
        raise CheckpointError(f"{who} has format {given.get('version')}; this version knows 1")
    numbers = {
        key: _whole_number(given.get(key), f"{who}: {key!r}")
        for key in ("step", "world_size", "rank", "started_unix_ns", "body_bytes")
    }
    texts = {key: str(given.get(key)) for key in ("job", "tag", "attempt", "body_xxh3")}
    right = is_tag(texts["job"]) and is_tag(texts["tag"]) and re.fullmatch("[0-9a-f]{32}", texts["attempt"])
    if not right or not re.fullmatch("[0-9a-f]{16}", texts["body_xxh3"]) or numbers["rank"] >= numbers["world_size"]:
        raise CheckpointError(f"{who} has a head that nobody writes")
    return Head(**texts, **numbers)  # type: ignore[arg-type]


def read_head(file: pathlib.Path, whose: Optional[frozenset[int]] = None) -> Head:
    """The head of a manifest whose file is as long as it says. `whose`: as for open_regular."""
    with open_regular(file, whose) as stream:
        line = stream.readline(_MAX_HEAD_BYTES)
        size = os.fstat(stream.fileno()).st_size
    if not line.endswith(b"\n"):
        raise CheckpointError(f"{file} has no head: it is no manifest, or was cut")
    head = parse_head(line, str(file))
    if size != len(line) + head.body_bytes + 1:
        raise CheckpointError(
            f"{file} has {size} bytes instead of {len(line) + head.body_bytes + 1}: it was cut or changed"
        )
    return head


def read_part(folder: pathlib.Path, attempt: str) -> Part:
    """The manifest of one part, with everything in it checked. Of those only who are believed."""
    file, whose = folder / f"manifest-{attempt}", believed(folder.parent.parent)
    head = read_head(file, whose)
    with open_regular(file, whose) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_MANIFEST_BYTES or head.body_bytes > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{file} has {size} bytes; at most {MAX_MANIFEST_BYTES} are read")
        stream.readline(_MAX_HEAD_BYTES)
        text = stream.read(head.body_bytes + 1)
    body = text[:-1]
    if len(text) != head.body_bytes + 1 or text[-1:] != b"\n":
        raise CheckpointError(f"{file} was cut or changed while it was read")
    found = hash_text(body)
    if found is not None and found != head.body_xxh3:
        raise CheckpointError(f"{file} is damaged: its body has another hash than its head says")
    try:
        given = json.loads(body)
        return _parse_body(folder, head, given, str(file))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} has a body that nobody writes: {error!r}") from error


def _parse_body(folder: pathlib.Path, head: Head, given: Any, who: str) -> Part:
    kind = given["block_hash"]
    if kind not in ("xxh3-64k", "none"):
        raise CheckpointError(f"{who} has hashes of the unknown kind {kind!r}")
    files = []
    for each in given["files"]:
        match = _DATA.fullmatch(each["name"])
        if match is None or match[1] != head.attempt:
            raise CheckpointError(f"{who} names {each['name']!r}, which is no data file of this attempt")
        origin = _parse_origin(each, who) if each["kind"] == "working" else None
        files.append(DataFile(each["name"], _whole_number(each["bytes"], who), origin))
    subgroups = tuple(_parse_subgroup(each, files, f"{who}: subgroup {i}") for i, each in enumerate(given["subgroups"]))
    return Part(folder, head, kind != "none", tuple(files), subgroups)


def _parse_origin(given: Any, who: str) -> Origin:
    daemon_uid, client_uid, rank, generation = (
        _whole_number(given[key], who) for key in ("daemon_uid", "client_uid", "rank", "generation")
    )
    return Origin(str(given["node"]), daemon_uid, client_uid, str(given["job"]), rank, generation)


def _parse_subgroup(given: Any, files: Sequence[DataFile], who: str) -> PartSubgroup:
    numel = _whole_number(given["numel"], who)
    tensors, first = [], 0
    for each in given["tensors"]:
        shard = _parse_shard(each, who)
        step = _whole_number(each["step"], who)
        tensors.append(PartTensor(name_of(each["name"], who), shard, step, first))
        first += shard.count
    blocks, at = [], 0
    for each in given["blocks"]:
        count, file, offset, stored = (_whole_number(value, who) for value in each[:4])
        if stored not in (STORED_NOTHING, STORED_MASTER, STORED_ALL) or count == 0 or len(each) != 5:
            raise CheckpointError(f"{who} has a block that nobody writes")
        end = offset + stored * padded(count)
        inside = stored == STORED_NOTHING or (
            file < len(files) and offset >= HEADER_BYTES and offset % ALIGN == 0 and end <= files[file].bytes
        )
        if not inside:
            raise CheckpointError(f"{who} has a block outside its file")
        blocks.append(Block(at, count, file, offset, stored, str(each[4])))
        at += count
    if first != numel or at != numel:
        raise CheckpointError(f"{who} has {numel} elements, its tensors {first} and its blocks {at}")
    return PartSubgroup(name_of(given["key"], who), str(given["dtype"]), tuple(tensors), tuple(blocks))


def _parse_shard(given: Any, who: str) -> Shard:
    sizes = {
        key: tuple(_whole_number(value, who) for value in given.get(key, ()))
        for key in ("global_shape", "shape", "offsets")
    }
    count, total = _whole_number(given["count"], who), math.prod(sizes["global_shape"])
    if not 1 <= len(sizes["global_shape"]) <= 8:
        raise CheckpointError(f"{who} has a tensor of {len(sizes['global_shape'])} dimensions")
    if "flat_first" in given:
        first = _whole_number(given["flat_first"], who)
        if first + count > total:
            raise CheckpointError(f"{who} has a range past its tensor's end")
        return Shard(sizes["global_shape"], count, flat_first=first)
    inside = len(sizes["shape"]) == len(sizes["offsets"]) == len(sizes["global_shape"]) and all(
        offset + size <= limit for offset, size, limit in zip(sizes["offsets"], sizes["shape"], sizes["global_shape"])
    )
    if not inside or math.prod(sizes["shape"]) != count:
        raise CheckpointError(f"{who} has a box that is not inside its tensor")
    return Shard(sizes["global_shape"], count, sizes["shape"], sizes["offsets"])


# ---- Which are complete, and whose ----


def believed(directory: pathlib.Path) -> frozenset[int]:
    """The users whose checkpoints in a directory are taken: whoever reads, root, and the directory's owner. In one that
    others can write to, anybody could put a newer checkpoint beside ours."""
    return frozenset((os.geteuid(), 0, directory.stat().st_uid))


@dataclass(frozen=True)
class Attempt:
    """The parts of one save: complete if there is one of each rank, and they agree."""

    folder: pathlib.Path  # of the tag
    id: str
    heads: dict[int, Head]

    @property
    def head(self) -> Head:
        return self.heads[min(self.heads)]

    @property
    def order(self) -> tuple[int, str]:
        """Of two attempts of one tag the larger one came later. The step does not count: who has gone back to an
        earlier one saves over a later one."""
        return self.head.started_unix_ns, self.id

    @property
    def complete(self) -> bool:
        def identity(head: Head) -> tuple[str, str, int, int]:
            return head.job, head.tag, head.step, head.world_size

        agree = all(identity(head) == identity(self.head) for head in self.heads.values())
        return agree and len(self.heads) == self.head.world_size


def attempts(folder: pathlib.Path) -> list[Attempt]:
    """Of one tag's folder, the one that came last at the end. What is no part, or of somebody who is not believed, is
    passed over."""
    heads: dict[str, dict[int, Head]] = {}
    whose = believed(folder.parent)
    if folder.lstat().st_uid not in whose:
        return []
    for part in sorted(folder.iterdir()):
        match = _PART.fullmatch(part.name)
        if match is None or not _is_folder(part, whose):
            continue
        for file in _listed(part):
            manifest = _MANIFEST.fullmatch(file.name)
            if manifest is None:
                continue
            try:
                head = read_head(file, whose)
            except (CheckpointError, OSError):
                continue
            if (head.rank, head.tag, head.attempt) == (int(match[1]), folder.name, manifest[1]):
                heads.setdefault(head.attempt, {})[head.rank] = head
    found = [Attempt(folder, attempt, by_rank) for attempt, by_rank in heads.items()]
    return sorted(found, key=lambda attempt: attempt.order)


def _listed(folder: pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:  # somebody removes it
        return []


def _is_folder(part: pathlib.Path, whose: frozenset[int]) -> bool:
    try:
        found = part.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid in whose


def choose(
    directory: pathlib.Path, tag: Optional[str], attempt: Optional[str] = None, job: Optional[str] = None
) -> Attempt:
    """The complete attempt that counts: the last of a tag, or without a tag that of the highest step; or of a tag the
    one asked for. With `job` the newest is one of that job, and one of another job only, with a warning, if that has
    none."""
    if tag is not None and not is_tag(tag):
        raise ValueError(f"{tag!r} is no tag")
    folders = [directory / tag] if tag is not None else [f for f in directory.iterdir() if is_tag(f.name)]
    last: list[Attempt] = []  # of each tag
    cut: list[Attempt] = []
    for folder in folders:
        if folder.is_symlink() or not folder.is_dir():
            if tag is not None:
                raise CheckpointError(f"{folder} is no folder of a checkpoint")
            continue
        found = attempts(folder)
        complete = [each for each in found if each.complete and attempt in (None, each.id)]
        last += complete[-1:]
        cut += [each for each in found if not each.complete]
    if attempt is not None and not last:
        raise CheckpointError(f"{directory} has no complete attempt {attempt} of {tag!r}: it was replaced or removed")
    if not last:
        why = "".join(f"; of {a.head.tag!r} there are {len(a.heads)} of {a.head.world_size} parts" for a in cut[:3])
        if tag is not None and folders[0].lstat().st_uid not in believed(directory):
            why = f": {folders[0]} is another user's (uid {folders[0].lstat().st_uid})"
        raise CheckpointError(f"{directory} has no complete checkpoint{'' if tag is None else f' {tag!r}'}{why}")
    own = [each for each in last if each.head.job == job]
    if tag is None and own:
        last = own
    chosen = max(last, key=lambda each: (each.head.step, each.head.started_unix_ns, each.head.tag))
    if tag is None and job is not None and not own:
        warnings.warn(
            f"{directory} has no complete checkpoint of job {job!r}: {chosen.head.tag!r} of job {chosen.head.job!r} is "
            "taken; name the tag if that is meant, or keep the jobs in directories of their own",
            RuntimeWarning,
            stacklevel=5,
        )
    return chosen


def check_files(attempt: Attempt) -> None:
    """Whether every file that a complete attempt's manifests name is there, as long as they say, and has the header it
    should; contents are not read. Raises CheckpointError or OSError naming the first that is not."""
    whose = believed(attempt.folder.parent)
    for rank in range(attempt.head.world_size):
        part = read_part(attempt.folder / f"part-{rank}", attempt.id)
        for file in part.files:
            path = part.folder / file.name
            with open_regular(path, whose) as stream:
                size = os.fstat(stream.fileno()).st_size
                found = read_page(stream.fileno(), str(path))
            if size < file.bytes:
                raise CheckpointError(f"{path} has {size} bytes instead of {file.bytes}: it was cut")
            if found != (file.origin or _expected(part.head, file, found)):
                raise CheckpointError(f"{path} has the header of another file: it was moved there")


def _expected(head: Head, file: DataFile, found: Union[PartHeader, Origin, None]) -> PartHeader:
    """The header of a part's own file. Who wrote it, and when that began, may be anything: a copy is as good."""
    uid, started = (found.uid, found.started_unix_ns) if isinstance(found, PartHeader) else (0, 0)
    index = int(file.name.rpartition("-")[2])
    return PartHeader(
        head.attempt, head.rank, head.world_size, head.step, index, uid, started, head.job, head.tag
    )


def open_regular(file: pathlib.Path, whose: Optional[frozenset[int]] = None) -> Any:
    """Opens a regular file for reading; a link or anything else in its place is an error, and with `whose` also one of
    any other user."""
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise CheckpointError(f"{file} is no regular file")
    if whose is not None and found.st_uid not in whose:
        os.close(fd)
        raise CheckpointError(f"{file} is another user's (uid {found.st_uid}): it is no part of a checkpoint of ours")
    return os.fdopen(fd, "rb", buffering=0 if file.name.startswith("data-") else -1)


# ---- Hashes ----


def hashing() -> Any:
    """xxhash, or None where it is not installed."""
    try:
        import xxhash
    except ImportError:
        return None
    return xxhash


def hash_text(text: bytes) -> Optional[str]:
    """XXH3-64 in hexadecimal digits; None without xxhash."""
    xxhash = hashing()
    return None if xxhash is None else f"{xxhash.xxh3_64_intdigest(text):016x}"


def hash_of_pieces(digests: Sequence[int]) -> Optional[str]:
    """A block's hash from those of its pieces: piece by piece, and of each piece array by array."""
    return hash_text(b"".join(digest.to_bytes(8, "little") for digest in digests))
