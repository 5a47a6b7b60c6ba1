"""A small model with what makes packing and windows interesting, and gradients recorded from training it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch

HYPER = (
    {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.999)},
    {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.8, 0.99)},
)


class OddModel(torch.nn.Module):
    """Sizes that are no multiples of anything; `side` is used in two of three steps; `unused` never."""

    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.first = torch.nn.Linear(17, width)
        self.norm = torch.nn.LayerNorm(width)
        self.side = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, 5)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))  # no dimensions

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        if step % 3:
            x = x + torch.tanh(self.side(x))
        return self.last(x) * self.scale


def build(seed: int, dtype: torch.dtype = torch.float32, width: int = 33) -> OddModel:
    torch.manual_seed(seed)
    return OddModel(width).to(dtype)


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two param groups: matrices, and everything else."""
    split: tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]] = ([], [])
    for param in model.parameters():
        split[param.ndim < 2].append(param)
    return [{"params": params, **hyper} for params, hyper in zip(split, HYPER)]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * 0.99**step)


def backward(
    model: OddModel, step: int, seed: int = 7, clip: Optional[Callable[[float], torch.Tensor]] = None
) -> torch.Tensor:
    """Sets gradients, clipped (by torch, or `clip`) to a norm that bites in most steps; None where a layer had no
    part."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    x = torch.randn(19, 17, generator=generator, dtype=torch.float64)
    y = torch.randn(19, 5, generator=generator, dtype=torch.float64)
    dtype = model.scale.dtype
    model.zero_grad(set_to_none=True)
    loss = (model(x.to(dtype), step).to(torch.float64 if dtype == torch.float64 else torch.float32) - y).square().mean()
    loss.backward()
    if clip is None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    else:
        clip(0.5)
    return loss.detach()


@dataclass
class Recording:
    """A training run of torch: the gradients it took, and learning rates by param group."""

    gradients: list[list[Optional[torch.Tensor]]]
    rates: list[list[float]]
    model: OddModel


def record(
    steps: int, model: OddModel, optimizer: torch.optim.Optimizer, after: Callable[[], None] = lambda: None
) -> Recording:
    """Trains `model`; `after` is called after each step of the optimizer."""
    scheduler = schedule(optimizer)
    gradients, rates = [], []
    for step in range(steps):
        backward(model, step)
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        after()
        scheduler.step()
    return Recording(gradients, rates, model)


def set_gradients(model: torch.nn.Module, gradients: list[Optional[torch.Tensor]]) -> None:
    for param, grad in zip(model.parameters(), gradients):
        param.grad = None if grad is None else grad.clone()
