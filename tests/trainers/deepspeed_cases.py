"""Cases of single behaviours, which check themselves. test_deepspeed_cases.py runs them: deepspeed_cases.py CASE."""

from __future__ import annotations

import errno
import sys
from typing import Any, Callable, Optional

import deepspeed
import mlpo
import mlpo.deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_grad,
)
from deepspeed_model import Net, batch, loss_of
from deepspeed_runs import OPTIMIZER, ds_config, is_used

torch.set_num_threads(1)

_made = 0


def engine_of(block: Optional[dict[str, Any]] = None, client: Any = None, **changes: Any) -> Any:
    """block: "mlpo". client: makes an optimizer of parameters, for the configuration's. changes: of the rest."""
    global _made
    _made += 1
    torch.manual_seed(3)
    model = Net()
    config = ds_config(**{"gradient_clipping": 0.0, **changes})
    config["mlpo"] = {"name": f"case{_made}", "subgroup_elements": 500, **(block or {})}
    optimizer = None
    if client is not None:
        del config["optimizer"]
        optimizer = client(model.parameters())
    return mlpo.deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config
    )[0]


def backward(engine: Any, step: int, spoilt: Optional[float] = None) -> None:
    """spoilt: an input's value: inf makes some gradients NaN, NaN makes all of them so."""
    x, y = batch(3, step, 0, torch.distributed.get_rank())
    if spoilt is not None:
        x[0, 0] = spoilt
    engine.backward(loss_of(engine(x.bfloat16()), y))


