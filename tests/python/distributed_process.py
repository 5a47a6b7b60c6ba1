"""One rank: python distributed_process.py DIRECTORY CASE..., started by test_distributed.py with RANK, WORLD_SIZE and
MLPO_SOCKET set. Runs the cases of these names and says which have passed; ends at the first that does not."""

import contextlib
import errno
import itertools
import os
import pathlib
import sys
import time
import warnings
from typing import Any, Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import mlpo  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from mlpo.checkpoints import find  # noqa: E402
from mlpo.torch import OffloadAdamW, _optimizer  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402

STEPS = 4
_numbers = itertools.count()
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


def build(seed: int = 3) -> torch.nn.Module:
    """Rows that two ranks share unequally, a tensor of one row (its second shard is empty), and biases."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 1)
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = batch(step, rank)
    return (model(x) - y).square().mean()


def offload(params: Any, **options: Any) -> OffloadAdamW:
    return OffloadAdamW(params, name=f"optimizer-{next(_numbers)}", **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def reference(steps: int, clip: float = 0.0) -> tuple[torch.nn.Module, torch.optim.AdamW, list[float]]:
    """torch's AdamW in one process on the mean of both ranks' gradients."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **HYPER)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        sum(loss_of(model, step, rank) / 2 for rank in range(2)).backward()
        if clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return model, optimizer, norms


def near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(whole(ours.detach()), theirs.detach(), rtol=2e-5, atol=2e-6)


def train(model: torch.nn.Module, optimizer: OffloadAdamW, first: int, steps: int, clip: float = 0.0) -> list[float]:
    norms = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        if clip:
            norms.append(float(optimizer.clip_grad_norm_(clip)))
        optimizer.step()
    return norms


def sharded(seed: int = 3) -> torch.nn.Module:
    model = build(seed)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def fsdp2(_: str) -> None:
    """Local shards train as the whole model does in one process, and the norm is that of all shards."""
    theirs, reference_optimizer, norms = reference(STEPS, clip=0.3)
    model = sharded()
    optimizer = offload(model.parameters(), **HYPER)
    found = train(model, optimizer, 0, STEPS, clip=0.3)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(norms), rtol=1e-5, atol=0)
    held = sum(subgroup.numel for subgroup in optimizer.subgroups)
    assert 0 < held < sum(p.numel() for p in theirs.parameters())
    for ours, reference_param in zip(model.parameters(), theirs.parameters()):
        near(ours, reference_param)
    state = optimizer.state_dict()["state"]
    for index, entry in enumerate(reference_optimizer.state_dict()["state"].values()):
        for name in ("exp_avg", "exp_avg_sq"):
            assert type(state[index][name]) is type(next(iter(model.parameters())).data)
            near(state[index][name], entry[name])
        assert state[index]["step"] == entry["step"] == STEPS


def overlap(directory: str) -> None:
    """Shards are sent in the backward pass, with the bits of a run that sends them at step(), and the norm is that of
    all shards; FSDP2 adds passes up, those that it reduces too, in any number from step to step where they are held
    back. Parameters that are not sharded are refused."""
    norms = reference(STEPS, clip=0.3)[2]
    made: list[torch.nn.Module] = []
    sent: list[bool] = []
    for overlap in (False, True):
        model = sharded()
        optimizer = OffloadAdamW(model.parameters(), **HYPER, overlap=overlap, name=str(overlap), subgroup_elements=20)
        found = train(model, optimizer, 0, STEPS, clip=0.3)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(norms), rtol=1e-5, atol=0)
        assert optimizer.sent_in_backward == overlap * len(optimizer.subgroups)
        for step in range(2):
            optimizer.zero_grad()
            model.set_requires_gradient_sync(False)
            loss_of(model, step, dist.get_rank()).backward()
            model.set_requires_gradient_sync(True)
            loss_of(model, 10 + step, dist.get_rank()).backward()
            optimizer.step()
        made.append(model)
        model = sharded()
        optimizer = offload(model.parameters(), **HYPER, overlap=overlap, subgroup_elements=20)
        for passes, hold in ((3, False), (3, False), (3, False), (2, True), (4, True), (1, False)):
            optimizer.zero_grad()
            for number in range(passes):
                with optimizer.no_sync() if hold and number < passes - 1 else contextlib.nullcontext():
                    loss_of(model, 20 + number, dist.get_rank()).backward()
            optimizer.step()
            if passes == 3:
                sent.append(optimizer.sent_in_backward > 0)
        made.append(model)
    for ours, theirs in zip(made[:2], made[2:]):
        for p, q in zip(ours.parameters(), theirs.parameters()):
            assert torch.equal(p.to_local(), q.to_local())
    assert sent == [False, False, False, False, True, True], sent
    whole = torch.nn.Parameter(torch.ones(3))
    unreduced = offload([whole], overlap=True, replicas=True)
    for call, text in (
        (lambda: whole.sum().backward(), "call optimizer.attach_ddp(model)"),
        (lambda: optimizer.attach_forward(model), "without wait=False"),
    ):
        try:
            call()
        except mlpo.NotOfferedError as error:
            assert text in str(error)
        else:
            raise AssertionError(f"not refused: {text}")
    unreduced.zero_grad()


