"""Trains a small GPT in BF16 with mlpo.torch.OffloadAdamW, then with torch.optim.AdamW, and compares the losses.

    quickstart_train.py --write-config FOLDER        the daemon's configuration: FOLDER/mlpo.toml
    quickstart_train.py --steps N [--ctl mlpo-ctl]   trains; the daemon is $MLPO_SOCKET's

The model reads bytes. Its text are the licenses that every Debian machine has. Both runs start from the same weights
and see the same batches; the reference keeps FP32 masters and gives torch the gradients in FP32, as the daemon does.
Exit code: 0 if the final losses differ by at most 1 %, if the model has learned, and if the state was on storage.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Callable, Protocol

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 256, 4, 8, 128, 8
LEARNING_RATE, WARMUP, CLIP = 1e-3, 10, 1.0
BLOCK = 64 << 10  # parameters; the daemon's unit of transfer. Small, so that this small state has many.
STATE_BYTES = 12  # a parameter: FP32 master and two moments
LICENSES = pathlib.Path("/usr/share/common-licenses")
TOLERANCE = 0.01


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                scale = 0.02 / math.sqrt(2 * LAYERS) if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(param, std=scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bytes(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.layers(x)))

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def model() -> Gpt:
    torch.manual_seed(1)
    return Gpt().to(torch.bfloat16)


def parameter_count() -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in Gpt().parameters())


def groups(params: dict[str, torch.Tensor]) -> list[dict[str, object]]:
    """Weight decay for matrices only."""
    return [
        {"params": [p for p in params.values() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.ndim != 2], "weight_decay": 0.0},
    ]


class Optimizer(Protocol):
    torch_optimizer: torch.optim.Optimizer

    def step(self) -> None: ...


class Offloaded:
    def __init__(self, gpt: Gpt) -> None:
        from mlpo.torch import OffloadAdamW

        self.torch_optimizer = OffloadAdamW(groups(dict(gpt.named_parameters())), lr=LEARNING_RATE)

    def step(self) -> None:
        self.torch_optimizer.step()


class Reference:
    """What training in mixed precision means: masters and moments in FP32, parameters rounded from the masters."""

    def __init__(self, gpt: Gpt) -> None:
        self.params = dict(gpt.named_parameters())
        self.masters = {name: param.detach().float() for name, param in self.params.items()}
        self.torch_optimizer = torch.optim.AdamW(groups(self.masters), lr=LEARNING_RATE)

    @torch.no_grad()
    def step(self) -> None:
        for name, param in self.params.items():
            assert param.grad is not None, name
            self.masters[name].grad = param.grad.float()
        self.torch_optimizer.step()
        for name, param in self.params.items():
            param.copy_(self.masters[name])


class Text:
    """Windows of bytes: for training, and from the last tenth to judge by."""

    def __init__(self) -> None:
        files = sorted(path for path in LICENSES.glob("*") if path.is_file() and not path.is_symlink())
        data = b"".join(path.read_bytes() for path in files)
        if len(data) < 100_000:
            sys.exit(f"quickstart: {LICENSES} has {len(data)} bytes of text; Debian's package base-files has the text")
        everything = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        cut = len(everything) * 9 // 10
        self.training, self.held_out = everything[:cut], everything[cut:]

    def windows(self, seed: int, held_out: bool = False, count: int = BATCH) -> torch.Tensor:
        text = self.held_out if held_out else self.training
        starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=torch.Generator().manual_seed(seed))
        return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])


@dataclass
class Outcome:
    first_loss: float  # on text that is not trained on, before training
    final_loss: float
    update_s: float  # median of step(), after the first, which registers


@torch.no_grad()
def judge(gpt: Gpt, text: Text) -> float:
    return statistics.fmean(gpt.loss(text.windows(seed, held_out=True)).item() for seed in range(8))


def train(gpt: Gpt, optimizer: Optimizer, text: Text, steps: int, show: Callable[[int], None]) -> Outcome:
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer.torch_optimizer,
        lambda step: min(1.0, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps))),
    )
    first_loss, update_s = judge(gpt, text), []
    shown, shown_at = 0, time.monotonic()
    for step in range(1, steps + 1):
        gpt.zero_grad(set_to_none=True)
        loss = gpt.loss(text.windows(1000 + step))
        loss.backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), CLIP)
        before = time.monotonic()
        optimizer.step()
        update_s.append(time.monotonic() - before)
        schedule.step()
        if step % max(1, steps // 10) == 0 or step == steps:
            now = time.monotonic()
            tokens_per_s = (step - shown) * BATCH * CONTEXT / (now - shown_at)
            print(
                f"step {step:5} of {steps}: loss {loss.item():.4f}, {tokens_per_s:,.0f} tokens/s, "
                f"update {1e3 * update_s[-1]:.1f} ms",
                flush=True,
            )
            show(step)
            shown, shown_at = step, time.monotonic()
    return Outcome(first_loss, judge(gpt, text), statistics.median(update_s[1:] or update_s))


def show_status(ctl: str) -> None:
    print(f"--- {ctl} status", flush=True)
    # 2: a path is not healthy; the output says which.
    subprocess.run([ctl, "status"], check=False, timeout=60)
    print("---", flush=True)


def write_config(folder: pathlib.Path) -> None:
    """A pool of a quarter of the state, two folders as paths."""
    pool = parameter_count() * STATE_BYTES // 4
    lines = ["[memory]", f"pool = {pool}", f"block = {BLOCK}"]
    for name in ("one", "two"):
        (folder / name).mkdir()
        lines += ["", "[[path]]", f'directory = "{folder / name}"']
    (folder / "mlpo.toml").write_text("\n".join(lines) + "\n")


def wrong_with(offloaded: Outcome, reference: Outcome, traffic: list[dict[str, int]]) -> list[str]:
    """What is not as it should be."""
    wrong = []
    ratio = offloaded.final_loss / reference.final_loss
    if not abs(ratio - 1) <= TOLERANCE:  # NaN is not
        wrong.append(f"the final losses differ by more than {TOLERANCE:.0%}: {offloaded.final_loss} {reference.final_loss}")
    for name, outcome in (("mlpo", offloaded), ("torch", reference)):
        if not outcome.final_loss < outcome.first_loss:
            wrong.append(f"{name} has learned nothing: loss {outcome.first_loss} before, {outcome.final_loss} after")
    for path in traffic:
        if not path["read_bytes"] or not path["written_bytes"]:
            wrong.append(f"path {path['name']} was not used: read {path['read_bytes']}, wrote {path['written_bytes']} bytes")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains a small GPT with mlpo and with torch, and compares.")
    parser.add_argument("--write-config", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--ctl", default="mlpo-ctl")
    arguments = parser.parse_args()
    if arguments.write_config:
        write_config(arguments.write_config)
        return 0

    import mlpo

    text, parameters, steps = Text(), parameter_count(), arguments.steps
    print(
        f"A GPT of {parameters:,} parameters in BF16, {len(text.training):,} bytes of text; its FP32 state of "
        f"{parameters * STATE_BYTES / 1e6:.1f} MB is in the daemon, a quarter of it in memory.",
        flush=True,
    )
    middle = max(1, steps // 10) * 5
    gpt = model()
    optimizer = Offloaded(gpt)
    offloaded = train(gpt, optimizer, text, steps, lambda step: show_status(arguments.ctl) if step == middle else None)
    show_status(arguments.ctl)
    client = optimizer.torch_optimizer.client
    assert isinstance(client, mlpo.Client)
    traffic = client.status()["paths"]
    optimizer.torch_optimizer.close()

    print("The same with torch.optim.AdamW on FP32 masters:", flush=True)
    gpt = model()
    reference = train(gpt, Reference(gpt), text, steps, lambda step: None)

    print(f"before training: loss {offloaded.first_loss:.4f} on text that is not trained on")
    wrong = wrong_with(offloaded, reference, traffic)
    for problem in wrong:
        print(f"quickstart: {problem}", file=sys.stderr)
    print(
        f"quickstart: {'failed' if wrong else 'ok'} loss_mlpo={offloaded.final_loss:.5f} "
        f"loss_torch={reference.final_loss:.5f} ratio={offloaded.final_loss / reference.final_loss:.5f} "
        f"parameters={parameters} update_parameters_per_s={parameters / offloaded.update_s:.4g}",
        flush=True,
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
