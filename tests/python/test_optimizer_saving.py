"""OffloadAdamW.save and load: through the daemon's checkpoints a run goes on with the bits of one that never stopped.

Other numbers of ranks, packings, paths and what is cut: test_saving.py, whose checkpoints are the same.
"""

from __future__ import annotations

import errno
import pathlib
from typing import Any, Callable

import mlpo
import pytest
import torch
from conftest import new_job
from mlpo import _rests
from mlpo.checkpoints import Checkpoint, find
from mlpo.torch import OffloadAdamW
from models import backward, build, groups
from running_daemon import SMALL_BLOCKS, Daemon, Layout
from torch.nn import Parameter

Make = Callable[..., OffloadAdamW]


def train(model: Any, optimizer: OffloadAdamW, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        backward(model, step, clip=optimizer.clip_grad_norm_)  # torch's has no gradients with overlap=True
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlap", [False, True], ids=["at-step", "overlap"])
def test_c17_what_is_loaded_goes_on_as_if_it_had_not_stopped(
    make: Make, tmp_path: pathlib.Path, dtype: torch.dtype, overlap: bool
) -> None:
    """Saved in the middle, while steps go on; loaded into a model of other weights, packed otherwise."""
    model = build(4, dtype)
    optimizer = make(groups(model), overlap=overlap)
    train(model, optimizer, 0, 5)
    saved = optimizer.save(str(tmp_path), "five")
    values = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer, 5, 5)
    assert saved.step == 5 and saved.result(60)
    other = build(99, dtype)
    resumed = make(groups(other), overlap=overlap, subgroup_elements=64)
    loaded = resumed.load(str(tmp_path), "five")
    assert (loaded.tag, loaded.step, loaded.world_size) == ("five", 5, 1)
    for param, value in zip(other.parameters(), values):
        assert torch.equal(param, value)
    train(other, resumed, 5, 5)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)
    x, y = optimizer.state_dict()["state"], resumed.state_dict()["state"]
    assert x.keys() == y.keys()
    for key in x:
        assert x[key].keys() == y[key].keys()
        assert all(torch.equal(x[key][name], y[key][name]) for name in x[key]), key


def test_weights_that_were_replaced_are_in_it(make: Make, tmp_path: pathlib.Path) -> None:
    """As the next step would have noticed them; and without any step there is a checkpoint of step 0."""
    w = Parameter(torch.arange(6, dtype=torch.bfloat16))
    optimizer = make([w])
    assert optimizer.save(str(tmp_path)).result(60)
    with Checkpoint(tmp_path, "step-0") as checkpoint:
        assert checkpoint.read("0").tolist() == [0, 1, 2, 3, 4, 5]
    w.data.fill_(3)
    assert optimizer.save(str(tmp_path), "replaced").result(60)
    with Checkpoint(tmp_path, "replaced") as checkpoint:
        assert checkpoint.read("0").tolist() == [3] * 6
    w.data.zero_()
    optimizer.load(str(tmp_path), "replaced")
    assert w.tolist() == [3] * 6 and not optimizer.state


def test_a_failed_step_before_is_finished_and_a_load_forgets_it(make: Make, tmp_path: pathlib.Path) -> None:
    """NaN in a gradient: nothing changed, and what is saved is the state before it."""
    w = Parameter(torch.ones(4))
    optimizer = make([w], lr=0.5)
    w.grad = torch.ones(4)
    optimizer.step()
    w.grad = torch.full((4,), float("nan"))
    with pytest.raises(mlpo.NonFiniteGradientError):
        optimizer.step()
    before = w.detach().clone()
    assert optimizer.save(str(tmp_path)).result(60)
    w.grad = torch.ones(4)
    optimizer.step()
    assert not torch.equal(w, before)
    optimizer.load(str(tmp_path))
    assert torch.equal(w, before) and float(optimizer.state[w]["step"]) == 1


def test_a_cut_save_goes_with_the_next_run(
    daemon_of: Callable[[Layout], Daemon],
    connect_to: Callable[..., mlpo.Client],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its part is whole, and its tag is used once: the first save of a later run of the job takes it away, when there
    is a complete one that began after it, and is some minutes old."""
    job = new_job()

    def save(tag: str) -> None:
        client = connect_to(daemon_of(SMALL_BLOCKS), job=job)
        optimizer = OffloadAdamW([Parameter(torch.ones(4))], client=client)
        assert optimizer.save(str(tmp_path), tag).result(60)
        client.close()

    with connect_to(daemon_of(SMALL_BLOCKS), job=job, rank=0, world_size=2) as one:
        one.subgroup("w", 4)
        assert not one.checkpoint(str(tmp_path), "step-1", 0, attempt=bytes(range(16))).result(60)
    save("step-2")
    assert sorted((found.tag, found.complete) for found in find(tmp_path)) == [("step-1", False), ("step-2", True)]
    save("step-3")
    assert [found.tag for found in find(tmp_path) if not found.complete] == ["step-1"]
    monkeypatch.setattr(_rests, "_REMEMBERED_NS", -1)
    save("step-4")
    assert all(found.complete for found in find(tmp_path))
    assert sorted(found.tag for found in find(tmp_path)) == ["step-2", "step-3", "step-4"]


def test_what_cannot_be_saved_or_loaded_says_why(
    make: Make, daemon_of: Callable[[Layout], Daemon], connect_to: Callable[..., mlpo.Client], tmp_path: pathlib.Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    optimizer = make([Parameter(torch.ones(4))])
    with pytest.raises(mlpo.MlpoError) as raised:
        optimizer.load(str(empty))
    assert raised.value.errno == errno.ENOENT
    assert optimizer.save(str(empty), "t").result(60)
    with pytest.raises(mlpo.MlpoError) as raised:
        optimizer.save(str(empty), "t")
    assert raised.value.errno == errno.EEXIST
    stranger = make([("stranger", Parameter(torch.ones(4)))])
    with pytest.raises(mlpo.MlpoError, match="stranger"):
        stranger.load(str(empty))
    # Two optimizers on one client whose parameters have no names.
    client = connect_to(daemon_of(SMALL_BLOCKS))
    two = [OffloadAdamW([Parameter(torch.ones(4))], client=client, name=name) for name in "ab"]
    for each in two:
        each.reload_masters()  # registers
    with pytest.raises(ValueError, match="named_parameters"):
        two[0].save(str(empty), "two")
    # Ranks that cannot ask each other what to load.
    alone = OffloadAdamW([Parameter(torch.ones(4))], client=connect_to(daemon_of(SMALL_BLOCKS), rank=0, world_size=2))
    with pytest.warns(RuntimeWarning, match="attempt="), pytest.raises(mlpo.MlpoError) as raised:
        alone.load(str(empty), "absent")
    assert raised.value.errno == errno.ENOENT
    optimizer.close()
    with pytest.raises(ValueError, match="closed"):
        optimizer.save(str(empty), "late")
