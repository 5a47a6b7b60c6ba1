"""OffloadAdamW(update_in_backward=True): subgroups are updated during the backward pass. The judge is the same training
without it, bit by bit."""

from __future__ import annotations

import contextlib
import pickle
import time
from typing import Any, Callable, Iterator

import mlpo
import pytest
import torch
from mlpo.torch import OffloadAdamW
from mlpo.torch._binding import Pack
from mlpo.torch._overlap import Overlap
from running_daemon import SMALL_BLOCKS, THREE_BUFFERS, Daemon
from torch.nn import Parameter
from word_models import WIDTH, Model, assert_same, fresh, loss_of, train

Make = Callable[..., OffloadAdamW]
PACK = 700


@pytest.fixture
def make(daemon_of, connect_to) -> Make:
    """make(params, ...): an OffloadAdamW with update_in_backward=True on a client of its own."""

    def get(params: Any, layout: Any = SMALL_BLOCKS, **options: Any) -> OffloadAdamW:
        options = {"update_in_backward": True, "subgroup_elements": PACK, **options}
        return OffloadAdamW(params, client=connect_to(daemon_of(layout)), **options)

    return get


def trained(make: Make, steps: int = 2, **options: Any) -> tuple[Model, OffloadAdamW]:
    model = fresh()
    optimizer = make(model.named_parameters(), **options)
    train(model, optimizer, steps)
    return model, optimizer


def pair(make: Make, steps: int = 2, **options: Any) -> tuple[tuple[Model, OffloadAdamW], tuple[Model, OffloadAdamW]]:
    """A model with update_in_backward, after some steps, and its twin without."""
    return trained(make, steps, **options), trained(make, steps, update_in_backward=False, **options)


def await_updates(optimizer: OffloadAdamW, epochs: int) -> None:
    """Returns when the daemon has made so many updates of every subgroup."""
    deadline = time.monotonic() + 30
    while any(subgroup.epoch != epochs for subgroup in optimizer.subgroups):
        assert time.monotonic() < deadline, [subgroup.epoch for subgroup in optimizer.subgroups]
        time.sleep(0.001)


@contextlib.contextmanager
def paused(daemon: Daemon) -> Iterator[None]:
    daemon.pause()
    try:
        yield
    finally:
        daemon.resume()


# ---- The same bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["plain", "tied", "reentrant"])
@pytest.mark.parametrize("passes", [1, 3])
def test_no_bit_changes(
    make: Make, monkeypatch: pytest.MonkeyPatch, passes: int, kind: str, dtype: torch.dtype
) -> None:
    """Parameters and all state, also with no_sync(); and the updates were submitted in the backward pass."""
    monkeypatch.setattr("mlpo.torch._overlap._LANE_BYTES", 1000)
    plain = fresh(kind, dtype)
    reference = make(plain.parameters(), update_in_backward=False)
    train(plain, reference, 5, passes)
    assert reference.updated_in_backward == 0
    for hold in (False, True) if passes > 1 else (False,):
        model = fresh(kind, dtype)
        optimizer = make(model.parameters(), gradient_accumulation_steps=1 if hold else passes)
        train(model, optimizer, 1, passes, hold)
        assert optimizer.updated_in_backward == 0
        train(model, optimizer, 4, passes, hold, first=1)
        assert optimizer.updated_in_backward == len(optimizer.subgroups) >= 2
        assert_same(model, optimizer, plain, reference)


def test_next_forward_goes_on_meanwhile(make: Make) -> None:
    """With attach_forward() and step(wait=False), in a pool that holds almost nothing."""
    made = []
    for early in (False, True):
        model = fresh("tied")
        optimizer = make(model.parameters(), THREE_BUFFERS, update_in_backward=early)
        if early:
            optimizer.attach_forward(model)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step(wait=not early)
        optimizer.wait()
        made.append((model, optimizer))
    assert made[1][1].updated_in_backward == len(made[1][1].subgroups)
    assert_same(*made[1], *made[0])


