"""save() and load() of several ranks: what all of them must agree on, so that their parts are of one checkpoint, and no
rank waits for one that has failed."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional, Sequence, TypeVar

import torch

from .._client import Client
from .._errors import MlpoError
from .._saving import Restored

T = TypeVar("T")


class Together:
    """The ranks of a job that save or load together; one alone asks nobody."""

    def __init__(self, client: Optional[Client], group: Any) -> None:
        """client: None if there is none yet. group: of all ranks of the job; None is torch's default one."""
        distributed = torch.distributed
        # Before there is a client, by what connect() will go by: on the rank on which it fails there never is one.
        ranks = client.world_size if client is not None else int(os.environ.get("WORLD_SIZE") or 1)
        self._group = group
        self.alone = ranks == 1 or not distributed.is_available() or not distributed.is_initialized()
        self.ranks = 1 if self.alone else int(distributed.get_world_size(group))
        self.rank = 0 if self.alone else int(distributed.get_rank(group))
        if self.rank < 0:
            raise ValueError("this rank is not in process_group: all ranks of the job save and load together")

    def all(self, call: Callable[[], T]) -> list[T]:
        """What `call` returns on each rank, in their order. Collective: if it raises on one, all ranks raise; that one
        its own error, the others one that says whose it is."""
        error: Optional[Exception] = None
        value: Optional[T] = None
        try:
            value = call()
        except Exception as raised:  # told to the others first
            error = raised
        said: list[Any] = [(None, value)]
        if not self.alone:
            said *= self.ranks
            text = None if error is None else f"{type(error).__name__}: {error}"
            torch.distributed.all_gather_object(said, (text, value), group=self._group)
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(said):
            if text is not None:
                raise MlpoError(-errno.ECANCELED, f"rank {rank} of {self.ranks} has failed, so all have: {text}")
        return [value for _, value in said]

    def check(self, client: Client) -> None:
        if not self.alone and self.ranks != client.world_size:
            raise ValueError(
                f"the process group has {self.ranks} ranks, the job {client.world_size}: all ranks of the job save and "
                "load together; pass the group that has them all as process_group"
            )


@dataclass(frozen=True)
class Plan:
    """What a rank wants to save, as save() was called there."""

    tag: Optional[str]
    step: Optional[int]
    attempt: Optional[bytes]
    overwrite: bool
    made: int  #: steps; 0 on a rank that holds no elements, however many the others have made
    new_attempt: bytes


class Choice(NamedTuple):
    tag: str
    step: int
    attempt: Optional[bytes]  # None: the daemon chooses


def agreed(plans: Sequence[Plan]) -> Choice:
    """What all ranks save. Raises on all of them if they want different things."""
    first = plans[0]
    for rank, plan in enumerate(plans):
        for name in ("tag", "step", "attempt", "overwrite"):
            theirs, ours = getattr(plan, name), getattr(first, name)
            if theirs != ours:
                raise ValueError(
                    f"rank {rank} saves with {name}={theirs!r}, rank 0 with {ours!r}: it must be the same on all ranks"
                )
    step = max(plan.made for plan in plans) if first.step is None else first.step
    attempt = first.new_attempt if first.attempt is None and len(plans) > 1 else first.attempt
    return Choice(f"step-{step}" if first.tag is None else first.tag, step, attempt)


def the_same(asked: Sequence[tuple[Optional[str], Optional[bytes], Optional[Restored]]]) -> Restored:
    """What rank 0 has found to load. Raises on all ranks if they ask for different things."""
    first, attempt, chosen = asked[0]
    for rank, (tag, theirs, _) in enumerate(asked):
        if (tag, theirs) != (first, attempt):
            raise ValueError(
                f"rank {rank} loads with tag={tag!r} and attempt={theirs!r}, rank 0 with tag={first!r} and "
                f"attempt={attempt!r}: they must be the same on all ranks"
            )
    assert chosen is not None
    return chosen


def check_names(client: Client) -> None:
    """A checkpoint has all that the client has registered, and finds it by name."""
    seen: dict[str, str] = {}
    for key, names in list(client._names.items()):
        for name in names:
            other = seen.setdefault(name, key)
            if other != key:
                raise ValueError(
                    f"tensors of subgroups {other!r} and {key!r} have the name {name!r}, by which a checkpoint finds "
                    "them: make the optimizers with model.named_parameters(), or use a client for each"
                )
