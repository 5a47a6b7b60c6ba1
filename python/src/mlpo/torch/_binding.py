"""A bound pack: parameters, their subgroup, and the tensors that are views on its slot."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Optional, Sequence

import torch
from torch.autograd.graph import increment_version

from .._client import Client
from .._device import DeviceCopies, DeviceSlot
from .._errors import MlpoError
from .._request import GradInfo, Request
from .._subgroup import Kind, Subgroup, TensorSpec
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
    def begin(self) -> int:
        """Where its elements begin in the subgroup."""
        return self.grad.storage_offset()

    @property
    def local(self) -> torch.Tensor:
        """The parameter's elements that this rank holds."""
        return _shards.local(self.param)


class Pack:
    """A subgroup and its parameters."""

    # For parameters on a GPU, where there is the CUDA side: copies by streams. Without it the calling thread copies.
    device: Optional[DeviceSlot] = None
    # What to do about a key that is taken.
    KEY_IS_TAKEN = "give each OffloadAdamW of a client its own name="

    def __init__(self, client: Client, key: str, items: Sequence[Named], grad_dtype: Optional[torch.dtype]) -> None:
        self.dtype = items[0].param.dtype
        self.grad_dtype = grad_dtype or self.dtype
        self.subgroup = self._registered(client, key, items)
        grads, values = self.subgroup.grad.torch(), self.subgroup.param.torch()
        self.members: list[Member] = []
        start = 0
        for index, item in enumerate(items):
            shape = _shards.local(item.param).shape
            end = start + shape.numel()
            grad, value = grads[start:end].view(shape), values[start:end].view(shape)
            self.members.append(self._member(item, index, grad, value))
            start = end

    def attach_device(self, client: Client) -> None:
        """Lets streams copy, if all parameters are on one GPU."""
        devices = {member.local.device for member in self.members}
        if len(devices) == 1 and self.subgroup.numel:
            (device,) = devices
            copies = DeviceCopies.of(client, device.index) if device.type == "cuda" else None
            if copies is not None:
                self.device = copies.slot(self.subgroup)

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        # A parameter may have been moved since.
        return self.device is not None and tensor.is_cuda and tensor.device.index == self.device.device

    def _are_on_device(self, members: Sequence[Member]) -> bool:
        return all(self._is_on_device(member.local) for member in members)

    def _member(self, item: Named, index: int, grad: torch.Tensor, value: torch.Tensor) -> Member:
        return Member(item.param, item.name, index, grad, value, seal(_shards.local(item.param)))

    def _spec(self, item: Named, index: int) -> TensorSpec:
        return _shards.spec(item.param, fit_name(item.name, str(index)))

    def _registered(self, client: Client, key: str, items: Sequence[Named]) -> Subgroup:
        specs, parts = [], []
        for index, item in enumerate(items):
            if item.param.is_meta:
                raise ValueError(
                    f"parameter {item.name} is on the meta device: give it memory and values before step()"
                )
            specs.append(self._spec(item, index))
            parts.append(_shards.local(item.param).detach().to("cpu", torch.float32).reshape(-1))
        initial = parts[0] if len(parts) == 1 else torch.cat(parts)
        del parts
        try:
            return client.subgroup(
                key, dtype=self.dtype, grad_dtype=self.grad_dtype, tensors=specs, initial=initial.numpy()
            )
        except MlpoError as error:
            if error.errno == errno.EEXIST:
                error.strerror = f"{error.strerror}; {self.KEY_IS_TAKEN}"
            raise

    def write_gradient(self, member: Member, grad: torch.Tensor, add: bool = False, alone: bool = False) -> None:
        """Puts a gradient, of the elements that this rank holds, into the slot, or adds it to what is there. From a
        device by its stream, as attach_device() says.

        `alone`: without the help of torch's threads, which another thread keeps busy.
        """
        if self.device is not None:
            if self._is_on_device(grad):
                self.device.write(member.begin, grad.detach(), add=add)
                return
            self.device.synchronize()
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
        return self.submit_pieces(listed)

    def submit_pieces(self, listed: Optional[Sequence[tuple[int, int, int]]]) -> Request[GradInfo]:
        """Submits pieces as Subgroup.submit_grad() does; what streams write to the slot is waited for by a stream."""
        return self.subgroup.submit_grad(listed) if self.device is None else self.device.submit(listed)

    @property
    def can_fetch(self) -> bool:
        """Whether a stream brings new values to all parameters as soon as their update has ended, without a thread."""
        return self.device is not None and self.device.stream_waits and self._are_on_device(self.members)

    def fetch(self, taken: Sequence[Member]) -> bool:
        """Has the stream for parameters bring new values, behind the update if that has not ended; use_fetched() then
        lets the current stream wait for them. False: the update has failed already."""
        assert self.device is not None
        return self.device.fetch([(member.begin, member.local) for member in taken])

    def let_stream_wait(self) -> None:
        """The current stream waits for what was fetched, if anything was."""
        if self.device is not None:
            self.device.use()

    def use_fetched(self, taken: Sequence[Member]) -> None:
        """Parameters have what was fetched for what the current stream does from here on."""
        self.let_stream_wait()
        for member in taken:
            increment_version(member.local)  # as by copy_()
            member.seal = seal(member.local)

    def write_back(self, taken: Sequence[Member]) -> None:
        """Copies what an update that has ended handed out, or a restore, into the parameters."""
        # fetch() fails here after an interrupt that had an update submitted twice: the refusal of the second one is
        # then the last that the client knows of the slot.
        if self.device is not None and self._are_on_device(taken) and self.fetch(taken):
            self.use_fetched(taken)
        else:
            self._copy_back(taken)

    def _copy_back(self, taken: Sequence[Member]) -> None:
        """Copies in this thread."""
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


def fit_name(name: str, otherwise: str, prefix: str = "") -> str:
    """`prefix` + `name` if the protocol has room for it, else with `otherwise` in its place."""
    fits = len((prefix + name).encode()) <= _MAX_NAME_BYTES
    return prefix + (name if fits else otherwise)
