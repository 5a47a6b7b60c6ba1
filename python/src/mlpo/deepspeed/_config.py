"""The "mlpo" block of a DeepSpeed configuration, and what of the rest cannot be had together with it.

    {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", ...}}, "mlpo": {"job": "run1"}}
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Mapping, Optional

import torch

from .._errors import not_offered
from ..torch import _checks

MOST_ELEMENTS = 64 << 20
_NO_SCALING = "every gradient must be known before the first update: leave update_in_backward out"


@dataclass(frozen=True)
class Settings:
    """The "mlpo" block. Every key may be left out."""

    enabled: bool = True  #: false: DeepSpeed's own optimizer offload, as without mlpo
    socket: Optional[str] = None  #: of the daemon; default as mlpo.connect()
    job: Optional[str] = None  #: the job's name; default as mlpo.connect()
    arena: Optional[int] = None  #: most bytes of shared memory a rank; default: what the model needs
    name: str = ""  #: beginning of keys and names: different for several engines of a process
    subgroup_elements: int = 16 << 20  #: parameters in one of the daemon's subgroups, at most 64 Mi
    update_in_backward: bool = False  #: updates follow their gradients at once: without clipping and loss scaling
    step_waits: bool = False  #: step() returns when all parameters are back, not when the updates are under way

    @property
    def shares_client(self) -> bool:
        """Whether the process's default client is used, which other optimizers use, too."""
        return self.socket is None and self.job is None and self.arena is None


_TYPES = {
    "enabled": bool, "socket": str, "job": str, "arena": int, "name": str, "subgroup_elements": int,
    "update_in_backward": bool, "step_waits": bool,
}  # fmt: skip


def settings(config: Mapping[str, Any]) -> Settings:
    """Reads the block of a whole configuration. ValueError names a key that is unknown, and a value that is wrong."""
    block = config.get("mlpo", {})
    if not isinstance(block, Mapping):
        raise ValueError(f'"mlpo" is {block!r} in the DeepSpeed configuration; it must be a block of keys: {{...}}')
    known = [item.name for item in fields(Settings)]
    for key, value in block.items():
        if key not in known:
            raise ValueError(f'unknown key "mlpo.{key}" in the DeepSpeed configuration; known are {", ".join(known)}')
        expected = _TYPES[key]
        right = isinstance(value, expected) and isinstance(value, bool) == (expected is bool)
        if not right and not (value is None and key in ("socket", "job", "arena")):
            raise ValueError(f'"mlpo.{key}" is {value!r} in the DeepSpeed configuration; it is a {expected.__name__}')
    found = Settings(**block)
    if not 1 <= found.subgroup_elements <= MOST_ELEMENTS:
        raise ValueError(f'"mlpo.subgroup_elements" is {found.subgroup_elements}; it is from 1 to {MOST_ELEMENTS}')
    if found.arena is not None and found.arena < 1:
        raise ValueError(f'"mlpo.arena" is {found.arena}; it is a number of bytes')
    return found


def of_engine(engine: Any) -> Optional[Settings]:
    """The settings of an engine that is being made; None if it keeps its optimizer state itself.

    Raises mlpo.NotOfferedError naming the key for what is asked for and not offered.
    """
    found = settings(engine.config)
    if not found.enabled:
        return None
    zero = engine._config.zero_config
    offload = zero.offload_optimizer
    wanted = zero.stage == 3 and offload is not None and offload.device in ("cpu", "nvme")
    if not wanted:
        if "mlpo" in engine.config:
            raise ValueError(
                'the DeepSpeed configuration has an "mlpo" block, which needs "zero_optimization": {"stage": 3, '
                '"offload_optimizer": {"device": "cpu" or "nvme"}}; add that, or set "mlpo": {"enabled": false}'
            )
        return None
    _refuse(engine, zero, offload)
    if isinstance(engine.client_optimizer, torch.optim.Optimizer):  # others are made of a callable, later
        check_optimizer(engine.client_optimizer)
    if found.update_in_backward:
        _refuse_scaling(engine)
    return found


def _refuse(engine: Any, zero: Any, offload: Any) -> None:
    config = engine._config
    leave = "leave it out, or set \"mlpo\": {\"enabled\": false} for DeepSpeed's own offload"
    for key, asked in (
        ("zero_optimization.zenflow", zero.zenflow is not None),
        ("zero_optimization.offload_optimizer.super_offload", offload.super_offload),
        ("zero_optimization.offload_optimizer.ratio below 1", offload.ratio < 1.0),
        ("fp16.fp16_master_weights_and_grads", config.float16_config.fp16_master_weights_and_grads),
        ("bf16.bf16_master_weights_and_grads", config.bfloat16_config.bf16_master_weights_and_grads),
        ("bf16.bf16_optimizer_states", config.bfloat16_config.bf16_optimizer_states),
        ("compile.deepcompile", config.compile_config.deepcompile),
    ):
        if asked:
            raise not_offered(f"{key} with mlpo", leave)
    if engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16:
        raise not_offered("torch_autocast.dtype float16 with mlpo", "use bfloat16, or fp16.enabled")
    name = config.optimizer_name
    if engine.client_optimizer is None and name is not None and name not in ("adam", "adamw"):
        raise not_offered(f"optimizer.type {name!r} with mlpo", "use Adam or AdamW; " + leave)


def _refuse_scaling(engine: Any) -> None:
    if engine.fp16_enabled():
        raise not_offered("mlpo.update_in_backward with fp16.enabled", _NO_SCALING)
    if engine.gradient_clipping() > 0:
        raise not_offered(
            f"mlpo.update_in_backward with gradient_clipping {engine.gradient_clipping()} (DeepSpeed's default is 1.0)",
            f'set "gradient_clipping": 0.0; else {_NO_SCALING}',
        )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses a basic optimizer that is not one of Adam's; what is refused of a param group is told by its key."""
    if adam_mode(optimizer) is None:
        raise not_offered(
            f"the optimizer {type(optimizer).__module__}.{type(optimizer).__name__} with mlpo",
            "use torch.optim.AdamW or Adam, DeepSpeed's Adam optimizers, or optimizer.type in the configuration",
        )
    for group in optimizer.param_groups:
        hyper(optimizer, group)


def adam_mode(optimizer: torch.optim.Optimizer) -> Optional[str]:
    """ "adamw" or "adam" (weight decay is added to the gradient); None for other optimizers."""
    name = type(optimizer).__name__
    if name in ("DeepSpeedCPUAdam", "FusedAdam"):
        return "adamw" if optimizer.adam_w_mode else "adam"  # type: ignore[attr-defined]
    if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        return "adamw" if optimizer.param_groups[0].get("decoupled_weight_decay", name == "AdamW") else "adam"
    return None


def hyper(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> _checks.Hyper:
    """The hyper-parameters of a param group at this moment, checked."""
    flags = {key: value for key, value in group.items() if key != "decoupled_weight_decay"}
    _checks.group_flags(flags)
    plain = _checks.hyper(group)
    mode = adam_mode(optimizer)
    assert mode is not None
    return _checks.Hyper(
        plain.lr, plain.betas, plain.eps, plain.weight_decay, mode, bool(group.get("bias_correction", True))
    )
