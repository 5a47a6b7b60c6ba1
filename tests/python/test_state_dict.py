"""State in and out: torch's distributed checkpoint, what its tests do with state dicts, memory, late parameters.

Round trips with torch's AdamW and what is refused: test_optimizer.py. Shards over ranks: test_distributed.py.
"""

from __future__ import annotations

import copy
import io
import pathlib
from typing import Any, Callable

import pytest
import torch
from mlpo.torch import OffloadAdamW, _seal
from models import backward, build, groups
from running_daemon import Layout
from torch.nn import Parameter

dcp = pytest.importorskip("torch.distributed.checkpoint", reason="skipped: this torch has no torch.distributed")
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

Make = Callable[..., OffloadAdamW]


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """torch's flattened form, and its check of what it loads, want state for every parameter."""
    model = build(seed, dtype)
    model.unused = None
    return model


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        backward(model, step)
        optimizer.step()
    optimizer.zero_grad()


def equal(a: Any, b: Any) -> bool:
    """Whether two nested states have the same keys and bits."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# ---- torch's distributed checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_distributed_checkpoint(make: Make, tmp_path: pathlib.Path, dtype: torch.dtype, flat: bool) -> None:
    """Saved by dcp.save and loaded into a new model and optimizer: training goes on with the same bits, masters too.
    Reading the state of an optimizer that has one changes nothing."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = model_of(1, dtype)
    optimizer = make(groups(model))
    train(model, optimizer, 1, 2)
    before = optimizer.state_dict()
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    assert equal(optimizer.state_dict(), before)
    dcp.save({"model": model.state_dict(), "optimizer": saved}, checkpoint_id=tmp_path / "checkpoint")

    other = model_of(2, dtype)
    resumed = make(groups(other))
    found = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, resumed, options=options)}
    dcp.load(found, checkpoint_id=tmp_path / "checkpoint")
    other.load_state_dict(found["model"])
    set_optimizer_state_dict(other, resumed, found["optimizer"], options=options)
    assert equal(resumed.state_dict()["state"], before["state"])
    train(model, optimizer, 4, 2)
    train(other, resumed, 4, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))


def test_an_empty_state_is_filled_as_torch_fills_its_own(make: Make) -> None:
    """get_optimizer_state_dict steps with zero gradients and lr 0 where there is no state: parameters stay, and the
    state is what torch's AdamW then has."""
    pairs = []
    for of in (make, torch.optim.AdamW):
        model = build(3)
        optimizer = of(groups(model))
        start = [p.detach().clone() for p in model.parameters()]
        pairs.append(get_optimizer_state_dict(model, optimizer))
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start))
        assert all(p.grad is None for p in model.parameters())
    ours, theirs = (pair["state"] for pair in pairs)
    assert equal(ours, theirs)
    assert pairs[0]["param_groups"][0].keys() >= pairs[1]["param_groups"][0].keys()


def test_states_by_name_go_to_torch_and_back(make: Make) -> None:
    """get_ and set_optimizer_state_dict between the two optimizers, exact for FP32."""
    model, twin, back = (model_of(5) for _ in range(3))
    ours, theirs, again = make(groups(model)), torch.optim.AdamW(groups(twin)), make(groups(back))
    train(model, ours, 1, 3)
    saved = get_optimizer_state_dict(model, ours)
    set_optimizer_state_dict(twin, theirs, copy.deepcopy(saved))
    set_optimizer_state_dict(back, again, get_optimizer_state_dict(twin, theirs))
    assert equal(get_optimizer_state_dict(back, again)["state"], saved["state"])


# ---- As in torch's own tests of optimizers


def test_states_of_other_versions_and_with_plain_steps(make: Make) -> None:
    """Options that an older state lacks have their defaults; a step may be a number."""
    model = build(6)
    optimizer = make(groups(model))
    train(model, optimizer, 1, 2)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        for key in set(group) - {"params", "lr", "betas", "eps", "weight_decay", "initial_lr"}:
            del group[key]
    for number, entry in enumerate(saved["state"].values()):
        entry["step"] = float(entry["step"]) if number % 2 else int(entry["step"])
    other = build(6)
    other.load_state_dict(model.state_dict())
    resumed = make(groups(other))
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["maximize"] is False
    train(model, optimizer, 3, 2)
    train(other, resumed, 3, 2)
    assert equal(optimizer.state_dict()["state"], resumed.state_dict()["state"])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))


