"""step(wait=False) and attach_forward(): updates go on during the next forward pass. The judge is the same training
with step(), bit by bit."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import weakref
from typing import Any, Callable

import mlpo
import pytest
import torch
from mlpo.torch import OffloadAdamW, _binding
from running_daemon import SMALL_BLOCKS, Daemon
from torch.nn import Parameter

Make = Callable[..., OffloadAdamW]
WIDTH = 16


@pytest.fixture
def make(daemon_of, connect_to) -> Make:
    """make(params, ...): an OffloadAdamW with one subgroup a parameter, on a client of its own."""

    def get(params: Any, **options: Any) -> OffloadAdamW:
        return OffloadAdamW(params, client=connect_to(daemon_of(SMALL_BLOCKS)), **{"subgroup_elements": 1, **options})

    return get


class Block(torch.nn.Module):
    """Attention, whose out_proj is not called but used by torch.nn.MultiheadAttention itself, and a layer that is
    called in every other pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.side = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, even: bool) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + torch.tanh(self.side(x)) if even else x


class Model(torch.nn.Module):
    """The head's weight is the first layer's, and used by the model itself; another is used as a table before the layer
    that has it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, even: bool = True) -> torch.Tensor:
        x = self.first(x) + torch.nn.functional.embedding(torch.arange(5), self.table.weight)
        for block in self.blocks:
            x = block(x, even)
        return torch.nn.functional.linear(self.last(self.table(x)), self.first.weight)


def fresh(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(3)
    return Model().to(dtype)


def loss_of(model: torch.nn.Module, number: int, **options: Any) -> torch.Tensor:
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(number))
    return model(x.to(next(model.parameters()).dtype), **options).float().square().mean()


def train(model: torch.nn.Module, optimizer: OffloadAdamW, steps: int, wait: bool, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step, even=step % 2 == 0).backward()
        optimizer.step(wait=wait)


def small(make: Make, **options: Any) -> tuple[torch.nn.Sequential, OffloadAdamW]:
    """Three layers after a first step with wait=False and a forward pass."""
    torch.manual_seed(4)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    optimizer = make(model.parameters(), lr=0.1, **options)
    optimizer.attach_forward(model)
    step_of(model, optimizer)
    return model, optimizer


def step_of(model: torch.nn.Module, optimizer: OffloadAdamW) -> list[torch.Tensor]:
    """A step with wait=False; the parameters before it, as they were used."""
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(wait=False)
    return before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_not_waiting_changes_no_bit(make: Make, overlap: bool, dtype: torch.dtype) -> None:
    """Losses' parameters, and the state, of a model with parameters that are used outside of their modules, that other
    modules use, and that are not used in each step."""
    plain, model = fresh(dtype), fresh(dtype)
    reference = make(plain.parameters())
    optimizer = make(model.parameters(), overlap=overlap)
    optimizer.attach_forward(model)
    train(plain, reference, 6, wait=True)
    train(model, optimizer, 6, wait=False)
    x, y = reference.state_dict()["state"], optimizer.state_dict()["state"]  # waits
    for (name, p), q in zip(model.named_parameters(), plain.named_parameters()):
        assert torch.equal(p, q[1]), name
    for key in x:
        assert all(torch.equal(x[key][name], y[key][name]) for name in x[key]), key


def test_modules_wait_for_their_own(make: Make) -> None:
    """When a layer runs, it and the ones before it have new values, the ones after it still the old."""
    model, optimizer = small(make)
    loss_of(model, 0)  # has seen which modules are called
    before = step_of(model, optimizer)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before)), "a parameter changed without a wait"
    changed: list[list[bool]] = []
    for layer in model:
        layer.register_forward_hook(
            lambda *_: changed.append([not torch.equal(p, old) for p, old in zip(model.parameters(), before)])
        )
    loss_of(model, 0)
    assert changed == [[True, False, False], [True, True, False], [True, True, True]]


def test_step_returns_while_the_daemon_works(make: Make, daemon_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a daemon that is stopped at the first update, step(wait=False) returns and the forward pass waits."""
    model, optimizer = small(make)
    optimizer.wait()
    daemon: Daemon = daemon_of(SMALL_BLOCKS)
    original = mlpo.Subgroup.submit_update

    def submit(self: mlpo.Subgroup, *args: Any, **options: Any) -> Any:
        daemon.pause()
        return original(self, *args, **options)

    resumed = threading.Event()

    def resume() -> None:
        resumed.set()
        daemon.resume()

    timer = threading.Timer(0.5, resume)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(mlpo.Subgroup, "submit_update", submit)
            before = step_of(model, optimizer)
        assert not resumed.is_set()
        timer.start()
        loss_of(model, 0)
        assert resumed.is_set()
    finally:
        timer.cancel()
        daemon.resume()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before))


