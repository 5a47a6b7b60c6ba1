"""A bound pack: parameters, their subgroup, and the tensors that are views on its slot."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Optional, Sequence

import torch

from .._client import Client
from .._errors import MlpoError
from .._request import GradInfo, Request
from .._subgroup import Kind, Subgroup, TensorSpec
from ._packing import Named

_MAX_NAME_BYTES = 256
# Elements whose FP32 copies are held at a time where a parameter's state is read or written in pieces.
PIECE_ELEMENTS = 4 << 20
# Types of the same size that compare bits: NaN equals itself and -0 is not 0.
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@dataclass
class Member:
    """One parameter in a pack."""

    param: torch.Tensor
    name: str
    index: int  # of its tensor in the subgroup
    grad: torch.Tensor  # on the slot, in the parameter's shape, row-major
    value: torch.Tensor  # likewise: what the daemon handed out last
    slot_is_value: bool = False  # `value` is what the master rounds to, unless somebody wrote to the slot


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
            end, shape = start + item.param.numel(), item.param.shape
            grad, value = grads[start:end].view(shape), values[start:end].view(shape)
            self.members.append(Member(item.param, item.name, index, grad, value))
            start = end
        self.fresh = True  # masters are what the parameters were at registration, in this very step

    def write_gradient(self, member: Member, add: bool = False) -> None:
        """Puts a parameter's .grad into the slot, or adds it to what is there, in the slot's type."""
        grad = member.param.grad
        assert grad is not None
        member.slot_is_value = False
        if add:
            member.grad.add_(grad if grad.device == member.grad.device else grad.to(member.grad.device))
        else:
            member.grad.copy_(grad)

    def submit_gradient(self, taken: Sequence[Member]) -> Request[GradInfo]:
        """Writes the gradients of `taken` into the slot and tells the daemon."""
        for member in taken:
            self.write_gradient(member)
        return self.submit(taken)

    def submit(self, taken: Sequence[Member]) -> Request[GradInfo]:
        """Tells the daemon that the gradients of `taken` are in the slot; the others are skipped."""
        self.fresh = False
        chosen = {member.index for member in taken}
        pieces: Optional[list[tuple[int, int, int]]] = None
        if len(chosen) < len(self.members):
            pieces, start = [], 0
            for member in self.members:
                kind = Kind.VALUE if member.index in chosen else Kind.SKIP
                pieces.append((start, member.param.numel(), kind))
                start += member.param.numel()
        return self.subgroup.submit_grad(pieces)

    def write_back(self, taken: Sequence[Member]) -> None:
        """Copies what the update handed out into the parameters."""
        for member in taken:
            member.param.copy_(member.value)
            member.slot_is_value = True

    def reload_masters(self, member: Member, force: bool = False) -> bool:
        """Makes masters follow a parameter that was replaced; True if any did.

        An element whose master does not round to the parameter's value is reset from it; the others keep the bits that
        rounding hides. With `force` the slot's bytes are not taken as a sign that nothing changed.
        """
        held = member.param.detach().to("cpu")
        bits = BITS[self.dtype]
        if member.slot_is_value and not force and torch.equal(held.view(bits), member.value.view(bits)):
            return False
        flat = held.reshape(-1)
        changed = False
        for first in range(0, flat.numel(), PIECE_ELEMENTS):
            now = flat[first : first + PIECE_ELEMENTS]
            master = torch.from_numpy(self.subgroup.read_state(member.index, first, now.numel())["master"])
            rounded = master.to(self.dtype)
            differs = (rounded.view(bits) != now.view(bits)) & ~(rounded.isnan() & now.isnan())
            if bool(differs.any()):
                changed = True
                reset = torch.where(differs, now.float(), master)
                self.subgroup.write_state(master=reset.numpy(), tensor=member.index, first=first, count=now.numel())
        return changed


def _register(
    client: Client, key: str, items: Sequence[Named], dtype: torch.dtype, grad_dtype: torch.dtype
) -> Subgroup:
    specs, parts = [], []
    for index, item in enumerate(items):
        if item.param.is_meta:
            raise ValueError(f"parameter {item.name} is on the meta device: give it memory and values before step()")
        shape = tuple(item.param.shape)
        if len(shape) > 8:
            shape = (item.param.numel(),)
        specs.append(TensorSpec(fit_name(item.name, str(index)), shape))
        parts.append(item.param.detach().to("cpu", torch.float32).reshape(-1))
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
