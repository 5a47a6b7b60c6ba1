"""Optimizer state in torch.optim.AdamW's form: {"step", "exp_avg", "exp_avg_sq"} of a parameter, and "master" for
16-bit ones. Moments have the parameter's shape and strides and are on the CPU in FP32; nothing is ever cast to the
parameter's type."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

import numpy as np
import torch

from . import _shards
from ._binding import Pack
from ._checks import DTYPES
from ._seal import pieces

_KEYS = ("exp_avg", "exp_avg_sq", "master")


def step_tensor(step: int) -> torch.Tensor:
    """A step count as torch's optimizers keep it."""
    return torch.tensor(float(step), dtype=torch.float32)


class Outline(torch.Tensor):
    """A tensor without memory, for what is in the daemon. Moving it to a device leaves it as it is: trainers move all
    that an optimizer's `state` has (Lightning at the end of a fit)."""

    _MOVES = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.pin_memory)

    @staticmethod
    def of(shape: torch.Size) -> Outline:
        return torch.empty(shape, dtype=torch.float32, device="meta").as_subclass(Outline)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls._MOVES and type(args[0]) is Outline:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})


def outline(param: torch.Tensor, step: torch.Tensor) -> dict[str, Any]:
    """What an optimizer's `state` has of a parameter: its step, and under the names of what is in the daemon tensors
    without memory. torch's flattened state dicts go by these names."""
    return {"step": step, **{name: Outline.of(param.shape) for name in _names(param)}}


def empty_moments(param: torch.Tensor) -> dict[str, Any]:
    """State of a parameter without elements, which the daemon does not know."""
    return {name: _shards.like(param, _like(param)) for name in _names(param)}


def read(pack: Pack, index: int) -> dict[str, Any]:
    """The state of a pack's parameter, from the daemon, in pieces."""
    param = pack.members[index].param
    names = _names(param)
    tensors = {name: _like(param) for name in names}
    step = 0
    for views in zip(*(pieces(tensor) for tensor in tensors.values())):
        first, view = views[0]
        piece: Mapping[str, Any] = pack.subgroup.read_state(index, first, view.numel())
        step = piece["step"]
        for name, (_, view) in zip(names, views):
            view.copy_(torch.from_numpy(piece[name]).view(view.shape))
    return {"step": step_tensor(step), **{name: _shards.like(param, tensor) for name, tensor in tensors.items()}}


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
    member.seal = None
    parts = {name: None if tensor is None else pieces(_shards.local(tensor)) for name, tensor in sources.items()}
    for first, view in pieces(member.grad):
        count = view.numel()
        written = {name: _floats(next(views)[1] if views else None, count) for name, views in parts.items()}
        pack.subgroup.write_state(tensor=index, first=first, count=count, **written)
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
            if value.dtype not in DTYPES:
                offered = "float32, float16 and bfloat16"
                raise ValueError(f"{key} of parameter {name} is {value.dtype}; offered are {offered}")
            if value.layout != torch.strided:
                raise ValueError(f"{key} of parameter {name} has the layout {value.layout}; it must be dense")
            if _shards.sharding(value) != _shards.sharding(param):
                raise ValueError(
                    f"{key} of parameter {name} is not distributed over the ranks as the parameter is: "
                    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict() can bring it there"
                )


def _names(param: torch.Tensor) -> Sequence[str]:
    return _KEYS[:2] if param.dtype == torch.float32 else _KEYS


def _like(param: torch.Tensor) -> torch.Tensor:
    """An FP32 tensor on the host for the elements that this rank holds, with the parameter's strides."""
    held = _shards.local(param)
    return torch.empty_like(held, dtype=torch.float32, device="cpu", memory_format=torch.preserve_format)


def _floats(tensor: Optional[torch.Tensor], count: int) -> Any:
    """The elements as an FP32 array on the host; zeros for None."""
    if tensor is None:
        return np.zeros(count, np.float32)
    return tensor.detach().reshape(-1).to("cpu", torch.float32).numpy()
