"""shard_group=: of ranks that hold the same parameters, each has the state of a part of them.

Every pack has one owner, which registers it with the daemon and updates it; then it broadcasts the new values, so that
all ranks have its bits. Which rank owns what follows from the order and the sizes of the parameters alone, so that
nobody has to ask. Gradients are the same on all ranks before step(), as DDP leaves them.
"""

from __future__ import annotations

import errno
import hashlib
from typing import Any, Callable, Collection, Mapping, Optional, Sequence

import torch

from .._errors import MlpoError
from . import _shards
from ._packing import Named, packs

_State = dict[str, Any]
_PACKS_A_RANK = 4


class Owners:
    """Who owns what in one optimizer."""

    def __init__(self, group: Any, subgroup_elements: int) -> None:
        """group: of torch.distributed; this rank is in it. ValueError if not."""
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized():
            raise ValueError("shard_group= needs torch.distributed: call init_process_group() before")
        self.group = group
        self.rank = int(distributed.get_rank(group))
        if self.rank < 0:
            raise ValueError("this rank is not in shard_group: pass one that has all ranks with these parameters")
        self.ranks = int(distributed.get_world_size(group))
        self._subgroup_elements = subgroup_elements
        self._loads = [0] * self.ranks
        self._owner: dict[torch.Tensor, int] = {}
        self._packs: list[tuple[int, list[torch.Tensor]]] = []  # what is broadcast together
        self._gathered: Optional[dict[torch.Tensor, _State]] = None

    def mine(self, items: Sequence[Named]) -> list[Named]:
        """Those of a param group's parameters that this rank owns. Gives owners to those that have none: the largest
        pack first, to the rank that owns least. Packs are small enough for each rank to have some."""
        unowned = [item for item in items if item.param not in self._owner]
        share = sum(item.param.numel() for item in unowned) // (_PACKS_A_RANK * self.ranks)
        new = list(packs(unowned, max(1, min(share, self._subgroup_elements))))
        sizes = [sum(item.param.numel() for item in pack) for pack in new]
        owners = [0] * len(new)
        for index in sorted(range(len(new)), key=lambda index: -sizes[index]):
            owners[index] = min(range(self.ranks), key=self._loads.__getitem__)
            self._loads[owners[index]] += sizes[index]
        for owner, pack in zip(owners, new):
            self._owner.update((item.param, owner) for item in pack)
            self._packs.append((owner, [item.param for item in pack]))
        return [item for item in items if self._owner.get(item.param) == self.rank]

    def elsewhere(self, param: torch.Tensor) -> bool:
        """Whether another rank owns the parameter."""
        return self._owner.get(param, self.rank) != self.rank

    def worst(self, value: int, having: Optional[Sequence[str]]) -> int:
        """The largest of all ranks' values. Collective. `having`: the parameters with gradients, None on a rank that
        has failed; ValueError on all ranks if they differ."""
        here = [float(value), -1.0, -float(2**48)]
        if having is not None:
            digest = int.from_bytes(hashlib.blake2b("\0".join(having).encode(), digest_size=6).digest(), "little")
            here[1:] = float(digest), -float(digest)
        worst, largest, smallest = _shards.all_reduced_together(here, "max", self.group)
        if having is not None and largest >= 0 and largest != -smallest:
            raise ValueError(
                "the ranks of shard_group have gradients of different parameters: reduce them over the ranks before "
                "step() (DDP does), with None on all ranks or on none; nothing was updated"
            )
        return int(worst)

    def together(self, call: Callable[[], None], what: str) -> None:
        """Calls it, and raises on all ranks if it raises on one. Collective."""
        failure: Optional[Exception] = None
        try:
            call()
        except Exception as error:  # told to the others first
            failure = error
        failed = _shards.all_reduced(float(failure is not None), "max", self.group)
        if failure is not None:
            raise failure
        if failed:
            raise MlpoError(-errno.ECANCELED, f"another rank of shard_group has failed (its error says why): {what}")

    def publish(self, changed: Collection[torch.Tensor]) -> None:
        """Gives all ranks the owners' values of these parameters. Collective, in one order on all ranks."""
        self._gathered = None
        for owner, pack in self._packs:
            params = [param for param in pack if param in changed]
            if params:
                self._broadcast(owner, params)

    def _broadcast(self, owner: int, params: Sequence[torch.Tensor]) -> None:
        source = torch.distributed.get_global_rank(self.group, owner)
        alone = len(params) == 1 and params[0].is_contiguous()
        flat = params[0].detach().view(-1) if alone else torch.cat([param.detach().reshape(-1) for param in params])
        torch.distributed.broadcast(flat.view(torch.uint8), source, self.group)  # bytes: of any type, by any backend
        if alone or owner == self.rank:
            return
        first = 0
        for param in params:
            param.detach().copy_(flat[first : first + param.numel()].view(param.shape))
            first += param.numel()

    def gather(self, read: Callable[[torch.Tensor], _State], stepped: Collection[torch.Tensor], to: int) -> None:
        """Brings the state of all parameters of `stepped` to the rank `to` of the group. Collective. `read` gives that
        of one that this rank owns."""
        target = torch.distributed.get_global_rank(self.group, to)
        gathered: dict[torch.Tensor, _State] = {}
        for owner, pack in self._packs:  # one at a time, for the sake of memory
            params = [param for param in pack if param in stepped]
            if not params or owner == to:
                continue
            here = self._read(read, params if owner == self.rank else [])
            there: Optional[list[Any]] = [None] * self.ranks if self.rank == to else None
            torch.distributed.gather_object(here, there, target, self.group)
            if there is not None:
                gathered.update(zip(params, there[owner]))
        self._gathered = gathered if self.rank == to else None

    def _read(self, read: Callable[[torch.Tensor], _State], params: Sequence[torch.Tensor]) -> list[_State]:
        states: list[_State] = []
        self.together(lambda: states.extend(map(read, params)), "no state was brought together")
        return states

    def gathered(self, param: torch.Tensor, name: str) -> _State:
        """The state of another rank's parameter, after gather()."""
        if self._gathered is None or param not in self._gathered:
            raise RuntimeError(
                f"the state of parameter {name} is kept by another rank (shard_group=): call consolidate_state_dict() "
                "on all ranks after the step, then state_dict() on the rank that it was brought to; or save() on all"
            )
        return self._gathered[param]

    def forget(self) -> None:
        """What was gathered is no longer the state."""
        self._gathered = None

    def steps(self, mine: Mapping[int, int]) -> dict[int, int]:
        """All ranks' entries together. Collective."""
        said: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(said, dict(mine), self.group)
        return {key: step for part in said for key, step in part.items()}
