"""save() and load(): what makes the ranks' parts one checkpoint, and what a checkpoint can be found by."""

from __future__ import annotations

import uuid
from typing import Any, Optional

import torch

from .._client import Client


def shared_attempt(client: Client, group: Any) -> Optional[bytes]:
    """Rank 0's new attempt, on all ranks of the group. None: the daemon chooses, as it can for ranks on its node."""
    distributed = torch.distributed
    if client.world_size == 1 or not distributed.is_available() or not distributed.is_initialized():
        return None
    ranks = distributed.get_world_size(group)
    if ranks != client.world_size:
        raise ValueError(
            f"the process group has {ranks} ranks, the job {client.world_size}: all ranks of the job save together; "
            "pass the group that has them all as process_group, or attempt="
        )
    first = 0 if group is None else distributed.get_global_rank(group, 0)
    shared = [uuid.uuid4().bytes]
    distributed.broadcast_object_list(shared, src=first, group=group)
    return shared[0]


def check_names(client: Client) -> None:
    """A checkpoint has all that the client has registered, and finds it by name."""
    seen: dict[str, str] = {}
    for subgroup in list(client._subgroups):
        for tensor in subgroup.tensors:
            other = seen.setdefault(tensor.name, subgroup.key)
            if other != subgroup.key:
                raise ValueError(
                    f"tensors of subgroups {other!r} and {subgroup.key!r} have the name {tensor.name!r}, by which a "
                    "checkpoint finds them: make the optimizers with model.named_parameters(), or use a client for each"
                )
