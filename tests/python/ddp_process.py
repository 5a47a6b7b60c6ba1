"""One rank, as distributed_process.py: DistributedDataParallel with overlap=True and with shard_group=, and how far
training on two ranks goes from a run in FP64."""

import errno
import pathlib
import statistics
import sys
import warnings
from typing import Any, Callable, Optional

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import mlpo  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from distributed_process import (  # noqa: E402
    HYPER,
    STEPS,
    build,
    connected,
    empty_folder,
    loss_of,
    main,
    near,
    offload,
    raised,
    reference,
)
from mlpo.torch import OffloadAdamW  # noqa: E402
from mlpo.torch._steps import Step  # noqa: E402
from mlpo.torch._windows import is_taken  # noqa: E402
from models import HYPER as TWO_GROUPS  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

Pass = Callable[[DDP, OffloadAdamW, int], None]  # all backward passes of a step


def ddp(module: Optional[torch.nn.Module] = None, **options: Any) -> DDP:
    """In buckets of a few hundred bytes, so that several are reduced during a backward pass."""
    return DDP(build() if module is None else module, bucket_cap_mb=0.0003, **options)


def one_pass(model: DDP, optimizer: OffloadAdamW, step: int) -> None:
    loss_of(model, step, dist.get_rank()).backward()


def trained(
    passes: Pass, *, steps: int = 5, module: Callable[[], torch.nn.Module] = build, clip: float = 0.0,
    wrapped: Optional[dict[str, Any]] = None, **options: Any,
) -> tuple[DDP, OffloadAdamW]:  # fmt: skip
    """A DDP model after some steps of an OffloadAdamW in small subgroups."""
    model = ddp(module(), **(wrapped or {}))
    optimizer = offload(model.parameters(), **HYPER, subgroup_elements=20, **options)
    optimizer.attach_ddp(model)
    for step in range(steps):
        optimizer.zero_grad()
        passes(model, optimizer, step)
        if clip:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
    return model, optimizer


def assert_same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        assert torch.equal(p, q), name


def assert_replicas_are_equal(model: torch.nn.Module) -> None:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    assert torch.equal(*both)


def overlap(_: str) -> None:
    """Buckets are sent as they are reduced, with the bits of overlap=False, and as torch's AdamW trains."""
    theirs, _, _ = reference(5)
    for wrapped in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        plain, _ = trained(one_pass, replicas=True, wrapped=wrapped)
        model, optimizer = trained(one_pass, replicas=True, overlap=True, wrapped=wrapped)
        assert optimizer.sent_in_backward == len(optimizer.subgroups) > 3, wrapped
        assert_same(model, plain)
        assert_replicas_are_equal(model)
        for p, q in zip(model.parameters(), theirs.parameters()):
            near(p, q)
    plain, _ = trained(one_pass, replicas=True, clip=0.3)
    model, optimizer = trained(one_pass, replicas=True, clip=0.3, overlap=True)
    assert optimizer.sent_in_backward == len(optimizer.subgroups)
    assert_same(model, plain)


def accumulation(_: str) -> None:
    """Passes that DDP holds back, passes that it reduces each, and one that nobody expected: all have the bits of
    overlap=False."""

    def held(model: DDP, optimizer: OffloadAdamW, step: int) -> None:
        with model.no_sync():
            loss_of(model, 3 * step, dist.get_rank()).backward()
        loss_of(model, 3 * step + 1, dist.get_rank()).backward()

    def reduced(model: DDP, optimizer: OffloadAdamW, step: int) -> None:
        for number in range(2):
            loss_of(model, 3 * step + number, dist.get_rank()).backward()

    def one_more(model: DDP, optimizer: OffloadAdamW, step: int) -> None:
        reduced(model, optimizer, step)
        if step == 3:
            assert is_taken(model.module[0].weight.grad) == (optimizer._overlap is not None)
            with model.no_sync():
                loss_of(model, 3 * step + 2, dist.get_rank()).backward()
            loss_of(model, 3 * step + 1, dist.get_rank()).backward()

    def dropped(model: DDP, optimizer: OffloadAdamW, step: int) -> None:
        if step == 3:
            one_pass(model, optimizer, 100 + step)
            assert is_taken(model.module[0].weight.grad) == (optimizer._overlap is not None)
            model.zero_grad()
        one_pass(model, optimizer, step)

    def forgotten(model: DDP, optimizer: OffloadAdamW, step: int) -> None:
        with optimizer.no_sync():
            loss_of(model, 3 * step, dist.get_rank()).backward()
        loss_of(model, 3 * step + 1, dist.get_rank()).backward()

    for passes, count, sent in (
        (held, 1, True), (reduced, 2, True), (one_more, 2, None), (dropped, 1, None), (forgotten, 1, True)
    ):  # fmt: skip
        for view in (False, True):
            wrapped = {"gradient_as_bucket_view": view}
            plain, _ = trained(passes, replicas=True, wrapped=wrapped)
            model, optimizer = trained(
                passes, replicas=True, overlap=True, gradient_accumulation_steps=count, wrapped=wrapped
            )
            assert sent is None or (optimizer.sent_in_backward > 0) == sent, passes
            assert_same(model, plain)
            assert_replicas_are_equal(model)


