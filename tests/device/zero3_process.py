"""Trains a small model on one GPU, for test_zero3_device.py: zero3_process.py KIND OUT STEPS SEED...

KIND: "stock", DeepSpeed ZeRO-3 with its own optimizer offload; "mlpo"; or "exact": the same arithmetic of the model in
bfloat16, and clipping and AdamW in FP64. Writes to OUT, by seed: losses, masters by name, and seconds of each step.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

WIDTH, WORDS, ROWS, LENGTH = 65, 211, 16, 33
OPTIMIZER = {"lr": 3e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01}
CLIP = 1.0


class Net(torch.nn.Module):
    """Odd sizes, a parameter of one element, and a layer that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.scale = torch.nn.Parameter(torch.full((1,), 1.25))
        self.unused = torch.nn.Linear(7, 5)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 131), torch.nn.GELU(), torch.nn.Linear(131, WIDTH)
            )
            for _ in range(4)
        )
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words [ROWS, LENGTH], and those that follow from them."""
    draw = torch.Generator().manual_seed(seed * 1009 + step)
    words = torch.randint(WORDS, (ROWS, LENGTH), generator=draw)
    return words.cuda(), ((3 * words + 1) % WORDS).cuda()


def loss_of(output: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.float().flatten(0, 1), following.flatten())


def with_deepspeed(ours: bool, seed: int, steps: int) -> dict[str, Any]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    torch.manual_seed(seed)
    model = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        # torch_adam: stock would compile its own otherwise.
        "optimizer": {"type": "AdamW", "params": {**OPTIMIZER, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3, "sub_group_size": 20_000, "reduce_bucket_size": 15_000, "stage3_prefetch_bucket_size": 9000,
            "stage3_param_persistence_threshold": 100, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "steps_per_print": 1_000_000,
    }  # fmt: skip
    start = deepspeed.initialize
    if ours:
        import mlpo.deepspeed

        start = mlpo.deepspeed.initialize
        config["mlpo"] = {"name": f"seed{seed}", "subgroup_elements": 9000}
    engine = start(model=model, model_parameters=model.parameters(), config=config)[0]
    losses, seconds = [], []
    for step in range(steps):
        began = time.monotonic()
        words, following = batch(seed, step)
        loss = loss_of(engine(words), following)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))  # waits for the device
        seconds.append(time.monotonic() - began)
    masters = {
        name: safe_get_full_fp32_param(param).double().cpu() for name, param in engine.module.named_parameters()
    }
    engine.destroy()
    return {"losses": losses, "masters": masters, "seconds": seconds}


def exact(seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net().bfloat16().cuda()
    params = dict(model.named_parameters())
    masters = {name: param.detach().double() for name, param in params.items()}
    m = {name: torch.zeros_like(master) for name, master in masters.items()}
    v = {name: torch.zeros_like(master) for name, master in masters.items()}
    beta1, beta2 = OPTIMIZER["betas"]
    losses = []
    for step in range(steps):
        words, following = batch(seed, step)
        model.zero_grad(set_to_none=True)
        loss = loss_of(model(words), following)
        loss.backward()
        losses.append(float(loss.detach()))
        grads = {name: param.grad.double() for name, param in params.items() if param.grad is not None}
        norm = float(sum(grad.square().sum() for grad in grads.values()) ** 0.5)
        for name, grad in grads.items():
            g, p = grad / max(1.0, (norm + 1e-6) / CLIP), masters[name]
            p *= 1 - OPTIMIZER["lr"] * OPTIMIZER["weight_decay"]
            m[name] += (g - m[name]) * (1 - beta1)
            v[name].mul_(beta2).addcmul_(g, g, value=1 - beta2)
            bc1, bc2 = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
            p -= OPTIMIZER["lr"] / bc1 * (m[name] / ((v[name] / bc2).sqrt() + OPTIMIZER["eps"]))
            params[name].data.copy_(p)
    return {"losses": losses, "masters": {name: master.cpu() for name, master in masters.items()}, "seconds": []}


def main() -> None:
    kind, out, steps, *seeds = sys.argv[1:]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if kind != "exact":
        import deepspeed

        deepspeed.init_distributed("nccl")
    results = {}
    for seed in map(int, seeds):
        results[seed] = exact(seed, int(steps)) if kind == "exact" else with_deepspeed(kind == "mlpo", seed, int(steps))
    torch.save(results, out)


if __name__ == "__main__":
    main()
