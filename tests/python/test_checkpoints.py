"""mlpo.checkpoints: parts that are written here, byte by byte as daemon/checkpoint/README.md says, come out in other
formats as those formats'
own libraries read them, and back; whatever is damaged is noticed."""

from __future__ import annotations

import json
import math
import pathlib
import re
import struct
import tracemalloc
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
import xxhash
from mlpo import _parts, checkpoints
from mlpo.checkpoints import Checkpoint, CheckpointError
from safetensors import numpy as safetensors_numpy
from safetensors import torch as safetensors_torch

STATES = ("master", "exp_avg", "exp_avg_sq")
MODEL = {"embedding": (37, 11), "weight": (24, 7, 3), "bias": (13,), "scalar": (1,), "none": (0, 4)}
ATTEMPT = "00112233445566778899aabbccddeeff"


def values(model: dict[str, tuple[int, ...]], seed: int = 1) -> dict[str, dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    return {
        name: {state: random.standard_normal(shape, np.float32) for state in STATES} for name, shape in model.items()
    }


def test_python_and_daemon_read_manifests_of_one_size() -> None:
    header = (pathlib.Path(__file__).parents[2] / "proto" / "abi.h").read_text()
    found = re.search(r"#define MLPO_MAX_MANIFEST_BYTES \(1u << (\d+)\)", header)
    assert found is not None and _parts.MAX_MANIFEST_BYTES == 1 << int(found[1])


def test_a_manifest_that_is_too_long_is_not_read(tmp_path: pathlib.Path) -> None:
    part = tmp_path / "tag" / "part-0"
    part.mkdir(parents=True)
    head = {
        "format": "mlpo-part", "version": 1, "job": "job", "tag": "tag", "step": 1, "world_size": 1, "rank": 0,
        "attempt": ATTEMPT, "started_unix_ns": 1, "body_bytes": 1 << 28, "body_xxh3": "0" * 16,
    }  # fmt: skip
    line = json.dumps(head).encode() + b"\n"
    with (part / f"manifest-{ATTEMPT}").open("wb") as out:
        out.write(line)
        out.truncate(len(line) + (1 << 28) + 1)  # a hole: nobody has read it
    with pytest.raises(CheckpointError, match="at most 268435456 are read"):
        _parts.read_part(part, ATTEMPT)


Cut = Callable[[tuple[int, ...], int, int], dict[str, Any]]


def rows(shape: tuple[int, ...], rank: int, ranks: int) -> dict[str, Any]:
    first, end = shape[0] * rank // ranks, shape[0] * (rank + 1) // ranks
    return {"offsets": [first] + [0] * (len(shape) - 1), "shape": [end - first, *shape[1:]]}


def columns(shape: tuple[int, ...], rank: int, ranks: int) -> dict[str, Any]:
    first, end = shape[-1] * rank // ranks, shape[-1] * (rank + 1) // ranks
    return {"offsets": [0] * (len(shape) - 1) + [first], "shape": [*shape[:-1], end - first]}


def flat(shape: tuple[int, ...], rank: int, ranks: int) -> dict[str, Any]:
    numel = math.prod(shape)
    first = numel * rank // ranks
    return {"flat_first": first, "count": numel * (rank + 1) // ranks - first}


def held(whole: np.ndarray, shard: dict[str, Any]) -> np.ndarray:
    """What a rank has of a tensor, by numpy's own indexing."""
    if "flat_first" in shard:
        return whole.reshape(-1)[shard["flat_first"] : shard["flat_first"] + shard["count"]]
    box = tuple(slice(o, o + s) for o, s in zip(shard["offsets"], shard["shape"]))
    return np.ascontiguousarray(whole[box]).reshape(-1)


def padded(array: np.ndarray) -> bytes:
    text = array.astype("<f4").tobytes()
    return text + bytes(-len(text) % 4096)


def block_hash(stored: Sequence[bytes]) -> str:
    """"xxh3-64k": of the hashes of 65536 elements each, piece by piece, and of each piece array by array."""
    pieces = (array[at : at + 65536 * 4] for at in range(0, len(stored[0]), 65536 * 4) for array in stored)
    digests = b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(piece)) for piece in pieces)
    return f"{xxhash.xxh3_64_intdigest(digests):016x}"


