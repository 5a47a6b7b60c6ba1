"""torch.amp.GradScaler with OffloadAdamW, which unscales by itself. Shards over ranks: test_distributed.py."""

from __future__ import annotations

from typing import Any, Callable, Optional

import mlpo
import pytest
import torch
from mlpo.torch import OffloadAdamW

Make = Callable[..., OffloadAdamW]


def build(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).to(dtype)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def scaled(scaler: Any, model: torch.nn.Module, optimizer: Any, step: int, broken: bool = False) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(model, step)).backward()
    if broken:
        next(model.parameters()).grad.view(-1)[1] = float("nan")
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("growth", [2.0, 3.0])
def test_overflows_are_skipped_as_with_torch(make: Make, growth: float) -> None:
    """The scale, the step counts and the parameters are those of torch's AdamW under the same scaler; a skipped step
    is counted, leaves all as it was and raises nothing. A scale that is no power of 2 rounds a little."""
    pairs = []
    for make_one in (make, lambda ps, **o: torch.optim.AdamW(ps, foreach=False, **o)):
        model = build(torch.float32)
        optimizer = make_one(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2, growth_factor=growth)
        for step in range(9):
            before = [p.detach().clone() for p in model.parameters()]
            scaled(scaler, model, optimizer, step, broken=step in (0, 4))
            if step in (0, 4):
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
        pairs.append((model, optimizer, scaler))
    (ours, a, scaler_a), (theirs, b, scaler_b) = pairs
    assert scaler_a.get_scale() == scaler_b.get_scale()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert a.state[p]["step"] == b.state[q]["step"] == 7
    assert a.client.status()["sessions"][-1]["skipped_steps"] == 2


@pytest.mark.parametrize("clip", [None, 1e-6])
def test_fp16_parameters_need_no_unscaled_gradients(make: Make, clip: Optional[float]) -> None:
    """torch's own unscale_ refuses FP16 gradients, and dividing them would flush the small ones to 0. Here the daemon
    divides in FP32: the result is that of FP32 masters with gradients upcast and divided, and clipped after that."""
    model = build(torch.float16)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    ours, theirs = make(model.parameters(), lr=0.01), torch.optim.AdamW(masters, lr=0.01, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for step in range(5):
        ours.zero_grad()
        scaler.scale(loss_of(model, step) * 2.0**-14).backward()  # unscaled they would be below FP16's smallest
        for p, master in zip(model.parameters(), masters):
            master.grad = p.grad.float() / 2.0**14
        assert any(bool((m.grad.half() != m.grad).any()) for m in masters)
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(masters, clip)
            found = ours.clip_grad_norm_(clip * scaler.get_scale()) / scaler.get_scale()
            torch.testing.assert_close(found, norm, rtol=1e-6, atol=0)
            # torch adds 1e-6 to the norm before it divides; here it is added to the scaled one.
            for master in masters:
                master.grad *= (norm + 1e-6) / norm
        scaler.step(ours)
        scaler.update()
        theirs.step()
    for index, master in enumerate(masters):
        found = ours.state_dict()["state"][index]["master"]
        assert (found - master).abs().max() <= 1e-6 * master.abs().max()


def test_unscaled_before_and_clipped(make: Make) -> None:
    """unscale_, then clipping by torch or by the optimizer, then step: as torch does with its AdamW."""
    models, optimizers = [build(torch.float32) for _ in range(3)], []
    for index, model in enumerate(models):
        of = torch.optim.AdamW if index == 0 else make
        optimizers.append(of(model.parameters(), lr=0.05))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(4):
            optimizers[-1].zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(optimizers[-1])
            if index == 2:
                optimizers[-1].clip_grad_norm_(0.01)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizers[-1])
            scaler.update()
    for model in models[1:]:
        for p, q in zip(model.parameters(), models[0].parameters()):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_scaler_with_overlap(make: Make) -> None:
    """Refused while it is enabled, since it would look at gradients that are gone; a disabled one changes nothing."""
    model = build(torch.float32)
    optimizer = make(model.parameters(), overlap=True)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match="overlap=True"):  # by the gradient that stands for the one that was taken
        scaler.step(optimizer)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with pytest.raises(mlpo.NotOfferedError, match="overlap=True"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    optimizer.zero_grad()
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.scale(loss_of(model, 0)).backward()
    disabled.step(optimizer)
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


def test_a_scale_that_is_none_is_refused(make: Make) -> None:
    """Attributes set by hand: a divisor of 0 or below, or one that is not finite."""
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = make([w])
    w.grad = torch.ones(2)
    for wrong in (0.0, -2.0, float("inf"), float("nan")):
        optimizer.grad_scale = torch.tensor(wrong)
        with pytest.raises(ValueError, match="grad_scale"):
            optimizer.step()
    assert w.detach().tolist() == [1.0, 1.0]


def test_a_failed_step_leaves_no_scale_behind(make: Make) -> None:
    """torch multiplies by a grad_scale that it finds: one that stays from a step that failed would count twice."""
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = make([w], lr=0.5, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((w * 2).sum()).backward()
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="learning rate"):
        scaler.step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.zero_grad()
    scaler.update()
    scaler.scale((w * 2).sum()).backward()
    scaler.step(optimizer)
    assert optimizer.state_dict()["state"][0]["exp_avg"].tolist() == pytest.approx([0.2, 0.2])
