"""One optimizer step on its way through the daemon.

Up to `decided` nothing has changed and the step can be forgotten; from then on it must be finished. Both hold whatever
interrupts it: every part can be repeated, so that an interrupt or a failure between two subgroups never leaves a step
half done. To submit the identical update again is what the daemon wants where one was refused before its first block
or ended partly done.

With update_in_backward=True some parts of a step are past that point before the step exists (Part.early): its end can
only be that they are finished, whatever becomes of the others.

To parameters on a device a stream brings new values as soon as their update has ended (Part.fetched), and with
step(wait=False) it is a stream, too, that waits for them where they are used (hand_over()). That an update has failed,
so that they got none, is then found by whoever needs the slot or the next step, and no gradient is sent before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Callable, MutableMapping, Optional, Sequence

import torch

from .._errors import MlpoError
from .._native import lib
from .._request import GradInfo, Request, wait_any
from ._binding import Member, Pack
from ._checks import Hyper
from ._seal import same, seal
from ._state import outline

_USED_OLD = (
    "what the forward pass has used since are the parameters before this update: call zero_grad() and make it again"
)
_TURN_S = 0.001  # how often to look whether an update whose request is lost has ended


@dataclass
class Part:
    """A step's work on one subgroup."""

    pack: Pack
    hyper: Hyper
    members: list[Member] = field(default_factory=list)  # those with a gradient
    grad_scale: float = 1.0  # multiplies the gradient
    priority: int = 0  # of the update; lower goes first, 0 is the order of submission
    early: bool = False  # the update was submitted in the backward pass
    epoch: int = 0  # of the subgroup before this step
    gradient: Optional[Request[GradInfo]] = None
    update: Optional[Request[int]] = None
    ended: bool = False
    versions: Optional[list[int]] = None  # of the members' tensors, if the trainer goes on before the update has ended
    untouched: Optional[list[Member]] = None  # by the trainer: decided before the first copy, which moves versions too
    fetched: Optional[list[int]] = None  # versions of `untouched` when a stream was told to bring their new values
    late: Optional[list[Member]] = None  # of these, written to since
    handed_over: bool = False  # the trainer's stream waits for these; whether the update has succeeded is not known

    def submit_update(self, apply_nonfinite: bool) -> None:
        """Submits the update, or finds that it has ended well already."""
        self.update = _submit(self, apply_nonfinite)

    def fetch(self) -> None:
        """Has new values brought by a stream, if one can wait for them. The update is under way, or has ended."""
        if self.pack.can_fetch:
            self._look_at_members()
            assert self.untouched is not None
            versions = [member.param._version for member in self.untouched]
            if self.pack.fetch(self.untouched):
                self.fetched = versions

    def hand_over(self) -> Optional[str]:
        """Parameters have their new values for what the current stream does from here on, by a stream or because the
        update has ended. What to raise if the trainer has written to one since the step."""
        if self.handed_over:
            if self.fetched is not None:
                self.pack.let_stream_wait()  # it may be another one
            return None
        self._look_at_members()
        assert self.untouched is not None
        if self.fetched is None:
            self.pack.write_back(self.untouched)
        else:
            if self.late is None:  # before versions are moved, since an interrupt may have this repeated
                found = zip(self.untouched, self.fetched)
                self.late = [member for member, version in found if member.param._version != version]
            self.pack.use_fetched(self.untouched)
            for member in self.late:
                member.seal = None  # masters follow it, whichever of the two it holds
        self.handed_over = True
        kept = {member.index for member in self.untouched}
        return self._written_to([member for member in self.members if member.index not in kept], self.late or [])

    def forget_update(self) -> None:
        """It has failed: nothing was brought, and it is to be submitted again."""
        if self.fetched is not None and self.versions is not None:
            self.untouched = None  # the trainer goes on, and may have written to some
        if self.handed_over:
            self.versions = None  # moved by that
        self.update = self.fetched = self.late = None
        self.handed_over = False

    def _look_at_members(self) -> None:
        """Decides which members get the update's value: those that the trainer has not written to."""
        if self.untouched is not None:
            return
        if self.early:
            self.untouched = [m for m in self.members if m.seal is not None and same(m.seal, seal(m.local))]
        else:
            versions = self.versions or [member.param._version for member in self.members]
            self.untouched = [m for m, version in zip(self.members, versions) if m.param._version == version]

    def _written_to(self, changed: Sequence[Member], late: Sequence[Member]) -> Optional[str]:
        if not changed and not late:
            return None
        by, call = ("update_in_backward=True", "step()") if self.early else ("step(wait=False)", "wait()")
        what = "what was written stays and will count, the update's value is lost"
        if not changed:
            what = "it holds what was written or the update's value, and that will count"
        return (
            f"parameter {[*changed, *late][0].name} was written to while its update by {by} was under way; {what}: "
            f"call optimizer.{call} before changing parameters"
        )

    def is_applied(self) -> bool:
        """Whether this is an early update that has changed anything, or may have. Waits for its end.

        It has not if it was never submitted, or if the daemon refused it for a gradient that is not finite.
        """
        if not self.early:
            return False
        if self.update is None:
            return _has_moved(self)
        failure = self.update.exception()
        return failure is None or failure.code != lib.MLPO_ERR_NOT_FINITE


