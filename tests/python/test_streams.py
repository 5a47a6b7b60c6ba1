"""OffloadAdamW on slots whose copies are made by streams, as on a GPU: the judge is the same training without, bit by
bit. How these streams do it on CUDA: test_cuda.py."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any, Callable, Iterator

import mlpo
import pytest
import torch
from host_streams import on_streams
from mlpo.torch import OffloadAdamW
from mlpo.torch._steps import Step
from running_daemon import SMALL_BLOCKS, Daemon
from torch.nn import Parameter
from word_models import Model, assert_same, fresh, loss_of, train

Make = Callable[..., OffloadAdamW]


def train_on(model: torch.nn.Module, optimizer: OffloadAdamW, steps: int, first: int = 0, passes: int = 1) -> None:
    """As word_models.train(), without waiting for updates."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for number in range(passes):
            (loss_of(model, step * passes + number) / passes).backward()
        optimizer.step(wait=False)


def started(make: Make, **options: Any) -> tuple[Model, OffloadAdamW]:
    """A model after two steps and a forward pass, attached, one subgroup a parameter."""
    model = fresh()
    optimizer = make(model.named_parameters(), subgroup_elements=1, lr=0.1, **options)
    optimizer.attach_forward(model)
    train_on(model, optimizer, 2)
    loss_of(model, 0)
    return model, optimizer


@contextlib.contextmanager
def stopped_at_updates(daemon: Daemon) -> Iterator[None]:
    """The daemon stops at the first update that is submitted, until the end."""
    original = mlpo.Subgroup.submit_update

    def submit(subgroup: mlpo.Subgroup, *arguments: Any, **options: Any) -> Any:
        daemon.pause()
        return original(subgroup, *arguments, **options)

    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(mlpo.Subgroup, "submit_update", submit)
            yield
    finally:
        daemon.resume()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["plain", "reentrant"])
@pytest.mark.parametrize("mode", ["at-step", "overlap", "in-backward"])
@pytest.mark.parametrize("passes", [1, 2])
def test_no_bit_changes(make: Make, passes: int, mode: str, kind: str, dtype: torch.dtype) -> None:
    """Parameters and all state: with gradients taken at step() and in backward, added up over passes and within one,
    and with step() and step(wait=False)."""
    options: dict[str, Any] = {"subgroup_elements": 700}
    if mode != "at-step":
        options.update(gradient_accumulation_steps=passes, overlap=True, update_in_backward=mode == "in-backward")
    plain = fresh(kind, dtype)
    reference = make(plain.parameters(), **options)
    train(plain, reference, 5, passes)
    for wait in (True, False):
        with on_streams() as streams:
            model = fresh(kind, dtype)
            optimizer = make(model.parameters(), **options)
            if wait:
                train(model, optimizer, 5, passes)
            else:
                optimizer.attach_forward(model)
                train_on(model, optimizer, 5, passes=passes)
            optimizer.wait()
            assert_same(model, optimizer, plain, reference)
            subgroups = len(optimizer.subgroups)
            assert subgroups > 2 and streams.submitted >= 5 * subgroups
            assert optimizer.sent_in_backward == reference.sent_in_backward
            assert (optimizer.updated_in_backward > 0) == (mode == "in-backward")


def test_values_are_fetched_behind_their_updates(make: Make, daemon_of: Any) -> None:
    """step(wait=False) returns while the daemon is stopped, with every parameter's copy asked for; what uses parameters
    then has the new ones."""
    with on_streams() as streams:
        model, optimizer = started(make)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss_of(model, 3).backward()
        optimizer.wait()
        asked = streams.fetched
        with stopped_at_updates(daemon_of(SMALL_BLOCKS)):
            optimizer.step(wait=False)
            assert streams.fetched - asked == len(optimizer.subgroups)
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
        loss_of(model, 3)
        assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before))


