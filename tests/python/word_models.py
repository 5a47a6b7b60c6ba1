"""Small language models whose gradients arrive in several ways, for tests of what happens in the backward pass."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from mlpo.torch import OffloadAdamW
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS = 24, 31


class Model(torch.nn.Module):
    """Embedding, blocks, head. "tied": the head's weight is the embedding's. "reentrant": checkpointed, tied, and a
    weight that all blocks share, so that autograd adds to one .grad several times in a pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        if kind != "plain":
            self.head.weight = self.words.weight
        if kind == "reentrant":
            self.blocks[2].weight = self.blocks[1].weight = self.blocks[0].weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block, norm in zip(self.blocks, self.norms):

            def run(x: torch.Tensor, block: Any = block, norm: Any = norm) -> torch.Tensor:
                return x + torch.nn.functional.gelu(block(norm(x)))

            x = checkpoint(run, x, use_reentrant=True) if self.kind == "reentrant" else run(x)
        return checkpoint(self.head, x, use_reentrant=True) if self.kind == "reentrant" else self.head(x)


def fresh(kind: str = "plain", dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(5)
    return Model(kind).to(dtype)


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    words = torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(number))
    return torch.nn.functional.cross_entropy(model(words[:, :-1]).float().flatten(0, 1), words[:, 1:].flatten())


def train(
    model: torch.nn.Module, optimizer: OffloadAdamW, steps: int, passes: int = 1, hold: bool = False, first: int = 0
) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for number in range(passes):
            held = optimizer.no_sync() if hold and number < passes - 1 else contextlib.nullcontext()
            with held:
                (loss_of(model, step * passes + number) / passes).backward()
        optimizer.step()


def assert_same(a: torch.nn.Module, of_a: OffloadAdamW, b: torch.nn.Module, of_b: OffloadAdamW) -> None:
    """Parameters and all state, bit by bit."""
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        assert torch.equal(p, q), name
    x, y = of_a.state_dict()["state"], of_b.state_dict()["state"]
    assert x.keys() == y.keys()
    for key in x:
        assert x[key].keys() == y[key].keys()
        for name in x[key]:
            assert torch.equal(x[key][name], y[key][name]), (key, name)