def update_in_backward(_: str) -> None:
    """Shards are updated in the backward pass, with the bits of step(); it needs nonfinite="apply". A rank that fails
    before its update leaves the others with what they have updated, and their error says so."""
    made: list[torch.nn.Module] = []
    for early in (False, True):
        model = sharded()
        optimizer = offload(
            model.parameters(), **HYPER, update_in_backward=early, nonfinite="apply", subgroup_elements=20
        )
        train(model, optimizer, 0, STEPS)
        assert optimizer.updated_in_backward == early * len(optimizer.subgroups)
        made.append(model)
    for p, q in zip(*(model.parameters() for model in made)):
        assert torch.equal(p.to_local(), q.to_local())
    saved = optimizer.state_dict()
    optimizer.zero_grad()
    loss_of(model, STEPS, dist.get_rank()).backward()
    if dist.get_rank() == 0:
        optimizer.param_groups[0]["lr"] = -1.0
    try:
        optimizer.step()
        raise AssertionError("nothing was raised")
    except (ValueError, mlpo.MlpoError) as error:
        count = len(optimizer.subgroups)
        text = "learning rate" if dist.get_rank() == 0 else f"{count} of {count} subgroups were already updated"
        assert text in str(error), error
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    try:
        offload(model.parameters(), update_in_backward=True)
    except mlpo.NotOfferedError as error:
        assert 'without nonfinite="apply"' in str(error), error
    else:
        raise AssertionError("not refused")


def checkpoint(directory: str) -> None:
    """torch's distributed checkpoint: saved after two steps, loaded into another model, which goes on with its bits."""
    model = sharded()
    optimizer = offload(model.parameters(), **HYPER)
    train(model, optimizer, 0, 2)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=directory)
    train(model, optimizer, 2, 2)

    other = sharded(seed=9)
    resumed = offload(other.parameters(), **HYPER)
    found = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, resumed)}
    dcp.load(found, checkpoint_id=directory)
    other.load_state_dict(found["model"])
    set_optimizer_state_dict(other, resumed, found["optimizer"])
    train(other, resumed, 2, 2)
    for ours, theirs in zip(other.parameters(), model.parameters()):
        assert torch.equal(ours.to_local(), theirs.to_local())

    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    resumed.zero_grad()  # torch fills the state of a new optimizer only where there are no gradients
    third = offload(other.parameters(), **HYPER)
    set_optimizer_state_dict(
        other, third, full if dist.get_rank() == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )  # fmt: skip
    x, y = optimizer.state_dict()["state"], third.state_dict()["state"]
    for index, entry in x.items():
        assert entry["step"] == y[index]["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(entry[name].to_local(), y[index][name].to_local()), (index, name)


def nonfinite(_: str) -> None:
    """An infinity on one rank's shard makes all ranks skip; a rank that fails before the update takes nobody along."""
    model = sharded()
    optimizer = offload(model.parameters(), **HYPER)
    train(model, optimizer, 0, 1)
    before = [p.to_local().clone() for p in model.parameters()]
    loss_of(model, 1, dist.get_rank()).backward()
    if dist.get_rank() == 1:
        model[0].weight.grad.to_local()[0, 0] = float("inf")
    try:
        optimizer.step()
        raise AssertionError("nothing was raised")
    except mlpo.NonFiniteGradientError as error:
        assert error.parameters == (("0",) if dist.get_rank() == 1 else ()), error.parameters
        assert "another rank" in str(error) or dist.get_rank() == 1
    optimizer.zero_grad()
    loss_of(model, 1, dist.get_rank()).backward()
    group = optimizer.param_groups[0]
    if dist.get_rank() == 0:
        group["lr"] = -1.0
    try:
        optimizer.step()
        raise AssertionError("nothing was raised")
    except (ValueError, mlpo.MlpoError) as error:
        assert ("learning rate" if dist.get_rank() == 0 else "another rank failed") in str(error), error
    assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), before))
    group["lr"] = HYPER["lr"]
    train(model, optimizer, 1, STEPS - 1)
    for ours, theirs in zip(model.parameters(), reference(STEPS)[0].parameters()):
        near(ours, theirs)


