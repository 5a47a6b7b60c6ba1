"""The gradients of one optimizer step on their way into the daemon: which are in the slots, which were submitted.

A piece's gradient is written into its slot when DeepSpeed has reduced it, added to what the passes before have left
there, and submitted (GRAD) in the pass that is the step's last. Nothing is ever taken from a slot that was not written
in this window: it holds parameters. What had no gradient is skipped at the step, as torch does.

That a pass is the last is what DeepSpeed says, and that a parameter is reduced once in it is a guess. A gradient that
comes after its GRAD is no error: the subgroup's gradients are taken back (DISCARD leaves the slot's bytes alone), added
to, and submitted at the step. Only an update that followed its gradient at once (update_in_backward) cannot be taken
back; it waits until a step has shown that each of its parameters is reduced once.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Optional, Sequence

import torch
from deepspeed.accelerator import get_accelerator

from .._errors import MlpoError
from .._native import lib
from .._request import GradInfo, Request
from .._subgroup import Kind
from ..torch._checks import Hyper
from ..torch._steps import Part
from ._pieces import Piece, ShardPack, part_of

_Found = Sequence[tuple[ShardPack, Piece]]


@dataclass
class _Open:
    """A subgroup's part of the window."""

    pack: ShardPack
    written: set[int] = field(default_factory=set)  # pieces with a gradient in the slot
    copying: set[int] = field(default_factory=set)  # those that wait for their copy to be submitted
    sent: set[int] = field(default_factory=set)  # those that were submitted, perhaps
    held: bool = False  # taken back: all of it leaves at the step
    requests: list[Request[GradInfo]] = field(default_factory=list)
    part: Optional[Part] = None  # its update was submitted, perhaps