def save(
    directory: pathlib.Path,
    state: dict[str, dict[str, np.ndarray]],
    cut: Cut,
    ranks: int,
    *,
    tag: str = "tag",
    step: int = 7,
    attempt: str = ATTEMPT,
    block: int = 100,
    moments: bool = True,
) -> None:
    """The parts of all ranks, two tensors a subgroup. Written from the description of the format, with none of the
    package's code."""
    for rank in range(ranks):
        folder = directory / tag / f"part-{rank}"
        folder.mkdir(parents=True)
        page = struct.pack(
            "<8sII16sIIQIIq136s136s", b"MLPOPART", 1, 4096, bytes.fromhex(attempt), rank, ranks, step, 0, 0, 1, b"job",
            tag.encode(),
        )  # fmt: skip
        page += bytes(4088 - len(page))
        data = page + struct.pack("<Q", xxhash.xxh3_64_intdigest(page))
        subgroups = []
        names = list(state)
        for at in range(0, len(names), 2):
            tensors, arrays = [], {each: [] for each in STATES}
            for name in names[at : at + 2]:
                shape = state[name]["master"].shape
                shard = cut(shape, rank, ranks)
                for each in STATES:
                    arrays[each].append(held(state[name][each], shard))
                count = arrays["master"][-1].size
                tensors.append({"name": name, "step": step, "global_shape": list(shape), **shard, "count": count})
            joined = {each: np.concatenate(arrays[each]) for each in STATES}
            numel = joined["master"].size
            blocks = []
            for first in range(0, numel, block):
                count = min(block, numel - first)
                stored = [padded(joined[each][first : first + count]) for each in STATES[: 3 if moments else 1]]
                blocks.append([count, 0, len(data), len(stored), block_hash(stored)])
                data += b"".join(stored)
            subgroups.append(
                {
                    "key": f"pack-{at}", "dtype": "bfloat16", "grad_dtype": "float32", "numel": numel,
                    "tensors": tensors, "blocks": blocks,
                }  # fmt: skip
            )
        (folder / f"data-{attempt}-0").write_bytes(data)
        body = json.dumps(
            {
                "block_hash": "xxh3-64k",
                "files": [{"name": f"data-{attempt}-0", "bytes": len(data), "kind": "part"}],
                "subgroups": subgroups,
            }
        ).encode()
        head = json.dumps(
            {
                "format": "mlpo-part", "version": 1, "job": "job", "tag": tag, "step": step, "world_size": ranks,
                "rank": rank, "attempt": attempt, "started_unix_ns": 1, "body_bytes": len(body),
                "body_xxh3": f"{xxhash.xxh3_64_intdigest(body):016x}",
            }  # fmt: skip
        ).encode()
        (folder / f"manifest-{attempt}").write_bytes(head + b"\n" + body + b"\n")


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("ranks", [1, 3, 4, 5])
@pytest.mark.parametrize("cut", [rows, columns, flat], ids=lambda cut: cut.__name__)
def test_tensors_come_out_whole_however_they_were_cut(tmp_path: pathlib.Path, cut: Cut, ranks: int) -> None:
    state = values(MODEL)
    save(tmp_path, state, cut, ranks)
    with Checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.tag, checkpoint.step, checkpoint.world_size) == ("tag", 7, ranks)
        assert set(checkpoint.tensors) == set(MODEL)
        checkpoint.verify()
        random = np.random.default_rng(2)
        for name, shape in MODEL.items():
            assert checkpoint.tensors[name].shape == shape
            for each in STATES:
                assert same(checkpoint.read(name, each), state[name][each])
                first = int(random.integers(0, math.prod(shape) + 1))
                count = int(random.integers(0, math.prod(shape) - first + 1))
                part = checkpoint.read(name, each, first, count)
                assert same(part, state[name][each].reshape(-1)[first : first + count])


