"""Parameters as this rank holds them: plain tensors whole, DTensors (FSDP2, tensor parallelism) by their local shards.

What must be agreed on by all ranks that hold parts of one tensor is reduced here, over the mesh dimensions on which
it is sharded and never over those on which it is replicated.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Iterable, Optional, Sequence

import torch

from .._subgroup import TensorSpec


@dataclass(frozen=True)
class Sharding:
    """How a DTensor lies on its mesh."""

    mesh: Any
    placements: tuple[Any, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """The mesh dimensions over which its elements are divided."""
        return tuple(dim for dim, placement in enumerate(self.placements) if not placement.is_replicate())

    @property
    def copies(self) -> int:
        """How many ranks hold each element."""
        count = 1
        for dim, placement in enumerate(self.placements):
            if placement.is_replicate():
                count *= self.mesh.size(dim)
        return count


def is_dtensor(tensor: Any) -> bool:
    # Not imported for those who have none: it is a large module.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def sharding(tensor: torch.Tensor) -> Optional[Sharding]:
    """None for a plain tensor."""
    if not is_dtensor(tensor):
        return None
    return Sharding(tensor.device_mesh, tuple(tensor.placements))  # type: ignore[attr-defined]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this rank holds, sharing the tensor's memory."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(param: torch.Tensor) -> torch.Tensor:
    """The gradient of the elements that this rank holds. Collective if it lies otherwise on the mesh than `param`."""
    grad = param.grad
    assert grad is not None
    laid = sharding(param)
    if laid is not None and sharding(grad) != laid:
        grad = grad.redistribute(laid.mesh, laid.placements)  # type: ignore[attr-defined]
    return local(grad)


def like(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor as one that lies on the mesh as `param` does; `part` stays on its device."""
    laid = sharding(param)
    if laid is None:
        return part
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # DTensor.from_local would bring it to the mesh's device, where there may be no room for moments.
    meta = TensorMeta(param.shape, param.stride(), part.dtype)
    spec = DTensorSpec(laid.mesh, laid.placements, meta)
    whole: torch.Tensor = DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return whole


def spec(param: torch.Tensor, name: str) -> TensorSpec:
    """What the daemon is told of a tensor: its shape, and where this rank's box lies in the whole."""
    shape = tuple(local(param).shape)
    laid = sharding(param)
    if len(shape) > 8:  # more dimensions than the protocol has
        return TensorSpec(name, (local(param).numel(),))
    if laid is None or any(type(placement).__name__ == "_StridedShard" for placement in laid.placements):
        return TensorSpec(name, shape)  # strided shards are no boxes
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    box, offsets = compute_local_shape_and_global_offset(param.shape, laid.mesh, laid.placements)
    if tuple(box) != shape:
        return TensorSpec(name, shape)
    return TensorSpec(name, shape, tuple(param.shape), tuple(offsets))


class Ranks:
    """The ranks with which parameters are shared, in an order that is the same on all of them."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        found: dict[tuple[Any, int], None] = {}
        for param in params:
            laid = sharding(param)
            if laid is not None:
                found.update(dict.fromkeys((laid.mesh, dim) for dim in laid.dims))
        self._dims = list(found)

    def worst(self, value: int) -> int:
        """The largest of all these ranks' values. Collective."""
        for mesh, dim in self._dims:
            value = int(all_reduced(float(value), "max", mesh.get_group(dim), mesh.device_type))
        return value


def all_reduced(value: float, how: str, group: Any, device_type: Optional[str] = None) -> float:
    """`value` summed ("sum") or its largest or smallest ("max", "min") over a process group. Collective."""
    return all_reduced_together([value], how, group, device_type)[0]


def all_reduced_together(
    values: Sequence[float], how: str, group: Any, device_type: Optional[str] = None
) -> list[float]:
    """As all_reduced(), each of several values, at once. Collective."""
    import torch.distributed as dist

    if device_type is None:
        device_type = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device_type)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, how.upper()), group)
    return [float(value) for value in tensor.tolist()]