def test_groups_schedulers_and_closures(make: Make) -> None:
    """Hyper-parameters are those of the group, at the time of the backward pass: those of step()."""
    made = []
    for early in (False, True):
        model = fresh()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1, "lr": torch.tensor(0.01)},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ]
        optimizer = make(groups, update_in_backward=early)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        for step in range(5):

            def closure(step: int = step, model: Model = model, optimizer: OffloadAdamW = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)
            scheduler.step()
        made.append((model, optimizer))
    assert made[1][1].updated_in_backward == len(made[1][1].subgroups) > 2
    assert_same(*made[1], *made[0])


def test_parameters_that_are_skipped(make: Make) -> None:
    """A subgroup with a parameter that is not called is updated at step(), since it might be called yet; one that was
    never called and is, late in a backward pass, has its gradient. A frozen one holds nothing up."""
    made, counts = [], []
    for early in (False, True):
        model = fresh()
        model.register_parameter("unused", Parameter(torch.ones(3)))
        model.norms[0].bias.requires_grad_(False)
        optimizer = make(model.parameters(), update_in_backward=early, subgroup_elements=1000)
        for step in range(9):
            optimizer.zero_grad()
            # Autograd calls the one last that was used first.
            loss = model.unused.square().sum() if step == 7 else 0.0
            (loss_of(model, step) + loss).backward()
            optimizer.step()
            if early:
                counts.append(len(optimizer.subgroups) - optimizer.updated_in_backward)
        made.append((model, optimizer))
    assert_same(*made[1], *made[0])
    assert len(optimizer._places[model.unused][0].members) > 1 and counts[6] == 1


def test_replaced_weights_are_noticed(make: Make) -> None:
    """Before the backward pass, as it is before step() otherwise: by a version that moves, and by one that does not."""
    made = []
    for early in (False, True):
        model, optimizer = trained(make, update_in_backward=early)
        for step in range(2, 5):
            optimizer.zero_grad()
            with torch.no_grad():
                if step == 3:
                    model.head.weight.fill_(0.25)
                elif step == 4:
                    model.words.weight.data[3] = 0.125
            loss_of(model, step).backward()
            optimizer.step()
        made.append((model, optimizer))
    assert_same(*made[1], *made[0])


def test_gradients_applied_as_they_are(make: Make) -> None:
    """nonfinite="apply": NaN goes where torch would put it."""
    made = []
    for early in (False, True):
        model, optimizer = trained(make, update_in_backward=early, nonfinite="apply")
        optimizer.zero_grad()
        (loss_of(model, 9) + model.blocks[1].bias.sum() * float("nan")).backward()
        optimizer.step()
        made.append((model, optimizer))
    for (name, p), q in zip(made[0][0].named_parameters(), made[1][0].parameters()):
        assert torch.equal(p.view(torch.int32), q.view(torch.int32)), name
        assert bool(p.isnan().all()) == (name == "blocks.1.bias")


# ---- While the backward pass runs


