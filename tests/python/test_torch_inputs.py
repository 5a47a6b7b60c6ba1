"""torch's own test inputs for AdamW, and what its optimizer tests try, against torch.optim.AdamW in the same process.

Each input either gives torch's results within the project's bounds or is refused by the error that README.md lists.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Iterable

import pytest
import torch
from mlpo.torch import OffloadAdamW
from torch.nn import Parameter
from torch.optim import lr_scheduler

try:
    from torch.testing._internal import common_optimizers
except ImportError as missing:
    pytest.skip(f"skipped: torch's test inputs cannot be imported: {missing}", allow_module_level=True)

ADAMW = next(info for info in common_optimizers.optim_db if info.optim_cls is torch.optim.AdamW)
REFUSED = ("amsgrad", "maximize", "differentiable")
# torch refuses these for the sake of implementations that have no meaning here.
ACCEPTED_ERRORS = (
    "lr as Tensor doesn't work with foreach & not capturable",
    "betas must be either both floats or both Tensors",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True",
)

Make = Callable[..., OffloadAdamW]


def plain(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same for torch's one-tensor implementation on the CPU, which takes no tensors as hyper-parameters there."""
    kept = {key: value for key, value in kwargs.items() if key not in ("foreach", "fused", "capturable")}
    if "lr" in kept:
        kept["lr"] = float(kept["lr"])
    if "betas" in kept:
        kept["betas"] = tuple(float(beta) for beta in kept["betas"])
    return {**kept, "foreach": False}


def inputs() -> Iterable[Any]:
    """All of torch's inputs for the CPU, with each implementation flag, and those that it gives for GPUs besides."""
    for dtype in (torch.float32, torch.float16):
        cpu = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs("cpu", dtype, ADAMW)
        for given in [*cpu, *ADAMW.optim_inputs_func("cuda", dtype)]:
            yield pytest.param(dtype, given.kwargs, id=f"{dtype}-{given.desc}")
    for given in ADAMW.optim_inputs_func("cpu", torch.bfloat16):
        yield pytest.param(torch.bfloat16, given.kwargs, id=f"bfloat16-{given.desc}")


def tensors(seed: int) -> list[torch.Tensor]:
    """What torch's tests take as parameters: a matrix and a vector, also with gaps between their elements."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [random(10, 5), random(10), random(10, 5, 2)[..., 0], random(10, 2)[..., 0], random(1, 1), random(0, 3)]


@pytest.mark.parametrize("dtype, kwargs", list(inputs()))
def test_inputs_of_torch(make: Make, dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
    """20 steps on recorded gradients: max|a-b| <= 1e-6 max|b| a tensor, for 16-bit types against FP32 masters."""
    params = [Parameter(t.to(dtype)) for t in tensors(1)]
    refused = [flag for flag in REFUSED if kwargs.get(flag)]
    if refused:
        with pytest.raises(ValueError, match="({})=True is not offered".format("|".join(refused))):
            make(params, **kwargs)
        return
    masters = [Parameter(p.detach().float()) for p in params]
    # The vectors have a group of their own, as in torch's tests.
    groups = [[p for p in ps if p.ndim > 1] for ps in (params, masters)]
    vectors = [[p for p in ps if p.ndim == 1] for ps in (params, masters)]
    ours = make([{"params": groups[0]}, {"params": vectors[0], "weight_decay": 0.3}], **kwargs)
    theirs = torch.optim.AdamW([{"params": groups[1]}, {"params": vectors[1], "weight_decay": 0.3}], **plain(kwargs))
    for step in range(20):
        for p, master, gradient in zip(params, masters, tensors(100 + step)):
            p.grad = gradient.to(dtype)
            master.grad = p.grad.float()
        ours.step()
        theirs.step()
    state = ours.state_dict()["state"]
    order = [p for group in ours.param_groups for p in group["params"]]
    for index, p in enumerate(order):
        master = next(m for q, m in zip(params, masters) if q is p)
        value = state[index]["master"] if dtype != torch.float32 else p.detach()
        assert value.shape == master.shape and near(value, master)
        assert state[index]["step"] == 20
        if dtype != torch.float32:
            assert torch.equal(p.detach(), value.to(dtype))


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.numel() == 0 or bool((ours - theirs).abs().max() <= 1e-6 * theirs.abs().max())


ERROR_INPUTS = ADAMW.optim_error_inputs_func("cpu", torch.float32)


@pytest.mark.parametrize("given", ERROR_INPUTS, ids=[given.optimizer_error_input.desc for given in ERROR_INPUTS])
def test_error_inputs_of_torch(make: Make, given: Any) -> None:
    """The error that torch raises, with its words; what torch refuses for one implementation's sake is accepted."""
    wrong = given.optimizer_error_input
    params = [Parameter(torch.ones(1, 1)), Parameter(torch.ones(1))] if wrong.params is None else wrong.params
    if wrong.desc in ACCEPTED_ERRORS:
        theirs = [Parameter(p.detach().clone()) for p in params]
        reference = torch.optim.AdamW(theirs, **plain(wrong.kwargs))
        for ps, optimizer in ((params, make(params, **wrong.kwargs)), (theirs, reference)):
            for p in ps:
                p.grad = torch.full_like(p, 0.25)
            optimizer.step()
        assert all(near(p, q) for p, q in zip(params, theirs))
    elif issubclass(given.error_type, Warning):
        with pytest.warns(given.error_type, match=given.error_regex):
            with pytest.raises(ValueError, match="overlap in memory"):
                OffloadAdamW(params, **wrong.kwargs)
    else:
        with pytest.raises(given.error_type, match=given.error_regex):
            OffloadAdamW(params, **wrong.kwargs)


# ---- Schedulers

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6, eta_min=1e-4),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=3, cycle_momentum=True),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=1e-4, anneal_epochs=4),
}


def test_every_scheduler_of_torch_is_tried() -> None:
    known = {name for name in dir(lr_scheduler) if inspect.isclass(kind := getattr(lr_scheduler, name))
             and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")}  # fmt: skip
    assert known - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_schedulers_of_torch(make: Make, tensor_lr: bool) -> None:
    """For 10 steps each gives both optimizers equal hyper-parameters, and near parameters; with a tensor as lr too."""
    for name, scheduler_of in SCHEDULERS.items():
        ps = [Parameter(torch.linspace(-2, 2, 7)) for _ in range(2)]
        ours = make([ps[0]], lr=torch.tensor(2e-3) if tensor_lr else 2e-3)
        theirs = torch.optim.AdamW([ps[1]], lr=2e-3, foreach=False)
        pairs = list(zip(ps, (ours, theirs), map(scheduler_of, (ours, theirs))))
        for step in range(10):
            for p, optimizer, scheduler in pairs:
                p.grad = torch.cos(torch.arange(7) * (step + 1.0))
                optimizer.step()
                scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            groups = [optimizer.param_groups[0] for optimizer in (ours, theirs)]
            assert float(groups[0]["lr"]) == pytest.approx(groups[1]["lr"], rel=1e-6), (name, step)
            assert [float(b) for b in groups[0]["betas"]] == pytest.approx(groups[1]["betas"], rel=1e-6), (name, step)
        torch.testing.assert_close(ps[0], ps[1], rtol=1e-6, atol=1e-6, msg=name)
