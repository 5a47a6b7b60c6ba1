"""OffloadAdamW against torch.optim.AdamW(foreach=False): one step, 100 steps, and training by itself."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from mlpo.torch import OffloadAdamW
from models import backward, build, groups, record, schedule, set_gradients
from reference import ulps
from running_daemon import SMALL_BLOCKS

F = np.float32


@pytest.fixture
def make(daemon_of, connect_to):
    """make(params, ...): an OffloadAdamW in small subgroups on a daemon whose pool holds a part of the state."""

    def get(params, **options):
        return OffloadAdamW(params, client=connect_to(daemon_of(SMALL_BLOCKS)), subgroup_elements=1500, **options)

    return get


@pytest.mark.parametrize("step", [0, 1, 999, 10**6])
@pytest.mark.parametrize(
    "hyper", [{}, {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-3}], ids=["default", "other"]
)
def test_one_step_is_within_ulps_of_torch(make, step: int, hyper: dict) -> None:
    """v within 2 ULP, m within 2 ULP of max(|m before|, |g|), p within 3 ULP of max(|p before|, |p|, lr)."""
    torch.manual_seed(step)
    n = 20_011
    spread = 10 ** torch.empty(n).uniform_(-6, 2)
    size = spread[torch.randperm(n)]  # of the gradients, apart from the parameters'
    p0, g, m0 = torch.randn(n) * spread, torch.randn(n) * size, torch.randn(n) * size
    v0 = m0**2 * (1 + torch.rand(n)) + (torch.rand(n) * size) ** 2  # m**2 <= v, as averages of one gradient have it
    if step == 0:
        m0, v0 = torch.zeros(n), torch.zeros(n)
    theirs, ours = (torch.nn.Parameter(p0.clone()) for _ in range(2))
    a = torch.optim.AdamW([theirs], foreach=False, **hyper)
    b = make([ours], **hyper)
    state = {"step": torch.tensor(float(step)), "exp_avg": m0, "exp_avg_sq": v0}
    saved = {"state": {0: state}, "param_groups": a.state_dict()["param_groups"]}
    a.load_state_dict(saved)
    b.load_state_dict(saved)
    theirs.grad, ours.grad = g.clone(), g.clone()
    a.step()
    b.step()
    x, y = a.state[theirs], b.state_dict()["state"][0]
    assert y["step"] == step + 1 == x["step"]

    def worst(name: str, of: torch.Tensor) -> float:
        return ulps((y[name] - x[name]).numpy(), of.numpy())

    assert worst("exp_avg_sq", x["exp_avg_sq"]) <= 2
    assert worst("exp_avg", torch.maximum(m0.abs(), g.abs())) <= 2
    size = torch.maximum(torch.maximum(p0.abs(), theirs.detach().abs()), torch.tensor(hyper.get("lr", 1e-3)))
    assert ulps((ours - theirs).detach().numpy(), size.numpy()) <= 3


def test_100_steps_with_recorded_gradients(make) -> None:
    """Two groups, a schedule, clipping, a layer without gradient in every third step: max|a-b| <= 1e-6 max|b| a tensor.

    Slots are filled with NaN between the steps, which changes nothing.
    """
    model = build(0)
    run = record(100, model, torch.optim.AdamW(groups(model), foreach=False))
    mine = build(0)
    optimizer = make(groups(mine))
    scheduler = schedule(optimizer)
    for gradients, rates in zip(run.gradients, run.rates):
        assert [group["lr"] for group in optimizer.param_groups] == rates
        set_gradients(mine, gradients)
        optimizer.step()
        scheduler.step()
        for subgroup in optimizer.subgroups:
            subgroup.grad.torch().fill_(float("nan"))
    for (name, ours), theirs in zip(mine.named_parameters(), run.model.parameters()):
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max(), name
    assert len(optimizer.subgroups) > 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_follow_fp32_masters(make, dtype: torch.dtype) -> None:
    """Reference: torch AdamW on FP32 masters with upcast gradients. The parameters are the masters rounded."""
    model = build(1, dtype)
    params = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    index = {id(p): i for i, p in enumerate(params)}
    master_groups = [{**g, "params": [masters[index[id(p)]] for p in g["params"]]} for g in groups(model)]
    mine = build(1, dtype)
    optimizer = make(groups(mine))
    reference = torch.optim.AdamW(master_groups, foreach=False)
    for step in range(50):
        backward(model, step)
        for p, master in zip(params, masters):
            master.grad = None if p.grad is None else p.grad.float()
        set_gradients(mine, [p.grad for p in params])
        reference.step()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(params, masters):
                p.copy_(master)
    state = optimizer.state_dict()["state"]
    order = [p for g in optimizer.param_groups for p in g["params"]]
    by_name = {id(p): name for name, p in mine.named_parameters()}
    names = [name for name, _ in model.named_parameters()]
    checked = 0
    for key, entry in state.items():
        master = masters[names.index(by_name[id(order[key])])]
        assert (entry["master"] - master).abs().max() <= 1e-6 * master.abs().max(), by_name[id(order[key])]
        assert torch.equal(order[key], entry["master"].to(dtype))
        checked += 1
    assert checked == len(names) - 1  # `unused` has no state


def test_training_by_itself_is_as_near_to_fp64_as_torch(make) -> None:
    """Own gradients, 5 seeds: L2 distance to a run in FP64 at most 1.5 times torch's; losses agree within 1 %."""
    ratios = []
    for seed in range(5):
        ends, losses = {}, {}
        for kind in ("fp64", "torch", "ours"):
            model = build(seed, torch.float64 if kind == "fp64" else torch.float32)
            if kind == "fp64":
                model.load_state_dict(build(seed).state_dict())
            name = f"seed{seed}"
            optimizer = (
                make(groups(model), name=name) if kind == "ours" else torch.optim.AdamW(groups(model), foreach=False)
            )
            run = record(60, model, optimizer)
            ends[kind] = torch.cat([p.detach().double().reshape(-1) for p in run.model.parameters()])
            losses[kind] = float(backward(model, 60))
        distance = {kind: float((ends[kind] - ends["fp64"]).norm()) for kind in ("torch", "ours")}
        ratios.append(distance["ours"] / distance["torch"])
        assert losses["ours"] == pytest.approx(losses["torch"], rel=0.01)
    assert statistics.median(ratios) <= 1.5, ratios