def test_exports_are_what_their_own_libraries_read(tmp_path: pathlib.Path) -> None:
    state = values(MODEL)
    save(tmp_path, state, rows, 3)
    with Checkpoint(tmp_path, "tag") as checkpoint:
        checkpoints.export_safetensors(checkpoint, tmp_path / "state.safetensors")
        checkpoints.export_safetensors(
            checkpoint, tmp_path / "weights.safetensors", states=("master",), names="{name}"
        )
        checkpoints.export_torch(checkpoint, tmp_path / "state.pt")
    exported = safetensors_numpy.load_file(tmp_path / "state.safetensors")
    assert len(exported) == 4 * len(MODEL)
    weights = safetensors_torch.load_file(tmp_path / "weights.safetensors")
    for mapped in (False, True):
        loaded = torch.load(tmp_path / "state.pt", mmap=mapped, weights_only=True)
        assert (loaded["tag"], loaded["step"]) == ("tag", 7)
        for name in MODEL:
            assert loaded["state"][name]["step"] == 7
            for each in STATES:
                assert same(loaded["state"][name][each].numpy(), state[name][each])
    for name in MODEL:
        assert exported[f"{name}.step"] == 7
        assert same(weights[name].numpy(), state[name]["master"])
        for each in STATES:
            assert same(exported[f"{name}.{each}"], state[name][each])
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_what_was_never_updated_has_no_moments(tmp_path: pathlib.Path) -> None:
    state = values(MODEL)
    save(tmp_path, state, rows, 2, moments=False)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.verify()
        for name, shape in MODEL.items():
            assert not checkpoint.tensors[name].moments
            assert same(checkpoint.read(name, "master"), state[name]["master"])
            assert same(checkpoint.read(name, "exp_avg"), np.zeros(shape, np.float32))


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_an_import_of_an_export_is_the_same(tmp_path: pathlib.Path, kind: str) -> None:
    state = values({**MODEL, "large": (1_000_003,)})
    save(tmp_path, state, rows, 2, block=65536)
    file = tmp_path / "state"
    with Checkpoint(tmp_path) as checkpoint:
        if kind == "safetensors":
            checkpoints.export_safetensors(checkpoint, file)
        else:
            checkpoints.export_torch(checkpoint, file)
    target = tmp_path / "imported"
    target.mkdir()
    if kind == "safetensors":
        checkpoints.import_safetensors([file], target, "start", step=9)
    else:
        checkpoints.import_torch(file, target, "start", step=9)
    found = checkpoints.find(target)
    assert [(f.tag, f.step, f.ranks, f.complete) for f in found] == [("start", 9, 1, True)]
    with Checkpoint(target) as checkpoint:
        checkpoint.verify()
        assert set(checkpoint.tensors) == set(state)
        for name, tensor in checkpoint.tensors.items():
            assert tensor.step == 7
            for each in STATES:
                assert same(checkpoint.read(name, each), state[name][each])
    with pytest.raises(FileExistsError, match="start"):
        checkpoints.import_safetensors([file] if kind == "safetensors" else [], target, "start")
    assert (target / "start" / "part-0").stat().st_mode & 0o777 == 0o700
    for each in (target / "start" / "part-0").iterdir():
        assert each.stat().st_mode & 0o777 == 0o600


def test_weights_in_16_bits_become_masters(tmp_path: pathlib.Path) -> None:
    weights = {
        "a": torch.randn(300, 7, dtype=torch.float32).to(torch.bfloat16),
        "b.weight": torch.randn(5, dtype=torch.float16),
        "c": torch.tensor(2.5),
    }
    safetensors_torch.save_file(weights, tmp_path / "weights.safetensors")
    torch.save(weights, tmp_path / "weights.pt")
    checkpoints.import_safetensors([tmp_path / "weights.safetensors"], tmp_path, "one")
    checkpoints.import_torch(tmp_path / "weights.pt", tmp_path, "two")
    for tag in ("one", "two"):
        with Checkpoint(tmp_path, tag) as checkpoint:
            for name, tensor in weights.items():
                expected = tensor.to(torch.float32).numpy()
                assert same(checkpoint.read(name).reshape(expected.shape), expected)
                assert checkpoint.tensors[name].step == 0
                assert not checkpoint.read(name, "exp_avg_sq").any()


