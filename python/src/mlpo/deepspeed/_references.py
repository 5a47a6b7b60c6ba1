"""What stands in DeepSpeed's files for FP32 tensors that are in the daemon's checkpoint beside them.

    DIR/TAG/zero_pp_rank_0_mp_rank_00_model_states.pt         DeepSpeed's, and "mlpo": the Mark of the save
    DIR/TAG/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt    likewise, with a Reference for each flat FP32 tensor
    DIR/TAG/mlpo/part-0/...                                   the daemon's checkpoint (daemon/checkpoint/README.md)

This module's name and its classes' are part of the format, since files name them.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import pathlib
import pickle
import zipfile
from typing import Any, Iterator, NamedTuple, Optional, Sequence

import torch

TAG = "mlpo"  # of the daemon's checkpoint, in the folder of DeepSpeed's
KEY = "mlpo"  # of the Mark in DeepSpeed's files
_VERSION = 1

_readable: contextvars.ContextVar[bool] = contextvars.ContextVar("readable", default=False)


class CheckpointFileError(ValueError):
    """A checkpoint that cannot be loaded, or exported, as it is; the text says which file, why, and what to do."""


class Piece(NamedTuple):
    """A parameter's elements in a flat tensor."""

    name: str  # of the tensor in the daemon's checkpoint
    first: int  # element of the parameter, row-major
    count: int
    padding: int  # elements behind them that belong to no parameter, and are zero


class Reference:
    """In the place of a flat FP32 tensor: what it is made of. One of "step" stands for a subgroup's number of updates.

    Whoever loads a file with one without readable() is told to export first.
    """

    def __init__(self, state: str, pieces: Sequence[Piece]) -> None:
        self.state, self.pieces = state, tuple(pieces)

    @property
    def numel(self) -> int:
        return sum(piece.count + piece.padding for piece in self.pieces)

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state, "pieces": self.pieces}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not _readable.get():
            raise RuntimeError(
                "this checkpoint was saved with mlpo.deepspeed: its FP32 state is not in DeepSpeed's files but in the "
                f"folder {TAG!r} beside them, and is loaded with mlpo.deepspeed only. To convert it to DeepSpeed's own "
                "format first, where it is: python -m mlpo.deepspeed export DIR (--tag TAG), of the folder DIR/TAG "
                "that has this file"
            )
        self.__dict__.update(state)


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """References can be loaded within."""
    token = _readable.set(True)
    try:
        yield
    finally:
        _readable.reset(token)


class Mark(NamedTuple):
    """Which save a file of DeepSpeed's is of: all files of one have the same, and so have the daemon's parts."""

    attempt: str  # 32 hexadecimal digits
    ranks: int

    def entry(self) -> dict[str, Any]:
        """As it is in a file. Plain, so that it is read without mlpo, too."""
        return {"version": _VERSION, "attempt": self.attempt, "ranks": self.ranks}


def mark_of(content: Any, file: pathlib.Path) -> Optional[Mark]:
    """The mark of what is in a file of DeepSpeed's; None: it was saved without mlpo.deepspeed."""
    entry = content.get(KEY) if isinstance(content, dict) else None
    if entry is None:
        return None
    if not isinstance(entry, dict) or entry.get("version") != _VERSION:
        found = entry.get("version") if isinstance(entry, dict) else entry
        raise CheckpointFileError(f"{file} is of format {found!r} of mlpo.deepspeed; this version knows {_VERSION}")
    return Mark(str(entry["attempt"]), int(entry["ranks"]))


def load(file: pathlib.Path) -> Any:
    """What DeepSpeed has saved in a file, with references as they are. Tensors are mapped: who reads one, reads it from
    the file. As with DeepSpeed itself a file can run code when it is loaded: take only what you trust."""
    with readable():
        try:
            # The old format without zip, which checkpoint.checkpoint_serialization = false gives, cannot be mapped.
            mapped = zipfile.is_zipfile(file)
            return torch.load(os.fspath(file), map_location="cpu", mmap=mapped, weights_only=False)
        except (EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            text = f"{file} cannot be loaded: it was cut or changed, or is no file of DeepSpeed's: {error}"
            raise CheckpointFileError(text) from error
