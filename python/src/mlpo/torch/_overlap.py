"""overlap=True: gradients go into the slots while the backward pass runs, and on to the daemon. From the host's memory
a thread copies them (_lane.py), from a GPU a stream (mlpo._device).

Whether a parameter has a gradient is always told by its .grad, as without overlap:
  None: it has none, whatever the slot holds; a Taken tensor: it is in the slot; another tensor: it is that one.
So zero_grad() of a model, gradients that somebody assigns and layers without a part mean what they always mean.

A subgroup's gradient leaves during the backward pass once each of its parameters was called as often as usual: as in
the step before. That is a guess. A call that comes after it takes the gradient back (DISCARD leaves the slot's bytes
alone), adds to it, and it leaves at step(): a wrong guess costs time, never a gradient. FSDP2 adds to .grad itself, so
a shard's gradient is not taken before its last usual call; one that comes after it fails in FSDP2.

update_in_backward=True: where all parameters of a subgroup have had their calls its update is submitted behind its
gradient, with the param_groups of that moment. That cannot be taken back. So a call that comes after it raises, and
from the first such update on the window is ended by step() or load_state_dict() alone: what else would drop or change
a gradient, or read a state that is neither before nor after the step, raises. Parameters get their new values at step()
or later, from the slot: what autograd has saved of them stays as it is.

DistributedDataParallel (attach_ddp()) reduces gradients in buckets, and puts what comes of it into .grad when the pass
is over. So arrived() takes a gradient from its bucket, if it is the last usual one, and ended() releases .grad behind
DDP. Until then .grad is DDP's: passes are added up in it, in the order and with the bits of overlap=False.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Optional, Sequence

import torch
from torch.autograd.graph import get_gradient_edge

from .._errors import MlpoError
from .._native import lib
from .._request import GradInfo, Request
from . import _checks, _shards
from ._binding import Member, Pack
from ._lane import Lane
from ._steps import Part, some_of
from ._windows import Taken, Watch, Window, is_in_slot, is_taken, late_text

if TYPE_CHECKING:
    from ._optimizer import OffloadAdamW

# A parameter that has not been called in so many steps at first is not waited for.
_IDLE_STEPS = 3
# Gradients smaller than this are copied at once; handing them over would take longer.
_LANE_BYTES = 256 << 10


class Overlap:
    """The hooks of one optimizer. Hooks run in autograd's threads, one of which may be the trainer's: one lock."""

    def __init__(self, owner: OffloadAdamW, passes: int, updates: bool) -> None:
        self._updates = updates  # update_in_backward
        self._owner = weakref.proxy(owner)  # no cycle, so that an optimizer's hooks go when it is dropped
        self._passes = passes
        self._watches: dict[torch.Tensor, Watch] = {}
        self._windows: dict[int, Window] = {}
        self._attached: set[torch.Tensor] = set()  # parameters that DDP reduces
        self._holds = 0  # no_sync() entered and not left
        self._held = False  # was it used in this window?
        self._lock = threading.RLock()
        self._lane = Lane()  # all that touches a slot goes through it, or after drain()
        self._left_early = 0
        self.sent_in_backward = 0  # subgroups of the last step
        self.updated_in_backward = 0  # likewise
        self.close = weakref.finalize(self, _release_all, self._watches)  # takes all hooks off, now or with this object
        self.close.atexit = False

    def watch(self) -> None:
        """Puts hooks on parameters that need gradients and have none, and takes them off those that left."""
        if not self.close.alive:
            return
        params = {item.param: item.name for item in self._owner._all_named()}
        with self._lock:
            for param in [param for param in self._watches if param not in params]:
                _release(self._watches.pop(param))
            for param in params:
                if param.requires_grad and param not in self._watches:
                    self._watches[param] = self._hooked(param)

    def attach(self, params: Iterable[torch.Tensor]) -> None:
        """From now on the gradients of these are taken by arrived()."""
        self._attached.update(params)

    def _hooked(self, param: Any) -> Watch:  # torch's hooks have no types
        node, before = self._before(param)
        # Weak, since autograd's lists of hooks would keep all of it for as long as the parameter lives.
        after = param.register_post_accumulate_grad_hook(functools.partial(_take, weakref.ref(self)))
        return Watch(param, node, _kind(param), [before, after])

    def _before(self, param: torch.Tensor) -> tuple[Any, Any]:
        """The parameter's AccumulateGrad and a hook on it."""
        node = get_gradient_edge(param).node
        # Not a hook of the tensor: those run for torch.autograd.grad() too, which leaves .grad alone.
        return node, node.register_prehook(functools.partial(_lift, weakref.ref(self), weakref.ref(param)))

    def _follow(self, watch: Watch) -> None:
        """Puts the hook on another AccumulateGrad where there is one. The other hook is the parameter's own."""
        kind = _kind(watch.param)
        if watch.kind != kind:
            watch.handles[0].remove()
            watch.node, watch.handles[0] = self._before(watch.param)
            watch.kind = kind

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._holds += 1
        self._held = True
        try:
            yield
        finally:
            self._holds -= 1

    # ---- During the backward pass

    def _lift(self, param: torch.Tensor) -> None:
        """Before autograd adds to .grad, which must not be a Taken then."""
        watch = self._watches.get(param)
        grad = param.grad
        if watch is None or not isinstance(grad, Taken):
            return
        if param in self._attached and not grad.used:
            self._put_back(watch, grad)
            return
        watch.lifted = grad
        param.grad = None

    def _take(self, param: torch.Tensor) -> None:
        """After autograd has put a gradient into .grad."""
        watch = self._watches.get(param)
        if watch is not None:
            self._follow(watch)
        if watch is None or param.grad is None or not _shards.local(param).numel():
            return
        if param in self._attached:
            self._owner._refuse_stale(param)
            watch.here = True
            return
        self._owner._refuse_unreduced(param)
        if watch.lifted is not None and watch.lifted.used:
            # Added to a gradient that is gone. Fine if zero_grad() drops it, as in a GAN's loop; else step() raises.
            param.grad, watch.lifted = watch.lifted, None
            return
        self._owner._check_open()  # in a forked child there are no slots
        self._owner._refuse_stale(param)
        with self._lock, torch.no_grad():
            pack, member = self._owner._place_of(param)
            _checks.gradient(param, member.name, pack.grad_dtype)
            window = self._window(pack)
            if _shards.is_dtensor(param) and watch.lifted is None:
                # FSDP2 adds passes up in .grad by itself, without autograd's hook before it, and wants a DTensor there.
                last = window.waiting is not None and watch.calls + 1 == watch.usual
                if self._holds or not last:
                    watch.calls += not self._holds
                    return
            if window.part is not None:
                window.late = member.name
                param.grad, watch.lifted = watch.taken, None
                raise RuntimeError(late_text(window.late))
            if window.submitted:
                self._lane.drain()
                self._take_back(window)
            self._write(pack, member, _shards.local_gradient(param).detach(), add=watch.lifted is not None)
            param.grad, watch.lifted = self._stand_in(watch, param.grad, member.name), None
            if self._holds:
                return
            watch.calls += 1
            if watch.calls == watch.usual:
                self._had_its_calls(window, member)

    def _stand_in(self, watch: Watch, grad: torch.Tensor, name: str) -> Taken:
        if watch.taken is None or watch.taken.dtype_of != grad.dtype:
            watch.taken = Taken.of(grad, name)
        watch.taken.used = False
        return watch.taken

    def _had_its_calls(self, window: Window, member: Member) -> None:
        if window.waiting is None:
            return
        window.waiting.discard(member.index)
        if not window.waiting:
            self._send_early(window, [each for each in window.pack.members if is_in_slot(window, each)])

    # ---- The same where DDP reduces gradients, in whatever thread it does

    def arrived(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """DDP has reduced a gradient, and will write it into .grad; `grad` keeps its values until the next pass.

        What this rank had no gradient of in the pass is left to step(): only then it is known whether another one had.
        """
        watch = self._watches.get(param)
        if watch is None or not watch.here or watch.lifted is not None:
            return
        self._owner._check_open()
        with self._lock:
            watch.here = False
            watch.calls += not self._holds
            place = self._owner._places.get(param)
            if place is None:  # another rank's (shard_group), or not registered yet
                return
            pack, member = place[0], place[0].members[place[1]]
            if self._holds or watch.calls != watch.usual:
                if id(pack) in self._windows:
                    self._windows[id(pack)].arrived.discard(member.index)
                return
            window = self._window(pack)
            if window.waiting is None:
                return
            _checks.gradient(param, member.name, pack.grad_dtype)
            if window.submitted:
                self._lane.drain()
                self._take_back(window)
            self._write(pack, member, grad)
            window.arrived.add(member.index)
            self._had_its_calls(window, member)

    def ended(self, params: Iterable[torch.Tensor]) -> None:
        """DDP has ended a backward pass and written .grad of these: those that are in slots are released."""
        with self._lock:
            for param in params:
                watch, place = self._watches.get(param), self._owner._places.get(param)
                if watch is None:
                    continue
                watch.here = False
                if watch.lifted is not None:
                    # Added to a gradient that is gone, as in _take().
                    param.grad, watch.lifted = watch.lifted, None
                    continue
                window = None if place is None else self._windows.get(id(place[0]))
                if place is None or window is None or place[1] not in window.arrived:
                    continue
                window.arrived.discard(place[1])
                if param.grad is not None:
                    param.grad = self._stand_in(watch, param.grad, place[0].members[place[1]].name)

    def before_forward(self, params: Iterable[torch.Tensor]) -> None:
        """Of a DDP model that looks for unused parameters: it would reduce their .grad too, whatever stands there."""
        for param in params:
            watch, place, grad = self._watches.get(param), self._owner._places.get(param), param.grad
            if watch is None or place is None or not isinstance(grad, Taken) or grad.used:
                continue
            window = self._windows.get(id(place[0]))
            if window is None or window.part is None:
                self._put_back(watch, grad)

    def _put_back(self, watch: Watch, taken: Taken) -> None:
        """Another pass adds to a gradient that is in the slot: .grad gets it back, as if it had not been taken."""
        with self._lock, torch.no_grad():
            pack, member = self._owner._place_of(watch.param)
            window = self._window(pack)
            if window.part is not None:
                window.late = member.name
                raise RuntimeError(late_text(window.late))
            self._lane.drain()
            self._take_back(window)
            watch.param.grad = torch.empty_like(watch.param, dtype=taken.dtype_of).copy_(member.grad)

    def _write(self, pack: Pack, member: Member, grad: torch.Tensor, add: bool = False) -> None:
        nbytes = grad.numel() * grad.element_size()
        if grad.device.type == "cpu" and nbytes >= _LANE_BYTES and pack.device is None:
            self._lane.put(nbytes, pack.write_gradient, member, grad, add, True)
        else:
            pack.write_gradient(member, grad, add)

    def _window(self, pack: Pack) -> Window:
        window = self._windows.get(id(pack))
        if window is None:
            self._owner._settle(pack)  # what the last step handed out is in the slot until it was copied
            window = self._windows[id(pack)] = Window(pack, self._expected(pack))
        return window

    def _expected(self, pack: Pack) -> Optional[set[int]]:
        expected = set()
        for member in pack.members:
            watch = self._watches.get(member.param)
            if watch is None or not member.param.requires_grad:
                continue
            if watch.usual is None:
                return None
            if watch.usual:
                expected.add(member.index)
        return expected

    def _send_early(self, window: Window, taken: Sequence[Member]) -> None:
        if window.pack.device is not None:  # its streams wait for each other
            window.submitted = True
            self._submit(window, taken)
        if self._updates and all(self._is_complete(window, member) for member in window.pack.members):
            window.part = self._owner._early_part(window.pack, taken)
            window.submitted = True
            self._lane.put(0, self._update, window)
        elif not window.submitted:
            window.submitted = True
            self._lane.put(0, self._submit, window, taken)
        self._left_early += 1

    def _is_complete(self, window: Window, member: Member) -> bool:
        """Whether what is in the slot, or not, is all that this parameter's gradient will be, if it is called as usual.

        One that was never called may be called once, and a gradient that somebody assigned may be changed.
        """
        param = member.param
        grad, watch = param.grad, self._watches.get(param)
        if member.index not in window.arrived and grad is not None and not (isinstance(grad, Taken) and not grad.used):
            return False
        return not param.requires_grad or (watch is not None and bool(watch.usual))

    def _update(self, window: Window) -> None:
        part = window.part
        assert part is not None
        if window.request is None:
            self._submit(window, part.members)
        else:
            window.request.result()  # by a stream: an update cannot be submitted before
        part.gradient = window.request
        for member in part.members:  # while the daemon reads the gradient
            part.pack.reload_masters(member)
        part.submit_update(self._owner._apply_nonfinite)

    def _submit(self, window: Window, members: Sequence[Member]) -> None:
        window.submitted = True
        window.of = frozenset(member.index for member in members)
        window.request = window.pack.submit(members)

    def _take_back(self, window: Window) -> None:
        """Makes the slot ours again, with the gradient that is in it."""
        if not window.submitted:
            return
        if window.request is not None:
            window.request.exception()  # the daemon reads the slot until then
        window.pack.subgroup.discard("user")
        window.submitted, window.request = False, None

    # ---- At step() and zero_grad()

    def updated(self) -> dict[int, Part]:
        """The updates that were submitted in the backward pass, by pack's id. Raises what made submitting fail."""
        if self._updates:
            self._lane.drain()
        return {id(window.part.pack): window.part for window in self._updated_windows() if window.part is not None}

    def _updated_windows(self) -> list[Window]:
        for window in self._windows.values():
            part = window.part
            if part is not None and part.update is None and not part.is_applied():
                window.part = None  # interrupted before the submission: the gradient leaves at step()
        return [window for window in self._windows.values() if window.part is not None]

    def refuse_updated(self, what: str) -> None:
        """Raises if subgroups were updated in the backward pass, so that `what` has no right result."""
        if self._updates:
            self._lane.settle()
        parts = [window.part for window in self._updated_windows() if window.part is not None]
        applied = [part for part in parts if part.is_applied()]
        if applied:
            raise RuntimeError(
                f"{what} between a backward pass with update_in_backward=True and its step(): {len(applied)} subgroups "
                f"were already updated ({some_of([part.pack.subgroup.key for part in applied])}). Call step(), which "
                "updates the others with the gradients that they have, or load_state_dict() to go back to a saved state"
            )

    def as_updated(self, part: Part, now: Optional[Part]) -> Optional[Part]:
        """What step() has to do for a subgroup that was updated in the backward pass, and would do now by `now`.

        Raises where these differ. Nothing is lost if the daemon has refused the update.
        """
        window = self._windows[id(part.pack)]
        key = part.pack.subgroup.key
        if window.late is not None:
            raise RuntimeError(late_text(window.late) + ", and load_state_dict() goes back to a saved state")
        left = set() if now is None else {m.index for m in now.members if is_taken(m.param.grad)}
        if now is None or len(left) != len(now.members) or left != {member.index for member in part.members}:
            if not part.is_applied():
                window.part = None
                return now
            raise RuntimeError(
                f"gradients of subgroup {key} were dropped or replaced after the backward pass had updated it "
                "(update_in_backward=True): load_state_dict() goes back to a saved state"
            )
        if now.hyper != part.hyper:
            was, now_is = vars(part.hyper), vars(now.hyper)
            changes = [f"{name} from {was[name]} to {now_is[name]}" for name in was if was[name] != now_is[name]]
            raise RuntimeError(
                f"{', '.join(changes)} was changed in param_groups after the backward pass had updated subgroup {key} "
                "with it (update_in_backward=True): put it back and call step() again, and change hyper-parameters "
                "between step() and the next backward pass"
            )
        return part

    def applied(self, parts: Sequence[Part]) -> None:
        """These were updated in the backward pass, and nothing else will come of their gradients."""
        for part in parts:
            for member in part.members:
                if isinstance(member.param.grad, Taken):
                    member.param.grad.used = True
            self._windows.pop(id(part.pack), None)

    def abandon(self) -> None:
        """All state will be written: waits for updates of the backward pass, and forgets them and their gradients."""
        if self._updates:
            self._lane.settle()
        windows = self._updated_windows()
        for window in windows:
            assert window.part is not None
            if window.part.update is None or window.part.update.exception() is not None:
                try:
                    self._take_back(window)
                except MlpoError as error:
                    if error.code != lib.MLPO_ERR_TORN:
                        raise
        self.applied([window.part for window in windows if window.part is not None])
        if windows:
            for watch in self._watches.values():
                watch.calls = 0

    def has_gradient(self, param: torch.Tensor) -> bool:
        """Whether step() is to use a gradient of this parameter."""
        grad = param.grad
        watch = self._watches.get(param)
        if watch is not None and watch.lifted is not None:
            raise RuntimeError(
                f"a backward pass was broken off while it added to the gradient of parameter "
                f"{self._owner._name_of(param)}: call the optimizer's zero_grad() and begin anew"
            )
        if isinstance(grad, Taken) and grad.used:
            raise RuntimeError(
                f"the gradient of parameter {self._owner._name_of(param)} was used by the step() before, and "
                "overlap=True does not keep it: call zero_grad() before the next backward pass"
            )
        return grad is not None

    def begin(self, packs: Sequence[Pack]) -> None:
        """A step of these subgroups begins: gradients of others that were sent and then dropped are forgotten."""
        self._lane.drain()
        chosen = {id(pack) for pack in packs}
        for key, window in self._windows.items():
            if key not in chosen:
                self._take_back(window)

    def submit(self, pack: Pack, members: Sequence[Member]) -> Request[GradInfo]:
        """The request of the gradients of `members`: that of the backward pass if it has just these."""
        window = self._windows.setdefault(id(pack), Window(pack, None))
        outside = [member for member in members if not is_taken(member.param.grad)]
        if outside or window.request is None or window.of != {member.index for member in members}:
            self._take_back(window)
            for member in outside:
                pack.write_gradient(member, _shards.local_gradient(member.param))
            self._submit(window, members)
        assert window.request is not None
        return window.request

    def forgotten(self, packs: Sequence[Pack]) -> None:
        """Their windows were discarded; the gradients are still in the slots."""
        for pack in packs:
            window = self._windows.get(id(pack))
            if window is not None:
                window.submitted, window.request, window.part = False, None, None

    def used(self, members: Sequence[Member]) -> None:
        """The gradients of `members` will be applied, and the next window begins."""
        with self._lock:
            for member in members:
                if isinstance(member.param.grad, Taken):
                    member.param.grad.used = True
            for watch in self._watches.values():
                self._learn(watch)
            self.updated_in_backward = sum(window.part is not None for window in self._windows.values())
            self._windows.clear()
            self._held = self._holds > 0
            self.sent_in_backward, self._left_early = self._left_early, 0

    def _learn(self, watch: Watch) -> None:
        calls, watch.calls = watch.calls, 0
        if not calls:
            if watch.last is None:
                watch.idle += 1
                if watch.idle == _IDLE_STEPS:
                    watch.usual = 0
            return
        # Of N passes, a parameter that not all of them use alike must wait for the last one, that is for step().
        even = self._held or calls % self._passes == 0
        watch.usual = calls if even and watch.last in (None, calls) else None
        watch.last = calls

    def drop(self, set_to_none: bool) -> None:
        """zero_grad(): forgets all gradients, wherever they are."""
        with self._lock:
            self.refuse_updated("gradients cannot be dropped")
            self._lane.clear()
            for window in self._windows.values():
                self._take_back(window)
            self._windows.clear()
            self._held = self._holds > 0
            self._left_early = 0
            for watch in self._watches.values():
                watch.lifted, watch.calls, watch.here = None, 0, False
                if is_taken(watch.param.grad):
                    watch.param.grad = None if set_to_none else torch.zeros_like(watch.param)


def _lift(overlap: weakref.ref[Overlap], param: weakref.ref[torch.Tensor], grads: Sequence[Any]) -> None:
    me, it = overlap(), param()
    if me is not None and it is not None and it.requires_grad and grads and grads[0] is not None:
        me._lift(it)  # else autograd adds nothing


def _take(overlap: weakref.ref[Overlap], param: torch.Tensor) -> None:
    me = overlap()
    if me is not None:
        me._take(param)


def _kind(param: torch.Tensor) -> tuple[torch.device, torch.dtype]:
    return param.device, param.dtype


def _release(watch: Watch) -> None:
    for handle in watch.handles:
        handle.remove()
    if is_taken(watch.param.grad):
        watch.param.grad = None


def _release_all(watches: dict[torch.Tensor, Watch]) -> None:
    for watch in watches.values():
        _release(watch)
    watches.clear()
