"""torch.amp.GradScaler, as it talks to optimizers that unscale by themselves (`_step_supports_amp_scaling`): around
step() it sets `grad_scale`, by which the gradients are to be divided, and `found_inf`, which is not 0 if one is not
finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Optional


@dataclass(frozen=True)
class Scaling:
    """What a scaler asks of one step."""

    factor: float = 1.0  # that gradients are multiplied by
    overflow: bool = False  # the step is to be skipped


def scaling(optimizer: Any) -> Optional[Scaling]:
    """None without an enabled scaler. Waits for the device, if the values are on one."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is None and found is None:
        return None
    if found is not None and float(found) != 0:
        return Scaling(overflow=True)
    divisor = 1.0 if scale is None else float(scale)
    if not (math.isfinite(divisor) and divisor > 0):
        raise ValueError(f"grad_scale is {divisor}; it must be positive and finite")
    return Scaling(1.0 / divisor)


def drop(optimizer: Any) -> None:
    """After a step that failed: the scaler would take what it left for a scale that the user has set, and multiply."""
    for name in ("grad_scale", "found_inf"):
        if hasattr(optimizer, name):
            delattr(optimizer, name)