def test_updates_before_step_leave_parameters_alone(make: Make) -> None:
    """The daemon makes an update while a layer before it still computes its gradient: no parameter changes before
    step(), nor does its version, and autograd finds what it has saved."""
    model, optimizer = trained(make)
    twin = fresh()
    twin.load_state_dict(model.state_dict())
    waited = []

    def wait(_: torch.Tensor) -> None:
        deadline = time.monotonic() + 30
        head = optimizer.subgroups[-1]
        while head.epoch != 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        waited.append([subgroup.epoch for subgroup in optimizer.subgroups])

    optimizer.zero_grad()
    versions = [p._version for p in model.parameters()]
    hook = model.blocks[0].weight.register_hook(wait)
    loss_of(model, 2).backward()
    hook.remove()
    assert waited and waited[0][0] == 2, "the first layer's update is to come"
    await_updates(optimizer, 3)
    assert versions == [p._version for p in model.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    reference_model, reference = trained(make, 3, update_in_backward=False)
    assert_same(model, optimizer, reference_model, reference)


def test_backward_waits_for_no_update(make: Make, daemon_of) -> None:
    """A stopped daemon does not stop the backward pass; when it goes on, updates end in the order of the forward pass,
    though the backward pass has submitted them in the opposite one."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(12)]
    model = torch.nn.Sequential(*layers)
    optimizer = make(model.parameters(), THREE_BUFFERS, subgroup_elements=1)
    optimizer.attach_forward(model)

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 64)).square().sum().backward()

    for _ in range(2):
        backward()
        optimizer.step(wait=False)
    optimizer.wait()
    with paused(daemon_of(THREE_BUFFERS)):
        backward()
        assert optimizer._overlap is not None
        parts = optimizer._overlap.updated()
        assert len(parts) == len(layers) and all(not part.update.done() for part in parts.values() if part.update)
    waiting = {part.update: optimizer.subgroups.index(part.pack.subgroup) for part in parts.values()}
    ended: list[int] = []
    while waiting:
        ended += [waiting.pop(update) for update in mlpo.wait_any(list(waiting), timeout=30)]
    assert list(waiting.values()) == [] and sorted(ended) == list(range(12))
    optimizer.step()
    # The few blocks that the pool holds go first, whichever they are.
    early, late = ended[: len(ended) // 2], ended[len(ended) // 2 :]
    assert sum(early) / len(early) + 3 < sum(late) / len(late), ended


def test_forward_begins_before_the_last_update_ends(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's forward() runs when its own update has ended, and the last one's has not."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    optimizer = make(model.parameters(), THREE_BUFFERS, subgroup_elements=1)
    optimizer.attach_forward(model)
    epochs: list[list[int]] = []
    layers[0].register_forward_hook(lambda *_: epochs.append([subgroup.epoch for subgroup in optimizer.subgroups]))
    for _ in range(3):
        loss = model(torch.ones(1, 512)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(wait=False)
    model(torch.ones(1, 512))
    for seen, step in zip(epochs[2:], (2, 3)):  # the first forward pass after an update waits for all
        assert seen[0] == step and seen[-1] == step - 1, epochs
    optimizer.wait()


# ---- What cannot be taken back


def test_gradient_that_is_not_finite(make: Make) -> None:
    """The error names it and the subgroups that were updated; these have new values and counts, and training goes on as
    where the others had no gradient."""
    (model, optimizer), (twin, reference) = pair(make)
    optimizer.zero_grad()
    (loss_of(model, 50) + model.blocks[1].bias.sum() * float("inf")).backward()
    with pytest.raises(mlpo.NonFiniteGradientError, match="already updated in the backward pass") as error:
        optimizer.step()
    assert error.value.parameters == ("blocks.1.bias",)
    packs = {pack.subgroup.key: [member.name for member in pack.members] for pack in optimizer._packs}
    left = [key for key, names in packs.items() if "blocks.1.bias" in names]
    assert len(packs) > 2 and set(error.value.updated) == set(packs) - set(left)
    assert all(key in str(error.value) for key in error.value.updated)
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.parameters, again.updated) == (error.value.parameters, error.value.updated)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
        optimizer.step()

    reference.zero_grad()
    loss_of(twin, 50).backward()
    for name, p in twin.named_parameters():
        if name in packs[left[0]]:
            p.grad = None
    reference.step()
    train(model, optimizer, 2, first=3)
    train(twin, reference, 2, first=3)
    assert_same(model, optimizer, twin, reference)


def test_only_gradient_is_not_finite(make: Make) -> None:
    """Nothing was updated, as without update_in_backward: zero_grad() drops it, without a step() too."""
    for step in (False, True):
        model = torch.nn.Linear(5, 5)
        optimizer = make(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(5)).sum().backward()
            optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        (model(torch.ones(5)).sum() * float("nan")).backward()
        if step:
            with pytest.raises(mlpo.NonFiniteGradientError, match="nothing was updated") as error:
                optimizer.step()
            assert error.value.updated == ()
        optimizer.zero_grad()
        assert optimizer.client is not None
        assert optimizer.client.status()["sessions"][-1]["skipped_steps"] == int(step)
        assert [subgroup.epoch for subgroup in optimizer.subgroups] == [2]
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
        model(torch.ones(5)).sum().backward()
        optimizer.step()
        assert [subgroup.epoch for subgroup in optimizer.subgroups] == [3]


def test_another_gradient_after_the_update(make: Make) -> None:
    """Raises in the backward pass and at step(), which would lose it; load_state_dict() goes back."""
    (model, optimizer), (twin, reference) = pair(make)
    saved, weights = optimizer.state_dict(), {name: p.clone() for name, p in model.state_dict().items()}
    optimizer.zero_grad()
    loss_of(model, 20).backward()
    with pytest.raises(RuntimeError, match="another gradient after.*gradient_accumulation_steps"):
        loss_of(model, 21).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"another gradient after.*load_state_dict\(\)"):
            optimizer.step()
    with pytest.raises(RuntimeError, match="already updated"):
        optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    model.load_state_dict(weights)
    train(model, optimizer, 3, first=2)
    train(twin, reference, 3, first=2)
    assert_same(model, optimizer, twin, reference)


def test_exception_in_backward(make: Make) -> None:
    """Some subgroups were updated: step() updates the others with what they have, as torch does; to drop the gradients,
    or to read a state in between, raises and changes nothing."""

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("boom")

    def broken_pass(model: Model, optimizer: OffloadAdamW) -> None:
        optimizer.zero_grad()
        x = Boom.apply(model.norms[0](model.blocks[0](model.words(torch.arange(5)))))
        x = model.norms[2](model.blocks[2](model.norms[1](model.blocks[1](x))))
        with pytest.raises(ArithmeticError, match="boom"):
            model.head(x).square().mean().backward()

    (model, optimizer), (twin, reference) = pair(make)
    broken_pass(model, optimizer)
    broken_pass(twin, reference)
    for use in (optimizer.zero_grad, optimizer.state_dict, optimizer.reload_masters):
        with pytest.raises(RuntimeError, match=r"subgroups were already updated \(default/.*step\(\).*load_state_dict"):
            use()
    optimizer.step()
    reference.step()
    assert 0 < optimizer.updated_in_backward < len(optimizer.subgroups)
    for step in range(3, 6):  # calls are counted anew
        train(model, optimizer, 1, first=step)
        train(twin, reference, 1, first=step)
    assert_same(model, optimizer, twin, reference)


@pytest.mark.parametrize("key, value", [("lr", 0.5), ("betas", (0.5, 0.5)), ("eps", 1e-3), ("weight_decay", 0.3)])
def test_hyper_parameters_that_change_before_step(make: Make, key: str, value: Any) -> None:
    """Raises with both values; when they are put back the step is as it would have been."""
    (model, optimizer), (twin, reference) = pair(make)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    before = optimizer.param_groups[0][key]
    optimizer.param_groups[0][key] = value
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
        assert f"{key} from {before} to {value}" in str(error.value)
    optimizer.param_groups[0][key] = before
    optimizer.step()
    train(twin, reference, 1, first=2)
    assert_same(model, optimizer, twin, reference)


@pytest.mark.parametrize("how", ["data", "version"])
def test_parameter_written_before_step(make: Make, how: str) -> None:
    """What was written stays, and step() says that the update's value is lost; the masters follow at the next one."""
    model, optimizer = trained(make)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    await_updates(optimizer, 3)  # what is written before a subgroup's update begins counts
    with torch.no_grad():
        weight = model.head.weight.data if how == "data" else model.head.weight
        weight.fill_(0.25)
    with pytest.raises(RuntimeError, match=r"head.weight was written to.*update_in_backward.*step\(\)"):
        optimizer.step()
    assert bool((model.head.weight == 0.25).all())
    train(model, optimizer, 1, first=3)
    assert float((model.head.weight.detach() - 0.25).abs().max()) < 0.01


@pytest.mark.parametrize("how", ["one is None", "one is another", "all are None"])
def test_gradients_that_change_before_step(make: Make, how: str) -> None:
    model, optimizer = trained(make)
    saved = optimizer.state_dict()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    if how == "all are None":
        model.zero_grad()
    else:
        model.blocks[1].weight.grad = None if how == "one is None" else torch.zeros(WIDTH, WIDTH)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"dropped or replaced.*load_state_dict\(\)"):
            optimizer.step()
    optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    for index, state in saved["state"].items():
        assert state["step"] == after["state"][index]["step"]
        assert torch.equal(state["exp_avg_sq"], after["state"][index]["exp_avg_sq"])