class Uneven(torch.nn.Module):
    """`second` is used by rank 1 alone in odd steps; the layout of `image`'s weight is not row-major."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.image = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.second(x) if self.both else x
        return x + self.image(x.view(-1, 2, 3, 1).expand(-1, 2, 3, 3)).mean()


def unused(_: str) -> None:
    """Parameters that only one rank uses have their gradient, those that none uses have none; also where another pass
    does not use what the first one did."""

    def passes(model: DDP, optimizer: OffloadAdamW, step: int) -> None:
        model.module.both = not (step % 2 and dist.get_rank() == 0)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).square().mean().backward()

    def two(model: DDP, optimizer: OffloadAdamW, step: int) -> None:
        """`second`: by both ranks in the first pass, by rank 1 alone in the other one, of every third step."""
        passes(model, optimizer, 2 * step)
        if step % 3 == 2:
            passes(model, optimizer, 2 * step + 1)

    wrapped = {"find_unused_parameters": True}
    plain, _ = trained(two, module=Uneven, replicas=True, wrapped=wrapped)
    model, _ = trained(two, module=Uneven, replicas=True, overlap=True, wrapped=wrapped)
    assert_same(model, plain)
    assert_replicas_are_equal(model)
    plain, _ = trained(passes, module=Uneven, replicas=True, wrapped=wrapped)
    model, optimizer = trained(passes, module=Uneven, replicas=True, overlap=True, wrapped=wrapped)
    assert optimizer.sent_in_backward > 0
    assert_same(model, plain)
    assert_replicas_are_equal(model)
    assert torch.equal(model.module.unused, torch.ones(3)) and model.module.unused.grad is None
    assert model.module.image.weight.stride() != model.module.image.weight.contiguous().stride()


class Checkpointed(torch.nn.Module):
    """Reentrant checkpoints: each layer's gradients come, and are reduced, in a backward pass within the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def checkpointed(_: str) -> None:
    plain, _ = trained(one_pass, module=Checkpointed, replicas=True)
    model, optimizer = trained(one_pass, module=Checkpointed, replicas=True, overlap=True)
    assert optimizer.sent_in_backward == len(optimizer.subgroups) > 3
    assert_same(model, plain)
    assert_replicas_are_equal(model)


def update_in_backward(_: str) -> None:
    """Updated in the backward pass, with the same bits; another gradient of what was updated raises."""
    plain, _ = trained(one_pass, replicas=True)
    model, optimizer = trained(one_pass, replicas=True, update_in_backward=True)
    assert optimizer.updated_in_backward == len(optimizer.subgroups)
    assert_same(model, plain)
    saved = optimizer.state_dict()
    optimizer.zero_grad()
    one_pass(model, optimizer, STEPS)
    error = raised(lambda: one_pass(model, optimizer, STEPS), RuntimeError)
    assert "another gradient after the backward pass had updated" in str(error), error
    optimizer.load_state_dict(saved)


