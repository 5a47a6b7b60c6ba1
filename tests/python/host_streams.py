"""Slots that behave towards OffloadAdamW as those on a GPU do, for parameters in the host's memory: two threads do what
the device's streams would, in order and late, and use() waits where the device's stream would."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence

import mlpo
import pytest
import torch
from mlpo._errors import check
from mlpo._native import ffi, lib
from mlpo._request import GradInfo, Request
from mlpo._subgroup import Kind, _grad_info
from mlpo.torch import _binding

_PATIENCE_S = 60.0


class Stream:
    """Does what it is given, one after another, each after a random delay of up to 2 ms."""

    def __init__(self, seed: int) -> None:
        self.failures: list[BaseException] = []
        self._random = random.Random(seed)
        self._work: queue.SimpleQueue[Optional[Callable[[], Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def synchronize(self) -> None:
        passed = threading.Event()
        self.put(passed.set)
        assert passed.wait(_PATIENCE_S), "a stream hangs"

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive(), "a stream hangs"
        assert not self.failures, self.failures

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            time.sleep(self._random.random() * 2e-3)
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - for close() to show
                self.failures.append(error)


class Streams:
    """Both, and what the slots on them were asked for."""

    def __init__(self) -> None:
        self.gradients, self.parameters = Stream(1), Stream(2)
        self.fetched = 0  # calls of fetch() that were made before their update had ended
        self.submitted = 0


class HostSlot:
    """Has DeviceSlot's interface."""

    stream_waits = True
    device = 0

    def __init__(self, subgroup: mlpo.Subgroup, streams: Streams) -> None:
        self.subgroup = subgroup
        self._streams = streams
        self._grad, self._param = subgroup.grad.torch(), subgroup.param.torch()
        self._arrived: Optional[threading.Event] = None

    def write(self, first: int, gradient: torch.Tensor, *, add: bool = False, stream: Any = None) -> None:
        check(lib.mlpo_grad_begin(self.subgroup._pointer))
        # A device's stream reads it before who comes behind it on that stream, or the allocator, gives it other values.
        part, given = self._grad[first : first + gradient.numel()], gradient.detach().reshape(-1).clone()
        arrived = self._arrived

        def work() -> None:
            if arrived is not None:
                arrived.wait(_PATIENCE_S)
            if add:
                part.add_(given)
            else:
                part.copy_(given)

        self._streams.gradients.put(work)

    def submit(
        self, pieces: Optional[Iterable[tuple[int, int, int]]] = None, *, stream: Any = None
    ) -> Request[GradInfo]:
        listed = [(0, self.subgroup.numel, Kind.VALUE)] if pieces is None else list(pieces)
        array = ffi.new("struct mlpo_grad_piece[]", [(first, count, int(kind), 0) for first, count, kind in listed])
        made = ffi.new("mlpo_request **")
        check(lib.mlpo_prepare_grad(self.subgroup._pointer, array, len(listed), made))
        pointer = made[0]
        self._streams.gradients.put(lambda: check(lib.mlpo_request_post(pointer)))
        self._streams.submitted += 1
        return Request(self.subgroup._session, self.subgroup._waiter, pointer, _grad_info)

    def fetch(self, targets: Sequence[tuple[int, torch.Tensor]]) -> bool:
        info = self.subgroup._info()
        if not info.update_outstanding and not info.holds_param:
            return False
        self._streams.fetched += info.update_outstanding
        ended, epoch = info.updates_ended + info.update_outstanding, info.epoch + info.update_outstanding
        arrived = self._arrived = threading.Event()

        def work() -> None:
            try:
                while self.subgroup._info().updates_ended < ended:
                    time.sleep(2e-4)
                if self.subgroup._info().epoch < epoch:
                    return  # it failed
                for first, target in targets:
                    part = self._param[first : first + target.numel()]
                    target.data.copy_(part.view_as(target))  # .data: torch does not know of a stream's writes either
            finally:
                arrived.set()

        self._streams.parameters.put(work)
        return True

    def use(self, stream: Any = None) -> None:
        assert self._arrived is None or self._arrived.wait(_PATIENCE_S), "a stream hangs"

    def synchronize(self) -> None:
        self._streams.gradients.synchronize()
        self.use()

    def close(self) -> None:
        self.synchronize()


@contextlib.contextmanager
def on_streams() -> Iterator[Streams]:
    """Optimizers that register parameters within it have them on such slots, and are to be used within it alone."""
    streams = Streams()

    def attach(pack: Any, client: mlpo.Client) -> None:
        pack.device = HostSlot(pack.subgroup, streams)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_binding.Pack, "attach_device", attach)
        patched.setattr(_binding.Pack, "_is_on_device", lambda pack, tensor: pack.device is not None)
        yield streams
    streams.gradients.close()
    streams.parameters.close()
