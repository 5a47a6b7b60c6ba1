"""OffloadAdamW as a torch.optim.Optimizer: what it accepts, what it refuses, and its state."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from typing import Any, Callable

import mlpo
import numpy as np
import pytest
import reference
import torch
from mlpo.torch import OffloadAdamW
from models import backward, build, groups, record, schedule
from running_daemon import SMALL_BLOCKS, Layout
from torch.nn import Parameter

Make = Callable[..., OffloadAdamW]


def expected(start: torch.Tensor, gradients: list[torch.Tensor], **hyper: Any) -> reference.Adam:
    adam = reference.Adam.start(start.detach().float().numpy())
    for gradient in gradients:
        adam.update(gradient.float().numpy(), **hyper)
    return adam


def same(param: torch.Tensor, adam: reference.Adam) -> bool:
    return np.array_equal(param.detach().reshape(-1).numpy(), adam.p)


# ---- Steps


def test_closure_and_hooks(make: Make) -> None:
    """step(closure) returns the loss, evaluates with gradients on, and runs step hooks, as torch does."""
    w = Parameter(torch.tensor([3.0]))
    optimizer = make([w], lr=0.5, weight_decay=0.0)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 9.0 and seen == ["pre", "post"]
    assert w.item() == 2.5


def test_hyper_parameters_are_read_at_each_step(make: Make) -> None:
    """Floats and one-element tensors in param_groups, changed between steps."""
    start, gradients = torch.randn(50), [torch.randn(50) for _ in range(3)]
    w = Parameter(start.clone())
    optimizer = make([w], lr=torch.tensor(0.5), betas=(torch.tensor(0.5), 0.75))
    group = optimizer.param_groups[0]
    adam = reference.Adam.start(start.numpy())
    for gradient, lr, betas, decay in zip(
        gradients, (0.5, 0.25, 0.125), ((0.5, 0.75), (0.25, 0.5), (0.5, 0.5)), (0.01, 0, 0.5)
    ):
        group["lr"].fill_(lr)
        group["betas"], group["weight_decay"] = betas, decay
        w.grad = gradient.clone()
        optimizer.step()
        adam.update(gradient.numpy(), lr=lr, betas=betas, weight_decay=decay)
    assert same(w, adam)


def test_schedulers_of_torch(make: Make) -> None:
    """A one-cycle schedule, which also moves beta1, drives both optimizers alike."""
    a, b = (Parameter(torch.ones(5)) for _ in range(2))
    pairs = [(a, torch.optim.AdamW([a], foreach=False)), (b, make([b]))]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12) for _, o in pairs]
    for _ in range(10):
        for w, optimizer in pairs:
            w.grad = torch.full((5,), 0.5)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert pairs[0][1].param_groups[0]["lr"] == pairs[1][1].param_groups[0]["lr"]
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_none_gradient_leaves_all_of_a_parameter(make: Make) -> None:
    """p, m, v and step stay although others in the same subgroup move; before its first gradient there is no state."""
    a, b, c = (Parameter(torch.randn(7)) for _ in range(3))
    starts = [p.detach().clone() for p in (a, b, c)]
    optimizer = make([a, b, c], lr=0.1)
    for used in ((a, b), (a,), (b, a)):
        for p in (a, b, c):
            p.grad = torch.full((7,), 0.5) if any(p is q for q in used) else None
        optimizer.step()
    half = torch.full((7,), 0.5)
    assert len(optimizer.subgroups) == 1
    assert same(a, expected(starts[0], [half] * 3, lr=0.1)) and same(b, expected(starts[1], [half] * 2, lr=0.1))
    assert torch.equal(c, starts[2])
    assert {k: float(v["step"]) for k, v in optimizer.state_dict()["state"].items()} == {0: 3.0, 1: 2.0}
    assert c not in optimizer.state


def test_any_strides_empty_and_large_parameters(make: Make) -> None:
    """Transposed, sliced, channels-last, 0-dimensional, empty, and larger than a subgroup: all as torch treats them."""

    def params() -> list[Parameter]:
        torch.manual_seed(5)
        made = [torch.randn(9, 7).t(), torch.randn(8, 12)[::2, 1::3],
                torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
                torch.randn(()), torch.randn(0, 3), torch.randn(3001),
                torch.randn(1, 1, 1, 2, 1, 1, 1, 3, 2)]  # fmt: skip
        return [Parameter(t) for t in made]

    ours, theirs = params(), params()
    a, b = make(ours, lr=0.1, subgroup_elements=200), torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for _ in range(3):
        for p, q in zip(ours, theirs):
            q.grad = torch.randn(q.shape)
            p.grad = q.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)
    state = a.state_dict()["state"]
    assert [float(entry["step"]) for entry in state.values()] == [3.0] * 7
    for index, p in enumerate(ours):
        assert state[index]["exp_avg"].shape == p.shape
    assert state[0]["exp_avg"].stride() == ours[0].stride() and state[2]["exp_avg"].stride() == ours[2].stride()


def test_param_groups_are_never_mixed(make: Make) -> None:
    """A subgroup holds parameters of one group and type; one added later has its own."""
    ps = [
        Parameter(torch.zeros(3, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float32)
    ]
    optimizer = make([{"params": ps[:2]}, {"params": [ps[2]], "lr": 0.5}], weight_decay=0.0)
    optimizer.add_param_group({"params": [ps[3]], "lr": 0.25})
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [(s.numel, s.dtype) for s in optimizer.subgroups] == [
        (3, "float32"),
        (3, "bfloat16"),
        (3, "float32"),
        (3, "float32"),
    ]
    assert [float(p.detach()[0]) for p in ps] == pytest.approx([-0.001, -0.001, -0.5, -0.25], rel=4e-3)
    late = Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [late], "lr": 1.0})
    late.grad = torch.ones(2)
    optimizer.step()
    assert float(late.detach()[0]) == pytest.approx(-1.0, rel=1e-6) and len(optimizer.subgroups) == 5


def test_fp32_gradients_of_16_bit_parameters(make: Make) -> None:
    """grad_dtype=torch.float32 keeps the bits of FP32 gradients; without it such a gradient is refused."""
    start, gradient = torch.randn(100).bfloat16(), torch.randn(100)
    for grad_dtype in (None, torch.float32):
        w = Parameter(start.clone())
        if not hasattr(w, "grad_dtype"):
            pytest.skip("this torch has no gradients of another type than their parameter's")
        w.grad_dtype = torch.float32
        w.grad = gradient.clone()
        optimizer = make([w], grad_dtype=grad_dtype)
        if grad_dtype is None:
            with pytest.raises(TypeError, match="grad_dtype"):
                optimizer.step()
            continue
        optimizer.step()
        adam = expected(start, [gradient])
        assert np.array_equal(optimizer.state_dict()["state"][0]["master"].numpy(), adam.p)


def test_grad_scaler_of_torch(make: Make) -> None:
    """torch's GradScaler unscales .grad and skips steps by itself."""
    w = Parameter(torch.ones(4))
    optimizer = make([w], lr=0.5, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((w * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    once = w.detach().clone()
    assert once.tolist() == pytest.approx([0.5] * 4, rel=1e-6)
    optimizer.zero_grad()
    scaler.scale((w * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(w.detach(), once) and scaler.get_scale() == 512.0


@pytest.mark.parametrize("call", ["submit_grad", "submit_update"])
@pytest.mark.parametrize("sent", [False, True], ids=["not sent", "sent"])
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_interrupted_step_is_never_half_done(
    make: Make, monkeypatch: pytest.MonkeyPatch, call: str, sent: bool, nth: int
) -> None:
    """Ctrl-C before or just after the n-th submission: before the first update the step is forgotten, after it the next
    call finishes it; then training goes on with the right bits."""
    start = [torch.randn(1000) for _ in range(3)]
    params = [Parameter(t.clone()) for t in start]
    optimizer = make(params, subgroup_elements=1000)
    gradients = [[torch.randn(1000) for _ in range(3)] for _ in range(3)]

    def step(number: int) -> None:
        for p, g in zip(params, gradients[number]):
            p.grad = g.clone()
        optimizer.step()

    step(0)
    original, calls = getattr(mlpo.Subgroup, call), []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == nth + 1 and not sent:
            raise KeyboardInterrupt
        request = original(*args, **options)
        if len(calls) == nth + 1:
            raise KeyboardInterrupt
        return request

    with monkeypatch.context() as patched:
        patched.setattr(mlpo.Subgroup, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(1)
    step(2)
    applied = (0, 2) if call == "submit_grad" else (0, 1, 2)
    for index, p in enumerate(params):
        assert same(p, expected(start[index], [gradients[number][index] for number in applied])), index
    assert {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()} == {float(len(applied))}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_registration_that_was_broken_off_is_repeated(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The daemon may have the subgroup by then: the next call asks for another key, and trains with the right bits."""
    start = [torch.randn(100) for _ in range(3)]
    params = [Parameter(t.clone()) for t in start]
    optimizer = make([(f"p{index}", p) for index, p in enumerate(params)], subgroup_elements=100)
    original, calls = mlpo.Client.subgroup, []

    def broken_off(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        calls.append(result.key)
        if len(calls) in (2, 3):
            raise error
        return result

    for p in params:
        p.grad = torch.ones(100)
    with monkeypatch.context() as patched:
        patched.setattr(mlpo.Client, "subgroup", broken_off)
        for _ in range(2):
            with pytest.raises(error):
                optimizer.step()
        optimizer.step()
    assert len(set(calls)) == len(calls) == 5
    assert len(optimizer.subgroups) == 3 and optimizer.subgroups[0].key == "default/p0"
    assert all(same(p, expected(t, [torch.ones(100)])) for p, t in zip(params, start))


# ---- State


def test_state_dict_goes_to_torch_and_back(make: Make) -> None:
    """Ours -> torch -> ours, with training in between, is exact for FP32, and training goes on with the same bits."""
    model = build(2)
    optimizer = make(groups(model))
    record(5, model, optimizer)
    saved = optimizer.state_dict()
    twin = copy.deepcopy(model)
    theirs = torch.optim.AdamW(groups(twin), foreach=False)
    theirs.load_state_dict(saved)
    back = copy.deepcopy(model)
    ours = make(groups(back), subgroup_elements=700)
    ours.load_state_dict(theirs.state_dict())
    again = ours.state_dict()
    assert again["param_groups"] == saved["param_groups"] and again["state"].keys() == saved["state"].keys()
    for key, entry in saved["state"].items():
        for name, value in entry.items():
            assert torch.equal(again["state"][key][name], value), (key, name)
    for step in range(5, 8):
        for m, o in ((model, optimizer), (back, ours), (twin, theirs)):
            backward(m, step)
            o.step()
    for p, q, r in zip(model.parameters(), back.parameters(), twin.parameters()):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, r, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_state_survives_saving(make: Make, dtype: torch.dtype) -> None:
    """Through torch.save, with masters: the next steps have the bits of a run that was not interrupted."""
    model = build(4, dtype)
    optimizer = make(groups(model))
    scheduler = schedule(optimizer)
    record(6, model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    assert all(
        entry["master"].dtype == entry["exp_avg"].dtype == torch.float32
        for entry in saved["optimizer"]["state"].values()
    )
    other = build(99, dtype)
    resumed = make(groups(other))
    before = [p.detach().clone() for p in other.parameters()]
    resumed.load_state_dict(saved["optimizer"])
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), before)), "loading wrote a parameter"
    other.load_state_dict(saved["model"])
    for step in range(6, 10):
        for m, o in ((model, optimizer), (other, resumed)):
            backward(m, step)
            o.step()
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)
    x, y = optimizer.state_dict()["state"], resumed.state_dict()["state"]
    assert all(torch.equal(x[key]["master"], y[key]["master"]) for key in x)
    del scheduler


def test_state_that_does_not_fit_is_refused_whole(make: Make) -> None:
    """A wrong shape, group, mode or entry raises before anything was changed."""
    w = Parameter(torch.ones(4))
    optimizer = make([w])
    w.grad = torch.ones(4)
    optimizer.step()
    good = optimizer.state_dict()

    def broken(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        state = copy.deepcopy(good)
        change(state)
        return state

    cases = [
        (lambda s: s["state"][0].update(exp_avg=torch.ones(5)), "exp_avg"),
        (lambda s: s["state"][0].pop("exp_avg_sq"), "exp_avg_sq"),
        (lambda s: s["state"][0].update(max_exp_avg_sq=torch.ones(4)), "amsgrad"),
        (lambda s: s["state"][0].update(step=-1), "step"),
        (lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad"),
        (lambda s: s["param_groups"][0].update(decoupled_weight_decay=False), "L2"),
        (lambda s: s["param_groups"][0].update(lr=float("nan")), "lr"),
        (lambda s: s["param_groups"].append({"params": []}), "param groups"),
        (lambda s: s["param_groups"][0].update(params=[0, 1]), "parameters"),
        (lambda s: s["state"].update({7: {}}), "no parameter"),
    ]
    for change, text in cases:
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(broken(change))
        now = optimizer.state_dict()
        assert torch.equal(now["state"][0]["exp_avg"], good["state"][0]["exp_avg"])
        assert now["param_groups"] == good["param_groups"]


def test_state_is_empty_before_the_first_step(make: Make) -> None:
    """state is empty, as is state_dict()["state"]; loading such a dict sets everything back."""
    w = Parameter(torch.ones(4))
    optimizer = make([w], lr=0.5, weight_decay=0.0)
    fresh = optimizer.state_dict()
    assert fresh["state"] == {} and len(optimizer.state) == 0
    w.grad = torch.ones(4)
    optimizer.step()
    assert float(optimizer.state[w]["step"]) == 1.0
    optimizer.load_state_dict(fresh)
    assert len(optimizer.state) == 0
    optimizer.step()
    assert w.detach().tolist() == pytest.approx([0.0] * 4, abs=1e-6)  # twice a first step of lr
    assert optimizer.state_dict()["state"][0]["step"] == 1


# ---- What is refused


def test_parameters_that_are_refused(make: Make) -> None:
    """In the constructor and in add_param_group, with the parameter's name; a refused group leaves no trace."""

    class Special(torch.Tensor):
        pass

    base = torch.randn(10)
    wrong = [
        ([Parameter(torch.ones(2, dtype=torch.complex64))], TypeError, "complex"),
        ([Parameter(torch.ones(2, dtype=torch.float64))], TypeError, "float64"),
        ([Parameter(torch.ones(2).to_sparse())], TypeError, "sparse"),
        ([torch.ones(2).as_subclass(Special).requires_grad_()], TypeError, "Special"),
        ([Parameter(torch.ones(1).expand(4))], ValueError, "share memory"),
        ([Parameter(base[:6]), Parameter(base[5:])], ValueError, "overlap"),
        ([torch.nn.parameter.UninitializedParameter()], TypeError, "not initialized"),
    ]
    w = Parameter(torch.ones(2))
    optimizer = make([w], lr=0.5, weight_decay=0.0)
    for params, kind, text in wrong:
        with pytest.raises(kind, match=text):
            OffloadAdamW(params)
        with pytest.raises(kind, match=text):
            optimizer.add_param_group({"params": params})
    w.grad = torch.ones(2)
    optimizer.step()
    assert len(optimizer.param_groups) == 1 and w.detach().tolist() == pytest.approx([0.5, 0.5], rel=1e-6)


@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "differentiable"])
def test_modes_that_are_refused(make: Make, flag: str) -> None:
    """In the constructor, a group, and when switched on later; nothing moves."""
    w = Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=flag):
        OffloadAdamW([w], **{flag: True})
    with pytest.raises(ValueError, match=flag):
        OffloadAdamW([{"params": [w], flag: True}])
    optimizer = make([w])
    optimizer.param_groups[0][flag] = True
    w.grad = torch.ones(2)
    with pytest.raises(ValueError, match=flag):
        optimizer.step()
    assert w.detach().tolist() == [1.0, 1.0]


def test_values_that_are_refused(make: Make) -> None:
    """Hyper-parameters out of range, also when set later, and sparse gradients: before any parameter moves."""
    for wrong in ({"lr": -1.0}, {"lr": float("nan")}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1.0},
                  {"lr": torch.ones(2)}, {"nonfinite": "skip"}, {"subgroup_elements": 0}):  # fmt: skip
        with pytest.raises(ValueError):
            OffloadAdamW([Parameter(torch.ones(2))], **wrong)
    a, table = Parameter(torch.ones(2)), torch.nn.Embedding(5, 2, sparse=True)
    optimizer = make([a, table.weight])
    a.grad = torch.ones(2)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    table.weight.grad = None
    optimizer.param_groups[0]["lr"] = float("inf")
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    assert a.detach().tolist() == [1.0, 1.0] and len(optimizer.state) == 0


def test_copies_and_what_is_not_offered(make: Make) -> None:
    """deepcopy and pickle point to state_dict(); attach_ddp() says which model it takes."""
    optimizer = make([Parameter(torch.ones(2))])
    for copying in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            copying(optimizer)
    with pytest.raises(TypeError, match="DistributedDataParallel, not Linear"):
        optimizer.attach_ddp(torch.nn.Linear(2, 2))


def test_copies_of_the_state_are_warned_of_unless_replicas(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more than one rank each keeps a whole copy: a warning names the number once, replicas=True means it."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    for replicas in (False, True):
        w = Parameter(torch.ones(2))
        optimizer = make([w], replicas=replicas, lr=0.5, weight_decay=0.0)
        w.grad = torch.ones(2)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            optimizer.step()
            optimizer.add_param_group({"params": [Parameter(torch.ones(2))]})
            optimizer.reload_masters()
        texts = [str(each.message) for each in warned if "ranks of torch.distributed" in str(each.message)]
        assert len(texts) == (not replicas) and all("8 ranks" in text and "shard_group=" in text for text in texts)
        assert float(w.detach()[0]) == pytest.approx(0.5, rel=1e-6)


def test_names_keep_optimizers_apart(daemon_of, connect_to) -> None:
    """Two optimizers on one client need two names; the error says so."""
    client = connect_to(daemon_of(SMALL_BLOCKS))
    ps = [Parameter(torch.ones(2)) for _ in range(3)]
    for p in ps:
        p.grad = torch.ones(2)
    OffloadAdamW([ps[0]], client=client).step()
    second = OffloadAdamW([ps[1]], client=client)
    for _ in range(2):
        with pytest.raises(mlpo.MlpoError, match="name="):
            second.step()
    OffloadAdamW([ps[2]], client=client, name="second").step()
    assert ps[1].detach().tolist() == [1.0, 1.0] != ps[2].detach().tolist()


def test_default_client_is_shared_and_closed_with_the_last(daemon_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers without client= share one session; closing the last ends it; a closed one refuses to step."""
    monkeypatch.setenv("MLPO_SOCKET", daemon_of(Layout()).socket)
    monkeypatch.setenv("MLPO_JOB", "default-client")
    made = []
    for name in ("a", "b"):
        w = Parameter(torch.ones(2))
        w.grad = torch.ones(2)
        made.append(OffloadAdamW([w], name=name))
        made[-1].step()
    client = made[0].client
    assert client is made[1].client and client is not None
    made[0].close()
    client.check_alive()
    made[1].step()
    made[1].close()
    with pytest.raises(mlpo.MlpoError):
        client.check_alive()
    with pytest.raises(ValueError, match="closed"):
        made[1].step()


def test_dropped_optimizers_give_the_default_client_back(daemon_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without close() too: the next optimizer, which asks for the same keys, gets a session of its own; not while one
    that shares the session lives."""
    monkeypatch.setenv("MLPO_SOCKET", daemon_of(Layout()).socket)
    monkeypatch.setenv("MLPO_JOB", "dropped-optimizer")

    def stepped(name: str) -> OffloadAdamW:
        w = Parameter(torch.ones(2))
        w.grad = torch.ones(2)
        optimizer = OffloadAdamW([w], name=name)
        optimizer.step()
        return optimizer

    a, b = stepped("a"), stepped("b")
    first = b.client
    del a
    gc.collect()
    c = stepped("c")
    assert first is not None and c.client is first
    del b, c
    gc.collect()
    d = stepped("a")
    with pytest.raises(mlpo.MlpoError):
        first.check_alive()
    d.close()
