"""load_state_dict: what connects a saved state with an optimizer's parameters."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Iterable, Mapping, Sequence

import torch

from . import _checks

_Groups = Sequence[dict[str, Any]]


def merged_groups(own: _Groups, defaults: Mapping[str, Any], saved: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved hyper-parameters with the optimizer's own parameters; ValueError if they do not belong together."""
    given = list(saved)
    if len(given) != len(own):
        raise ValueError(f"the state has {len(given)} param groups, the optimizer {len(own)}")
    merged = []
    for index, (old, new) in enumerate(zip(own, given)):
        counts = len(new["params"]), len(old["params"])
        if counts[0] != counts[1]:
            raise ValueError(
                f"param group {index} of the state has {counts[0]} parameters, the optimizer's {counts[1]}"
            )
        group = {key: deepcopy(value) for key, value in new.items() if key != "params"}
        for key, value in defaults.items():
            group.setdefault(key, value)
        group["params"] = old["params"]
        if "param_names" in old:
            group["param_names"] = old["param_names"]
        _checks.group_flags(group)
        _checks.hyper(group)
        merged.append(group)
    return merged


def states_of(own: _Groups, state_dict: Mapping[str, Any]) -> dict[torch.Tensor, dict[str, Any]]:
    """The saved states by parameter; the order of parameters in the groups connects them, as in torch."""
    ids = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in own for param in group["params"]]
    by_id = dict(zip(ids, params))
    unknown = [key for key in state_dict["state"] if key not in by_id]
    if unknown:
        raise ValueError(f"the state has entries of no parameter: {unknown[:8]}")
    return {by_id[key]: value for key, value in state_dict["state"].items()}
