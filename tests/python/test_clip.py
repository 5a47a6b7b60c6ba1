"""clip_grad_norm_ of the optimizer against torch.nn.utils.clip_grad_norm_; more ranks: test_distributed.py."""

from __future__ import annotations

import math
from typing import Any, Callable

import mlpo
import pytest
import torch
from mlpo.torch import OffloadAdamW
from running_daemon import SMALL_BLOCKS
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

Make = Callable[..., OffloadAdamW]
SHAPES = ((70, 40), (3,), (), (0, 4), (100_003,))


@pytest.fixture
def make(daemon_of, connect_to) -> Make:
    """make(params, ...): an OffloadAdamW on a client of its own, in several subgroups."""

    def get(params: Any, **options: Any) -> OffloadAdamW:
        return OffloadAdamW(params, client=connect_to(daemon_of(SMALL_BLOCKS)), subgroup_elements=3000, **options)

    return get


def twins(dtype: torch.dtype = torch.float32) -> tuple[list[Parameter], list[Parameter]]:
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    return [Parameter(v.clone()) for v in values], [Parameter(v.float()) for v in values]


def filled(params: list[Parameter]) -> list[Parameter]:
    """torch's own function has no largest element of an empty tensor."""
    return [p for p in params if p.numel()]


def gradients(params: list[Parameter], step: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, p in enumerate(params):
        p.grad = (torch.randn(p.shape, generator=generator) * size * 10.0**-index).to(p.dtype)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clips_as_torch_does(make: Make, norm_type: float, dtype: torch.dtype) -> None:
    """The norm, and what the next steps do: one that is clipped, one that is not, one without clipping.

    For 16-bit types torch clips FP32 copies of the same gradients.
    """
    ours, theirs = twins(dtype)
    a, b = make(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for step, limit in enumerate((0.5, 1e9, None, 0.25)):
        gradients(ours, step)
        for p, q in zip(ours, theirs):
            q.grad = p.grad.float().clone()
        kept = [p.grad.clone() for p in ours]
        if limit is not None:
            found = a.clip_grad_norm_(limit, norm_type)
            torch.testing.assert_close(found, clip_grad_norm_(filled(theirs), limit, norm_type), rtol=2e-6, atol=0)
            assert found.shape == () and found.dtype == torch.float32
        assert all(torch.equal(p.grad, before) for p, before in zip(ours, kept)), ".grad is left as it is"
        a.step()
        b.step()
    state = a.state_dict()["state"]
    for index, (p, q) in enumerate(zip(ours, theirs)):
        value = p if dtype == torch.float32 else state[index]["master"]
        torch.testing.assert_close(value, q, rtol=1e-5, atol=2e-6)
        if p.numel():
            torch.testing.assert_close(state[index]["exp_avg_sq"], b.state[q]["exp_avg_sq"], rtol=1e-5, atol=0)


def test_clipping_twice_is_clipping_what_the_first_left(make: Make) -> None:
    """As with torch, whose first call has changed the gradients; and zero_grad() or a step forgets it."""
    ours, theirs = twins()
    a, b = make(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for step in range(3):
        gradients(ours, step)
        gradients(theirs, step)
        for limit, norm_type in ((5.0, 2.0), (0.5, math.inf), (100.0, 2.0)):
            found, expected = a.clip_grad_norm_(limit, norm_type), clip_grad_norm_(filled(theirs), limit, norm_type)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        if step == 1:  # dropped by both
            a.zero_grad()
            b.zero_grad()
            gradients(ours, 10)
            gradients(theirs, 10)
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-6)


def test_a_failed_clip_and_missing_gradients(make: Make) -> None:
    """No gradients have norm 0; wrong arguments are refused; a norm that is not finite raises when asked to."""
    p, q = twins()[0][:2]
    optimizer = make([p, q], lr=1.0, weight_decay=0.0)
    assert float(optimizer.clip_grad_norm_(1.0)) == float(clip_grad_norm_([p, q], 1.0)) == 0.0
    q.grad = torch.full_like(q, 2.0)
    for wrong in ({"max_norm": -1.0}, {"max_norm": math.nan}, {"max_norm": 1.0, "norm_type": 0.0},
                  {"max_norm": 1.0, "norm_type": -1.0}):  # fmt: skip
        with pytest.raises(ValueError, match="must"):
            optimizer.clip_grad_norm_(**wrong)
    q.grad[1] = math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert float(optimizer.clip_grad_norm_(1.0)) == math.inf
    before = q.detach().clone()
    with pytest.raises(mlpo.NonFiniteGradientError, match="1"):
        optimizer.step()
    assert torch.equal(q.detach(), before)


def test_infinite_norm_where_it_is_applied(make: Make) -> None:
    """nonfinite="apply": torch multiplies by max_norm / inf, that is by 0, and inf times 0 is NaN. A NaN is refused."""
    ours, theirs = ([Parameter(torch.ones(3))] for _ in range(2))
    a, b = make(ours, lr=0.5, nonfinite="apply"), torch.optim.AdamW(theirs, lr=0.5, foreach=False)
    clips = (a.clip_grad_norm_, lambda limit: clip_grad_norm_(theirs, limit))
    for p, optimizer, clip in zip((*ours, *theirs), (a, b), clips):
        p.grad = torch.tensor([1.0, math.inf, 2.0])
        assert float(clip(1.0)) == math.inf
        optimizer.step()
    assert torch.equal(ours[0].isnan(), theirs[0].isnan()) and bool(ours[0].isnan()[1])
    torch.testing.assert_close(ours[0], theirs[0], equal_nan=True, rtol=1e-6, atol=0)
    ours[0].grad = torch.full((3,), math.nan)
    with pytest.raises(RuntimeError, match="NaN"):
        a.clip_grad_norm_(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_overlap_the_daemon_knows_the_norm(make: Make, dtype: torch.dtype) -> None:
    """Gradients taken in the backward pass: the same norm and bits; other norms are refused by name."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        layers = (torch.nn.Linear(30, 200), torch.nn.Tanh(), torch.nn.Linear(200, 40))
        models.append(torch.nn.Sequential(*layers).to(dtype))
    optimizers = [make(m.parameters(), lr=0.05, overlap=o) for m, o in zip(models, (True, False))]
    for step in range(4):
        x = torch.randn(20, 30, generator=torch.Generator().manual_seed(step)).to(dtype)
        norms = []
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            norms.append(optimizer.clip_grad_norm_(0.1))
            optimizer.step()
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-7, atol=0)
        assert norms[0] > 0.1
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(p, q)
    models[0](x).float().sum().backward()
    with pytest.raises(mlpo.NotOfferedError, match="norm_type"):
        optimizers[0].clip_grad_norm_(1.0, norm_type=1.0)
