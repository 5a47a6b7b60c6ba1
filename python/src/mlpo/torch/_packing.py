"""Which parameters share a subgroup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import torch

from . import _shards


@dataclass(frozen=True)
class Named:
    """A parameter and what to call it in keys and messages."""

    param: torch.Tensor
    name: str


def packs(params: Sequence[Named], subgroup_elements: int) -> Iterator[list[Named]]:
    """Cuts the parameters of one param group into subgroups of at most `subgroup_elements` elements, of one type and
    one layout on the mesh, since the daemon's statistics are of a whole subgroup, and of one device, whose streams copy.

    Keeps their order within a type. A larger parameter is alone in its subgroup; empty ones are in none, since there
    is nothing to keep for them.
    """
    alike: dict[Any, list[Named]] = {}
    for item in params:
        if _shards.local(item.param).numel():
            kind = (item.param.dtype, item.param.device, _shards.sharding(item.param))
            alike.setdefault(kind, []).append(item)
    for items in alike.values():
        pack: list[Named] = []
        elements = 0
        for item in items:
            count = _shards.local(item.param).numel()
            if pack and elements + count > subgroup_elements:
                yield pack
                pack, elements = [], 0
            pack.append(item)
            elements += count
        yield pack