class Step:
    """A step and what it will have changed: `counts` are the parameters' step counts after it."""

    def __init__(self, parts: Sequence[Part], counts: dict[torch.Tensor, torch.Tensor]) -> None:
        self.parts = list(parts)
        self.counts = counts
        self.decided = False
        self.closing = False  # gradients are being given up: from here on the step is not begun anew
        self.left = False  # by step(wait=False): decided, and the trainer goes on
        self._by_pack = {id(part.pack): part for part in self.parts}

    def send_gradients(self, submit: Callable[[Pack, Sequence[Member]], Request[GradInfo]]) -> None:
        """Sends all gradients by `submit`."""
        for part in self.parts:
            if not part.early:
                part.epoch = part.pack.subgroup.epoch
                part.gradient = submit(part.pack, part.members)

    def gradients_are_finite(self) -> bool:
        """Waits until the daemon has read them."""
        return all([part.gradient.result().all_finite for part in self.parts if part.gradient is not None])

    def forget(self, overflow: bool = False) -> None:
        """Ends the windows without an update, but early parts'. `overflow` counts one skipped step of the session."""
        for part in self.parts:
            if part.early:
                continue
            if part.gradient is not None:
                part.gradient.exception()  # the daemon reads the slot until then
            part.pack.subgroup.discard("overflow" if overflow else "user")
            overflow = False

    def updated_early(self) -> Step:
        """The step that has become of this one if all else is forgotten."""
        parts = [part for part in self.parts if part.is_applied()]
        done = Step(parts, {m.param: self.counts[m.param] for part in parts for m in part.members})
        done.decided = True
        return done

    def finish(self, apply_nonfinite: bool, state: MutableMapping[Any, dict[str, Any]]) -> None:
        """Submits the updates, copies parameters back as they arrive, and moves the step counts.

        Waits for all updates, then raises the first failure; a repeated call goes on with those that failed.
        """
        self.finish_parts(self.parts, apply_nonfinite)
        self.count(state)

    def count(self, state: MutableMapping[Any, dict[str, Any]]) -> None:
        """Moves the step counts."""
        for param, count in self.counts.items():
            if param in state:
                state[param]["step"] = count
            else:
                state[param] = outline(param, count)

    def finish_parts(self, parts: Sequence[Part], apply_nonfinite: bool) -> None:
        """As finish(), for some subgroups and without the step counts."""
        failure = self.submit_updates(parts, apply_nonfinite)
        failure = self.wait_for(parts) or failure
        if failure is not None:
            raise failure

    def part_of(self, pack: Pack) -> Optional[Part]:
        """The step's work on a subgroup; None if it has none."""
        return self._by_pack.get(id(pack))

    def go_on(self, apply_nonfinite: bool) -> None:
        """Submits all updates and leaves the waiting to later calls."""
        self.left = True
        for part in self.parts:
            part.versions = [member.param._version for member in part.members]
        failure = self.submit_updates(self.parts, apply_nonfinite)
        if failure is not None:
            raise failure

    def submit_updates(self, parts: Sequence[Part], apply_nonfinite: bool) -> Optional[MlpoError]:
        """Submits the updates that are not under way; the first failure."""
        failure: Optional[MlpoError] = None
        for part in parts:
            if not part.ended and part.update is None:
                try:
                    part.submit_update(apply_nonfinite)
                except MlpoError as error:
                    failure = failure or error
                else:
                    if part.update is None:
                        _end(part)
            if not part.ended and part.update is not None and part.fetched is None:
                part.fetch()
        return failure

    def make_ready(self, parts: Sequence[Part], apply_nonfinite: bool) -> None:
        """Parameters of these have their new values for what the trainer does next; see Part.hand_over(). Waits for the
        updates of those that no stream brings, and raises as finish_parts()."""
        for part in parts:
            text = None if part.fetched is None else part.hand_over()
            if text is not None:
                raise RuntimeError(text)
        rest = [part for part in parts if part.fetched is None]
        if rest:
            self.finish_parts(rest, apply_nonfinite)

    def end_arrived(self) -> None:
        """Ends parts that were handed over and whose updates are known to have ended well, up to the first that is not.
        Never waits; one that has failed is left to who needs to know."""
        for part in self.parts:
            if part.ended:
                continue
            if not part.handed_over or part.update is None or not part.update.done() or part.update.exception():
                return
            _end(part)

    def wait_for(self, parts: Sequence[Part]) -> Optional[MlpoError]:
        """Waits for the updates that are under way and copies parameters back as they arrive; the first failure."""
        failure: Optional[MlpoError] = None
        waiting = {part.update: part for part in parts if part.update is not None and not part.ended}
        while waiting:
            for update in wait_any(list(waiting)):
                part = waiting.pop(update)
                found = update.exception()
                if found is None:
                    _end(part)
                elif _has_moved(part):  # by an update whose request was lost: nothing was fetched behind that
                    part.fetched, part.handed_over = None, False
                    _end(part)
                else:
                    if part.handed_over:
                        found.strerror = f"{found.strerror}; {_USED_OLD}"
                    part.forget_update()
                    failure = failure or found
        return failure

    def abandon(self) -> None:
        """Gives up updates that failed. A subgroup left partly updated needs all of its state written afterwards."""
        for part in self.parts:
            if part.ended:
                continue
            try:
                part.pack.subgroup.discard("user")
            except MlpoError as error:
                if error.code != lib.MLPO_ERR_TORN:
                    raise