def test_updates_are_submitted_in_forward_order(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the parameters in the optimizer."""
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    shuffled = [2, 0, 3, 1]
    optimizer = make([(str(index), layers[index].weight) for index in shuffled])
    optimizer.attach_forward(model)
    keys: list[str] = []
    original = mlpo.Subgroup.submit_update

    def submit(self: mlpo.Subgroup, *args: Any, **options: Any) -> Any:
        keys.append(self.key)
        return original(self, *args, **options)

    monkeypatch.setattr(mlpo.Subgroup, "submit_update", submit)
    step_of(model, optimizer)
    assert [key[-1] for key in keys] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_use_of_an_old_value_raises(make: Make, overlap: bool) -> None:
    """A parameter that is used outside of its module's forward() before it was waited for: the backward pass names it;
    wait() makes the same use right."""
    model, optimizer = small(make, overlap=overlap)
    loss_of(model, 0)
    step_of(model, optimizer)
    optimizer.zero_grad()
    loss = model[2].weight.square().sum()
    with pytest.raises(RuntimeError, match=r"parameter 2 .*wait\(\)"):
        loss.backward()
    optimizer.zero_grad()
    optimizer.wait()
    model[2].weight.square().sum().backward()
    optimizer.step()


def test_who_waits_for_all(make: Make) -> None:
    """The model's state_dict() and load_state_dict(), the optimizer's, the next step, wait(), and load_state_dict()."""
    model, optimizer = small(make)
    loss_of(model, 0)

    def all_new(before: list[torch.Tensor]) -> bool:
        return all(not torch.equal(p, old) for p, old in zip(model.parameters(), before))

    for call in (model.state_dict, model[1].state_dict, optimizer.state_dict, optimizer.wait, optimizer.reload_masters,
                 lambda: optimizer.load_state_dict(optimizer.state_dict()), optimizer.step):  # fmt: skip
        before = step_of(model, optimizer)
        call()
        assert all_new(before), call
        loss_of(model, 0)
    saved = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    step_of(model, optimizer)
    model.load_state_dict(saved)
    optimizer.wait()
    assert all(bool((p == 0.25).all()) for p in model.parameters()), "an update came after load_state_dict()"


def test_writing_to_a_parameter_under_way_raises(make: Make) -> None:
    """What was written stays, the wait names the parameter, and training goes on from what was written."""
    model, optimizer = small(make)
    loss_of(model, 0)
    step_of(model, optimizer)
    with torch.no_grad():
        model[1].weight.fill_(0.5)
    with pytest.raises(RuntimeError, match=r"parameter 1 was written"):
        optimizer.wait()
    optimizer.wait()
    assert bool((model[1].weight == 0.5).all())
    optimizer.zero_grad()
    (model[1].weight.sum() * 0.0).backward()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert bool((model[1].weight == 0.5).all()), "the value before came back"


@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("eval_mode", [False, True], ids=["train", "eval"])
def test_passes_that_go_another_way(make: Make, eval_mode: bool, gradients: bool) -> None:
    """In eval mode, or without gradients, a model uses a layer's weight without calling it: never the old one."""

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(WIDTH, WIDTH)
            self.inner = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training or not torch.is_grad_enabled():
                x = x + torch.nn.functional.linear(x, self.inner.weight)
            return self.inner(self.first(x))  # type: ignore[no-any-return]

    model = Around()
    optimizer = make(model.parameters(), lr=0.1)
    optimizer.attach_forward(model)
    for _ in range(3):
        model.train()
        step_of(model, optimizer)
        model.train(not eval_mode)
        with torch.set_grad_enabled(gradients):
            found = loss_of(model, 1)
            optimizer.wait()
            assert torch.equal(found, loss_of(model, 1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_whose_calls_are_not_seen(make: Make) -> None:
    """Inside a traced part no hook is called and no function of torch's: the module around waits for its parameters."""

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(WIDTH, WIDTH)
            self.inner = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
            self.fast = [torch.jit.trace(self.inner, torch.zeros(1, WIDTH))]  # in a list: no submodule

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.fast[0](self.first(x))
            return out

    made = []
    for wait in (True, False):
        torch.manual_seed(6)
        model = Around()
        optimizer = make(model.parameters())
        if not wait:
            optimizer.attach_forward(model)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step(wait=wait)
        optimizer.wait()
        made.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*made))


def test_parameters_of_no_model_are_waited_for(make: Make) -> None:
    """By step(wait=False) itself."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    loose = Parameter(torch.ones(5))
    optimizer = make([*model.parameters(), loose])
    optimizer.attach_forward(model)
    (loss_of(model, 0) + loose.sum()).backward()
    optimizer.step(wait=False)
    assert bool((loose != 1).all())


def test_forward_that_fails_leaves_waiting_right(make: Make) -> None:
    """After an exception in the middle of a forward pass the next ones wait as before."""
    model, optimizer = small(make)
    optimizer.wait()
    plain = copy.deepcopy(model)
    reference = make(plain.parameters(), lr=0.1)
    reference.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.ones(2, WIDTH + 1))
        step_of(model, optimizer)
        reference.zero_grad()
        loss_of(plain, 0).backward()
        reference.step()
    optimizer.wait()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


def test_a_copy_of_the_model_has_no_hooks(make: Make) -> None:
    """A copied or pickled model runs by itself; while updates are under way it would be old, so copying raises."""
    model, optimizer = small(make)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match=r"wait\(\)"):
            copying(model)
    optimizer.wait()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(loss_of(twin, 1), loss_of(model, 1))


def test_what_is_refused(make: Make) -> None:
    """step(wait=False) without attach_forward(), and attach_forward() of something else, before anything changes."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = make(model.parameters())
    loss_of(model, 0).backward()
    with pytest.raises(ValueError, match="attach_forward"):
        optimizer.step(wait=False)
    with pytest.raises(TypeError, match="Module"):
        optimizer.attach_forward(model.weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter"):
        optimizer.attach_forward(torch.nn.Linear(2, 2))
    with pytest.raises(mlpo.NotOfferedError, match="DataParallel"):
        optimizer.attach_forward(torch.nn.DataParallel(model))
    assert len(optimizer.state) == 0


def test_the_last_update_is_not_lost(make: Make) -> None:
    """close() waits for updates; those of an optimizer that nobody holds are waited for by the model."""
    for close in (True, False):
        model, optimizer = small(make)
        loss_of(model, 0)
        before = step_of(model, optimizer)
        gone = weakref.ref(optimizer)
        if close:
            optimizer.close()
        del optimizer
        gc.collect()
        if not close:
            loss_of(model, 0)
            gc.collect()
        assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before))
        assert gone() is None