@pytest.mark.parametrize("overlap", [False, True], ids=["at-step", "overlap"])
def test_an_update_that_fails_is_raised_before_the_next_gradient_goes(
    make: Make, daemon_of: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Nothing hangs, the forward pass has the values before the update, and the error says that; a pass without
    gradients does not compute with them. Training goes on from what is loaded."""
    with on_streams() as streams:
        model, optimizer = started(make, overlap=overlap)
        saved = optimizer.state_dict()
        values = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with monkeypatch.context() as patched:  # the daemon refuses what the optimizer would have refused
            patched.setattr(Step, "gradients_are_finite", lambda step: [p.gradient.result() for p in step.parts] != [])
            (loss_of(model, 5) * float("inf")).backward()
            with stopped_at_updates(daemon_of(SMALL_BLOCKS)):
                optimizer.step(wait=False)
        loss = loss_of(model, 5)
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), values))
        submitted = streams.submitted
        optimizer.zero_grad()
        with pytest.raises(mlpo.NonFiniteGradientError, match="parameters before this update"):
            loss.backward()
            optimizer.step(wait=False)
        assert streams.submitted == submitted
        with torch.no_grad(), pytest.raises(mlpo.NonFiniteGradientError):
            loss_of(model, 5)
        optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        plain = fresh()
        plain.load_state_dict({name: value for (name, _), value in zip(plain.named_parameters(), values)})
        reference = make(plain.named_parameters(), lr=0.1)
        reference.load_state_dict(saved)
        train_on(model, optimizer, 2, first=6)
        train(plain, reference, 2, first=6)
        optimizer.wait()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


def test_writing_to_a_parameter_under_way_raises(make: Make) -> None:
    """Whichever of the two values it holds is the one that training goes on from."""
    with on_streams():
        model, optimizer = started(make)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        optimizer.step(wait=False)
        with torch.no_grad():
            model.blocks[1].bias.fill_(0.5)
        with pytest.raises(RuntimeError, match=r"parameter blocks\.1\.bias was written"):
            loss_of(model, 2)
        optimizer.wait()
        held = model.blocks[1].bias.detach().clone()
        optimizer.zero_grad()
        (model.blocks[1].bias.sum() * 0.0).backward()
        optimizer.param_groups[0].update(weight_decay=0.0, lr=0.0)
        optimizer.step()
        assert torch.equal(model.blocks[1].bias, held), "a value came back that it did not hold"


def test_torch_notices_that_parameters_changed(make: Make) -> None:
    """A graph from before the step cannot be used after it, as with torch's optimizers."""
    with on_streams():
        weight = Parameter(torch.randn(30, 20))
        optimizer = make([weight])
        loss = (weight * weight).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_any_strides_replaced_weights_and_what_is_loaded(make: Make, tmp_path: pathlib.Path) -> None:
    """Transposed parameters; weights that are replaced between steps; save() and load() into other slots."""
    made = []
    for streams in (False, True):
        torch.manual_seed(8)
        weight, bias = Parameter(torch.randn(40, 30).t()), Parameter(torch.randn(30))
        directory = tmp_path / str(streams)
        directory.mkdir()

        def run(weight: Any = weight, bias: Any = bias, directory: pathlib.Path = directory) -> list[torch.Tensor]:
            optimizer = make([("w", weight), ("b", bias)])

            def step(number: int) -> None:
                torch.manual_seed(number)
                optimizer.zero_grad()
                (weight.sin() * torch.randn(30, 40) + bias[:, None].sin()).sum().backward()
                optimizer.step()

            for number in range(3):
                step(number)
            with torch.no_grad():
                weight.data.mul_(0.5)
            step(3)
            saved = optimizer.save(str(directory))
            kept = [p.detach().clone() for p in (weight, bias)]
            step(4)
            assert saved.result(60)
            optimizer.load(str(directory))
            assert all(torch.equal(p, old) for p, old in zip((weight, bias), kept))
            step(4)
            optimizer.close()
            return [weight.detach(), bias.detach()]

        if streams:
            with on_streams():
                made.append(run())
        else:
            made.append(run())
    assert all(torch.equal(p, q) for p, q in zip(*made))