def attaching(_: str) -> None:
    """What attach_ddp() refuses, a hook of the user's, two optimizers of one model, and a model without its own."""
    model = ddp()
    first, second = list(model.module[0].parameters()), [*model.module[2].parameters(), *model.module[3].parameters()]
    optimizers = [offload(params, **HYPER, overlap=True, replicas=True) for params in (first, second)]
    error = raised(lambda: one_pass(model, optimizers[0], 0), mlpo.NotOfferedError)
    assert "attach_ddp(model)" in str(error), error
    optimizers[0].zero_grad()

    model = ddp()
    first, second = list(model.module[0].parameters()), [*model.module[2].parameters(), *model.module[3].parameters()]
    optimizers = [offload(params, **HYPER, overlap=True, replicas=True) for params in (first, second)]
    other = ddp()
    error = raised(lambda: optimizers[0].attach_ddp(other), ValueError)
    assert "no parameter" in str(error), error
    optimizers[0].attach_ddp(model, comm_hook=allreduce_hook)
    optimizers[1].attach_ddp(model)
    plain = ddp()
    reference_optimizer = offload(plain.parameters(), **HYPER, replicas=True)
    for step in range(4):
        for each in (*optimizers, reference_optimizer):
            each.zero_grad()
        for each in (model, plain):
            loss_of(each, step, dist.get_rank()).backward()
        for each in (*optimizers, reference_optimizer):
            each.step()
    assert all(each.sent_in_backward for each in optimizers)
    assert_same(model, plain)
    error = raised(lambda: optimizers[0].attach_ddp(model, comm_hook=allreduce_hook), ValueError)
    assert "attached before" in str(error), error
    for each in optimizers:
        each.close()
    model.zero_grad()
    one_pass(model, optimizers[0], 9)
    gradients = [p.grad.clone() for p in model.parameters()]
    plain.zero_grad()
    loss_of(plain, 9, dist.get_rank()).backward()
    assert all(torch.equal(x, p.grad) for x, p in zip(gradients, plain.parameters()))

    taken = ddp()
    taken.register_comm_hook(None, allreduce_hook)
    optimizer = offload(taken.parameters(), overlap=True, replicas=True)
    error = raised(lambda: optimizer.attach_ddp(taken), ValueError)
    assert "comm_hook=" in str(error), error


def errors_in_buckets(_: str) -> None:
    """What goes wrong while a bucket is taken is raised by backward() as it is, and the step is still possible."""
    model = ddp()
    optimizer = offload(model.parameters(), **HYPER, overlap=True, replicas=True, subgroup_elements=20)
    optimizer.attach_ddp(model)
    for step in range(2):
        optimizer.zero_grad()
        one_pass(model, optimizer, step)
        optimizer.step()
    optimizer.zero_grad()
    write = optimizer._overlap._write

    def fails(*_: Any) -> None:
        raise mlpo.MlpoError(-errno.EIO, "no slot")

    optimizer._overlap._write = fails
    error = raised(lambda: one_pass(model, optimizer, 2), mlpo.MlpoError)
    assert error.errno == errno.EIO and "no slot" in str(error), error
    optimizer._overlap._write = write
    optimizer.step()
    plain, _ = trained(one_pass, replicas=True, steps=3)
    assert_same(model, plain)


def shard_group(directory: str) -> None:
    """Each rank has the state of about half of the subgroups; parameters, norms and the state that is brought together
    have the bits of a whole copy on each rank."""
    whole, copies = trained(one_pass, replicas=True, clip=0.3)
    expected = copies.state_dict()
    for options in ({}, {"overlap": True}):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*whole copy")
            model, optimizer = trained(one_pass, shard_group=dist.group.WORLD, clip=0.3, **options)
        assert_same(model, whole)
        assert_replicas_are_equal(model)
        if options:
            assert optimizer.sent_in_backward == len(optimizer.subgroups) > 0
        held = [None, None]
        dist.all_gather_object(held, sum(subgroup.numel for subgroup in optimizer.subgroups))
        numel = sum(p.numel() for p in model.parameters())
        assert sum(held) == numel and min(held) > numel / 4, held
        assert "consolidate_state_dict()" in str(raised(optimizer.state_dict, RuntimeError))
        optimizer.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            state = optimizer.state_dict()
            for index, entry in expected["state"].items():
                for name, value in entry.items():
                    assert torch.equal(state["state"][index][name], value), (index, name)
        else:
            raised(optimizer.state_dict, RuntimeError)
        norms = []
        for each, of in ((model, optimizer), (whole, copies)):
            of.zero_grad()
            one_pass(each, of, 7)
            norms.append(of.clip_grad_norm_(0.3))
            of.zero_grad()
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)

    # The state of a run with copies, loaded into one with owners, goes on with its bits.
    other = ddp(build(seed=9))
    other.load_state_dict(whole.state_dict())
    resumed = offload(other.parameters(), **HYPER, shard_group=dist.group.WORLD, subgroup_elements=20)
    resumed.load_state_dict(expected)
    for each, of in ((other, resumed), (whole, copies)):
        for step in range(5, 8):
            of.zero_grad()
            one_pass(each, of, step)
            of.step()
    assert_same(other, whole)