def test_step_that_fails_elsewhere(make: Make) -> None:
    """Before anything else is updated: what was updated waits for the next step(), which is whole."""
    (model, optimizer), (twin, reference) = pair(make)
    extra = [Parameter(torch.ones(4)) for _ in range(2)]
    optimizer.add_param_group({"params": [("extra", extra[0])]})
    reference.add_param_group({"params": [("extra", extra[1])]})
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    extra[0].grad = torch.ones(4).to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()
    extra[0].grad = torch.ones(4)
    optimizer.step()
    reference.zero_grad()
    loss_of(twin, 2).backward()
    extra[1].grad = torch.ones(4)
    reference.step()
    assert torch.equal(*extra)
    assert_same(model, optimizer, twin, reference)


@pytest.mark.parametrize("sent", [False, True], ids=["not sent", "sent"])
@pytest.mark.parametrize("call", ["submit_grad", "submit_update", "read_state"])
def test_submission_that_fails(make: Make, monkeypatch: pytest.MonkeyPatch, call: str, sent: bool) -> None:
    """In the thread that submits: step() raises it, and what was updated keeps gradients from being dropped."""
    (model, optimizer), (twin, reference) = pair(make)
    saved, weights = optimizer.state_dict(), {name: p.clone() for name, p in model.state_dict().items()}
    original, calls = getattr(mlpo.Subgroup, call), []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2 and not sent:
            raise mlpo.MlpoError(-5, "as if")
        result = original(*args, **options)
        if len(calls) == 2:
            raise mlpo.MlpoError(-5, "as if")
        return result

    optimizer.zero_grad()
    if call == "read_state":
        for p in model.parameters():
            p.data.mul_(1.0).add_(1e-3)
    with monkeypatch.context() as patched:
        patched.setattr(mlpo.Subgroup, call, failing)
        loss_of(model, 2).backward()
        for _ in range(2):
            with pytest.raises(mlpo.MlpoError, match="as if"):
                optimizer.step()
    if call != "read_state":
        with pytest.raises(RuntimeError, match="already updated"):
            optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    model.load_state_dict(weights)
    train(model, optimizer, 2, first=2)
    train(twin, reference, 2, first=2)
    assert_same(model, optimizer, twin, reference)


