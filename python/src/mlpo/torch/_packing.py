"""Which parameters share a subgroup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Sequence

import torch


@dataclass(frozen=True)
class Named:
    """A parameter and what to call it in keys and messages."""

    param: torch.Tensor
    name: str


def packs(params: Sequence[Named], subgroup_elements: int) -> Iterator[list[Named]]:
    """Cuts the parameters of one param group into subgroups of one type and at most `subgroup_elements` elements.

    Keeps their order within a type. A larger parameter is alone in its subgroup; empty ones are in none, since there
    is nothing to keep for them.
    """
    by_type: dict[torch.dtype, list[Named]] = {}
    for item in params:
        if item.param.numel():
            by_type.setdefault(item.param.dtype, []).append(item)
    for items in by_type.values():
        pack: list[Named] = []
        elements = 0
        for item in items:
            if pack and elements + item.param.numel() > subgroup_elements:
                yield pack
                pack, elements = [], 0
            pack.append(item)
            elements += item.param.numel()
        yield pack
