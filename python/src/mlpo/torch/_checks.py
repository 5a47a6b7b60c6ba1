"""What the optimizer refuses, and the sentences it does it with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Optional

import torch

from . import _shards

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_REFUSED_FLAGS = ("amsgrad", "maximize", "differentiable")


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of a param group at one step, as numbers."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    mode: str = "adamw"  # as Subgroup.submit_update has it
    bias_correction: bool = True


def number(value: Any, name: str) -> float:
    """A float from a number or a tensor with one element."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element; it has {value.numel()}")
        return float(value.item())
    return float(value)


def hyper(group: Mapping[str, Any]) -> Hyper:
    """Reads and checks a param group's hyper-parameters; ValueError as torch raises it."""
    lr, eps, decay = (number(group[key], key) for key in ("lr", "eps", "weight_decay"))
    betas = group["betas"]
    if len(betas) != 2:
        raise ValueError(f"betas is {betas!r}; it must be a pair")
    beta1, beta2 = number(betas[0], "betas[0]"), number(betas[1], "betas[1]")
    for name, value in (("learning rate (lr)", lr), ("epsilon value", eps), ("weight_decay value", decay)):
        if not (0.0 <= value < math.inf):
            raise ValueError(f"Invalid {name}: {value}; it must be finite and not negative")
    for index, value in enumerate((beta1, beta2)):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {value}; it must be in [0, 1)")
    return Hyper(lr, (beta1, beta2), eps, decay)


def group_flags(group: Mapping[str, Any]) -> None:
    """Refuses modes of torch.optim.AdamW that would compute something else."""
    for flag in _REFUSED_FLAGS:
        if group.get(flag):
            raise ValueError(f"{flag}=True is not offered: OffloadAdamW is torch.optim.AdamW without it")
    if not group.get("decoupled_weight_decay", True):
        raise ValueError("the param group is of Adam with L2 weight decay; OffloadAdamW decouples it (AdamW)")


def parameter(param: torch.Tensor, name: str) -> None:
    """Refuses a parameter that the daemon cannot keep."""
    if _shards.is_dtensor(param):
        if any(placement.is_partial() for placement in param.placements):  # type: ignore[attr-defined]
            raise TypeError(f"parameter {name} is a DTensor of partial sums; redistribute() it")
    elif type(param) not in (torch.Tensor, torch.nn.Parameter):
        what = type(param).__name__
        if what.startswith("Uninitialized"):
            raise TypeError(f"parameter {name} is not initialized: run the model once before making the optimizer")
        raise TypeError(f"parameter {name} is of the tensor subclass {what}; offered are plain tensors and DTensor")
    if param.is_complex():
        raise TypeError(f"parameter {name} is complex; offered are real parameters")
    if param.layout != torch.strided:
        raise TypeError(f"parameter {name} has the layout {param.layout}; offered are dense parameters")
    if param.dtype not in DTYPES:
        raise TypeError(f"parameter {name} is {param.dtype}; offered are float32, float16 and bfloat16")
    if _overlaps_itself(_shards.local(param)):
        raise ValueError(f"parameter {name} has elements that share memory (an expanded tensor?); clone() it")


def overlaps(params: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Refuses parameters whose memory overlaps: the update of one would be undone by the other's."""
    ranges = []
    for whole, name in params:
        param = _shards.local(whole)
        if param.numel() and not param.is_meta:
            ranges.append((str(param.device), param.data_ptr(), param.data_ptr() + _span_bytes(param), name))
    ranges.sort()
    for before, after in zip(ranges, ranges[1:]):
        if before[0] == after[0] and after[1] < before[2]:
            raise ValueError(
                f"parameters {before[3]} and {after[3]} overlap in memory; give each its own storage, or pass only one"
            )


def gradient(param: torch.Tensor, name: str, offered: Optional[torch.dtype]) -> None:
    """Refuses a gradient that could not be taken without loss. `offered` is the slot's type; None: any."""
    grad = param.grad
    assert grad is not None
    if _shards.is_dtensor(param) != _shards.is_dtensor(grad):
        raise TypeError(f"of parameter {name} and its gradient only one is a DTensor")
    if grad.layout != torch.strided:
        raise TypeError(f"parameter {name} has a sparse gradient; OffloadAdamW needs dense ones (sparse=False)")
    if offered is not None and grad.dtype != offered and offered != torch.float32:
        raise TypeError(
            f"the gradient of parameter {name} is {grad.dtype}, its slot {offered}: "
            "pass grad_dtype=torch.float32 to OffloadAdamW to keep its bits"
        )


def _span_bytes(param: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride()))
    return (last + 1) * param.element_size()


def _overlaps_itself(param: torch.Tensor) -> bool:
    """Whether elements may share memory: walking the dimensions by stride, each must step over all before it."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(param.stride(), param.shape) if size > 1):
        if stride <= reach:
            return param.numel() > 0
        reach += (size - 1) * stride
    return False