@pytest.mark.parametrize("place", ["first mark", "last mark", "copy"])
def test_interrupted_step(make: Make, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Whatever was updated in the backward pass is so after the next call, with its count."""
    (model, optimizer), (twin, reference) = pair(make)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    owner, name = (Pack, "write_back") if place == "copy" else (Overlap, "_learn")
    original, calls = getattr(owner, name), []
    nth = {"first mark": 1, "last mark": len(list(model.parameters())), "copy": 2}[place]

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    optimizer.zero_grad()
    train(twin, reference, 1, first=2)
    assert_same(model, optimizer, twin, reference)
    train(model, optimizer, 2, first=3)
    train(twin, reference, 2, first=3)
    assert_same(model, optimizer, twin, reference)


# ---- What is refused


def test_what_is_refused(make: Make) -> None:
    half = Parameter(torch.ones(4, dtype=torch.float16))
    with pytest.raises(mlpo.NotOfferedError, match="parameter w, which is FP16.*loss scaling"):
        make([("w", half)])
    assert not half._post_accumulate_grad_hooks
    with pytest.raises(mlpo.NotOfferedError, match="grad_dtype=torch.float16.*loss scaling"):
        make([Parameter(torch.ones(4))], grad_dtype=torch.float16)
    model = fresh()
    optimizer = make(model.parameters())
    with pytest.raises(mlpo.NotOfferedError, match="FP16"):
        optimizer.add_param_group({"params": half})
    with pytest.raises(mlpo.NotOfferedError, match=r"clip_grad_norm_\(\) with update_in_backward=True.*overlap=True"):
        optimizer.clip_grad_norm_(1.0)
    model.half()  # before anything is registered
    with pytest.raises(mlpo.NotOfferedError, match="FP16"):
        loss_of(model, 0).backward()


def test_loss_scaling_is_refused_before_an_update(make: Make) -> None:
    """The first step, which is made at step(), finds the scaler."""
    model = fresh()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises((mlpo.NotOfferedError, RuntimeError), match="overlap"):
        scaler.step(optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    assert all(subgroup.epoch == 0 for subgroup in optimizer.subgroups)


def test_clipping_of_torch_is_refused(make: Make) -> None:
    model, optimizer = trained(make)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    with pytest.raises(RuntimeError, match="taken during the backward pass"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_close_between_backward_and_step(make: Make) -> None:
    model, optimizer = trained(make)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.close()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="closed"):
        optimizer.step()
