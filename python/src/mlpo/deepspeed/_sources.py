"""Saved states by parameter, whatever ranks they were saved by and however they were cut: checkpoints of DeepSpeed's
ZeRO-3 with FP32 state in files, universal checkpoints, and our own where the daemon does not read them itself."""

from __future__ import annotations

import math
import pathlib
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Optional, Protocol, Sequence

import numpy as np
import numpy.typing as npt
import torch
from deepspeed.checkpoint.constants import (
    EP_IS_EXPERT_PARAM,
    FP32_FLAT_GROUPS,
    OPTIMIZER_STATE_DICT,
    PARAM,
    PARAM_SHAPES,
    PARTITION_COUNT,
    ZERO_STAGE,
)

from .. import checkpoints
from . import _references
from ._layout import model_files, optimizer_files
from ._references import CheckpointFileError, Mark, Reference

_Floats = npt.NDArray[np.float32]


class Source(Protocol):
    """What a state is loaded from. `settings` has DeepSpeed's loss scaler and the like; `groups` the hyper-parameters
    of each param group, as torch's state_dict() has them."""

    settings: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]

    def numel(self, name: str) -> int:
        """Elements of a parameter. Raises CheckpointFileError if it is not there."""

    def step(self, name: str) -> int:
        """Updates that it has had."""

    def read(self, name: str, state: str, first: int, count: int) -> _Floats:
        """Elements [first, first + count) of its "master", "exp_avg" or "exp_avg_sq", row-major."""


def zero_state(content: Any, file: pathlib.Path) -> dict[str, Any]:
    """ZeRO-3's state in what an optimizer's file has. Raises CheckpointFileError if it is of another kind."""
    state = content.get(OPTIMIZER_STATE_DICT) if isinstance(content, dict) else None
    if not isinstance(state, dict) or FP32_FLAT_GROUPS not in state:
        stage = state.get(ZERO_STAGE) if isinstance(state, dict) else None
        raise CheckpointFileError(
            f"{file} has no state of ZeRO-3{f', but of stage {int(stage)}' if stage is not None else ''}: convert it "
            "with DeepSpeed's ds_to_universal.py, and load that with checkpoint.load_universal = true"
        )
    return state


def partition(numel: int, ranks: int) -> int:
    """Elements of each rank's part of a parameter, with ZeRO's padding."""
    return math.ceil(numel / ranks)


def spans(first: int, count: int, part: int) -> Iterator[tuple[int, int, int, int]]:
    """Elements [first, first + count) of a parameter of which each rank has `part`: (rank, place in its part, place
    among those asked for, elements), in ascending order."""
    done = 0
    while done < count:
        rank, inside = divmod(first + done, part)
        some = min(count - done, part - inside)
        yield rank, inside, done, some
        done += some


@dataclass(frozen=True)
class _Place:
    """Where a parameter is in the flat tensors of each rank."""

    numel: int
    subgroup: int
    at: int
    partition: int


class Stock:
    """A checkpoint that DeepSpeed's ZeRO-3 has saved with its FP32 state in its files, or an exported one."""

    def __init__(self, folder: pathlib.Path, mp_rank: int = 0) -> None:
        """Maps the files; values are read when they are asked for."""
        self._files = optimizer_files(folder, mp_rank)
        self._states = [zero_state(_references.load(file), file) for file in self._files]
        self.settings: Mapping[str, Any] = self._states[0]
        base = [state[OPTIMIZER_STATE_DICT] for state in self._states]
        self.groups: Sequence[Mapping[str, Any]] = base[0]["param_groups"]
        self._moments = [each["state"] for each in base]
        self._masters = [state[FP32_FLAT_GROUPS] for state in self._states]
        ranks = len(self._files)
        count = self.settings[PARTITION_COUNT]
        if count != ranks:
            raise CheckpointFileError(f"{folder} has the files of {ranks} ranks, but was saved by {count}")
        if self.settings.get("ds_zero_partition_groups") is not None:
            raise CheckpointFileError(
                f"{folder} has experts that are partitioned over their own groups of ranks (AutoEP), which only "
                "DeepSpeed itself loads: convert it with its ds_to_universal.py"
            )
        model = model_files(folder, mp_rank)[0]
        shapes = _references.load(model)[PARAM_SHAPES]
        if len(shapes) != len(self._masters[0]):
            raise CheckpointFileError(f"{model} has {len(shapes)} subgroups, {self._files[0]} {len(self._masters[0])}")
        self._places = _places(shapes, ranks)
        for file, masters in zip(self._files, self._masters):
            self._check(file, masters)

    def _check(self, file: pathlib.Path, masters: Sequence[Any]) -> None:
        wanted = [0] * len(masters)
        for place in self._places.values():
            wanted[place.subgroup] = max(wanted[place.subgroup], place.at + place.partition)
        for subgroup, master in enumerate(masters):
            if isinstance(master, Reference):
                raise CheckpointFileError(f"{file} was saved with mlpo.deepspeed, others beside it were not")
            if master.numel() == 0 and wanted[subgroup] > 0:
                raise CheckpointFileError(
                    f"{file} has no FP32 state: with offload_optimizer.device = nvme DeepSpeed keeps it elsewhere, in "
                    "files that only it reads. What it saves with device = cpu is taken"
                )
            if master.numel() < wanted[subgroup]:
                raise CheckpointFileError(
                    f"{file} has {master.numel()} elements of subgroup {subgroup}, its parameters {wanted[subgroup]}"
                )

    def numel(self, name: str) -> int:
        return self._place(name).numel

    def step(self, name: str) -> int:
        place = self._place(name)
        steps = {self._step(rank, place.subgroup) for rank in range(len(self._files))}
        if len(steps) > 1:
            raise CheckpointFileError(f"{self._files[0]}: {name} has had {sorted(steps)} updates on its ranks")
        return steps.pop()

    def _step(self, rank: int, subgroup: int) -> int:
        state = self._moments[rank].get(subgroup, {})
        return int(state["step"]) if "step" in state else 0

    def read(self, name: str, state: str, first: int, count: int) -> _Floats:
        place = self._place(name)
        out = np.zeros(count, np.float32)
        for rank, inside, to, some in spans(first, count, place.partition):
            tensor = self._flat(rank, place.subgroup, state)
            if tensor is not None:
                out[to : to + some] = _values(tensor, place.at + inside, some)
        return out

    def _flat(self, rank: int, subgroup: int, state: str) -> Optional[torch.Tensor]:
        """None for moments before the first update: they are zero."""
        if state == "master":
            return self._masters[rank][subgroup]
        moments = self._moments[rank].get(subgroup)
        if not moments:
            return None
        if state not in moments:
            raise CheckpointFileError(f"{self._files[rank]} has no {state}: the optimizer that it is of was not Adam")
        return moments[state]

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            raise CheckpointFileError(f"{self._files[0]} and those beside it have no parameter {name}")
        return place