def test_saving_is_repeatable_and_safe_to_load(make: Make) -> None:
    """Two state dicts in a row are equal and share no memory; torch.load reads one with weights_only, its default."""
    model = build(7, torch.float16)
    optimizer = make(groups(model))
    train(model, optimizer, 1, 2)
    first, second = optimizer.state_dict(), optimizer.state_dict()
    assert equal(first, second)
    first["state"][0]["exp_avg"].zero_()
    assert equal(optimizer.state_dict(), second)
    file = io.BytesIO()
    torch.save(second, file)
    file.seek(0)
    assert equal(torch.load(file, weights_only=True), second)


def test_hooks_around_states(make: Make) -> None:
    """The six kinds of hooks are called as torch calls them, and what they return counts."""
    w = Parameter(torch.ones(3))
    optimizer = make([w], lr=0.5, weight_decay=0.0)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("before step"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: {k: v for k, v in state.items() if k != "note"})
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("after loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("first after loading"), prepend=True)
    w.grad = torch.ones(3)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["note"] == 1
    optimizer.load_state_dict(saved)
    assert calls == ["before step", "after step", "before saving", "first after loading", "after loading"]
    assert w.detach().tolist() == pytest.approx([0.5] * 3)


def test_zero_gradients_without_decay_change_nothing_but_the_step(make: Make) -> None:
    """As in torch: zeros are gradients, None is not."""
    a, b = Parameter(torch.randn(9)), Parameter(torch.randn(9))
    start = [a.detach().clone(), b.detach().clone()]
    optimizer = make([a, b], lr=0.5, weight_decay=0.0)
    for _ in range(3):
        a.grad = torch.zeros(9)
        optimizer.step()
    assert torch.equal(a, start[0]) and torch.equal(b, start[1])
    state = optimizer.state_dict()["state"]
    assert state.keys() == {0} and state[0]["step"] == 3 and not state[0]["exp_avg"].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32])
def test_states_of_other_types_are_refused(make: Make, dtype: torch.dtype) -> None:
    """FP64 would lose bits. BF16, which torch's AdamW keeps for BF16 parameters, is exact in FP32."""
    w = Parameter(torch.ones(4))
    optimizer = make([w])
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4).to(dtype)}
    with pytest.raises(ValueError, match="exp_avg_sq of parameter 0 is torch"):
        optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
    assert not optimizer.state
    state["exp_avg_sq"] = torch.full((4,), 0.3).bfloat16()
    optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg_sq"], torch.full((4,), 0.3).bfloat16().float())


# ---- Parameters that come late


