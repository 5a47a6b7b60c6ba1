"""attach_ddp(): the communication hook by which DistributedDataParallel's gradients are taken as they are reduced.

DDP has one such hook, which gets each bucket when the backward pass has filled it, and returns a future of what it is
reduced to. At the end of the pass DDP waits for these futures and writes .grad. What is done here with a bucket is done
when its future is there; .grad is released behind DDP, by a callback that a callback of autograd has queued: those that
are queued while callbacks run come after all others.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterator, Optional, Sequence

import torch

from .._errors import not_offered
from ._overlap import Overlap

CommHook = Callable[[Any, Any], Any]  # torch's: (state, bucket) -> future of the bucket's tensor


class _Buckets:
    """The hook of one model, for the optimizers that are attached to it.

    Called in autograd's threads and in those that reduce. It outlives the optimizers, since DDP keeps its hook.
    """

    def __init__(self, group: Any, hook: Optional[CommHook], state: Any) -> None:
        self._group = group
        self._hook, self._state = hook, state
        self._users: list[weakref.ref[Overlap]] = []
        self._params: dict[torch.Tensor, None] = {}  # of this pass
        self._failure: Optional[BaseException] = None

    def add(self, overlap: Overlap) -> None:
        if all(user is not overlap for user in self._overlaps()):
            self._users.append(weakref.ref(overlap))

    def _overlaps(self) -> Iterator[Overlap]:
        for user in self._users:
            overlap = user()
            if overlap is not None:
                yield overlap

    def reduce(self, bucket: Any) -> Any:
        """Starts to reduce a bucket; a future of the result."""
        flat, params = bucket.buffer(), bucket.parameters()
        if flat.layout != torch.strided:
            raise TypeError("a bucket has a sparse gradient; OffloadAdamW needs dense ones (sparse=False)")
        first = flat.storage_offset()
        starts = [gradient.storage_offset() - first for gradient in bucket.gradients()]
        self._params.update(dict.fromkeys(params))
        if bucket.is_last():  # DDP queues its own end next, in this pass: reentrant checkpoints have passes within it
            torch.autograd.Variable._execution_engine.queue_callback(self._before_the_end)  # type: ignore[attr-defined]
        return self._reduced(bucket, flat).then(lambda done: self._take(done.value(), params, starts))

    def _reduced(self, bucket: Any, flat: torch.Tensor) -> Any:
        if self._hook is not None:
            return self._hook(self._state, bucket)
        flat.mul_(1.0 / self._group.size())  # the operation of DDP without a hook: the same bits
        work = torch.distributed.all_reduce(flat, group=self._group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _take(self, flat: torch.Tensor, params: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
        # Errors are raised at the end of the pass: as they are, and with DDP's own bookkeeping done.
        try:
            with torch.no_grad():
                for param, start in zip(params, starts):
                    for overlap in self._overlaps():
                        overlap.arrived(param, _gradient_in(flat, start, param))
        except BaseException as error:  # noqa: BLE001 - whatever it is
            self._failure = self._failure or error
        return flat

    def before_forward(self, params: Sequence[torch.Tensor]) -> None:
        if torch.is_grad_enabled():
            for overlap in self._overlaps():
                overlap.before_forward(params)

    def _before_the_end(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def _end(self) -> None:
        """DDP has written .grad."""
        params, self._params = self._params, {}
        with torch.no_grad():
            for overlap in self._overlaps():
                overlap.ended(params)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


_attached: weakref.WeakKeyDictionary[torch.nn.Module, _Buckets] = weakref.WeakKeyDictionary()


def _hook(buckets, bucket):  # type: ignore[no-untyped-def]
    # Without types: DDP compares them with its own, and here they would be text.
    return buckets.reduce(bucket)


def _before_forward(buckets: weakref.ref[_Buckets], params: Sequence[torch.Tensor]) -> None:
    held = buckets()
    if held is not None:
        held.before_forward(params)


def reduced_parameters(model: Any) -> list[torch.Tensor]:
    """The parameters whose gradients a DistributedDataParallel model reduces. Refuses what is none, or one of a kind
    that reduces other values than those that .grad gets."""
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"attach_ddp() takes a torch.nn.parallel.DistributedDataParallel, not {type(model).__name__}: pass the "
            "wrapped model (of Accelerate: what prepare() returns)"
        )
    if model.mixed_precision is not None:
        raise not_offered("attach_ddp() with DDP's mixed_precision=", "use torch.autocast, or overlap=False")
    ignored = model.parameters_to_ignore
    return [
        param for name, param in model.module.named_parameters() if param.requires_grad and name not in ignored
    ]


def attach(overlap: Overlap, model: Any, hook: Optional[CommHook], state: Any) -> None:
    """Has the model's buckets given to `overlap`, reduced by `hook` or as DDP does."""
    buckets = _attached.get(model)
    if buckets is None:
        buckets = _Buckets(model.process_group, hook, state)
        try:
            model.register_comm_hook(buckets, _hook)
        except RuntimeError as error:
            raise ValueError(
                f"DDP takes one communication hook, and has one ({error}): give it to attach_ddp(comm_hook=, "
                "comm_state=) instead of register_comm_hook()"
            ) from error
        _attached[model] = buckets
        if model.find_unused_parameters:
            kept, params = weakref.ref(buckets), reduced_parameters(model)
            model.register_forward_pre_hook(lambda *_: _before_forward(kept, params))
    elif hook is not None:
        raise ValueError("the model was attached before: pass comm_hook= in its first attach_ddp()")
    buckets.add(overlap)
    overlap.attach(reduced_parameters(model))


def _gradient_in(flat: torch.Tensor, start: int, param: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient in a bucket: with the parameter's strides where these leave no gaps, as DDP lays it."""
    if torch.empty_like(param, device="meta").stride() == param.stride():
        return flat.as_strided(param.shape, param.stride(), flat.storage_offset() + start)
    return flat.narrow(0, start, param.numel()).view(param.shape)
