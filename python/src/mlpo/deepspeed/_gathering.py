"""Hooks on the methods that ZeRO-3 has given each parameter: whoever gathers parameters waits for their updates first,
and parameters that were written to while gathered get new masters.

DeepSpeed calls these methods of the first of several parameters, whichever that is, frozen ones too; so all parameters
of a model have the hooks, and each looks at the whole list.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Iterable

from . import _versions

if TYPE_CHECKING:
    from ._optimizer import MlpoZeroOptimizer_Stage3


class Gathering:
    """The hooks of one optimizer."""

    def __init__(self, owner: MlpoZeroOptimizer_Stage3) -> None:
        self._owner = owner
        self._originals: list[tuple[Any, dict[str, Any]]] = []

    def hook(self, params: Iterable[Any]) -> None:
        for param in params:
            originals = {name: getattr(param, name) for name in ("all_gather", "all_gather_coalesced", "partition")}
            _versions.check_closures(originals)
            self._originals.append((param, originals))
            param.all_gather = self._all_gather(param, originals["all_gather"])
            param.all_gather_coalesced = self._all_gather_coalesced(originals["all_gather_coalesced"])
            param.partition = self._partition(param, originals["partition"])

    def unhook(self) -> None:
        for param, originals in self._originals:
            for name, original in originals.items():
                setattr(param, name, original)
        self._originals.clear()

    def _all_gather(self, param: Any, original: Any) -> Any:
        @functools.wraps(original)
        def all_gather(param_list: Any = None, *arguments: Any, **options: Any) -> Any:
            params = [param] if param_list is None else list(param_list)
            self._owner.wait_for(params, surely=False)
            return original(params, *arguments, **options)

        return all_gather

    def _all_gather_coalesced(self, original: Any) -> Any:
        @functools.wraps(original)
        def all_gather_coalesced(params: Iterable[Any], *arguments: Any, **options: Any) -> Any:
            listed = list(params)
            self._owner.wait_for(listed, surely=False)
            return original(listed, *arguments, **options)

        return all_gather_coalesced

    def _partition(self, param: Any, original: Any) -> Any:
        @functools.wraps(original)
        def partition(
            param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
        ) -> Any:
            params = [param] if param_list is None else list(param_list)
            if has_been_updated:
                self._owner._window.refuse_updated("parameters are written to")
            result = original(params, hierarchy, has_been_updated, free_data)
            if has_been_updated:
                self._owner.reload_masters(params)
            return result

        return partition