class Window:
    """For the thread that runs backward passes and steps; DeepSpeed's hooks run in one at a time."""

    def __init__(
        self, hyper_of: Callable[[ShardPack], Hyper], settle: Callable[[ShardPack], None], early: bool
    ) -> None:
        """hyper_of: hyper-parameters of this moment. settle(pack): the last step is done with the slot. early: updates
        follow gradients at once."""
        self._hyper_of = hyper_of
        self._settle = settle
        self._early = early
        self._opened: dict[ShardPack, _Open] = {}
        self._reduced: set[int] = set()  # ds_id of parameters with a gradient, whatever of it this rank holds
        self._calls: Counter[int] = Counter()  # reductions in last passes, by ds_id
        self._usual: Counter[int] = Counter()  # those of the window before
        # Copies from a device that may be under way: the event behind them, and what is to be submitted then. Where
        # streams submit what they have copied (pack.device) there is nothing to wait for.
        self._copying: deque[tuple[Any, list[tuple[_Open, list[int]]]]] = deque()
        self._unsubmitted: deque[_Open] = deque()  # updates that are due when a stream has submitted the gradient
        self.sums: dict[ShardPack, float] = {}  # of squares, of the gradients that close() has sent
        self.sent_in_backward = 0  # subgroups that were complete before the last step
        self.updated_in_backward = 0  # of these, those that were updated

    def has(self, param: Any) -> bool:
        """Whether a parameter has a gradient in this window: the same on all ranks of its process group."""
        return param.ds_id in self._reduced

    @property
    def is_open(self) -> bool:
        return bool(self._reduced)

    def updated(self) -> list[Part]:
        """The updates that were submitted in the backward pass."""
        return [opened.part for opened in self._opened.values() if opened.part is not None]

    def refuse_updated(self, what: str) -> None:
        """Raises if `what` would see or change a state of which a part is after the step, and a part is before it."""
        if self.updated():
            raise RuntimeError(
                f"{what} between a backward pass with mlpo.update_in_backward and its step: subgroups are updated "
                "already. Call engine.step() first"
            )

    # ---- In backward passes

    @torch.no_grad()
    def take(self, reduced: Iterable[tuple[Any, torch.Tensor, _Found]], last: bool) -> None:
        """Takes gradients that were reduced: (parameter, this rank's partition of its gradient, its pieces).

        last: of the step's last backward pass. Partitions may be reused on return where copies are synchronous, else
        by the stream that is current.
        """
        ready: dict[ShardPack, tuple[_Open, list[int]]] = {}
        for param, partition, found in reduced:
            self._reduced.add(param.ds_id)
            if last:
                self._calls[param.ds_id] += 1
            for pack, piece in found:
                opened = self._write(pack, piece, part_of(partition, piece))
                if last and not opened.held:
                    ready.setdefault(pack, (opened, []))[1].append(piece.index)
        self._send_copied(wait=False)
        batch = [pair for pair in ready.values() if pair[0].pack.device is not None]
        self._send(batch, early=True)
        batch = [pair for pair in ready.values() if pair[0].pack.device is None]
        if get_accelerator().is_synchronized_device():
            self._send(batch, early=True)
        elif batch:
            for opened, indices in batch:
                opened.copying.update(indices)
            event = get_accelerator().Event()
            event.record()
            self._copying.append((event, batch))

    def _write(self, pack: ShardPack, piece: Piece, gradient: torch.Tensor) -> _Open:
        opened = self._opened.get(pack)
        if opened is None:
            self._settle(pack)
            opened = self._opened[pack] = _Open(pack)
        if pack.copied is not None:  # parameters may still be read from the slot
            if gradient.device.type == "cpu":
                pack.copied.synchronize()
            else:
                get_accelerator().current_stream().wait_event(pack.copied)
        if opened.part is not None:
            raise RuntimeError(
                f"parameter {piece.name} has another gradient after its update (mlpo.update_in_backward): a pass too "
                "many before engine.step(), or a layer that is used more often than in the step before. Set "
                '"update_in_backward": false, or tell DeepSpeed the number of passes (gradient_accumulation_steps)'
            )
        if piece.index in opened.sent:
            self._take_back(opened)
        elif piece.index in opened.copying:
            opened.held = True  # what waits for the first copy would be submitted in the middle of this one
        add = piece.index in opened.written
        if pack.device is not None and pack._is_on_device(gradient):
            # On the stream that has reduced it, and may use its memory again.
            stream = None if gradient.device.type == "cpu" else get_accelerator().current_stream()
            pack.device.write(piece.begin, gradient, add=add, stream=stream)
        elif gradient.device.type == "cpu":
            pack.write_gradient(piece, gradient, add)
        else:
            if add:  # on the device, where it is fast
                sum_ = piece.grad.to(gradient.device, non_blocking=True)
                gradient = sum_.add_(gradient.to(sum_.dtype))
            piece.grad.copy_(gradient, non_blocking=True)
        opened.written.add(piece.index)
        return opened

    def _take_back(self, opened: _Open) -> None:
        """Makes the slot ours again, with the gradients that are in it."""
        for request in opened.requests:
            request.exception()  # the daemon reads the slot until then
        opened.pack.subgroup.discard("user")
        opened.requests.clear()
        opened.sent.clear()
        opened.held = True

    def _send_copied(self, wait: bool) -> None:
        """Submits what has arrived from the device; with `wait` everything that is to arrive."""
        while self._copying and (wait or self._copying[0][0].query()):
            event, batch = self._copying[0]
            event.synchronize()
            self._copying.popleft()
            self._send(batch, early=True)
        while self._unsubmitted and (wait or all(request.done() for request in self._unsubmitted[0].requests)):
            opened = self._unsubmitted.popleft()
            if opened.held:  # taken back since then
                continue
            for request in opened.requests:
                request.result()
            self._update(opened)

    def _send(self, batch: Iterable[tuple[_Open, list[int]]], early: bool) -> None:
        """early: in a backward pass."""
        for opened, indices in batch:
            new = [index for index in indices if index not in opened.sent]
            if opened.held or not new:  # taken back since then
                continue
            self._submit(opened, [(*opened.pack.range_of(index), int(Kind.VALUE)) for index in new], new)
            if early and len(opened.sent) == len(opened.pack.members):
                self.sent_in_backward += 1
                if self._early and all(self._usual[piece.owner.ds_id] == 1 for piece in opened.pack.members):
                    if opened.pack.device is None:
                        self._update(opened)
                    else:
                        self._unsubmitted.append(opened)

    def _submit(self, opened: _Open, listed: list[tuple[int, int, int]], indices: Iterable[int]) -> None:
        if listed:
            opened.sent.update(indices)  # before: an interrupt leaves nothing unknown
            opened.requests.append(opened.pack.submit_pieces(listed))

    def _update(self, opened: _Open) -> None:
        part = self._part(opened)
        part.early, part.epoch = True, opened.pack.subgroup.epoch
        opened.part = part
        part.submit_update(False)
        self.updated_in_backward += 1

    def _part(self, opened: _Open) -> Part:
        pack = opened.pack
        part = Part(pack, self._hyper_of(pack), [piece for piece in pack.members if piece.index in opened.written])
        part.epoch = pack.subgroup.epoch
        part.gradient = opened.requests[-1]
        part.untouched = list(part.members)  # a partition is written by us alone: what else does is refused, or reloads
        return part

    def arrived(self) -> None:
        """Waits for copies from the device, and submits what they have brought. At the end of a backward pass."""
        self._send_copied(wait=True)

    def send_written(self) -> None:
        """Submits everything that was written: the caller knows that there is no further pass before the step."""
        self.arrived()
        written = [(opened, sorted(opened.written)) for opened in self._opened.values() if opened.part is None]
        self._send(written, early=False)

    # ---- Gradients that are looked at, or set

    def read(self, piece: Piece, pack: ShardPack, out: torch.Tensor) -> None:
        """Copies a piece's gradient; zeros if it has none."""
        self.refuse_updated("a gradient is asked for")
        self.arrived()
        opened = self._opened.get(pack)
        if opened is None or piece.index not in opened.written:
            out.zero_()
        else:
            _await_writes(pack)
            out.copy_(piece.grad)

    @torch.no_grad()
    def replace(self, param: Any, values: torch.Tensor, found: _Found) -> None:
        """Sets a parameter's gradient: the partition of this rank, padding included or not."""
        self.refuse_updated("a gradient is set")
        self.arrived()
        self._reduced.add(param.ds_id)
        for pack, piece in found:
            opened = self._opened.get(pack)
            if opened is not None:
                if piece.index in opened.sent:
                    self._take_back(opened)
                opened.written.discard(piece.index)  # so that it is not added to
            self._write(pack, piece, part_of(values, piece).to(piece.grad.device))

    def all_finite(self) -> bool:
        """Whether all gradients of this rank are; those that were written are submitted."""
        self.send_written()
        for opened in self._opened.values():
            unsent = [piece for piece in opened.pack.members if piece.index in opened.written - opened.sent]
            if not all(request.result().all_finite for request in opened.requests):
                return False
            if unsent:
                _await_writes(opened.pack)
            if not all(bool(piece.grad.isfinite().all()) for piece in unsent):  # taken back
                return False
        return True

    # ---- At the step

    def close(self) -> tuple[list[Part], bool]:
        """Submits the rest, waits until the daemon has read everything, and returns the step's parts, and whether all
        gradients are finite. The window stays until drop() or done()."""
        self.arrived()
        for opened in self._opened.values():
            if opened.part is not None or not opened.written:
                continue
            rest = [index for index in range(len(opened.pack.members)) if index not in opened.sent]
            listed = []
            for index in rest:
                kind = Kind.VALUE if index in opened.written else Kind.SKIP
                listed.append((*opened.pack.range_of(index), int(kind)))
            self._submit(opened, listed, rest)
        parts, finite = [], True
        self.sums.clear()
        for opened in self._opened.values():
            if not opened.written:
                continue
            infos = [request.result() for request in opened.requests]
            (whole,) = [info for info in infos if info.complete]
            self.sums[opened.pack] = whole.sum_of_squares
            finite = finite and whole.all_finite
            parts.append(self._part(opened) if opened.part is None else self._checked(opened))
        return parts, finite

    def _checked(self, opened: _Open) -> Part:
        part = opened.part
        assert part is not None
        if part.hyper != self._hyper_of(opened.pack):
            raise ValueError(
                f"hyper-parameters of the param group of {opened.pack.members[0].name} are others at step() than when "
                "its update was submitted in the backward pass (mlpo.update_in_backward): change them after step()"
            )
        return part

    def done(self) -> None:
        """The step has been decided on: what the window holds is the step's."""
        self._opened.clear()
        self._reduced.clear()
        self._usual, self._calls = self._calls, Counter()

    def begin_pass(self) -> None:
        """Of a new step: counts of sent_in_backward start again."""
        if not self._reduced:
            self.sent_in_backward = self.updated_in_backward = 0

    def drop(self) -> None:
        """Forgets all gradients. What was updated in the backward pass stays updated: see refuse_updated()."""
        while self._copying:
            self._copying.popleft()[0].synchronize()
        self._unsubmitted.clear()
        for opened in self._opened.values():
            for request in opened.requests:
                request.exception()
            if opened.part is None and opened.sent:
                _discard(opened.pack)
        self._opened.clear()
        self._reduced.clear()
        self._calls.clear()


def _await_writes(pack: ShardPack) -> None:
    """What streams write to the slot is there for the host."""
    if pack.device is not None:
        pack.device.synchronize()


def _discard(pack: ShardPack) -> None:
    try:
        pack.subgroup.discard("user")
    except MlpoError as error:
        if error.code != lib.MLPO_ERR_TORN:  # an update that failed: it is repeated by the next wait
            raise