def test_interrupted_first_pass(make: Make) -> None:
    """Ctrl-C in the forward pass that sees who uses what: nothing of it is left, and the next one sees it."""
    model = fresh()
    optimizer = make(model.parameters())
    optimizer.attach_forward(model)
    interrupt = model.blocks[1].norm.register_forward_hook(raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model, 0)
    interrupt.remove()
    plain = fresh()
    reference = make(plain.parameters())
    train(model, optimizer, 4, wait=False)
    train(plain, reference, 4, wait=True)
    assert torch._C._len_torch_function_stack() == 0
    optimizer.wait()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_interrupt_while_parameters_are_written(make: Make, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Ctrl-C between two parameters of a subgroup: what was copied before is no write of the trainer, and the next wait
    copies all."""
    model, plain = fresh(), fresh()
    optimizer = make(model.parameters(), subgroup_elements=100_000)
    reference = make(plain.parameters())
    optimizer.attach_forward(model)
    train(model, optimizer, 2, wait=False)
    original, copies = _binding.copied, itertools.count()

    def interrupted(*args: Any) -> Any:
        result = original(*args)
        if next(copies) == nth:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(_binding, "copied", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.wait()
    optimizer.wait()
    train(model, optimizer, 2, wait=False, first=2)
    train(plain, reference, 4, wait=True)
    optimizer.wait()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


def raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_closed_optimizer_leaves_the_model_alone(make: Make) -> None:
    """close() takes the hooks off, so the model runs on."""
    model, optimizer = small(make)
    optimizer.wait()
    optimizer.close()
    loss_of(model, 0).backward()
    assert all(p.grad is not None for p in model.parameters())
