"""Optimizer state in torch.optim.AdamW's form: {"step", "exp_avg", "exp_avg_sq"} of a parameter, and "master" for
16-bit ones. Moments have the parameter's shape and strides and are on the CPU in FP32; nothing is ever cast to the
parameter's type."""

from __future__ import annotations

from typing import Any, Mapping, Optional

import torch

from ._binding import PIECE_ELEMENTS, Pack

_KEYS = ("exp_avg", "exp_avg_sq", "master")


def step_tensor(step: int) -> torch.Tensor:
    """A step count as torch's optimizers keep it."""
    return torch.tensor(float(step), dtype=torch.float32)


def empty_moments(param: torch.Tensor) -> dict[str, Any]:
    """State of a parameter without elements, which the daemon does not know."""
    names = _KEYS[:2] if param.dtype == torch.float32 else _KEYS
    return {name: _like(param) for name in names}


def read(pack: Pack, index: int) -> dict[str, Any]:
    """The state of a pack's parameter, from the daemon, in pieces."""
    param = pack.members[index].param
    names = _KEYS[:2] if param.dtype == torch.float32 else _KEYS
    tensors = {name: torch.empty(param.shape, dtype=torch.float32) for name in names}
    flat = {name: tensor.view(-1) for name, tensor in tensors.items()}
    step = 0
    for first in range(0, param.numel(), PIECE_ELEMENTS):
        count = min(PIECE_ELEMENTS, param.numel() - first)
        piece: Mapping[str, Any] = pack.subgroup.read_state(index, first, count)
        step = piece["step"]
        for name in names:
            flat[name][first : first + count] = torch.from_numpy(piece[name])
    laid_out = {
        name: tensor if param.is_contiguous() else _like(param).copy_(tensor) for name, tensor in tensors.items()
    }
    return {"step": step_tensor(step), **laid_out}


def write(pack: Pack, index: int, state: Mapping[str, Any]) -> None:
    """Replaces the whole state of a pack's parameter by one that check() has passed; an empty one is that before the
    first step. Masters come from "master", else from the parameter: that of an FP32 parameter is the parameter."""
    member = pack.members[index]
    has_master = "master" in state and member.param.dtype != torch.float32
    sources = {
        "master": state["master"] if has_master else member.param,
        "exp_avg": state.get("exp_avg"),
        "exp_avg_sq": state.get("exp_avg_sq"),
    }
    member.slot_is_value = False
    pack.fresh = False
    for first in range(0, member.param.numel(), PIECE_ELEMENTS):
        count = min(PIECE_ELEMENTS, member.param.numel() - first)
        parts = {name: _piece(tensor, first, count) for name, tensor in sources.items()}
        pack.subgroup.write_state(tensor=index, first=first, count=count, **parts)
    pack.subgroup.write_state(tensor=index, step=int(state["step"]) if state else 0)


def check(param: torch.Tensor, name: str, state: Mapping[str, Any]) -> None:
    """Refuses a state that is not one of AdamW for this parameter."""
    if not state:
        return
    if "max_exp_avg_sq" in state:
        raise ValueError(f"the state of parameter {name} is of amsgrad=True, which is not offered")
    missing = [key for key in ("step", "exp_avg", "exp_avg_sq") if key not in state]
    if missing:
        raise ValueError(f"the state of parameter {name} lacks {', '.join(missing)}: is it of AdamW?")
    step = float(state["step"])
    if step < 0 or step != int(step):
        raise ValueError(f"the state of parameter {name} has the step {step}; it must be a whole number")
    for key in _KEYS:
        if key in state:
            value = state[key]
            if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                shape = tuple(getattr(value, "shape", ()))
                raise ValueError(f"{key} of parameter {name} has shape {shape}, the parameter {tuple(param.shape)}")
            if value.is_complex() or not value.is_floating_point():
                raise ValueError(f"{key} of parameter {name} is {value.dtype}; it must be floating point")


def _like(param: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(param, dtype=torch.float32, device="cpu", memory_format=torch.preserve_format)


def _piece(tensor: Optional[torch.Tensor], first: int, count: int) -> Any:
    """Elements of a tensor as FP32; zeros for None."""
    if tensor is None:
        return torch.zeros(count).numpy()
    flat = tensor.detach().reshape(-1)[first : first + count]
    return flat.to("cpu", torch.float32).contiguous().numpy()
