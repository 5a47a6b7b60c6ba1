"""OffloadAdamW(overlap=True): gradients taken in the backward pass. The judge is the same training without it, bit by
bit, and torch's AdamW."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any, Callable, Iterator, Optional

import mlpo
import pytest
import torch
from models import build, groups, record
from mlpo.torch import OffloadAdamW
from running_daemon import SMALL_BLOCKS
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

Make = Callable[..., OffloadAdamW]
WIDTH, WORDS = 24, 31


@pytest.fixture
def make(daemon_of, connect_to) -> Make:
    """make(params, ...): an OffloadAdamW with overlap=True on a client of its own."""

    def get(params: Any, **options: Any) -> OffloadAdamW:
        return OffloadAdamW(params, client=connect_to(daemon_of(SMALL_BLOCKS)), **{"overlap": True, **options})

    return get


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


@contextlib.contextmanager
def submissions(monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None]) -> Iterator[None]:
    """note(key) at each submit_grad of a subgroup."""
    original = mlpo.Subgroup.submit_grad

    def submit(self: mlpo.Subgroup, *args: Any, **options: Any) -> Any:
        note(self.key)
        return original(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(mlpo.Subgroup, "submit_grad", submit)
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["plain", "tied", "reentrant"])
@pytest.mark.parametrize("passes", [1, 4])
def test_overlap_changes_no_bit(make: Make, passes: int, kind: str, dtype: torch.dtype) -> None:
    """Parameters, moments, masters and steps after training with it and without, also with no_sync() around all
    passes but the last; and gradients did leave in the backward passes."""
    plain = fresh(kind, dtype)
    reference = make(plain.parameters(), overlap=False, subgroup_elements=800)
    train(plain, reference, 5, passes)
    for hold in (False, True) if passes > 1 else (False,):
        model = fresh(kind, dtype)
        optimizer = make(model.parameters(), subgroup_elements=800, gradient_accumulation_steps=1 if hold else passes)
        train(model, optimizer, 1, passes, hold)
        assert optimizer.sent_in_backward == 0
        train(model, optimizer, 4, passes, hold, first=1)
        assert optimizer.sent_in_backward == len(optimizer.subgroups) >= 2
        assert_same(model, optimizer, plain, reference)


def test_against_torch(make: Make) -> None:
    """100 steps with the gradients of a recorded run of torch's, each handed in by a backward pass."""
    model = build(3)
    recording = record(100, model, torch.optim.AdamW(groups(model), foreach=False))
    ours = build(3)
    optimizer = make(groups(ours), subgroup_elements=300)
    for gradients, rates in zip(recording.gradients, recording.rates):
        optimizer.zero_grad()
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        sum((p * g).sum() for p, g in zip(ours.parameters(), gradients) if g is not None).backward()
        optimizer.step()
    for p, q in zip(ours.parameters(), recording.model.parameters()):
        assert float((p - q).detach().abs().max()) <= 1e-6 * float(q.detach().abs().max())


def test_calls_under_reentrant_checkpointing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subgroup leaves with the last of its parameters' calls, counted by hooks of the test: tied weights under
    reentrant checkpointing have several in a pass."""
    model = fresh("reentrant")
    calls: dict[int, int] = {}
    keys: dict[str, list[Parameter]] = {}

    def count(param: torch.Tensor) -> None:
        calls[id(param)] = calls.get(id(param), 0) + 1

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    optimizer = make(model.named_parameters(), subgroup_elements=700)
    train(model, optimizer, 2, 2)
    names = dict(model.named_parameters())
    for subgroup in optimizer.subgroups:
        keys[subgroup.key] = [names[tensor.name] for tensor in subgroup.tensors]
    calls.clear()
    at: list[tuple[str, list[int]]] = []
    with submissions(monkeypatch, lambda key: at.append((key, [calls[id(p)] for p in keys[key]]))):
        optimizer.zero_grad()
        for number in range(2):
            loss_of(model, number).backward()
        assert len(at) == len(keys), "each subgroup once, before step()"
        optimizer.step()
    assert len(at) == len(keys)
    for key, seen in at:
        assert seen == [calls[id(p)] for p in keys[key]], key
    shared = {name: calls[id(p)] for name, p in names.items()}
    assert shared["words.weight"] == 4 and shared["blocks.0.weight"] == 6 and shared["blocks.0.bias"] == 2


def test_daemon_has_the_gradient_before_step(make: Make) -> None:
    """After backward() the daemon itself refuses a second gradient for each of the subgroups."""
    model = fresh()
    optimizer = make(model.parameters(), subgroup_elements=800)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    loss_of(model, 9).backward()
    for subgroup in optimizer.subgroups:
        with pytest.raises(mlpo.MlpoError) as refused:
            subgroup.submit_grad().result(timeout=30)
        assert refused.value.code == -4098  # MLPO_E_COVERAGE
    optimizer.step()
    assert optimizer.sent_in_backward == len(optimizer.subgroups)