def _end(part: Part) -> None:
    text = part.hand_over()
    part.ended = True
    if text is not None:
        raise RuntimeError(text)


def _submit(part: Part, apply_nonfinite: bool) -> Optional[Request[int]]:
    """Submits the update; None if an interrupted call before has submitted it and it has ended well.

    Where that one ends in between, a second one is refused for want of a gradient, and _has_moved tells.
    """
    subgroup, hyper = part.pack.subgroup, part.hyper
    while not _has_moved(part):
        try:
            return subgroup.submit_update(
                hyper.lr, hyper.betas, hyper.eps, hyper.weight_decay, part.grad_scale,
                mode=hyper.mode, bias_correction=hyper.bias_correction,
                apply_nonfinite=apply_nonfinite, priority=part.priority,
            )  # fmt: skip
        except MlpoError as error:
            if error.code != lib.MLPO_ERR_SLOT_BUSY:
                raise
        time.sleep(_TURN_S)  # only after an interrupt: its request is lost, the update is running
    return None


def _has_moved(part: Part) -> bool:
    return part.pack.subgroup.epoch == part.epoch + 1


def not_finite(parts: Sequence[Part]) -> tuple[int, str, int, tuple[str, ...], tuple[str, ...]]:
    """The arguments of NonFiniteGradientError for a step, with the names of parameters, and of subgroups updated early.

    Waits for early updates: the slots of those that were applied hold parameters.
    """
    rest = [part for part in parts if not part.is_applied()]
    names = tuple(member.name for part in rest for member in part.members if not bool(member.grad.isfinite().all()))
    keys = tuple(part.pack.subgroup.key for part in parts if part.is_applied())
    what = 'nothing was updated. Skip the step, or pass nonfinite="apply" for what torch does'
    shown = some_of(names) or "a parameter on another rank"
    text = f"the gradient of {shown} is not finite; {updated_text(parts) or what}"
    return lib.MLPO_ERR_NOT_FINITE, text, 0, names, keys


def updated_text(parts: Sequence[Part]) -> str:
    """What to say of a step that ends with early updates alone; "" if it has none. Waits for their end."""
    keys = [part.pack.subgroup.key for part in parts if part.is_applied()]
    if not keys:
        return ""
    return (
        f"{len(keys)} of {len(parts)} subgroups were already updated in the backward pass and stay so: "
        f"{some_of(keys)}; the others were not. Go on from that, or load what was saved into model and optimizer"
    )


def some_of(names: Sequence[str], most: int = 8) -> str:
    """Names for a sentence."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
