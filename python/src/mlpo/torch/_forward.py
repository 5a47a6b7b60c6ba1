"""step(wait=False): updates go on during the next forward pass, and each module waits for its own parameters.

A parameter gets its new value only by a wait in the trainer's thread, as a whole; until then it has the old one. A
module waits before its forward() for the parameters that are its own, and for those of modules inside it that were seen
not to be called, since then it uses them itself (as MultiheadAttention does with its out_proj). The first forward pass
waits for everything at its beginning, since nothing was seen yet. A parameter that was used before it was waited for is
found when its gradient arrives, and the backward pass raises.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Iterable, Optional

import torch

from ._steps import Step

if TYPE_CHECKING:
    from ._optimizer import OffloadAdamW

_LAST = 1 << 62


class ForwardWaits:
    """The hooks of one optimizer on one model. For the thread that runs both."""

    def __init__(self, owner: OffloadAdamW, model: torch.nn.Module) -> None:
        self._owner = owner
        self._model = model
        self._own = {module: list(module.parameters(recurse=False)) for module in model.modules()}
        self._early: dict[torch.nn.Module, dict[torch.Tensor, None]] = {module: {} for module in self._own}
        self._seen: set[torch.nn.Module] = set()  # outermost modules of which a whole forward pass was seen
        self._running: list[torch.nn.Module] = []  # forward() calls that have not ended, outermost first
        self._called: dict[torch.nn.Module, None] = {}  # in this forward pass, in order
        self._order: dict[torch.Tensor, int] = {}  # when the model's last forward pass wanted a parameter
        self.params = frozenset(model.parameters())
        self._handles: list[Any] = []
        module: Any  # torch's hooks have no types
        for module in self._own:
            self._handles += [
                module.register_forward_pre_hook(_Hook(self, "_before"), prepend=True),
                module.register_forward_hook(_Hook(self, "_after"), always_call=True),
                module.register_state_dict_pre_hook(_Hook(self, "_before_state")),
                module.register_load_state_dict_pre_hook(_Hook(self, "_before_state")),
            ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def order(self, param: torch.Tensor) -> int:
        """Lower is wanted earlier by the forward pass."""
        return self._order.get(param, _LAST)

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        outermost = not self._running
        self._running.append(module)
        if outermost:
            self._called.clear()
        self._called[module] = None
        if outermost and module not in self._seen:
            self._owner._wait_for([param for inner in module.modules() for param in self._own.get(inner, ())])
        else:
            self._owner._wait_for([*self._own[module], *self._early[module]])

    def _after(self, module: torch.nn.Module, *_: Any) -> None:
        while self._running and self._running.pop() is not module:
            pass  # of a forward() that ended without its hook
        if self._running:
            return
        self._assign(module)
        self._seen.add(module)
        if module is self._model:
            wanted = (param for called in self._called for param in (*self._own[called], *self._early[called]))
            self._order = {}
            for param in wanted:
                self._order.setdefault(param, len(self._order))

    def _before_state(self, *_: Any) -> None:
        self._owner.wait()

    def _assign(self, outermost: torch.nn.Module) -> None:
        """From now on the nearest called module around one that was not called waits for that one's parameters."""
        pending, done = [(outermost, child) for child in outermost.children()], set()
        while pending:
            pair = around, inner = pending.pop()
            if pair in done:
                continue
            done.add(pair)
            if inner in self._called:
                around = inner
            else:
                self._early[around].update(dict.fromkeys(self._own.get(inner, ())))
            pending += [(around, child) for child in inner.children()]


class _Hook:
    """A method as a hook of a module that can be copied and pickled: the copy's hook does nothing.

    Copying would take old values where updates are under way, so it raises then.
    """

    def __init__(self, waits: Optional[ForwardWaits], name: str) -> None:
        self._waits = None if waits is None else weakref.ref(waits)
        self._name = name

    def __call__(self, *args: Any) -> None:
        waits = None if self._waits is None else self._waits()
        if waits is not None:
            getattr(waits, self._name)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        waits = None if self._waits is None else self._waits()
        if waits is not None and waits._owner._awaits():
            raise RuntimeError(
                "updates by step(wait=False) are under way, and a copy would have old values: "
                "call optimizer.wait() before the model is copied"
            )
        return _Hook, (None, self._name)


class StaleUses:
    """Hooks that look at gradients as they arrive, where overlap=True has none."""

    def __init__(self, owner: OffloadAdamW) -> None:
        self._owner = weakref.ref(owner)
        self._handles: dict[torch.Tensor, Any] = {}

    def watch(self, params: Iterable[torch.Tensor]) -> None:
        param: Any  # torch's hooks have no types
        for param in params:
            if param.requires_grad and param not in self._handles:
                self._handles[param] = param.register_post_accumulate_grad_hook(self._look)

    def _look(self, param: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner._refuse_stale(param)

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def is_awaited(step: Optional[Step], param: torch.Tensor) -> bool:
    """Whether step(wait=False) has not yet given the parameter its new value."""
    if step is None or not step.left or param not in step.counts:
        return False
    return any(not part.ended and any(member.param is param for member in part.members) for part in step.parts)