def _places(shapes: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    for subgroup, group in enumerate(shapes):
        at = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            places[name] = _Place(numel, subgroup, at, partition(numel, ranks))
            at += places[name].partition
    return places


def _values(tensor: torch.Tensor, first: int, count: int) -> _Floats:
    values: _Floats = tensor.detach().narrow(0, first, count).to(torch.float32).numpy()
    return values


class Universal:
    """A universal checkpoint, as DeepSpeed's ds_to_universal.py makes it: whole parameters in files of their own."""

    _FILES = {"master": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

    def __init__(self, folder: pathlib.Path) -> None:
        self._zero = folder / "zero"
        file = self._zero / "optimizer_state.pt"
        if not file.is_file():
            raise CheckpointFileError(
                f"{folder} is no universal checkpoint: it has no zero/optimizer_state.pt. Make one of an ordinary "
                "checkpoint with DeepSpeed's ds_to_universal.py, or set checkpoint.load_universal = false"
            )
        self.settings: Mapping[str, Any] = _references.load(file)
        self.groups: Sequence[Mapping[str, Any]] = self.settings.get("param_groups", [])
        self._whole: dict[str, torch.Tensor] = {}  # of the last parameter
        self._name = ""

    def numel(self, name: str) -> int:
        return self._tensor(name, "master").numel()

    def step(self, name: str) -> int:
        """One for all parameters, as in the file; of checkpoints of other stages, the parameter's own."""
        own = self._zero / name / "step.pt"
        if own.is_file():
            return int(_references.load(own))
        states = self.settings.get(OPTIMIZER_STATE_DICT, {}).get("state", {})
        return int(states[0]["step"]) if states.get(0) else 0

    def read(self, name: str, state: str, first: int, count: int) -> _Floats:
        return _values(self._tensor(name, state), first, count)

    def _tensor(self, name: str, state: str) -> torch.Tensor:
        if name != self._name:
            self._name, self._whole = name, {}
        if state not in self._whole:
            file = self._zero / name / f"{self._FILES[state]}.pt"
            if not file.is_file():
                raise CheckpointFileError(f"the universal checkpoint has no parameter {name}: {file} is missing")
            content = _references.load(file)
            if isinstance(content, dict) and content.get(EP_IS_EXPERT_PARAM):
                raise CheckpointFileError(
                    f"{file} has experts that are partitioned over their own groups of ranks (AutoEP): universal "
                    "checkpoints of these are loaded by DeepSpeed alone"
                )
            self._whole[state] = (content[PARAM] if isinstance(content, dict) else content).reshape(-1)
        return self._whole[state]


class Own:
    """One that mlpo.deepspeed has saved, read without a daemon."""

    def __init__(self, folder: pathlib.Path, mark: Mark, mp_rank: int = 0) -> None:
        """Raises CheckpointFileError if the daemon's parts are not all there."""
        file = optimizer_files(folder, mp_rank)[0]
        self.settings, self.groups = own_settings(file, mark)
        self._checkpoint = open_parts(folder, mark)

    def numel(self, name: str) -> int:
        return self._tensor(name).numel

    def step(self, name: str) -> int:
        return self._tensor(name).step

    def read(self, name: str, state: str, first: int, count: int) -> _Floats:
        return self._checkpoint.read(name, state, first, count)

    def close(self) -> None:
        self._checkpoint.close()

    def _tensor(self, name: str) -> checkpoints.Tensor:
        tensor = self._checkpoint.tensors.get(name)
        if tensor is None:
            raise CheckpointFileError(f"checkpoint {self._checkpoint.tag} has no parameter {name}")
        return tensor


def own_settings(file: pathlib.Path, mark: Mark) -> tuple[dict[str, Any], Sequence[Mapping[str, Any]]]:
    """(settings, groups) of a file of ours."""
    content = _references.load(file)
    if _references.mark_of(content, file) != mark:
        raise CheckpointFileError(f"{file} is of another save than the files beside it")
    state = zero_state(content, file)
    return state, state[OPTIMIZER_STATE_DICT]["param_groups"]


def open_parts(folder: pathlib.Path, mark: Mark) -> checkpoints.Checkpoint:
    """The daemon's checkpoint beside DeepSpeed's files."""
    try:
        return checkpoints.Checkpoint(folder, _references.TAG, attempt=mark.attempt)
    except (checkpoints.CheckpointError, FileNotFoundError) as error:
        raise CheckpointFileError(
            f"{folder} has DeepSpeed's files of a save with mlpo.deepspeed, but in its folder {_references.TAG!r} not "
            f"all of the FP32 state that goes with them: {error}"
        ) from error
