"""Copies between slots and a GPU for optimizers, on two streams of their own: gradients leave the device on one while
the backward pass goes on, parameters return on the other. No thread waits for either.

    copies = DeviceCopies.of(client, 0)       # of a device; None without the CUDA side: copy by hand then
    slot = copies.slot(subgroup)
    slot.write(first, gradient)               # in a hook; the caller may drop `gradient` at once
    request = slot.submit()                   # behind all that was written, when the device gets there
    ...
    update = subgroup.submit_update(...)      # after request.result(): the daemon has the gradient
    slot.fetch([(first, parameter)])          # its stream waits for the update, and copies what it hands out
    slot.use()                                # the current stream waits for these copies: in front of what uses them
    ...
    update.result()                           # at the latest before the slot's next write(): raises if it failed

A stream that waits for an update is released whatever that ends with, the daemon's death included, so that a GPU never
hangs. After an update that failed nothing was copied: the parameters are what they were, and the error is the request's
to tell, once somebody asks it. write() asks for the trainer: it raises EBUSY while an update has not ended. So a step
that failed is known before the next one has sent a gradient. When the update was repeated, fetch() again.
"""

from __future__ import annotations

import collections
import errno
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Iterable, Optional, Sequence

from . import cuda
from ._errors import MlpoError
from ._request import GradInfo, Request
from ._subgroup import Kind, Subgroup

if TYPE_CHECKING:
    from ._client import Client

# Gradients whose memory waits for their copies; beyond it write() waits for the oldest.
MOST_BYTES = 1 << 30

_making = threading.Lock()
# One of a client, since a process can register memory with CUDA once. It lives as long as its slots.
_made: weakref.WeakValueDictionary[Client, DeviceCopies] = weakref.WeakValueDictionary()


class DeviceCopies:
    """The streams between a client's slots and one CUDA device. Made by of(). Thread-safe."""

    @staticmethod
    def of(client: Client, device: int) -> Optional[DeviceCopies]:
        """Those of a client and a device (its index), which may be others' too; pins the client's shared memory.

        None, with a warning, if this package has no CUDA side, or the client's are of another device. Raises MlpoError
        with ENODEV without a GPU.
        """
        why = cuda.why_not()
        if not why:
            with _making:
                found = _made.get(client)
                if found is None:
                    found = _made[client] = DeviceCopies(client, device)
            if found.device == device:
                return found
            why = (
                f"a client's copies are by streams of one GPU, here cuda:{found.device}: give what is on cuda:{device} "
                "an optimizer with a client of its own (client=)"
            )
        warnings.warn(
            f"{why}; until then copies between the GPU and the daemon block the training thread",
            RuntimeWarning,
            stacklevel=3,
        )
        return None

    def __init__(self, client: Client, device: int) -> None:
        import torch

        self._torch: Any = torch
        self._side = cuda.attach(client, device)
        self.device = device
        # Copies behind an update are kernels: they must not queue up behind those that wait for them.
        self.gradients: Any = torch.cuda.Stream(device, priority=-1)
        self.parameters: Any = torch.cuda.Stream(device, priority=-1)
        self._lock = threading.Lock()
        self._copying: collections.deque[tuple[Any, int]] = collections.deque()  # the event behind a copy, its bytes
        self._bytes = 0  # of all of them

    def slot(self, subgroup: Subgroup) -> DeviceSlot:
        """The slot of a subgroup of this client; one at a time."""
        return DeviceSlot(self, subgroup, self._side.slot(subgroup))

    def info(self) -> cuda.Info:
        """What is pinned and how streams wait."""
        return self._side.info()

    def _behind_current(self, stream: Any) -> Any:
        stream.wait_stream(self._torch.cuda.current_stream(self.device))
        return stream

    def _note_copy(self, nbytes: int) -> None:
        """Keeps gradients that are dropped and not yet copied from taking all of the device's memory."""
        event = self._torch.cuda.Event()
        event.record(self.gradients)
        with self._lock:
            self._copying.append((event, nbytes))
            self._bytes += nbytes
            while self._copying and (self._copying[0][0].query() or self._bytes > MOST_BYTES):
                oldest, freed = self._copying.popleft()
                oldest.synchronize()
                self._bytes -= freed


