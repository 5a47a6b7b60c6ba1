"""The norm of gradients over parameters, shards and ranks."""

from __future__ import annotations

import math
from typing import Any, Iterable, Optional

import torch

from . import _shards
from ._seal import pieces

# That is held in FP64: in it the sum is the daemon's to nearly the last bit, so that clipping does not depend on who
# has the gradients. FP32 sums over a large tensor lose digits (6e-4 of the norm with 16 Mi elements in torch's own).
_PIECE = 1 << 18


class Norm:
    """Collects sums of |g|^p, or the largest |g| for p = inf.

    Kept apart by how the tensors lie on their meshes, since shards are summed and replicas are not, and kept on the
    gradients' devices, so that adding waits for nothing.
    """

    def __init__(self, norm_type: float, params: Iterable[torch.Tensor]) -> None:
        """`params` are those of all ranks: their layouts are reduced in this order, whoever has gradients."""
        if not norm_type > 0:
            raise ValueError(f"norm_type is {norm_type}; it must be positive (inf is the largest element)")
        self._p = norm_type
        self._how = "sum" if math.isfinite(norm_type) else "max"
        self._found: dict[Optional[_shards.Sharding], dict[torch.device, torch.Tensor]] = {}
        for param in params:
            self._found.setdefault(_shards.sharding(param), {})

    def add(self, laid: Optional[_shards.Sharding], gradient: torch.Tensor) -> None:
        """Adds the elements of a gradient that this rank holds."""
        for _, view in pieces(gradient, _PIECE):
            piece = view.reshape(-1).double()
            if self._p == 2:
                self._merge(laid, torch.dot(piece, piece))
            else:
                norm = torch.linalg.vector_norm(piece, self._p)
                self._merge(laid, norm.pow(self._p) if self._how == "sum" else norm)

    def add_sum_of_squares(self, laid: Optional[_shards.Sharding], value: float) -> None:
        """Adds what the daemon found in gradients that it has; for p = 2."""
        self._merge(laid, torch.tensor(value, dtype=torch.float64))

    def total(self, *groups: Any) -> float:
        """The norm over everything, and over the ranks of the process groups that are not None. Collective."""
        results = []
        for laid, by_device in self._found.items():
            part = self._together([float(value.item()) for value in by_device.values()])
            if laid is not None:
                for dim in laid.dims:
                    part = self._over(part, laid.mesh.get_group(dim), laid.mesh.device_type)
            results.append(part)
        total = self._together(results)
        for group in groups:
            if group is not None:
                total = self._over(total, group)
        if self._how == "max":
            return total
        return math.sqrt(total) if self._p == 2 else float(total ** (1 / self._p))

    def _merge(self, laid: Optional[_shards.Sharding], value: torch.Tensor) -> None:
        held = self._found.setdefault(laid, {})
        before = held.get(value.device)
        if before is not None:
            value = before + value if self._how == "sum" else torch.maximum(before, value)
        held[value.device] = value

    def _together(self, values: list[float]) -> float:
        if self._how == "sum":
            return sum(values)
        return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)

    def _over(self, value: float, group: Any, device_type: Optional[str] = None) -> float:
        if self._how == "max" and math.isnan(value):
            value = math.inf  # a maximum need not carry a NaN
        return _shards.all_reduced(value, self._how, group, device_type)


def clip_factor(norm: float, max_norm: float, apply_nonfinite: bool) -> float:
    """What gradients of this norm are multiplied by, as torch.nn.utils.clip_grad_norm_ does.

    1 if it is not finite and step() will refuse the gradients. NaN as a factor is not offered by the daemon.
    """
    if math.isfinite(norm):
        return min(1.0, max_norm / (norm + 1e-6))
    if not apply_nonfinite:
        return 1.0
    if math.isnan(norm):
        raise RuntimeError("the norm is NaN, with which torch would multiply all gradients; drop them with zero_grad()")
    return 0.0
