"""OffloadAdamW(overlap=True): gradients taken in the backward pass. The judge is the same training without it, bit by
bit, and torch's AdamW."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import time
import weakref
from typing import Any, Callable

import mlpo
import pytest
import torch
from models import build, groups, record
from mlpo.torch import OffloadAdamW
from mlpo.torch._binding import Pack
from mlpo.torch._lane import Lane
from mlpo.torch._overlap import Overlap
from running_daemon import SMALL_BLOCKS
from torch.nn import Parameter
from word_models import WIDTH, WORDS, Model, assert_same, fresh, loss_of, train

Make = Callable[..., OffloadAdamW]


@pytest.fixture
def make(daemon_of, connect_to) -> Make:
    """make(params, ...): an OffloadAdamW with overlap=True on a client of its own."""

    def get(params: Any, **options: Any) -> OffloadAdamW:
        return OffloadAdamW(params, client=connect_to(daemon_of(SMALL_BLOCKS)), **{"overlap": True, **options})

    return get


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["plain", "tied", "reentrant"])
@pytest.mark.parametrize("passes", [1, 4])
def test_overlap_changes_no_bit(
    make: Make, monkeypatch: pytest.MonkeyPatch, passes: int, kind: str, dtype: torch.dtype
) -> None:
    """Parameters, moments, masters and steps after training with it and without, also with no_sync() around all
    passes but the last; and gradients did leave in the backward passes. Matrices are copied in the other thread, in
    pieces."""
    monkeypatch.setattr("mlpo.torch._overlap._LANE_BYTES", 1000)
    monkeypatch.setattr("mlpo.torch._binding._ALONE", 100)
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
    put = Lane.put

    def noted(lane: Lane, nbytes: int, call: Any, window: Any, *args: Any) -> None:
        key = window.pack.subgroup.key  # handed over to be sent; the gradients themselves are small and copied at once
        at.append((key, [calls[id(p)] for p in keys[key]]))
        put(lane, nbytes, call, window, *args)

    monkeypatch.setattr(Lane, "put", noted)
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
    """After backward() the daemon itself refuses a second gradient for each of the subgroups; after zero_grad() it
    takes one."""
    model = fresh()
    optimizer = make(model.parameters(), subgroup_elements=800)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    loss_of(model, 9).backward()
    optimizer._overlap._lane.drain()
    for subgroup in optimizer.subgroups:
        with pytest.raises(mlpo.MlpoError) as refused:
            subgroup.submit_grad().result(timeout=30)
        assert refused.value.code == -4098  # MLPO_E_COVERAGE
    optimizer.step()
    assert optimizer.sent_in_backward == len(optimizer.subgroups)
    optimizer.zero_grad()
    loss_of(model, 10).backward()
    optimizer.zero_grad()
    for subgroup in optimizer.subgroups:
        assert subgroup.submit_grad().result(timeout=30).complete
        subgroup.discard()


# ---- What a window may look like: each compared with the same calls without overlap


def paired(
    make: Make, drive: Callable[[Model, OffloadAdamW, int], None], steps: int = 6, **options: Any
) -> OffloadAdamW:
    """drive(model, optimizer, step) for each step with overlap and without; all bits must be equal. The one with."""
    made = []
    for overlap in (False, True):
        model = fresh()
        optimizer = make(model.parameters(), overlap=overlap, subgroup_elements=700, **options)
        for step in range(steps):
            drive(model, optimizer, step)
        made.append((model, optimizer))
    assert_same(*made[0], *made[1])
    return made[1][1]


def test_number_of_passes_that_varies(make: Make) -> None:
    """More backward passes than the step before: what was sent is taken back; fewer: it is sent at step()."""

    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        optimizer.zero_grad()
        for number in range((1, 1, 3, 2, 2, 1)[step]):
            loss_of(model, 10 * step + number).backward()
        optimizer.step()

    paired(make, drive)


def test_layers_that_are_not_used_in_some_steps(make: Make) -> None:
    """Their gradient is None and they are skipped, whether they share a subgroup or not; frozen and unfrozen between
    steps, one from before the optimizer was made."""

    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        optimizer.zero_grad()
        model.norms[1].weight.requires_grad_(step not in (2, 3))
        x = model.words(torch.arange(step, step + 8))
        for number, block in enumerate(model.blocks):
            if number != 1 or step % 3:
                x = torch.tanh(block(model.norms[number](x)))
        model.head(x).square().mean().backward()
        optimizer.step()

    optimizer = paired(make, drive, steps=8)
    assert optimizer.sent_in_backward > 0

    made = []
    for overlap in (False, True):
        model = fresh()
        model.head.weight.requires_grad_(False)
        optimizer = make(model.parameters(), overlap=overlap)
        train(model, optimizer, 2)
        model.head.weight.requires_grad_(True)
        train(model, optimizer, 3, first=2)
        made.append((model, optimizer))
    assert_same(*made[0], *made[1])


def test_parameters_that_are_never_used_hold_nothing_up(make: Make) -> None:
    """After a few steps without them their subgroups no longer wait for them; when they are used after all, no
    gradient is lost."""

    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == 6:
            loss = loss + unused[optimizer].square().sum()
        loss.backward()
        optimizer.step()
        sent[optimizer].append(optimizer.sent_in_backward)

    unused, sent, made = {}, {}, []
    for overlap in (False, True):
        model = fresh()
        model.register_parameter("unused", Parameter(torch.ones(3)))
        optimizer = make(model.parameters(), overlap=overlap)
        unused[optimizer], sent[optimizer] = model.unused, []
        for step in range(8):
            drive(model, optimizer, step)
        made.append((model, optimizer))
    assert_same(*made[0], *made[1])
    assert len(optimizer.subgroups) == 1 and sent[optimizer][2:6] == [0, 1, 1, 1]


def test_dropped_gradients(make: Make) -> None:
    """zero_grad() of the model or the optimizer, of either kind, between passes and after all of them; a single .grad
    set to None, or to another gradient."""

    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        loss_of(model, 100 + step).backward()
        if step == 2:
            model.zero_grad()
        elif step == 3:
            optimizer.zero_grad(set_to_none=False)
        elif step != 7:
            optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 4:
            model.head.weight.grad = None
        elif step == 5:
            model.blocks[1].weight.grad = torch.full((WIDTH, WIDTH), 0.25)
            (loss_of(model, 5) + model.blocks[0].bias.sum()).backward()
        optimizer.step()
        model.zero_grad()

    optimizer = paired(make, drive, steps=9)
    assert optimizer.sent_in_backward == 0  # two passes, of which the first is dropped: counted as one; see below


def test_everything_dropped_then_a_step(make: Make) -> None:
    """A step after model.zero_grad() has no gradients, though they were sent: nothing changes, also not later."""

    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        loss_of(model, step).backward()
        if step == 3:
            model.zero_grad()
        optimizer.step()
        model.zero_grad()

    paired(make, drive)


def test_losses_of_other_optimizers(make: Make) -> None:
    """As in a GAN: a backward pass for another optimizer adds to gradients that step() has used; zero_grad() drops
    them. Without zero_grad() the next step() raises, since overlap keeps no gradient."""

    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        loss_of(model, 50 + step).backward()

    optimizer = paired(make, drive)
    with pytest.raises(RuntimeError, match=r"parameter 0 was used by the step\(\) before.*zero_grad"):
        optimizer.step()


def test_closure(make: Make) -> None:
    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) > 0

    assert paired(make, drive).sent_in_backward > 0


def test_exception_in_backward(make: Make) -> None:
    """A backward pass that ends early leaves what it had: for zero_grad() to drop or step() to use."""

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("boom")

    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        optimizer.zero_grad()
        if step % 2:
            x = Boom.apply(model.blocks[0](model.words(torch.arange(5))))
            with pytest.raises(ArithmeticError, match="boom"):
                model.head(model.blocks[1](x)).square().mean().backward()
            if step == 3:
                optimizer.zero_grad()
        if step != 5:
            loss_of(model, step).backward()
        optimizer.step()

    paired(make, drive)


def test_hooks_of_users(make: Make) -> None:
    """Earlier ones see and change the pass's gradient; torch.autograd.grad() takes none; create_graph works."""
    sums: dict[bool, list[float]] = {False: [], True: []}

    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step).backward(create_graph=step == 3)
        penalty = torch.autograd.grad(loss_of(model, step), list(model.parameters()))
        assert all(bool(g.isfinite().all()) for g in penalty)
        loss_of(model, 20 + step).backward()
        optimizer.step()

    made = []
    for overlap in (False, True):
        model = fresh()

        def halve(param: torch.Tensor, overlap: bool = overlap) -> None:
            assert param.grad is not None
            sums[overlap].append(float(param.grad.detach().sum()))

        model.head.weight.register_hook(lambda grad: grad * 0.5)
        if overlap:
            model.head.weight.register_post_accumulate_grad_hook(halve)
        optimizer = make(model.parameters(), overlap=overlap)
        with pytest.warns(UserWarning, match="create_graph") if not made else contextlib.nullcontext():
            for step in range(5):
                drive(model, optimizer, step)
        made.append((model, optimizer))
    assert_same(*made[0], *made[1])
    assert len(sums[True]) == 10