class DeviceSlot:
    """A subgroup's slot for copies by streams, made by DeviceCopies.slot(). For one thread at a time.

    A stream that is passed is torch's. Tensors are on the device of its copies, of any strides.
    """

    def __init__(self, copies: DeviceCopies, subgroup: Subgroup, slot: cuda.Slot) -> None:
        self._copies = copies
        self._slot = slot
        self._torch = copies._torch
        self._grad_dtype = getattr(copies._torch, subgroup.grad_dtype)
        self._arrived: Any = None  # the event behind the last fetch()
        self._written: Any = None  # the event behind the last write() on a stream of the caller's
        self.subgroup = subgroup
        self.device = copies.device
        about = copies.info()
        #: Whether fetch() may come before the update has ended; else it makes the calling thread wait for that.
        self.stream_waits = about.stream_waits and about.pinned_bytes == about.arena_bytes

    def write(self, first: int, gradient: Any, *, add: bool = False, stream: Any = None) -> None:
        """Puts elements [first, first + gradient.numel()) of a gradient into the slot, cast to its type, or adds them
        to what was written there.

        On the stream for gradients, behind what the current stream was given so far: its memory is the allocator's
        again once it has been copied. Or on `stream`: then it is the caller's to keep it until that stream has passed.
        Raises EBUSY while an update of the subgroup has not ended.
        """
        if not gradient.numel():
            return
        copies = self._copies
        on = copies._behind_current(copies.gradients) if stream is None else stream
        with self._torch.cuda.stream(on):
            part = gradient.reshape(-1)
            if add:  # in the slot's type, as torch adds in place
                held = self._torch.empty(part.numel(), dtype=self._grad_dtype, device=part.device)
                self._slot.read_grad(held, first, stream=on)
                part = held.add_(part)
            else:
                part = part.to(self._grad_dtype)
            self._slot.write_grad(part, first, stream=on)
        if stream is None:
            gradient.record_stream(on)
            copies._note_copy(gradient.numel() * gradient.element_size())
        else:  # which follows all writes before
            self._written = self._torch.cuda.Event()
            self._written.record(on)

    def submit(
        self, pieces: Optional[Iterable[tuple[int, int, int]]] = None, *, stream: Any = None
    ) -> Request[GradInfo]:
        """Submits what was written, all of it or pieces as Subgroup.submit_grad() has them, once the device is past the
        writes, whatever streams they came on. Raises EBUSY as write() does."""
        listed: list[tuple[int, int, Any]] = [(0, self.subgroup.numel, cuda.IN_SLOT)]
        if pieces is not None:
            listed = [
                (first, count, cuda.IN_SLOT if kind == Kind.VALUE else Kind(kind)) for first, count, kind in pieces
            ]
        return self._slot.copy_grad(listed, stream=self._copies.gradients if stream is None else stream)

    def fetch(self, targets: Sequence[tuple[int, Any]]) -> bool:
        """Has parameters copied to tensors, (first, tensor) each, on the stream for parameters: behind the update that
        is outstanding now, if there is one, and behind what the current stream was given so far.

        False: the slot holds none, since the update has ended already and failed, as its request says.
        """
        copies = self._copies
        stream = copies._behind_current(copies.parameters)
        try:
            with self._torch.cuda.stream(stream):
                for first, tensor in targets:
                    target = tensor.detach()
                    if target.is_contiguous():
                        self._slot.copy_param(target, first, stream=stream)
                    else:
                        held = target.contiguous()  # of what is there, which stays if the update fails
                        self._slot.copy_param(held, first, stream=stream)
                        target.copy_(held)
                        target.record_stream(stream)
        except MlpoError as error:
            if error.errno != errno.ENODATA:
                raise
            return False
        finally:
            self._arrived = self._torch.cuda.Event()
            self._arrived.record(stream)
        return True

    def use(self, stream: Any = None) -> None:
        """Lets a stream, by default the current one, wait for what was fetched. For each stream that uses it."""
        if self._arrived is not None:
            waiting = self._torch.cuda.current_stream(self.device) if stream is None else stream
            waiting.wait_event(self._arrived)

    def synchronize(self) -> None:
        """Waits, in this thread, until no stream writes or reads the slot: in front of what the host does there."""
        self._copies.gradients.synchronize()
        for event in (self._written, self._arrived):
            if event is not None:
                event.synchronize()

    def close(self) -> None:
        """Waits until its copies have ended, and frees it. Raises mlpo.TimeoutError and stays open if they do not."""
        self._slot.close()
