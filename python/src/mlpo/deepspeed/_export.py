"""From a checkpoint of mlpo.deepspeed to one of DeepSpeed's own format, in place: each reference becomes the tensor
that it stands for, read from the daemon's parts as it is written. DeepSpeed loads the result, and so do its
zero_to_fp32.py and ds_to_universal.py; mlpo.deepspeed still loads it from the parts."""

from __future__ import annotations

import pathlib
import warnings
from typing import Callable, Iterator, Optional

import numpy as np
import numpy.typing as npt
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT

from .. import _torch_file, checkpoints
from .._new_files import NewFile
from ._commit import saved_mark
from ._layout import latest, rank_files
from ._references import CheckpointFileError, Piece, Reference, load
from ._sources import open_parts, zero_state

_Floats = npt.NDArray[np.float32]


def export(directory: pathlib.Path, tag: Optional[str] = None, said: Callable[[str], None] = lambda line: None) -> int:
    """Converts the optimizer's files in directory/tag; the tag is by default what the file "latest" names. Returns how
    many there were to convert: 0 if all of it was exported before.

    One file at a time is written beside the one that it replaces: so much room is needed besides that for all FP32
    state. Cut short it leaves some files converted; called again it goes on. `said` gets a line for each file.

    Raises CheckpointFileError if it is no checkpoint of mlpo.deepspeed, or not all of it is there; CheckpointError if a
    block has another hash than when it was saved; OSError.
    """
    folder = directory / (tag if tag is not None else latest(directory))
    mark = saved_mark(folder)
    if mark is None:
        raise CheckpointFileError(f"{folder} was not saved with mlpo.deepspeed: there is nothing to export")
    converted = 0
    with open_parts(folder, mark) as checkpoint:
        for kind, _, _, file in rank_files(folder):
            if kind == "optim":
                exported = _convert(checkpoint, file)
                converted += exported
                said(f"{file}: {'exported' if exported else 'was exported before'}")
    return converted


def _convert(checkpoint: checkpoints.Checkpoint, file: pathlib.Path) -> bool:
    """Whether there was anything to convert."""
    content = load(file)
    zero = zero_state(content, file)
    masters = zero[FP32_FLAT_GROUPS]
    base = zero[OPTIMIZER_STATE_DICT]
    if not any(isinstance(master, Reference) for master in masters):
        return False
    zero[FP32_FLAT_GROUPS] = [_streamed(checkpoint, master) for master in masters]
    for state in base["state"].values():
        for name, reference in state.items():
            if isinstance(reference, Reference):
                steps = reference.state == "step"
                state[name] = _step(checkpoint, reference, file) if steps else _streamed(checkpoint, reference)
    for group in base["param_groups"]:
        group.setdefault("bias_correction", True)  # what DeepSpeedCPUAdam asks for, and torch's AdamW has not
    for rest in file.parent.glob(f".{file.name}.*"):  # of an export that was killed
        rest.unlink()
    with NewFile(file) as out:
        _torch_file.write(out, content)
    return True


def _streamed(checkpoint: checkpoints.Checkpoint, reference: Reference) -> _torch_file.Streamed:
    def values() -> Iterator[_Floats]:
        for piece in reference.pieces:
            yield from _elements(checkpoint, piece, reference.state)

    return _torch_file.Streamed((reference.numel,), values)


def _elements(checkpoint: checkpoints.Checkpoint, piece: Piece, state: str) -> Iterator[_Floats]:
    for first in range(0, piece.count, checkpoints.PIECE):
        count = min(checkpoints.PIECE, piece.count - first)
        yield checkpoint.read(piece.name, state, piece.first + first, count)
    if piece.padding:
        yield np.zeros(piece.padding, np.float32)


def _step(checkpoint: checkpoints.Checkpoint, reference: Reference, file: pathlib.Path) -> int:
    """DeepSpeed has one number of updates for all parameters of a subgroup."""
    steps = {piece.name: checkpoint.tensors[piece.name].step for piece in reference.pieces}
    most = max(steps.values(), default=0)
    behind = [name for name, step in steps.items() if step < most]
    if behind:
        warnings.warn(
            f"{file}: {len(behind)} parameters had no gradient in some steps, {behind[0]} for instance in "
            f"{most - steps[behind[0]]} of {most}: DeepSpeed's format has one number of updates for a whole subgroup, "
            f"and they get {most}, which changes their next updates' bias correction",
            RuntimeWarning,
            stacklevel=2,
        )
    return most