def scaler(_: str) -> None:
    """GradScaler with shards: an overflow on one rank is skipped by both, without an error."""
    model = sharded()
    optimizer = offload(model.parameters(), **HYPER)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        for broken in (True, False):
            optimizer.zero_grad()
            grad_scaler.scale(loss_of(model, step, dist.get_rank())).backward()
            if broken and dist.get_rank() == 1:
                model[0].weight.grad.to_local()[0, 0] = float("inf")
            grad_scaler.step(optimizer)
            grad_scaler.update()
    assert grad_scaler.get_scale() == 1024.0 / 2**STEPS
    for ours, theirs in zip(model.parameters(), reference(STEPS)[0].parameters()):
        near(ours, theirs)


@contextlib.contextmanager
def warned_of_copies(expected: bool) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
    copies = [each for each in warned if "2 ranks of torch.distributed keep a whole copy" in str(each.message)]
    assert len(copies) == expected, [str(each.message) for each in warned]


def replicas(_: str) -> None:
    """DDP and hybrid sharding keep copies: a warning tells how many, replicas=True says that they are meant."""
    theirs, _, norms = reference(STEPS, clip=0.3)
    model = torch.nn.parallel.DistributedDataParallel(build())
    optimizer = offload(model.parameters(), **HYPER)
    with warned_of_copies(True):
        found = train(model, optimizer, 0, STEPS, clip=0.3)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(norms), rtol=1e-5, atol=0)
    for ours, reference_param in zip(model.parameters(), theirs.parameters()):
        near(ours, reference_param)

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for meant in (False, True):
        hybrid = fully_shard(build(), mesh=mesh)
        optimizer = offload(hybrid.parameters(), **HYPER, replicas=meant)
        with warned_of_copies(not meant):
            found = train(hybrid, optimizer, 0, STEPS, clip=0.3)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(norms), rtol=1e-5, atol=0)
        for ours, reference_param in zip(hybrid.parameters(), theirs.parameters()):
            near(ours, reference_param)


def pieces_by_hand(_: str) -> None:
    """Plain tensors of which each rank has its own: the norm is over both with process_group."""
    rank = dist.get_rank()
    w = torch.nn.Parameter(torch.zeros(3))
    optimizer = offload([w], lr=1.0, weight_decay=0.0, replicas=True)
    w.grad = torch.tensor([3.0, 0.0, 0.0]) * (rank + 1)
    assert float(optimizer.clip_grad_norm_(1.0)) == 3.0 * (rank + 1)
    optimizer.zero_grad()
    w.grad = torch.tensor([3.0, 0.0, 0.0]) * (rank + 1)
    norm = optimizer.clip_grad_norm_(1.0, process_group=dist.group.WORLD)
    torch.testing.assert_close(norm, torch.tensor(45.0).sqrt())
    largest = optimizer.clip_grad_norm_(100.0, norm_type=float("inf"), process_group=dist.group.WORLD)
    torch.testing.assert_close(largest, torch.tensor(6.0) / 45.0**0.5)  # of what the first call left