def gradients(step: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By plain autograd from equal weights: the mean over the ranks, in FP32."""
    ranks = torch.distributed.get_world_size()
    total: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        model = Net().bfloat16()
        for name, param in model.named_parameters():
            param.data.copy_(weights[name])
        x, y = batch(3, step, 0, rank)
        loss_of(model(x.bfloat16()), y).backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                total[name] = total.get(name, 0) + param.grad.float() / ranks
    return total


def state(engine: Any) -> dict[str, list[torch.Tensor]]:
    keys = ("exp_avg", "exp_avg_sq")
    return {
        name: [safe_get_full_fp32_param(param).clone()]
        + [safe_get_full_optimizer_state(param, key).clone() for key in keys]
        for name, param in engine.module.named_parameters()
    }


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    params = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return {name: param.detach().clone() for name, param in params.items()}


def steps_of(engine: Any) -> list[int]:
    """Of the tensors that this rank holds."""
    return [
        pack.subgroup.read_state(piece.index)["step"] for pack in engine.optimizer.packs for piece in pack.members
    ]


def check_equal(a: dict[str, list[torch.Tensor]], b: dict[str, list[torch.Tensor]]) -> None:
    for name in a:
        assert all(torch.equal(x, y) for x, y in zip(a[name], b[name])), name


def adamw(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The parameter after torch's first AdamW step, in FP64."""
    param = torch.nn.Parameter(p.double())
    param.grad = g.double()
    options = {**OPTIMIZER, "betas": tuple(OPTIMIZER["betas"])}
    torch.optim.AdamW([param], **options).step()
    return param.detach()


# ---- Gradients that are not finite


def nonfinite() -> None:
    engine = engine_of(gradient_clipping=1.0)
    backward(engine, 0)
    engine.step()
    before, steps = state(engine), steps_of(engine)
    for step in range(1, 6):  # on the last rank alone
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        backward(engine, step, float("inf") if last else None)
        engine.step()
        assert engine.skipped_steps == step and not engine.was_step_applied()
    check_equal(before, state(engine))
    assert steps == steps_of(engine)
    client = engine.optimizer.client
    sessions = client.status()["sessions"]
    mine = [each for each in sessions if (each["job"], each["rank"]) == (client.job, client.rank)]
    assert [each["skipped_steps"] for each in mine] == [5], mine
    backward(engine, 9)
    engine.step()
    after = state(engine)
    assert all(not torch.equal(before[name][0], after[name][0]) for name in before if is_used(name))
    assert all(bool(tensor.isfinite().all()) for each in after.values() for tensor in each)


def nonfinite_in_backward() -> None:
    engine = engine_of({"update_in_backward": True})
    for step in range(3):
        backward(engine, step)
        engine.step()
    assert engine.optimizer.updated_in_backward > 0
    before = state(engine)
    backward(engine, 3, float("nan"))
    try:
        engine.step()
    except mlpo.NonFiniteGradientError as error:
        assert error.parameters, error
    else:
        raise AssertionError("a gradient that is not finite was applied")
    check_equal(before, state(engine))
    backward(engine, 4)
    engine.step()
    after = state(engine)
    assert all(not torch.equal(before[name][0], after[name][0]) for name in before if is_used(name))


# ---- safe_get_* and safe_set_*


def fragments() -> None:
    engine = engine_of()
    params = dict(engine.module.named_parameters())
    expected = gradients(0, weights_of(engine))
    backward(engine, 0)
    for name, param in params.items():
        found = safe_get_full_grad(param)
        if not is_used(name):
            assert found is None, name
            continue
        assert found.shape == param.ds_shape and found.dtype == torch.float32
        scale = float(expected[name].abs().max())
        assert float((found - expected[name]).abs().max()) <= 0.02 * scale, name
        local = safe_get_local_grad(param)
        assert local.numel() == param.partition_numel()
    masters = {name: safe_get_full_fp32_param(param).clone() for name, param in params.items()}
    new = {name: torch.randn(param.ds_shape).bfloat16().float() for name, param in params.items() if is_used(name)}
    for index, (name, value) in enumerate(new.items()):
        torch.distributed.broadcast(value, 0)
        if index % 2:
            safe_set_full_grad(params[name], value)
        else:
            size, rank = params[name].partition_numel(), torch.distributed.get_rank()
            padded = torch.nn.functional.pad(value.flatten(), (0, size * torch.distributed.get_world_size()))
            safe_set_local_grad(params[name], padded[size * rank : size * (rank + 1)])
        assert torch.equal(safe_get_full_grad(params[name]), value), name
    engine.step()
    for name, param in params.items():
        assert safe_get_full_grad(param) is None
        now = safe_get_full_fp32_param(param)
        if is_used(name):
            assert torch.allclose(now.double(), adamw(masters[name], new[name]), rtol=1e-6, atol=1e-8), name
        else:
            assert torch.equal(now, masters[name])
    for name, param in params.items():
        for get, put, key in (
            (safe_get_full_fp32_param, safe_set_full_fp32_param, ()),
            (safe_get_full_optimizer_state, safe_set_full_optimizer_state, ("exp_avg",)),
            (safe_get_full_optimizer_state, safe_set_full_optimizer_state, ("exp_avg_sq",)),
        ):
            value = torch.rand(param.ds_shape)
            torch.distributed.broadcast(value, 0)
            put(param, value, *key)
            assert torch.equal(get(param, *key), value), name
        assert safe_get_local_fp32_param(param).numel() == param.partition_numel()


def vectorized() -> None:
    from deepspeed.utils import safe_update_full_grad_vectorized

    engine = engine_of()
    params = dict(engine.module.named_parameters())
    backward(engine, 0)
    before = {name: safe_get_full_grad(param) for name, param in params.items()}
    safe_update_full_grad_vectorized(list(params.values()), lambda gradient, _: gradient * 2)
    for name, param in params.items():
        found = safe_get_full_grad(param)
        assert found is None if before[name] is None else torch.equal(found, before[name] * 2), name


# ---- Weights that are written to


def gathered() -> None:
    engine = engine_of()
    params = dict(engine.module.named_parameters())
    for step in range(3):
        backward(engine, step)
        engine.step()
    before = state(engine)
    changed = [params["second.weight"], params["scale"]]
    with deepspeed.zero.GatheredParameters(changed, modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            params["second.weight"].data[3:] = 2.0
            params["scale"].data.fill_(2.0)
    after = state(engine)
    assert bool((after["scale"][0] == 2.0).all()) and bool((after["second.weight"][0][3:] == 2.0).all())
    kept = before["second.weight"][0][:3]
    assert torch.equal(after["second.weight"][0][:3], kept)  # with the bits that rounding hides
    assert not torch.equal(kept, kept.bfloat16().float())
    check_equal({name: each for name, each in before.items() if name not in ("second.weight", "scale")}, after)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    backward(engine, 3)
    engine.step()
    weights = weights_of(engine)
    assert bool((weights["scale"] == 2.0).all()) and bool((weights["second.weight"][3:] == 2.0).all())


def refresh() -> None:
    engine = engine_of()
    backward(engine, 0)
    engine.step()
    engine.optimizer.wait()
    before = state(engine)
    param = dict(engine.module.named_parameters())["first.weight"]
    engine.optimizer.checkpoint_event_prologue()
    param.ds_tensor.fill_(0.5)
    engine.optimizer.refresh_fp32_params()
    engine.optimizer.checkpoint_event_epilogue()
    after = state(engine)
    assert bool((after["first.weight"][0] == 0.5).all())
    check_equal({name: before[name] for name in before if name != "first.weight"}, after)


# ---- Passes


def one_more_backward() -> None:
    """Another pass after the last is added, although its gradients were submitted."""
    engine = engine_of()
    params = dict(engine.module.named_parameters())
    weights = weights_of(engine)
    first, second = gradients(0, weights), gradients(1, weights)
    backward(engine, 0)
    backward(engine, 1)
    for name in first:
        total = first[name] + second[name]
        found = safe_get_full_grad(params[name])
        assert float((found - total).abs().max()) <= 0.03 * float(total.abs().max()), name
    masters = {name: safe_get_full_fp32_param(params[name]).clone() for name in first}
    applied = {name: safe_get_full_grad(params[name]) for name in first}
    engine.step()
    for name in first:
        now = safe_get_full_fp32_param(params[name]).double()
        assert torch.allclose(now, adamw(masters[name], applied[name]), rtol=1e-6, atol=1e-8), name


def dropped() -> None:
    """zero_grad() forgets; the step after it has only the gradients since."""
    engine = engine_of()
    before = state(engine)
    backward(engine, 0)
    engine.optimizer.zero_grad()
    engine.step()
    check_equal(before, state(engine))
    backward(engine, 1)
    try:
        engine.optimizer.check_closed("it")
    except mlpo.MlpoError as error:
        assert error.errno == errno.EBUSY
    else:
        raise AssertionError("the window is open")
    engine.step()
    assert not torch.equal(before["scale"][0], state(engine)["scale"][0])


# ---- Errors tell what to do


def errors() -> None:
    offload = "zero_optimization.offload_optimizer."
    cases: list[tuple[type[BaseException], str, Callable[[], Any]]] = [
        (ValueError, 'unknown key "mlpo.subgroup_size"', lambda: engine_of({"subgroup_size": 1})),
        (ValueError, '"mlpo.arena" is True', lambda: engine_of({"arena": True})),
        (ValueError, '"mlpo.subgroup_elements" is 0', lambda: engine_of({"subgroup_elements": 0})),
        (ValueError, '"mlpo.update_in_backward" is 1', lambda: engine_of({"update_in_backward": 1})),
        (ValueError, "offload_optimizer", lambda: engine_of(zero_optimization={"offload_optimizer": None})),
        (ValueError, "offload_optimizer", lambda: engine_of(zero_optimization={"stage": 2})),
        (
            mlpo.NotOfferedError, "gradient_clipping 1.0",
            lambda: engine_of({"update_in_backward": True}, gradient_clipping=1.0),
        ),
        (
            mlpo.NotOfferedError, offload + "super_offload",
            lambda: engine_of(zero_optimization={"offload_optimizer": {"device": "cpu", "super_offload": True}}),
        ),
        (
            mlpo.NotOfferedError, offload + "ratio",
            lambda: engine_of(zero_optimization={"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        ),
        (mlpo.NotOfferedError, "optimizer.type 'lion'", lambda: engine_of(optimizer={"type": "Lion"})),
        (mlpo.NotOfferedError, "torch.optim.sgd.SGD", lambda: engine_of(client=lambda p: torch.optim.SGD(p, 0.1))),
        (ValueError, "amsgrad", lambda: engine_of(client=lambda p: torch.optim.AdamW(p, amsgrad=True))),
        (mlpo.NotOfferedError, "compile.deepcompile", lambda: engine_of(compile={"deepcompile": True})),
        (mlpo.MlpoError, "/nowhere/mlpo.sock", lambda: engine_of({"socket": "/nowhere/mlpo.sock", "job": "none"})),
        (mlpo.MlpoError, "mlpo.arena", lambda: engine_of({"arena": 4096, "job": "tight"})),
    ]  # fmt: skip
    for kind, needle, call in cases:
        try:
            call()
        except kind as error:
            assert needle in str(error), f"{needle!r} is not in {error!s}"
            assert type(error) is kind or kind is mlpo.MlpoError, repr(error)
        else:
            raise AssertionError(f"nothing was raised where {needle!r} should be")
    engine = engine_of()  # after all of these one can be made
    backward(engine, 0)
    engine.step()


def l2_decay() -> None:
    """Adam with adam_w_mode false is torch.optim.Adam, weight decay and all."""
    params = {**OPTIMIZER, "adam_w_mode": False}
    engine = engine_of(optimizer={"type": "Adam", "params": params})
    before = {name: each[0] for name, each in state(engine).items()}
    backward(engine, 0)
    found = {name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()}
    engine.step()
    after = {name: each[0] for name, each in state(engine).items()}
    for name, gradient in found.items():
        if gradient is not None:
            param = torch.nn.Parameter(before[name].double())
            param.grad = gradient.double()
            torch.optim.Adam([param], **{**OPTIMIZER, "betas": tuple(OPTIMIZER["betas"])}).step()
            assert torch.allclose(after[name].double(), param.detach(), rtol=1e-6, atol=1e-8), name


def stock_when_disabled() -> None:
    engine = engine_of({"enabled": False})
    assert not isinstance(engine.optimizer, mlpo.deepspeed.MlpoZeroOptimizer_Stage3)
    mlpo.deepspeed.enable()
    try:
        torch.manual_seed(3)
        model = Net()
        config = ds_config(mlpo={"name": "enabled"})
        made = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        assert isinstance(made.optimizer, mlpo.deepspeed.MlpoZeroOptimizer_Stage3)
    finally:
        mlpo.deepspeed.disable()


def main() -> None:
    deepspeed.init_distributed("gloo")
    globals()[sys.argv[1]]()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