def test_what_cannot_be_imported_is_refused_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    safetensors_numpy.save_file({"a": np.zeros(3, np.float64)}, tmp_path / "double.safetensors")
    safetensors_numpy.save_file({"a.exp_avg": np.zeros(3, np.float32)}, tmp_path / "moments.safetensors")
    good = tmp_path / "good.safetensors"
    safetensors_numpy.save_file({"a": np.zeros(3, np.float32)}, good)
    (tmp_path / "cut.safetensors").write_bytes(good.read_bytes()[:-4])
    (tmp_path / "none.safetensors").write_bytes(b"\xff" * 100)
    for name, error in (("double", TypeError), ("moments", ValueError), ("cut", ValueError), ("none", ValueError)):
        with pytest.raises(error, match=name):
            checkpoints.import_safetensors([tmp_path / f"{name}.safetensors"], tmp_path, "tag")
    with pytest.raises(ValueError, match="twice"):
        checkpoints.import_safetensors([good, good], tmp_path, "tag")
    with pytest.raises(ValueError, match="tag"):
        checkpoints.import_safetensors([good], tmp_path, "../tag")
    assert not (tmp_path / "tag").exists()
    assert checkpoints.find(tmp_path) == []


def every_bit(size: int, count: int) -> Iterator[tuple[int, int]]:
    random = np.random.default_rng(3)
    for byte in random.integers(0, size, count):
        yield int(byte), 1 << int(random.integers(0, 8))


def test_a_flipped_bit_of_a_block_is_noticed(tmp_path: pathlib.Path) -> None:
    """Each of p, m, v and their padding, at random places; nothing is taken from a block that is not what it was."""
    state = values({"w": (150_000,)})
    save(tmp_path, state, flat, 1, block=70_000)
    file = tmp_path / "tag" / "part-0" / f"data-{ATTEMPT}-0"
    good = bytearray(file.read_bytes())
    with file.open("r+b", buffering=0) as stream:
        for byte, bit in every_bit(len(good) - 4096, 40):
            at = 4096 + byte
            stream.seek(at)
            stream.write(bytes([good[at] ^ bit]))
            with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match="another hash"):
                for each in STATES:
                    checkpoint.read("w", each)
            stream.seek(at)
            stream.write(bytes([good[at]]))
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.verify()
    file.write_bytes(good[:-4096])
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match="shorter"):
        checkpoint.verify()


def test_a_changed_manifest_is_never_used(tmp_path: pathlib.Path) -> None:
    save(tmp_path, values(MODEL), rows, 1)
    file = tmp_path / "tag" / "part-0" / f"manifest-{ATTEMPT}"
    good = file.read_bytes()
    body = good.index(b"\n") + 1
    for byte, bit in every_bit(len(good) - body, 200):
        changed = bytearray(good)
        changed[body + byte] ^= bit
        file.write_bytes(changed)
        with pytest.raises(CheckpointError):
            Checkpoint(tmp_path)
    for length in (0, 10, body, len(good) - 1):
        file.write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            Checkpoint(tmp_path)


def test_only_complete_ones_are_seen_and_the_newest_of_them(tmp_path: pathlib.Path) -> None:
    state = values(MODEL)
    save(tmp_path, state, rows, 3, tag="old", step=5)
    save(tmp_path, state, rows, 3, tag="new", step=6)
    save(tmp_path, state, rows, 3, tag="cut", step=7)
    (tmp_path / "cut" / "part-1" / f"manifest-{ATTEMPT}").unlink()
    (tmp_path / "stranger").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "old")
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tag == "new"
    assert [(f.tag, f.ranks, f.complete) for f in checkpoints.find(tmp_path)] == [
        ("old", 3, True),
        ("new", 3, True),
        ("cut", 2, False),
    ]
    for tag in ("cut", "link", "stranger", "absent"):
        with pytest.raises(CheckpointError):
            Checkpoint(tmp_path, tag)
    with pytest.raises(ValueError, match="no tag"):
        Checkpoint(tmp_path, "../old")
    # A part of another attempt does not make it complete.
    other = "ff" * 16
    other_folder = tmp_path / "other"
    save(other_folder, state, rows, 3, tag="cut", step=7, attempt=other)
    for name in (f"manifest-{other}", f"data-{other}-0"):
        (other_folder / "cut" / "part-1" / name).rename(tmp_path / "cut" / "part-1" / name)
    with pytest.raises(CheckpointError, match="no complete"):
        Checkpoint(tmp_path, "cut")


