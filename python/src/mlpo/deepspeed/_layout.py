"""The files of a checkpoint of DeepSpeed's ZeRO-3, by their names."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

from ._references import CheckpointFileError

_NAME = re.compile(r"(?:bf16_)?zero_pp_rank_(0|[1-9][0-9]*)_mp_rank_([0-9]+)_(model|optim)_states\.pt")


class RankFile(NamedTuple):
    """A file of one rank. `rank` is its place among those that share a model, `mp_rank` that in model parallelism."""

    kind: str  # "model" or "optim"
    mp_rank: int
    rank: int
    path: pathlib.Path


def is_rank_file(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def rank_files(folder: pathlib.Path) -> list[RankFile]:
    """Those in a folder DIR/TAG, in order. Raises CheckpointFileError if there is no such folder."""
    if not folder.is_dir():
        raise CheckpointFileError(f"there is no folder {folder} of a checkpoint")
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.append(RankFile(match[3], int(match[2]), int(match[1]), path))
    return sorted(found)


def optimizer_files(folder: pathlib.Path, mp_rank: int = 0) -> list[pathlib.Path]:
    """Those with the optimizer's states, by rank. Raises CheckpointFileError if one is missing."""
    return _by_rank(folder, "optim", mp_rank)


def model_files(folder: pathlib.Path, mp_rank: int = 0) -> list[pathlib.Path]:
    """Those with the model's states, likewise."""
    return _by_rank(folder, "model", mp_rank)


def _by_rank(folder: pathlib.Path, kind: str, mp_rank: int) -> list[pathlib.Path]:
    found = [file for file in rank_files(folder) if (file.kind, file.mp_rank) == (kind, mp_rank)]
    ranks = [file.rank for file in found]
    if len(set(ranks)) < len(ranks):
        raise CheckpointFileError(f"{folder} has two files of one rank: {', '.join(f.path.name for f in found)}")
    if not found or ranks != list(range(len(found))):
        missing = next(rank for rank in range(len(found) + 1) if rank not in ranks)
        others = f", but those of ranks {ranks}" if found else ""
        name = f"zero_pp_rank_{missing}_mp_rank_{mp_rank:02d}_{kind}_states.pt"
        raise CheckpointFileError(f"{folder} has no file {name} (or bf16_{name}) of ZeRO-3{others}")
    return [file.path for file in found]


def latest(directory: pathlib.Path, universal: bool = False) -> str:
    """The tag that DeepSpeed's file "latest" names."""
    name = "latest_universal" if universal else "latest"
    try:
        return (directory / name).read_text().strip()
    except FileNotFoundError as error:
        raise CheckpointFileError(f"{directory} has no file {name!r}, which would name a tag: pass the tag") from error