def layouts(_: str) -> None:
    """Partial sums are no parameters, a state lies on the mesh as its parameter, and a gradient is brought there."""
    mesh = init_device_mesh("cpu", (2,))
    try:
        offload([torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))])
        raise AssertionError("nothing was raised")
    except TypeError as error:
        assert "partial sums" in str(error), error
    w = torch.nn.Parameter(distribute_tensor(torch.zeros(5), mesh, [Shard(0)]))
    optimizer = offload([w], lr=0.5, weight_decay=0.0)
    moment = torch.ones(5)
    state = {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": moment}
    try:
        optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
        raise AssertionError("nothing was raised")
    except ValueError as error:
        assert "not distributed" in str(error), error
    gradient = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
    w.grad = distribute_tensor(gradient, mesh, [Replicate()])
    norm = optimizer.clip_grad_norm_(1e9)
    torch.testing.assert_close(norm, gradient.norm())
    optimizer.step()
    torch.testing.assert_close(w.detach().full_tensor(), -0.5 * gradient.sign())
    w.grad = gradient
    try:
        optimizer.step()
        raise AssertionError("nothing was raised")
    except TypeError as error:
        assert "only one is a DTensor" in str(error), error


def connected(name: str) -> mlpo.Client:
    """A client of its own for what a case saves or loads: a checkpoint has all that a client has registered."""
    return mlpo.connect(job=f"{os.environ['MLPO_JOB']}-{name}")


def empty_folder(directory: str, name: str) -> pathlib.Path:
    """The same new folder on both ranks."""
    place = pathlib.Path(directory).with_name(name)
    if dist.get_rank() == 0:
        place.mkdir()
    dist.barrier()
    return place


def raised(call: Callable[[], Any], kinds: Any = (mlpo.MlpoError, ValueError)) -> Any:
    try:
        call()
    except kinds as error:
        return error
    raise AssertionError("nothing was raised")


def own_checkpoint(directory: str) -> None:
    """save() while training goes on, and load() into shards of other weights, which go on with the same bits. A rank
    without elements of a parameter, or without any step, saves under the same tag as the others."""
    place = empty_folder(directory, "own")
    with connected("saving") as first, connected("loading") as second:
        model = sharded()
        optimizer = offload(model.parameters(), client=first, **HYPER)
        train(model, optimizer, 0, 2)
        saved = optimizer.save(str(place))
        assert (saved.tag, saved.step) == ("step-2", 2)
        train(model, optimizer, 2, 2)
        saved.result(60)
        dist.barrier()
        assert saved.is_complete()
        other = sharded(seed=9)
        resumed = offload(other.parameters(), client=second, subgroup_elements=20, **HYPER)
        loaded = resumed.load(str(place))
        assert (loaded.tag, loaded.step, loaded.world_size, loaded.attempt) == ("step-2", 2, 2, saved.attempt)
        assert all(float(resumed.state[p]["step"]) == 2 for p in other.parameters())
        train(other, resumed, 2, 2)
        for ours, theirs in zip(other.parameters(), model.parameters()):
            assert torch.equal(ours.to_local(), theirs.to_local())
    with connected("unequal") as client:
        w = torch.nn.Parameter(torch.zeros(3))
        optimizer = offload([(f"of-{dist.get_rank()}", w)], client=client, replicas=True, **HYPER)
        for _ in range(3 if dist.get_rank() == 0 else 0):
            w.grad = torch.ones(3)
            optimizer.step()
        saved = optimizer.save(str(place))
        assert saved.tag == "step-3"
        saved.result(60)
        dist.barrier()
        assert saved.is_complete()


def loads_one_checkpoint(directory: str) -> None:
    """Another checkpoint becomes complete after rank 0 has found the newest, and before the other rank looks."""
    place = empty_folder(directory, "newest")
    hidden = place.with_name("newest-hidden")
    find_it = _optimizer.begin_restore

    def found_late(*arguments: Any) -> Any:
        deadline = time.monotonic() + 60
        while dist.get_rank() == 1 and not (place / "step-2").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        restoring = find_it(*arguments)
        if dist.get_rank() == 0:
            hidden.rename(place / "step-2")
        return restoring

    with connected("newest") as first, connected("newest-loading") as second:
        model = sharded()
        optimizer = offload(model.parameters(), client=first, **HYPER)
        values = []
        for step in range(2):
            train(model, optimizer, step, 1)
            optimizer.save(str(place)).result(60)
            values.append([p.to_local().clone() for p in model.parameters()])
        dist.barrier()
        if dist.get_rank() == 0:
            (place / "step-2").rename(hidden)
        dist.barrier()
        other = sharded(seed=9)
        resumed = offload(other.parameters(), client=second, **HYPER)
        _optimizer.begin_restore = found_late
        try:
            loaded = resumed.load(str(place))
        finally:
            _optimizer.begin_restore = find_it
        assert (loaded.tag, loaded.step) == ("step-1", 1), loaded
        assert all(torch.equal(p.to_local(), value) for p, value in zip(other.parameters(), values[0]))
        assert resumed.load(str(place)).tag == "step-2"
        assert all(torch.equal(p.to_local(), value) for p, value in zip(other.parameters(), values[1]))


def fails(call: Callable[[], Any], failing: int, code: int) -> None:
    """On one rank with an errno, on the other one with what names the first."""
    error = raised(call)
    assert isinstance(error, mlpo.MlpoError), error
    if dist.get_rank() == failing:
        assert error.errno == code, error
    else:
        assert error.errno == errno.ECANCELED and f"rank {failing} of 2" in str(error), error
    dist.barrier()


def one_rank_cannot_save(directory: str) -> None:
    """A rank that fails, before or while it begins, takes the others along at once; nothing of theirs stays, and the
    next save works. The same for load()."""
    place = empty_folder(directory, "one-fails")
    absent = str(place / "absent")
    rank = dist.get_rank()
    with connected("one-fails") as client, connected("one-fails-loading") as second:
        model = sharded()
        optimizer = offload(model.parameters(), client=client, **HYPER)
        train(model, optimizer, 0, 1)
        resumed = offload(sharded(seed=9).parameters(), client=second, **HYPER)
        fails(lambda: resumed.load(str(place)), 0, errno.ENOENT)
        for failing in range(2):
            fails(lambda: optimizer.save(absent if rank == failing else str(place)), failing, errno.ENOENT)
            assert not list(place.iterdir())
            dist.barrier()
        error = raised(lambda: optimizer.save(str(place), f"tag-{rank}"))
        assert "rank 1 saves with tag='tag-1', rank 0 with 'tag-0'" in str(error), error
        optimizer.save(str(place)).result(60)
        dist.barrier()
        assert [(found.tag, found.complete) for found in find(place)] == [("step-1", True)]
        fails(lambda: resumed.load(absent if rank == 1 else str(place)), 1, errno.ENOENT)
        assert resumed.load(str(place)).tag == "step-1"
        # Before it begins: two tensors of one name.
        if rank == 1:
            client.subgroup("double", tensors=[mlpo.TensorSpec("0", (3,))])
        error = raised(lambda: optimizer.save(str(place), "double"))
        if rank == 1:
            assert isinstance(error, ValueError) and "named_parameters" in str(error), error
        else:
            assert isinstance(error, mlpo.MlpoError) and "named_parameters" in str(error), error
        dist.barrier()
        assert not (place / "double").exists()


def saves_over_the_last_one(directory: str) -> None:
    """While one rank still saves its part, the next save() under the tag is refused before any rank begins, and so
    takes nothing away; where a part has only to get its names, with a daemon of another user, it gets them before."""
    place, rank = empty_folder(directory, "over"), dist.get_rank()
    with connected("over") as client:
        model = sharded()
        optimizer = offload(model.parameters(), client=client, **HYPER)
        train(model, optimizer, 0, 1)
        client.daemon_uid += 1
        saved = optimizer.save(str(place), "rolling")
        deadline = time.monotonic() + 60
        while not saved.done():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if rank == 0:
            assert not saved.result(60)
        dist.barrier()
        if rank == 1:
            saved._end.done = lambda: False  # type: ignore[method-assign]
        fails(lambda: optimizer.save(str(place), "rolling", overwrite=True), 1, errno.EBUSY)
        if rank == 1:
            del vars(saved._end)["done"]
        dist.barrier()
        optimizer.save(str(place), "rolling", overwrite=True).abandon()
        dist.barrier()
        assert saved.is_complete() and saved.result(60) == (rank == 1)
        assert optimizer.load(str(place)).attempt == saved.attempt


def main(cases: dict[str, Callable[[str], None]]) -> None:
    """Runs the cases that the arguments name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in sys.argv[2:]:
        cases[case](sys.argv[1])
        dist.barrier()
        print(f"{case} passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(globals())
