"""Accelerate: prepare(), its checkpoints, and two processes of DDP, beside torch's AdamW in the same place."""

from __future__ import annotations

import pathlib
from typing import Any, Callable, Iterator

import pytest
import torch
from mlpo.torch import OffloadAdamW

accelerate = pytest.importorskip(
    "accelerate", reason="skipped: accelerate is not installed (tests/run --trainers says why)"
)

from accelerate.state import AcceleratorState, GradientState  # noqa: E402

HYPER = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture
def accelerator() -> Iterator[Any]:
    """One on the CPU; what Accelerate keeps for the process is dropped before and afterwards."""
    reset()
    yield accelerate.Accelerator(cpu=True)
    reset()


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def build(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))


def train(accelerator: Any, model: Any, optimizer: Any, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(x).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def test_trains_as_torch_does(accelerator: Any, make: Callable[..., OffloadAdamW]) -> None:
    ends = []
    for of in (make, torch.optim.AdamW):
        model = build()
        model, optimizer = accelerator.prepare(model, of(model.parameters(), **HYPER))
        train(accelerator, model, optimizer, 0, 10)
        ends.append([p.detach().clone() for p in model.parameters()])
    for ours, theirs in zip(*ends):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_prepare_registers_nothing(accelerator: Any, make: Callable[..., OffloadAdamW]) -> None:
    """prepare() loads the empty state that it has read; FSDP2 replaces the parameters only afterwards."""
    model = build()
    optimizer = make(model.parameters(), **HYPER)
    prepared = accelerator.prepare(optimizer)
    assert optimizer.subgroups == () and not optimizer.state
    replacement = build(2)
    optimizer.param_groups[0]["params"] = list(replacement.parameters())
    train(accelerator, replacement, prepared, 0, 1)
    assert sum(subgroup.numel for subgroup in optimizer.subgroups) == sum(p.numel() for p in replacement.parameters())


def test_save_state_and_load_state(
    accelerator: Any, make: Callable[..., OffloadAdamW], tmp_path: pathlib.Path
) -> None:
    """What save_state() has written goes on with the bits of the run that did not stop."""
    model = build()
    optimizer = make(model.parameters(), **HYPER)
    model, prepared = accelerator.prepare(model, optimizer)
    train(accelerator, model, prepared, 0, 3)
    accelerator.save_state(str(tmp_path / "saved"))
    train(accelerator, model, prepared, 3, 3)
    expected = [p.detach().clone() for p in model.parameters()]
    moments = optimizer.state_dict()["state"]
    accelerator.load_state(str(tmp_path / "saved"))
    assert all(float(entry["step"]) == 3 for entry in optimizer.state_dict()["state"].values())
    train(accelerator, model, prepared, 3, 3)
    for p, q in zip(model.parameters(), expected):
        assert torch.equal(p, q)
    for index, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, moments[index][name]), (index, name)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_two_processes(torchrun: Callable[..., str], tmp_path: pathlib.Path, overlap: bool) -> None:
    """DDP by prepare(), with shard_group: as torch's AdamW there, and the same on both ranks."""
    script = pathlib.Path(__file__).with_name("accelerate_process.py")
    torchrun(script, tmp_path, int(overlap))
    ours, other, theirs = (torch.load(tmp_path / name) for name in ("ours.0", "ours.1", "torch.0"))
    for p, q, r in zip(ours, other, theirs):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, r, rtol=1e-5, atol=1e-6)
