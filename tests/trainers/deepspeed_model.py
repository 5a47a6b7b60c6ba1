"""The model, the data and an FP64 reference of the DeepSpeed tests."""

from __future__ import annotations

from typing import Any

import torch

IN, OUT, ROWS = 13, 3, 8


class Net(torch.nn.Module):
    """Parameters of odd sizes, one of one element, and a layer that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(IN, 37)
        self.scale = torch.nn.Parameter(torch.full((1,), 1.25))
        self.unused = torch.nn.Linear(7, 5)
        self.second = torch.nn.Linear(37, 29, bias=False)
        self.last = torch.nn.Linear(29, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        return self.last(torch.nn.functional.gelu(self.second(x)))


def batch(seed: int, step: int, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a seed's step, pass and rank: inputs [ROWS, IN] and what is to be learnt of them [ROWS, OUT], FP32."""
    draw = torch.Generator().manual_seed(((seed * 1009 + step) * 31 + number) * 17 + rank)
    x = torch.randn(ROWS, IN, generator=draw)
    return x, torch.stack([x[:, :4].sum(1).sin(), x[:, 4] * x[:, 5], x[:, 6:].mean(1)], 1)


def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((output.float() - y) ** 2).mean()


def reference(
    seed: int, steps: int, ranks: int, dtype: torch.dtype, optimizer: dict[str, Any], clip: float, passes: int = 1
) -> dict[str, Any]:
    """As deepspeed_process.train(), in one process with FP64 state and arithmetic, forward and backward in `dtype`."""
    torch.manual_seed(seed)
    model = Net().to(dtype)
    params = {name: param for name, param in model.named_parameters()}
    masters = {name: param.detach().double() for name, param in params.items()}
    m = {name: torch.zeros_like(master) for name, master in masters.items()}
    v = {name: torch.zeros_like(master) for name, master in masters.items()}
    beta1, beta2 = optimizer["betas"]
    losses = []
    for step in range(steps):
        grads: dict[str, torch.Tensor] = {}
        losses.append(0.0)
        for rank in range(ranks):
            for number in range(passes):
                x, y = batch(seed, step, number, rank)
                loss = loss_of(model(x.to(dtype)), y)
                losses[-1] += float(loss.detach()) / (ranks * passes)
                model.zero_grad(set_to_none=True)
                (loss / passes).backward()
                for name, param in params.items():
                    if param.grad is not None:
                        grads[name] = grads.get(name, 0) + param.grad.double() / ranks
        norm = torch.stack([(grad**2).sum() for grad in grads.values()]).sum().sqrt()
        factor = 1.0 / max(1.0, (float(norm) + 1e-6) / clip) if clip > 0 else 1.0
        for name, grad in grads.items():
            g, p = grad * factor, masters[name]
            p *= 1 - optimizer["lr"] * optimizer["weight_decay"]
            m[name] += (g - m[name]) * (1 - beta1)
            v[name].mul_(beta2).addcmul_(g, g, value=1 - beta2)
            bc1, bc2 = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
            p -= optimizer["lr"] / bc1 * (m[name] / ((v[name] / bc2).sqrt() + optimizer["eps"]))
            params[name].data.copy_(p)
    return {"losses": losses, "masters": masters}