def test_fp32_sums_of_16_bit_gradients(make: Make) -> None:
    """grad_dtype=torch.float32: passes are added in FP32, as a sum of FP32 copies of their gradients."""
    model, twin = fresh(dtype=torch.bfloat16), fresh(dtype=torch.bfloat16)
    optimizer = make(model.parameters(), grad_dtype=torch.float32)
    reference = make([Parameter(p.detach().float()) for p in twin.parameters()], overlap=False)
    masters = reference.param_groups[0]["params"]
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        for number in range(3):
            loss_of(model, 3 * step + number).backward()
            twin.zero_grad()
            loss_of(twin, 3 * step + number).backward()
            for master, p in zip(masters, twin.parameters()):
                master.grad = p.grad.float() if number == 0 else master.grad + p.grad.float()
        optimizer.step()
        reference.step()
        with torch.no_grad():
            for master, p in zip(masters, twin.parameters()):
                p.copy_(master)
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p, q)


# ---- Failures


def test_copying_in_the_other_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes to copy: backward() goes on, no gradient is sent before it is whole, memory stays bounded,
    and a failure there is raised by the next call."""
    monkeypatch.setattr("mlpo.torch._overlap._LANE_BYTES", 1)
    monkeypatch.setattr("mlpo.torch._lane.Lane._MOST_BYTES", 3000)
    write, waiting, most, threads = Pack.write_gradient, [0], [0], set()

    def slow(pack: Pack, member: Any, grad: torch.Tensor, *how: bool) -> None:
        threads.add(threading.current_thread())
        time.sleep(0.002)
        write(pack, member, grad, *how)
        waiting[0] -= grad.numel() * 4

    put = Lane.put

    def counted(lane: Lane, nbytes: int, *args: Any) -> None:
        put(lane, nbytes, *args)
        waiting[0] += nbytes
        most[0] = max(most[0], waiting[0])

    with monkeypatch.context() as patched:
        patched.setattr(Pack, "write_gradient", slow)
        patched.setattr(Lane, "put", counted)
        model = fresh()
        optimizer = make(model.parameters(), subgroup_elements=800)
        train(model, optimizer, 4, 2)
        assert optimizer.sent_in_backward == len(optimizer.subgroups)
        assert threads and threading.current_thread() not in threads
        assert most[0] <= 3000 + 2 * 4 * WORDS * WIDTH
    twin = fresh()
    reference = make(twin.parameters(), overlap=False, subgroup_elements=800)
    train(twin, reference, 4, 2)
    assert_same(model, optimizer, twin, reference)

    def broken(*_: Any) -> None:
        raise MemoryError("no memory to copy")

    with monkeypatch.context() as patched:
        patched.setattr(Pack, "write_gradient", broken)
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        for _ in range(2):
            with pytest.raises(MemoryError, match="no memory to copy"):
                optimizer.step()
    with pytest.raises(MemoryError, match="no memory to copy"):
        optimizer.step()
    for m, o in ((model, optimizer), (twin, reference)):
        train(m, o, 2, 2, first=7)
    assert_same(model, optimizer, twin, reference)


def test_a_copying_thread_that_does_not_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass raises, while it puts a gradient there or adds one, and nothing waits for that thread; step()
    raises where a part of a sum is missing; after zero_grad() training goes on."""
    monkeypatch.setattr("mlpo.torch._overlap._LANE_BYTES", 1)
    monkeypatch.setattr(Lane, "_IDLE_S", 0.01)
    model, twin = fresh(), fresh()
    optimizer, reference = make(model.parameters()), make(twin.parameters(), overlap=False)

    def broken(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for passes in (0, 1):
        optimizer.zero_grad()
        for _ in range(passes):
            loss_of(model, 1).backward()
        deadline = time.monotonic() + 30
        while any(thread.name == "mlpo-gradients" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", broken)
            with pytest.raises(RuntimeError, match="can't start"):
                loss_of(model, 1).backward()
        if passes:
            with pytest.raises(RuntimeError, match="broken off"):
                optimizer.step()
    train(model, optimizer, 2)
    train(twin, reference, 2)
    assert_same(model, optimizer, twin, reference)


def test_forked_child_touches_no_slot(make: Make) -> None:
    """backward() in a child that was forked in the middle of a window raises; the parent goes on."""
    model = fresh()
    optimizer = make(model.parameters())
    loss_of(model, 1).backward()
    child = os.fork()
    if child == 0:
        try:
            loss_of(model, 2).backward()
        except mlpo.MlpoError as error:
            os._exit(0 if "forked" in str(error) else 2)
        except BaseException:
            os._exit(3)
        os._exit(4)
    assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    assert len(optimizer.state) > 0


@pytest.mark.parametrize("early", [False, True], ids=["at step", "in backward"])
def test_gradient_that_is_not_finite(make: Make, early: bool) -> None:
    """Named, nothing changes, and after zero_grad() training goes on with the right bits."""
    model, twin = fresh(), fresh()
    optimizer, reference = make(model.named_parameters()), make(twin.parameters(), overlap=False)
    before = 2 if early else 0
    train(model, optimizer, before)
    train(twin, reference, before)
    optimizer.zero_grad()
    (loss_of(model, 50) + model.blocks[1].bias.sum() * float("inf")).backward()
    with pytest.raises(mlpo.NonFiniteGradientError) as error:
        optimizer.step()
    assert error.value.parameters == ("blocks.1.bias",)
    train(model, optimizer, 3, first=before)
    train(twin, reference, 3, first=before)
    assert_same(model, optimizer, twin, reference)


@pytest.mark.parametrize("call", ["submit_grad", "submit_update", "discard"])
@pytest.mark.parametrize("sent", [False, True], ids=["not sent", "sent"])
@pytest.mark.parametrize("nth", [0, 1])
def test_interrupts(make: Make, monkeypatch: pytest.MonkeyPatch, call: str, sent: bool, nth: int) -> None:
    """Ctrl-C before or just after a submission in a backward pass or in step(): after zero_grad() training goes on as
    if the step had been done or had not."""
    model = fresh()
    optimizer = make(model.parameters(), subgroup_elements=700)
    train(model, optimizer, 2)
    original, calls = getattr(mlpo.Subgroup, call), []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == nth + 1 and not sent:
            raise KeyboardInterrupt
        result = original(*args, **options)
        if len(calls) == nth + 1:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(mlpo.Subgroup, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.zero_grad()
            loss_of(model, 90).backward()
            loss_of(model, 91).backward()
            optimizer.step()
    with contextlib.suppress(KeyboardInterrupt):
        optimizer.zero_grad()
    done = call == "submit_update"
    train(model, optimizer, 2, first=3)

    twin = fresh()
    reference = make(twin.parameters(), overlap=False, subgroup_elements=700)
    train(twin, reference, 2)
    if done:
        reference.zero_grad()
        for number in (90, 91):
            loss_of(twin, number).backward()
        reference.step()
    train(twin, reference, 2, first=3)
    assert_same(model, optimizer, twin, reference)


@pytest.mark.parametrize("nth", [0, 2])
def test_interrupt_before_the_decision(make: Make, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Ctrl-C after gradients were marked as used and before the step is decided: no parameter changes, the step cannot
    be repeated with slots whose content nobody knows, and after zero_grad() training goes on."""
    model, twin = fresh(), fresh()
    optimizer = make(model.parameters(), subgroup_elements=700)
    reference = make(twin.parameters(), overlap=False, subgroup_elements=700)
    train(model, optimizer, 2)
    train(twin, reference, 2)
    original, calls = Overlap._learn, itertools.count()

    def interrupted(*args: Any) -> None:
        if next(calls) == nth:
            raise KeyboardInterrupt
        original(*args)

    optimizer.zero_grad()
    loss_of(model, 90).backward()
    with monkeypatch.context() as patched:
        patched.setattr(Overlap, "_learn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    for again in (False, True):
        if again:
            loss_of(model, 91).backward()
        with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
            optimizer.step()
    assert_same(model, optimizer, twin, reference)
    train(model, optimizer, 2, first=3)
    train(twin, reference, 2, first=3)
    assert_same(model, optimizer, twin, reference)


def test_state_in_a_window(make: Make) -> None:
    """state_dict(), load_state_dict() and replaced weights between backward() and step() keep the gradient."""

    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 2:
            saved.append(optimizer.state_dict())
        elif step == 4:
            optimizer.load_state_dict(saved[-1])
        elif step == 5:
            with torch.no_grad():
                model.head.weight.data.copy_(torch.full((WORDS, WIDTH), 0.125))
        optimizer.step()

    saved: list[dict[str, Any]] = []
    paired(make, drive, steps=7)


# ---- What raises


def test_what_would_see_no_gradient_raises(make: Make) -> None:
    """torch's clipping, GradScaler, arithmetic and printing of values; the text names what to do. Asking whether there
    is a gradient does not raise."""
    model = fresh()
    optimizer = make(model.named_parameters())
    loss_of(model, 1).backward()
    grads = [p.grad for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    for use in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
        lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: torch.nn.utils.get_total_norm(grads),
        lambda: (scaler.scale(loss_of(model, 1)), scaler.unscale_(optimizer)),
        lambda: grads[0].norm(),
        lambda: grads[0] + 1,
        lambda: 1 + grads[0],
        lambda: torch.stack(grads[1:2]),
        lambda: torch._foreach_norm(grads),
        lambda: grads[0].mul_(2),
        lambda: grads[0][0],
        lambda: grads[0].numpy(),
        lambda: grads[0].data,
        lambda: grads[0].detach(),
        lambda: grads[0].tolist(),
        lambda: torch.isfinite(grads[0]).all(),
        lambda: model.zero_grad(set_to_none=False),
    ):
        with pytest.raises(RuntimeError, match=r"taken during the backward pass"):
            use()
    assert all(g is not None for g in grads) and "words.weight" in repr(grads[0])
    optimizer.step()
    with pytest.raises(RuntimeError, match="taken during the backward pass"):
        grads[0].norm()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_memory_of_gradients_is_released(make: Make) -> None:
    """After each hook .grad has one element's memory, and the gradient's tensor is gone."""
    model = fresh()
    kept: list[weakref.ref[torch.Tensor]] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda param: kept.append(weakref.ref(param.grad)))
    optimizer = make(model.parameters())
    loss_of(model, 1).backward()
    gc.collect()
    assert len(kept) == len(list(model.parameters())) and all(ref() is None for ref in kept)
    optimizer.step()


def test_ranks_of_torch_distributed_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more than one rank, replicas=True or not: hooks see gradients before they are reduced."""
    model = fresh()
    optimizer = make(model.parameters(), replicas=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 4)
    with pytest.raises(mlpo.NotOfferedError, match=r"4 ranks.*attach_ddp\(model\).*overlap=False"):
        loss_of(model, 1).backward()
    with pytest.raises(TypeError, match="DistributedDataParallel, not Model"):
        optimizer.attach_ddp(model)


def test_arguments_that_are_refused(make: Make) -> None:
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="gradient_accumulation_steps"):
            OffloadAdamW([Parameter(torch.ones(2))], overlap=True, gradient_accumulation_steps=wrong)
    with pytest.raises(ValueError, match="init_process_group"):
        OffloadAdamW([Parameter(torch.ones(2))], shard_group=object())
    with pytest.raises(mlpo.NotOfferedError, match="shard_group= with update_in_backward=True"):
        OffloadAdamW([Parameter(torch.ones(2))], shard_group=object(), update_in_backward=True)
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = make(table.parameters())
    with pytest.raises(TypeError, match="sparse"):
        table(torch.tensor([1])).sum().backward()
    assert len(optimizer.subgroups) == 1


def test_a_constructor_that_fails_leaves_no_hooks(make: Make) -> None:
    model = fresh()
    with pytest.raises(TypeError, match="float64") as kept:
        OffloadAdamW(
            [{"params": list(model.parameters())}, {"params": [Parameter(torch.ones(2).double())]}], overlap=True
        )
    loss_of(model, 1).backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters()) and kept.value is not None


def test_no_sync_without_overlap_does_nothing(make: Make) -> None:
    model, twin = fresh(), fresh()
    optimizer, reference = make(model.parameters(), overlap=False), make(twin.parameters(), overlap=False)
    train(model, optimizer, 2, 2, hold=True)
    train(twin, reference, 2, 2)
    assert_same(model, optimizer, twin, reference)


def test_an_optimizer_that_is_gone_leaves_the_model_alone(make: Make) -> None:
    """After close(), and after an optimizer was dropped without it, .grad is as ever and the hooks do nothing."""
    for close in (True, False):
        model = fresh()
        optimizer = make(model.parameters())
        gone = weakref.ref(optimizer)
        loss_of(model, 1).backward()
        if close:
            optimizer.close()
            assert all(p.grad is None for p in model.parameters())
            optimizer.zero_grad()
            loss_of(model, 1).backward()
        del optimizer
        assert gone() is None, "kept by a cycle"
        loss_of(model, 1).backward()
        assert all(type(p.grad) is torch.Tensor and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_backward_in_another_thread(make: Make) -> None:
    """Hooks run in the thread that called backward()."""

    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        optimizer.zero_grad()
        thread = threading.Thread(target=lambda: loss_of(model, step).backward())
        thread.start()
        thread.join()
        optimizer.step()

    assert paired(make, drive).sent_in_backward > 0


def test_a_model_of_another_type_after_the_optimizer_was_made(make: Make) -> None:
    """model.bfloat16() sets .data, and autograd adds by another node then: several passes are added up all the same."""
    made = []
    for overlap in (True, False):
        model = fresh()
        optimizer = make(model.parameters(), overlap=overlap, grad_dtype=torch.bfloat16)
        model.bfloat16()
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        train(model, optimizer, 3, passes=3)
        made += [model, optimizer]
    assert_same(*made)


def test_groups_and_parameters_that_change(make: Make) -> None:
    """add_param_group() brings parameters that get hooks; one that left its group loses them."""

    def drive(model: Model, optimizer: OffloadAdamW, step: int) -> None:
        extra = late.setdefault(optimizer, Parameter(torch.ones(6)))
        if step == 2:
            optimizer.add_param_group({"params": [extra], "lr": 0.1})
        elif step == 5:
            optimizer.param_groups[1]["params"].clear()
            optimizer.state.pop(extra)
        optimizer.zero_grad()
        extra.grad = None
        (loss_of(model, step) + extra.square().sum()).backward()
        optimizer.step()
        if step == 4:
            held_up[optimizer] = len(optimizer.subgroups) - optimizer.sent_in_backward
        elif step == 6:
            assert extra.grad is not None and torch.equal(extra.grad, 2 * extra)

    late: dict[OffloadAdamW, Parameter] = {}
    held_up: dict[OffloadAdamW, int] = {}
    assert held_up[paired(make, drive, steps=7)] == 0
    values = [p.detach() for p in late.values()]
    assert len(values) == 2 and torch.equal(*values) and not torch.equal(values[0], torch.ones(6))
