"""How DeepSpeed's engine comes to make our optimizer: one method of it is wrapped, by enable() for good, by
initialize() for the making of one engine. Within it the names by which the engine finds its optimizers are others."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

# Their base is stage3's class of this moment; imported while that is ours they would get ours.
from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: F401
from deepspeed.runtime.zero import stage3

from .._errors import not_offered
from . import _config, _engine
from ._optimizer import MlpoZeroOptimizer_Stage3

_stock = DeepSpeedEngine._configure_optimizer
_stage3_name = "DeepSpeedZeroOptimizer_Stage3"


def initialize(*arguments: Any, **options: Any) -> Any:
    """deepspeed.initialize() with the optimizer's state in the daemon: the same arguments and results.

    Raises ValueError for an unknown key of the "mlpo" block, and for a configuration without optimizer offload of
    ZeRO-3; mlpo.NotOfferedError naming a key that is not offered; MlpoError if there is no daemon (ENOENT,
    ECONNREFUSED), or too little room for what the model needs (EDQUOT, ENOSPC, with figures).
    """
    with _enabled():
        made = deepspeed.initialize(*arguments, **options)
    engine = made[0]
    if not isinstance(engine.optimizer, MlpoZeroOptimizer_Stage3) and _config.settings(engine.config).enabled:
        raise ValueError(
            'mlpo.deepspeed.initialize() needs "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu" '
            'or "nvme"}} and an optimizer, in the DeepSpeed configuration; or "mlpo": {"enabled": false}'
        )
    return made


def enable() -> None:
    """From now on deepspeed.initialize() puts the optimizer's state into the daemon, where ZeRO-3 would offload it.

    For code that calls deepspeed.initialize() itself (Accelerate, the Hugging Face Trainer). Calling it twice does
    nothing.
    """
    DeepSpeedEngine._configure_optimizer = _configure_optimizer


def disable() -> None:
    """Ends enable(): for engines that are made from now on."""
    DeepSpeedEngine._configure_optimizer = _stock


@contextlib.contextmanager
def _enabled() -> Iterator[None]:
    before = DeepSpeedEngine._configure_optimizer
    enable()
    try:
        yield
    finally:
        DeepSpeedEngine._configure_optimizer = before


@functools.wraps(_stock)
def _configure_optimizer(engine: Any, client_optimizer: Any, model_parameters: Any) -> None:
    if _config.of_engine(engine) is None:
        _stock(engine, client_optimizer, model_parameters)
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(stage3, _stage3_name, MlpoZeroOptimizer_Stage3))
        # No optimizer of DeepSpeed's own, which would have to be compiled, and none is asked for.
        stack.enter_context(_replaced(engine, "get_optimizer_configuration", _adam))
        stack.enter_context(_replaced(engine, "zero_force_ds_cpu_optimizer", lambda: False))
        _stock(engine, client_optimizer, model_parameters)
    if isinstance(engine.optimizer, MlpoZeroOptimizer_Stage3):
        _engine.attach(engine)


@contextlib.contextmanager
def _replaced(of: Any, name: str, by: Any) -> Iterator[None]:
    own = name in vars(of)
    before = getattr(of, name)
    setattr(of, name, by)
    try:
        yield
    finally:
        if own:
            setattr(of, name, before)
        else:
            delattr(of, name)


def _adam(
    optimizer_parameters: dict[str, Any], adam_w_mode: bool, allow_legacy_fallback: bool = False
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """DeepSpeedEngine.get_optimizer_configuration: torch's Adam, which holds the param groups and nothing else.

    optimizer_parameters: optimizer.params of the configuration; what is not torch's is taken out. Defaults are those of
    DeepSpeed's Adam, whose weight decay is 0, unless torch_adam asks for torch's.
    """
    if not optimizer_parameters.pop("torch_adam", False):
        optimizer_parameters.setdefault("weight_decay", 0.0)
    if optimizer_parameters.pop("fp32_optimizer_states", None) is False:
        raise not_offered("optimizer.params.fp32_optimizer_states false with mlpo", "moments are FP32: leave it out")
    bias_correction = bool(optimizer_parameters.pop("bias_correction", True))

    def make(params: Any, **settings: Any) -> torch.optim.Optimizer:
        optimizer = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(params, **settings)
        for group in optimizer.param_groups:
            group["bias_correction"] = bias_correction
        return optimizer

    return make, {}
