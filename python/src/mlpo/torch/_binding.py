"""A bound pack: parameters, their subgroup, and the tensors that are views on its slot."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Optional, Sequence

import torch

from .._client import Client
from .._errors import MlpoError
from .._request import GradInfo, Request
from .._subgroup import Kind, Subgroup
from . import _shards
from ._packing import Named
from ._seal import BITS, Seal, copied, pieces, same, seal

_MAX_NAME_BYTES = 256
# Elements that torch works on in the calling thread alone (at::internal::GRAIN_SIZE).
_ALONE = 1 << 15


@dataclass
class Member:
    """One parameter in a pack."""

    param: torch.Tensor
    name: str
    index: int  # of its tensor in the subgroup
    grad: torch.Tensor  # on the slot, in the shape of the elements that this rank holds, row-major
    value: torch.Tensor  # likewise: what the daemon handed out last
    seal: Optional[Seal] = None  # of the values that the masters round to, where known

    @property
    def local(self) -> torch.Tensor:
        """The parameter's elements that this rank holds."""
        return _shards.local(self.param)


class Pack:
    """A subgroup and its parameters."""

    def __init__(self, client: Client, key: str, items: Sequence[Named], grad_dtype: Optional[torch.dtype]) -> None:
        self.dtype = items[0].param.dtype
        self.grad_dtype = grad_dtype or self.dtype
        self.subgroup = _register(client, key, items, self.dtype, self.grad_dtype)
        grads, values = self.subgroup.grad.torch(), self.subgroup.param.torch()
        self.members: list[Member] = []
        start = 0
        for index, item in enumerate(items):
            shape = _shards.local(item.param).shape
            end = start + shape.numel()
            grad, value = grads[start:end].view(shape), values[start:end].view(shape)
            self.members.append(Member(item.param, item.name, index, grad, value, seal(_shards.local(item.param))))
            start = end

    def write_gradient(self, member: Member, grad: torch.Tensor, add: bool = False, alone: bool = False) -> None:
        """Puts a gradient, of the elements that this rank holds, into the slot, or adds it to what is there.

        `alone`: without the help of torch's threads, which another thread keeps busy.
        """
        if add:
            grad = grad.to(member.grad.device)
        limit = _ALONE if alone else grad.numel()
        for (_, to), (_, of) in zip(pieces(member.grad, limit), pieces(grad, limit)):
            if add:
                to.add_(of)
            else:
                to.copy_(of)

    def submit_gradient(self, taken: Sequence[Member]) -> Request[GradInfo]:
        """Writes the gradients of `taken` into the slot and tells the daemon."""
        for member in taken:
            self.write_gradient(member, _shards.local_gradient(member.param))
        return self.submit(taken)

    def submit(self, taken: Sequence[Member]) -> Request[GradInfo]:
        """Tells the daemon that the gradients of `taken` are in the slot; the others are skipped."""
        chosen = {member.index for member in taken}
        listed: Optional[list[tuple[int, int, int]]] = None
        if len(chosen) < len(self.members):
            listed, start = [], 0
            for member in self.members:
                kind = Kind.VALUE if member.index in chosen else Kind.SKIP
                listed.append((start, member.grad.numel(), kind))
                start += member.grad.numel()
        return self.subgroup.submit_grad(listed)

    def write_back(self, taken: Sequence[Member]) -> None:
        """Copies what the update handed out into the parameters."""
        for member in taken:
            member.seal = copied(member.local, member.value)

    def reload_masters(self, member: Member, force: bool = False) -> bool:
        """Makes masters follow a parameter that was replaced; True if any did.

        An element whose master does not round to the parameter's value is reset from it; the others keep the bits that
        rounding hides. With `force` its digest is not taken as a sign that nothing changed.
        """
        local = member.local
        now = seal(local)
        if member.seal is not None and not force and same(member.seal, now):
            return False
        bits = BITS[self.dtype]
        changed = False
        for first, piece in pieces(local):
            held = piece.detach().reshape(-1).to("cpu")
            count = held.numel()
            master = torch.from_numpy(self.subgroup.read_state(member.index, first, count)["master"])
            rounded = master.to(self.dtype)
            differs = (rounded.view(bits) != held.view(bits)) & ~(rounded.isnan() & held.isnan())
            if bool(differs.any()):
                changed = True
                reset = torch.where(differs, held.float(), master)
                self.subgroup.write_state(master=reset.numpy(), tensor=member.index, first=first, count=count)
        member.seal = now
        return changed


def _register(
    client: Client, key: str, items: Sequence[Named], dtype: torch.dtype, grad_dtype: torch.dtype
) -> Subgroup:
    specs, parts = [], []
    for index, item in enumerate(items):
        if item.param.is_meta:
            raise ValueError(f"parameter {item.name} is on the meta device: give it memory and values before step()")
        specs.append(_shards.spec(item.param, fit_name(item.name, str(index))))
        parts.append(_shards.local(item.param).detach().to("cpu", torch.float32).reshape(-1))
    initial = parts[0] if len(parts) == 1 else torch.cat(parts)
    del parts
    try:
        return client.subgroup(key, dtype=dtype, grad_dtype=grad_dtype, tensors=specs, initial=initial.numpy())
    except MlpoError as error:
        if error.errno == errno.EEXIST:
            error.strerror = f"{error.strerror}; give each OffloadAdamW of a client its own name="
        raise


def fit_name(name: str, otherwise: str, prefix: str = "") -> str:
    """`prefix` + `name` if the protocol has room for it, else with `otherwise` in its place."""
    fits = len((prefix + name).encode()) <= _MAX_NAME_BYTES
    return prefix + (name if fits else otherwise)