def test_parts_that_do_not_belong_together_are_refused(tmp_path: pathlib.Path) -> None:
    def overlapping(shape: tuple[int, ...], rank: int, ranks: int) -> dict[str, Any]:
        return rows(shape, rank, ranks) if rank == 0 else rows(shape, 0, 1)

    def gap(shape: tuple[int, ...], rank: int, ranks: int) -> dict[str, Any]:
        return rows(shape, rank, ranks + 1)

    def replicated(shape: tuple[int, ...], rank: int, ranks: int) -> dict[str, Any]:
        return rows(shape, 0, 1)

    state = values({"w": (30, 4)})
    for cut, what in ((overlapping, "twice"), (gap, "hold")):
        save(tmp_path / what, state, cut, 2)
        with pytest.raises(CheckpointError, match=what):
            Checkpoint(tmp_path / what)
    # Copies are taken once, if they are copies.
    save(tmp_path / "copies", state, replicated, 2)
    with Checkpoint(tmp_path / "copies") as checkpoint:
        assert same(checkpoint.read("w"), state["w"]["master"])
    save(tmp_path / "others", values({"w": (30, 4)}, seed=5), replicated, 2)
    name = f"data-{ATTEMPT}-0"
    for file in (name, f"manifest-{ATTEMPT}"):
        source = tmp_path / "others" / "tag" / "part-1" / file
        (tmp_path / "copies" / "tag" / "part-1" / file).write_bytes(source.read_bytes())
    with pytest.raises(CheckpointError, match="no copies"):
        Checkpoint(tmp_path / "copies")


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_c20_a_stream_needs_no_more_than_some_blocks(tmp_path: pathlib.Path, kind: str) -> None:
    """48 MB of state, in two ways at once; a block has 12 MiB."""
    state = values({"a": (2_000_000,), "b": (1000, 2000)})
    save(tmp_path, state, rows, 2, block=1 << 20)
    del state
    torch.zeros(1)  # what the library needs for itself
    tracemalloc.start()
    with Checkpoint(tmp_path) as checkpoint:
        if kind == "safetensors":
            checkpoints.export_safetensors(checkpoint, tmp_path / "file")
        else:
            checkpoints.export_torch(checkpoint, tmp_path / "file")
    target = tmp_path / "target"
    target.mkdir()
    if kind == "safetensors":
        checkpoints.import_safetensors([tmp_path / "file"], target, "tag")
    else:
        checkpoints.import_torch(tmp_path / "file", target, "tag")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_names_are_any_bytes(tmp_path: pathlib.Path) -> None:
    name = b"layer \xff\x00".decode("utf-8", "surrogateescape")
    assert _parts.name_of(_parts.name_json(name), "x") == name
    assert _parts.name_json("ä\n") == "ä\n"
    for value in (None, 3, {"hex": "zz"}, {"hex": "ff", "x": 1}, []):
        with pytest.raises(CheckpointError):
            _parts.name_of(value, "x")


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = values(MODEL)
    save(tmp_path, state, rows, 2)
    command: Callable[[Sequence[str]], int] = checkpoints._main
    assert command(["list", str(tmp_path)]) == 0
    assert "tag  step 7  2 ranks" in capsys.readouterr().out
    file = tmp_path / "out.safetensors"
    assert command(["export", str(tmp_path), str(file), "--states", "master"]) == 0
    assert same(safetensors_numpy.load_file(file)["bias.master"], state["bias"]["master"])
    assert command(["import", str(tmp_path), "second", str(file)]) == 0
    with Checkpoint(tmp_path, "second") as checkpoint:
        assert same(checkpoint.read("bias"), state["bias"]["master"])
    assert command(["export", str(tmp_path / "second"), str(file)]) == 1
    assert "no complete checkpoint" in capsys.readouterr().err
