"""What the examples train: a small language model on text that is made here, so that nothing has to be downloaded.

The text follows a rule in nine of ten places (each token has one that comes after it), so the loss falls from
log(64) = 4.2 to about 0.8.
"""

from __future__ import annotations

import argparse
import os
from typing import Optional

import torch

TOKENS, LENGTH, WIDTH = 64, 32, 64


class TinyLM(torch.nn.Module):
    """Returns the mean cross-entropy of the next tokens. 110,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(TOKENS, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (batch, LENGTH + 1), int64."""
        given, next_ones = tokens[:, :-1], tokens[:, 1:]
        x = self.words(given) + self.places(torch.arange(LENGTH, device=tokens.device))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        scores = self.head(self.norm(x))
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), next_ones.flatten())


def text(rows: int, seed: int) -> torch.Tensor:
    """(rows, LENGTH + 1) tokens, the same for the same seed."""
    after = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(TOKENS, (rows,), generator=generator)]
    for _ in range(LENGTH):
        guess = torch.randint(TOKENS, (rows,), generator=generator)
        follows = torch.rand(rows, generator=generator) < 0.9
        columns.append(torch.where(follows, after[columns[-1]], guess))
    return torch.stack(columns, dim=1)


def batch(step: int, rank: int = 0, device: Optional[torch.device] = None) -> torch.Tensor:
    """A rank's tokens of one step."""
    return text(16, 1 + 1000 * step + rank).to(device or "cpu")


def arguments(about: Optional[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (%(default)s)")
    return parser


def device_of_rank() -> torch.device:
    """This rank's GPU if there are any, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def report(step: int, loss: float) -> None:
    """Prints what rank 0 has: every tenth step, and more where it is asked for."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"step {step}: loss {loss:.4f}", flush=True)
