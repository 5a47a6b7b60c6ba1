"""What overlap=True knows of a parameter and of a subgroup, and what .grad is while a gradient is in a slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

import torch

from .._request import GradInfo, Request
from ._binding import Member, Pack
from ._steps import Part


class Taken(torch.Tensor):
    """What .grad is while the gradient is in a slot: has the gradient's shape and no memory, and raises on any use."""

    used: bool  # by step(): the slot holds parameters again
    dtype_of: torch.dtype  # of the gradient; `dtype` raises, as everything does
    text: str

    @staticmethod
    def of(grad: torch.Tensor, name: str) -> Taken:
        taken = torch.empty((), dtype=grad.dtype, device=grad.device).expand(grad.shape).as_subclass(Taken)
        taken.used, taken.dtype_of = False, grad.dtype
        taken.text = (
            f"the gradient of parameter {name} was taken during the backward pass (overlap=True), so .grad cannot be "
            "used: clip with optimizer.clip_grad_norm_(), drop gradients with zero_grad(set_to_none=True), or make the "
            "optimizer with overlap=False for what reads or changes .grad (torch.nn.utils, GradScaler)"
        )
        return taken

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        given += [item for value in given if isinstance(value, (list, tuple)) for item in value]
        texts = [value.text for value in given if type(value) is Taken]
        raise RuntimeError(texts[0] if texts else "a gradient that was taken during the backward pass cannot be used")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self.text}>"


def is_taken(grad: Optional[torch.Tensor]) -> bool:
    """Whether this .grad stands for a gradient in a slot."""
    return type(grad) is Taken


@dataclass
class Watch:
    """A parameter with hooks."""

    param: torch.Tensor
    node: Any  # its AccumulateGrad: a hook on it lasts as long as somebody holds it
    kind: tuple[torch.device, torch.dtype]  # torch makes another AccumulateGrad where `p.data =` changes these
    handles: list[Any]  # of the hooks before and after autograd adds a gradient
    taken: Optional[Taken] = None  # made once; what .grad is while the gradient is in the slot
    lifted: Optional[Taken] = None  # what .grad was; it is None while autograd puts the next gradient there
    calls: int = 0  # of this window, without those inside no_sync()
    last: Optional[int] = None  # calls in the last window with any
    usual: Optional[int] = None  # calls to wait for; None: the subgroup leaves at step()
    idle: int = 0  # windows without a call, from the start
    here: bool = False  # DDP: this rank has had a gradient since the last bucket


@dataclass
class Window:
    """A subgroup's gradient of this step."""

    pack: Pack
    waiting: Optional[set[int]]  # members that are still to be called; None: leaves at step()
    submitted: bool = False  # perhaps: set before the submission, so that an interrupt leaves nothing unknown
    request: Optional[Request[GradInfo]] = None
    of: frozenset[int] = field(default_factory=frozenset)  # members whose gradient was submitted
    part: Optional[Part] = None  # its update was submitted, perhaps
    late: Optional[str] = None  # the parameter that had another gradient afterwards
    arrived: set[int] = field(default_factory=set)  # DDP: members in the slot whose .grad becomes a Taken


def is_in_slot(window: Window, member: Member) -> bool:
    """Whether a member's gradient of this window is in the slot, whatever .grad is meanwhile."""
    return is_taken(member.param.grad) or member.index in window.arrived


def late_text(name: str) -> str:
    """What to say where a gradient comes after the update in the backward pass."""
    return (
        f"parameter {name} has another gradient after the backward pass had updated its subgroup "
        "(update_in_backward=True), and that cannot be added any more: say gradient_accumulation_steps=, make all "
        "passes of a step but the last under no_sync(), or use overlap=True alone"
    )