def test_meta_parameters_get_their_values_later(make: Make) -> None:
    """An optimizer is made before the parameters have memory; they are bound at the first step, as they are then."""
    with torch.device("meta"):
        model, twin = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    ours, theirs = make(model.parameters(), lr=0.1), torch.optim.AdamW(twin.parameters(), lr=0.1, foreach=False)
    with pytest.raises(ValueError, match="0 is on the meta device"):
        model.weight.grad = torch.zeros(3, 4, device="meta")
        ours.step()
    for made, optimizer in ((model, ours), (twin, theirs)):
        made.to_empty(device="cpu")  # makes new parameters
        torch.manual_seed(1)
        made.reset_parameters()
        optimizer.param_groups[0]["params"] = list(made.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            made(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    swapped = Parameter(torch.ones(2, device="meta"))
    optimizer = make([swapped], lr=0.5, weight_decay=0.0)
    torch.utils.swap_tensors(swapped, Parameter(torch.full((2,), 3.0)))  # keeps the object
    swapped.grad = torch.ones(2)
    optimizer.step()
    assert swapped.detach().tolist() == pytest.approx([2.5, 2.5])


def test_replaced_entries_of_param_groups(make: Make) -> None:
    """Also after steps: the new parameter begins anew under a key of its own, and the old one's state is forgotten."""
    old, other, new = (Parameter(torch.ones(4)) for _ in range(3))
    optimizer = make([old, other], lr=0.5, weight_decay=0.0)

    def step(*params: Parameter) -> None:
        for p in params:
            p.grad = torch.ones(4)
        optimizer.step()

    step(old, other)
    optimizer.param_groups[0]["params"][0] = new
    step(new, other)
    assert old.detach().tolist() == new.detach().tolist() == pytest.approx([0.5] * 4)
    assert other.detach().tolist() == pytest.approx([0.0] * 4, abs=1e-6)
    assert len({subgroup.key for subgroup in optimizer.subgroups}) == 2
    saved = optimizer.state_dict()["state"]
    assert [float(saved[index]["step"]) for index in (0, 1)] == [1.0, 2.0] and old not in optimizer.state
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0] = Parameter(other[1:])
    with pytest.raises(ValueError, match="overlap"):
        step(other)
    optimizer.param_groups[0]["params"][0] = Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.raises(TypeError, match="float64"):
        step(other)
    optimizer.param_groups[0]["params"] = [other, other]
    with pytest.raises(ValueError, match="twice"):
        step(other)
    assert other.detach().tolist() == pytest.approx([0.0] * 4, abs=1e-6)


def test_add_param_group_between_steps_and_states(make: Make) -> None:
    """A group that is added after steps trains and is saved with the others, as in torch; frozen parameters as well."""
    results = []
    for of in (make, lambda ps, **o: torch.optim.AdamW(ps, foreach=False, **o)):
        ps = [Parameter(torch.full((5,), float(index + 1))) for index in range(4)]
        ps[2].requires_grad_(False)
        optimizer = of([{"params": ps[:1], "lr": 0.1}])
        for step in range(4):
            if step in (1, 2):
                optimizer.add_param_group({"params": ps[step : step + 1] if step == 1 else ps[2:], "lr": 0.2 * step})
            for p in ps:
                p.grad = torch.full((5,), 0.5 + step) if p.requires_grad else None
            optimizer.step()
        results.append((ps, optimizer.state_dict()))
    (ours, saved), (theirs, expected) = results
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
    assert saved["state"].keys() == expected["state"].keys() == {0, 1, 3}
    assert {k: float(v["step"]) for k, v in saved["state"].items()} == {0: 4.0, 1: 3.0, 3: 2.0}
    assert [g["params"] for g in saved["param_groups"]] == [g["params"] for g in expected["param_groups"]]


# ---- Memory


def _peak_kib() -> int:
    """The most memory that this process has had since _forget_peak()."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise AssertionError("/proc/self/status has no VmHWM")


def _forget_peak() -> int:
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _peak_kib()


@pytest.mark.parametrize("transposed", [False, True])
def test_state_dict_needs_memory_for_its_result_and_a_piece(
    daemon_of, connect_to, monkeypatch: pytest.MonkeyPatch, transposed: bool
) -> None:
    """32 MiB a tensor of state: reading, and loading it again, holds little more than the 64 MiB that are asked for."""
    monkeypatch.setattr(_seal.pieces, "__defaults__", (1 << 18, 0))
    w = Parameter(torch.ones(2048, 4096).t() if transposed else torch.ones(2048, 4096))
    optimizer = OffloadAdamW([w], client=connect_to(daemon_of(Layout(pool="256MiB"))))
    w.grad = torch.ones_like(w)
    optimizer.step()
    w.grad = None
    optimizer.state_dict()  # connects and maps what is needed once
    try:
        before = _forget_peak()
    except OSError as error:
        pytest.skip(f"skipped: the peak of memory cannot be set back: {error}")
    saved = optimizer.state_dict()
    read = _peak_kib() - before
    before = _forget_peak()
    optimizer.load_state_dict(saved)
    written = _peak_kib() - before
    assert 60 << 10 <= read <= 80 << 10, f"{read} KiB more while reading"
    assert written <= 16 << 10, f"{written} KiB more while writing"
