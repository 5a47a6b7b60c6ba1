"""step(wait=False): updates go on during the next forward pass, and each module waits for its own parameters.

A parameter gets its new value only by a wait in the trainer's thread, as a whole; until then it has the old one. A
module waits before its forward() for the parameters that are its own, and for those that it uses although they are of
others, as MultiheadAttention does with the weight of its out_proj. Which these are is seen in the first forward pass,
one in training and one in eval mode, which waits for everything at its beginning, and from modules that are not called
in a later one. A pass without gradients always waits for everything: a mistake would show nowhere. With them, a
parameter that was used before it was waited for is found when its gradient arrives, and the backward pass raises; if it
has been waited for by then, nothing tells. So wait() is to be called before parameters are used outside of modules.

To parameters on a GPU a stream brings new values as soon as their updates have ended, and waiting for them is the
current stream's: the trainer's thread goes on. Until a module has waited such a parameter has its old or its new value.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Iterable, Optional

import torch
from torch.overrides import TorchFunctionMode

from .._errors import not_offered
from . import _shards

if TYPE_CHECKING:
    from ._optimizer import OffloadAdamW

_LAST = 1 << 62


def check_model(model: Any) -> None:
    """Refuses models whose parameters are read before the modules that have them run."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"attach_forward() takes a torch.nn.Module, not {type(model).__name__}")
    if any(_shards.is_dtensor(param) for param in model.parameters()):
        raise not_offered(
            "attach_forward() with parameters that are DTensors",
            "use step() without wait=False: fully_shard gathers parameters of several modules at once",
        )
    if any(isinstance(module, torch.nn.DataParallel) for module in model.modules()):
        raise not_offered("attach_forward() with DataParallel, which copies the model first", "use step() without wait")


class ForwardWaits:
    """The hooks of one optimizer on one model. For the thread that runs both."""

    def __init__(self, owner: OffloadAdamW, model: torch.nn.Module) -> None:
        self._owner = weakref.proxy(owner)  # no cycle, so that an optimizer's hooks go when it is dropped
        self._model = model
        # What a module waits for: sets, in order.
        self._waits: dict[torch.nn.Module, dict[torch.Tensor, None]] = {
            module: dict.fromkeys(module.parameters(recurse=False)) for module in model.modules()
        }
        # Outermost modules, and whether they were training, of which a whole forward pass was seen.
        self._seen: set[tuple[torch.nn.Module, bool]] = set()
        self._uses: Any = None  # a _Uses in such a first pass; torch has no types for modes
        self._running: list[torch.nn.Module] = []  # forward() calls that have not ended, outermost first
        self._called: dict[torch.nn.Module, None] = {}  # in this forward pass, in order
        self._order: dict[torch.Tensor, int] = {}  # when the model's last forward pass wanted a parameter
        self.params = frozenset(model.parameters())
        self._handles: list[Any] = []
        module: Any  # torch's hooks have no types
        for module in self._waits:
            self._handles += [
                module.register_forward_pre_hook(_Hook(self, "_before"), prepend=True),
                module.register_forward_hook(_Hook(self, "_after"), always_call=True),
                module.register_state_dict_pre_hook(_Hook(self, "_before_state")),
                module.register_load_state_dict_pre_hook(_Hook(self, "_before_state")),
            ]

    def close(self) -> None:
        self._end_pass()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def order(self, param: torch.Tensor) -> int:
        """Lower is wanted earlier by the forward pass."""
        return self._order.get(param, _LAST)

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        if self._running and module is self._running[0]:
            self._end_pass()  # an interrupt left the one before without its hook
        outermost = not self._running
        self._running.append(module)
        if outermost:
            self._called.clear()
        self._called[module] = None
        if outermost and not torch.is_grad_enabled():
            self._owner._wait_for(self.params, surely=True)
        elif outermost and (module, module.training) not in self._seen:
            self._owner._wait_for(self.params)
            self._uses = _Uses(self)
            self._uses.__enter__()
        else:
            self._owner._wait_for(self._waits[module])

    def _after(self, module: torch.nn.Module, *_: Any) -> None:
        while self._running and self._running.pop() is not module:
            pass  # of a forward() that was left without its hook
        if self._running:
            return
        if self._uses is not None:
            self._seen.add((module, module.training))
        self._end_pass()
        self._assign(module)
        if module is self._model:
            self._order = {}
            for called in self._called:
                for param in self._waits[called]:
                    self._order.setdefault(param, len(self._order))

    def _end_pass(self) -> None:
        self._running.clear()
        if self._uses is not None:
            self._uses.__exit__(None, None, None)
            self._uses = None

    def use(self, param: torch.Tensor) -> None:
        """The innermost running module uses a parameter: if no module before it waits for that, it has to."""
        if self._running and not any(param in self._waits[module] for module in self._called):
            self._waits[self._running[-1]][param] = None

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
                self._waits[around].update(self._waits.get(inner, {}))
            pending += [(around, child) for child in inner.children()]


class _Uses(TorchFunctionMode):
    """Tells which parameters the functions of torch are called with."""

    def __init__(self, waits: ForwardWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__" and not isinstance(result, torch.Tensor):
            return result  # a shape, a device
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, torch.Tensor) and item in self._waits.params:
                    self._waits.use(item)
        return result


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