def shard_group_saves(directory: str) -> None:
    """save() has each tensor once, and load() gives all ranks parameters, state and step counts."""
    place = empty_folder(directory, "owners")
    with connected("owners") as first, connected("owners-loading") as second:
        model, optimizer = trained(one_pass, shard_group=dist.group.WORLD, client=first)
        optimizer.save(str(place)).result(60)
        dist.barrier()
        other = ddp(build(seed=9))
        resumed = offload(other.parameters(), client=second, shard_group=dist.group.WORLD, **HYPER)
        assert resumed.load(str(place)).step == 5
        assert_same(other, model)
        assert all(float(resumed.state[p]["step"]) == 5 for p in other.parameters())
        for each, of in ((other, resumed), (model, optimizer)):
            of.zero_grad()
            one_pass(each, of, 5)
            of.step()
        assert_same(other, model)


def shard_group_fails(_: str) -> None:
    """What one rank cannot do, no rank does; afterwards the same step works on all."""
    model, optimizer = trained(one_pass, shard_group=dist.group.WORLD)
    rank = dist.get_rank()
    before = [p.detach().clone() for p in model.parameters()]

    def unchanged() -> bool:
        return all(torch.equal(p, q) for p, q in zip(model.parameters(), before))

    # A rank that fails before its update.
    optimizer.zero_grad()
    one_pass(model, optimizer, 5)
    optimizer.param_groups[0]["lr"] = -1.0 if rank == 0 else HYPER["lr"]
    error = raised(optimizer.step, ValueError if rank == 0 else mlpo.MlpoError)
    assert ("learning rate" if rank == 0 else "another rank failed") in str(error), error
    assert unchanged()
    optimizer.param_groups[0]["lr"] = HYPER["lr"]
    # Gradients of other parameters on one rank.
    kept = model.module[0].weight.grad
    if rank == 1:
        model.module[0].weight.grad = None
    assert "different parameters" in str(raised(optimizer.step, ValueError)) and unchanged()
    # An infinity in one parameter, which one rank owns.
    model.module[0].weight.grad = kept.clone()
    model.module[0].weight.grad[0, 0] = float("inf")
    error = raised(optimizer.step, mlpo.NonFiniteGradientError)
    owned = model.module[0].weight in optimizer._places
    assert error.parameters == (("0",) if owned else ()) and unchanged(), error
    model.module[0].weight.grad = kept
    # A daemon that fails in the update of what one rank owns: the next call goes on.
    finish = Step.finish_parts

    def broken(*_: Any) -> None:
        raise mlpo.MlpoError(-errno.EIO, "path is gone")

    if rank == 1:
        Step.finish_parts = broken
    error = raised(optimizer.step, mlpo.MlpoError)
    assert error.errno == (errno.EIO if rank == 1 else errno.ECANCELED), error
    Step.finish_parts = finish
    optimizer.wait()
    plain, _ = trained(one_pass, replicas=True, steps=6)
    assert_same(model, plain)
    assert all(float(optimizer.state[p]["step"]) == 6 for p in model.parameters())
    for call, text in (
        (lambda: optimizer.attach_forward(model), "attach_forward() with shard_group="),
        (lambda: offload(model.parameters(), shard_group=dist.new_group([0])), "not in shard_group"),
    ):
        if text.startswith("not in") and rank == 0:
            call()  # the group has this rank, and new_group() is for all
            continue
        assert text in str(raised(call, (mlpo.NotOfferedError, ValueError)))


class Small(torch.nn.Module):
    """With a parameter of one element, and tensors that two ranks share unequally."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(17, 33), torch.nn.LayerNorm(33), torch.nn.Tanh(), torch.nn.Linear(33, 33, bias=False),
            torch.nn.Tanh(), torch.nn.Linear(33, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": [p for p in self.parameters() if (p.ndim < 2) == bool(index)], **hyper}
            for index, hyper in enumerate(TWO_GROUPS)
        ]


def small_loss(model: Callable[..., torch.Tensor], seed: int, step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * seed + 10 * step + rank)
    x = torch.randn(19, 17, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn(19, 1, generator=generator, dtype=torch.float64).to(dtype)
    return (model(x) - y).square().mean()


def run(kind: str, wrap: str, seed: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters and losses of a training of 50 steps, in FP64. `kind`: of the optimizer; "fp64": torch's, in one
    process with both ranks' data."""
    dtype = torch.float64 if kind == "fp64" else torch.float32
    module = Small(seed).to(dtype)
    model: Any = module
    if kind != "fp64" and wrap == "ddp":
        model = DDP(module, bucket_cap_mb=0.002)
    elif kind != "fp64":
        for layer in module.layers:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        fully_shard(module)
    if kind in ("fp64", "torch"):
        optimizer: Any = torch.optim.AdamW(module.groups(), foreach=False)
    else:
        options = {"overlap": kind.startswith("overlap"), "subgroup_elements": 500}
        options |= {"shard_group": dist.group.WORLD} if kind.endswith("owners") else {"replicas": True}
        optimizer = offload(module.groups(), **options)
        if wrap == "ddp":
            optimizer.attach_ddp(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if kind == "fp64":
            loss = sum(small_loss(model, seed, step, rank, dtype) / 2 for rank in range(2))
            loss.backward()
        else:
            loss = small_loss(model, seed, step, dist.get_rank(), dtype)
            loss.backward()
            loss = loss.detach().double() / 2
            dist.all_reduce(loss)
        losses.append(loss.detach().double())
        optimizer.step()
        if isinstance(optimizer, OffloadAdamW) and optimizer._overlap is None:
            for subgroup in optimizer.subgroups:
                subgroup.grad.torch().fill_(float("nan"))  # whatever is in a slot between steps counts for nothing
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    if kind.startswith("overlap"):
        assert optimizer.sent_in_backward == len(optimizer.subgroups)
    return torch.cat([p.detach().double().reshape(-1) for p in whole]), torch.stack(losses)


def distance(_: str) -> None:
    """50 steps on two ranks, 3 seeds, DDP and FSDP2: parameters and losses are at most 1.5 times as far from a run in
    FP64 as with torch's AdamW; ways to run ours have the same bits, on both ranks."""
    for wrap in ("ddp", "fsdp2"):
        kinds = ["ours", "overlap"] + (["owners", "overlap-owners"] if wrap == "ddp" else [])
        ratios: tuple[list[float], list[float]] = ([], [])
        for seed in range(3):
            exact, theirs = run("fp64", wrap, seed, 50), run("torch", wrap, seed, 50)
            ours = {kind: run(kind, wrap, seed, 50) for kind in kinds}
            for kind in kinds:
                assert all(torch.equal(x, y) for x, y in zip(ours[kind], ours["ours"])), (wrap, kind)
            both = [torch.empty_like(ours["ours"][0]) for _ in range(2)]
            dist.all_gather(both, ours["ours"][0])
            assert torch.equal(*both), wrap
            for found, of in zip(ratios, range(2)):
                away = float((theirs[of] - exact[of]).norm())
                assert 0 < away < 1, (wrap, away)  # else there is nothing to compare with
                found.append(float((ours["ours"][of] - exact[of]).norm()) / away)
        for found, what in zip(ratios, ("parameters", "losses")):
            print(f"{wrap}, {what}: distances to FP64 over torch's: {found}", flush=True)
            assert statistics.median(found) <= 1.5, (wrap, what, found)


CASES: dict[str, Callable[[str], None]] = {
    call.__name__: call
    for call in (
        overlap, accumulation, unused, checkpointed, update_in_backward, attaching, errors_in_buckets, shard_group,
        shard_group_saves, shard_group_fails, distance,
    )
}  # fmt: skip

if __name__ == "__main__":
    main(CASES)
