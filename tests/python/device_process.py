"""Uses mlpo._device on the stand-in for the CUDA runtime, which is preloaded: device_process.py SOCKET PID, of a daemon
that it kills at its end. Prints "passed".

Not in pytest's process: torch's libraries want the real runtime.
"""

import ctypes
import errno
import gc
import math
import os
import signal
import sys
import threading
import time
import warnings

import numpy as np
import stand_in_torch as torch
from stand_in_torch import Tensor, fake

sys.modules["torch"] = torch.module()

import mlpo  # noqa: E402
import mlpo._device  # noqa: E402
import mlpo.cuda  # noqa: E402
from mlpo import Kind  # noqa: E402
from mlpo._device import DeviceCopies  # noqa: E402

NUMEL = 10_000
SIGN = {"lr": 1, "betas": (0, 0), "eps": 1e-30, "weight_decay": 0}  # moves each parameter by 1 against its gradient


def raises_busy(call):
    try:
        call()
    except mlpo.MlpoError as error:
        assert error.errno == errno.EBUSY, error
        return
    raise AssertionError("nothing was raised while an update runs")


def seen(tensor):
    """What the current stream finds in a tensor when it gets there; a list that is filled then."""
    found = []
    torch.current_stream().enqueue(lambda: found.append(tensor.array.copy()))
    return found


def train(client):
    """Steps of three subgroups with random delays, where this thread waits for nothing but the gradients' requests:
    parts, passes that are added, casts, gaps; and what uses the parameters has each step's."""
    copies = DeviceCopies.of(client, 0)
    assert DeviceCopies.of(client, 0) is copies
    subgroups = [client.subgroup(f"w{i}", NUMEL, grad_dtype="float16" if i == 1 else "float32") for i in range(3)]
    slots = [copies.slot(subgroup) for subgroup in subgroups]
    assert all(slot.stream_waits for slot in slots)
    params = [Tensor(np.full(NUMEL, 7, np.float32), every=1 + i % 2) for i in range(3)]
    half, uses = NUMEL // 2, []
    for step in range(1, 9):
        requests = []
        for i, slot in enumerate(slots):
            first = torch.empty(half, dtype="torch.float32")
            second = Tensor(np.zeros(NUMEL - half, np.float32), every=2)
            first.fill_(step)  # by the current stream, late
            second.fill_(-2 * step)
            slot.write(0, first)
            slot.write(half, second)
            if step % 2 == 0:
                slot.write(half, second, add=True)  # another pass
            assert set(first.recorded) == {copies.gradients}  # else torch would give its memory away too early
            pieces = [(0, half, Kind.VALUE), (half, NUMEL - half, Kind.VALUE)] if i == 0 else None
            requests.append(slot.submit(pieces))
        for request in requests:
            last = 4 * step if step % 2 == 0 else 2 * step
            info = request.result(timeout=30)
            assert info.complete and info.sum_of_squares == half * (step**2 + last**2), info
        updates = [subgroup.submit_update(**SIGN) for subgroup in subgroups]
        for slot, param in zip(slots, params):
            assert slot.fetch([(0, param)])
        for slot, param in zip(slots, params):
            slot.use()
            uses.append((step, seen(param)))
        for update in updates:
            assert update.result(timeout=30) == step
    torch.current_stream().synchronize()
    for step, found in uses:
        assert (found[0][:half] == -step).all() and (found[0][half:] == step).all(), (step, found)
    return copies, subgroups, slots, params


def nobody_waits(slot, subgroup, param, pid):
    """While the daemon is stopped everything returns, and the stream waits; a gradient is refused until then."""
    gradient = Tensor(np.ones(NUMEL, np.float32))
    slot.write(0, gradient)
    slot.submit().result(timeout=30)
    before = param.array.copy()
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    update = subgroup.submit_update(**SIGN)
    assert slot.fetch([(0, param)])
    slot.use()
    found = seen(param)
    raises_busy(lambda: slot.write(0, gradient))
    raises_busy(slot.submit)
    assert time.monotonic() - began < 2
    time.sleep(0.05)
    assert not found and not update.done()
    os.kill(pid, signal.SIGCONT)
    torch.current_stream().synchronize()
    assert (found[0] == before - 1).all()
    update.result(timeout=30)


def a_failed_update(slot, subgroup, param):
    """Nothing was copied, whether the fetch came before or after the end; the request says why."""
    for early in (True, False):
        slot.write(0, Tensor(np.full(NUMEL, math.inf, np.float32)))
        assert not slot.submit().result(timeout=30).all_finite
        before = param.array.copy()
        update = subgroup.submit_update(**SIGN)
        if not early:
            assert isinstance(update.exception(timeout=30), mlpo.NonFiniteGradientError)
        asked = slot.fetch([(0, param)])
        assert asked in ((True, False) if early else (False,))
        slot.use()
        torch.current_stream().synchronize()
        assert (param.array == before).all()
        assert isinstance(update.exception(timeout=30), mlpo.NonFiniteGradientError)
        subgroup.discard()


def memory_is_bounded(copies, slot, subgroup):
    """write() waits for the oldest copies while gradients of more than MOST_BYTES have not been copied."""
    most, mlpo._device.MOST_BYTES = mlpo._device.MOST_BYTES, 6 * NUMEL
    go, written = threading.Event(), []
    copies.gradients.enqueue(go.wait)

    def write():
        for _ in range(2):
            slot.write(0, Tensor(np.ones(NUMEL, np.float32)))
            written.append(True)

    writing = threading.Thread(target=write)
    writing.start()
    time.sleep(0.1)
    assert len(written) == 1
    go.set()
    writing.join(30)
    assert len(written) == 2
    mlpo._device.MOST_BYTES = most
    slot.submit().result(timeout=30)
    subgroup.discard()


def where_streams_cannot_wait(socket):
    """The slot says so; fetched after the update's end it is all the same."""
    fake.fake_cuda_offer_waits(0)
    with mlpo.connect(socket=socket, job="no-waits") as client:
        subgroup = client.subgroup("w", NUMEL)
        slot = DeviceCopies.of(client, 0).slot(subgroup)
        assert not slot.stream_waits
        param = Tensor(np.zeros(NUMEL, np.float32))
        slot.write(0, Tensor(np.ones(NUMEL, np.float32)))
        slot.submit().result(timeout=30)
        subgroup.submit_update(**SIGN).result(timeout=30)
        assert slot.fetch([(0, param)])
        slot.use()
        torch.current_stream().synchronize()
        assert (param.array == -1).all()
        slot.synchronize()
        slot.close()
    fake.fake_cuda_offer_waits(1)


def where_there_are_none(client):
    """Without the CUDA side, and for a second GPU: one warning that says why, and that the thread copies then."""
    native, reason = mlpo.cuda._native, mlpo.cuda._reason
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert DeviceCopies.of(client, 1) is None
        mlpo.cuda._native, mlpo.cuda._reason = None, "no CUDA toolkit"
        assert DeviceCopies.of(client, 0) is None
    mlpo.cuda._native, mlpo.cuda._reason = native, reason
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2 and "an optimizer with a client of its own" in texts[0], texts
    assert "no CUDA toolkit; until then" in texts[1], texts


def the_daemon_dies(slot, subgroup, param, pid):
    """The stream goes on with the parameters that were there, and the request says why."""
    slot.write(0, Tensor(np.ones(NUMEL, np.float32)))
    slot.submit().result(timeout=30)
    before = param.array.copy()
    os.kill(pid, signal.SIGSTOP)
    update = subgroup.submit_update(**SIGN)
    assert slot.fetch([(0, param)])
    slot.use()
    found = seen(param)
    time.sleep(0.05)
    assert not found
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    torch.current_stream().synchronize()
    assert time.monotonic() - began < 5
    assert (found[0] == before).all()
    failure = update.exception(timeout=30)
    assert failure is not None and failure.code == mlpo.cuda._native.lib.MLPO_ERR_DAEMON_DIED, failure


def main():
    socket, pid = sys.argv[1], int(sys.argv[2])
    assert mlpo.cuda.available(), mlpo.cuda.why_not()
    fake.fake_cuda_delays(1000, ctypes.c_uint64(4))
    client = mlpo.connect(socket=socket, job="device")
    copies, subgroups, slots, params = train(client)
    nobody_waits(slots[0], subgroups[0], params[0], pid)
    a_failed_update(slots[0], subgroups[0], params[0])
    memory_is_bounded(copies, slots[0], subgroups[0])
    where_streams_cannot_wait(socket)
    where_there_are_none(client)
    the_daemon_dies(slots[2], subgroups[2], params[2], pid)
    for slot in slots[:2]:
        slot.close()
    del copies, slots, slot  # the last one is closed by the garbage collector
    gc.collect()
    assert fake.fake_cuda_registered_bytes() == 0
    client.close()
    assert not torch.failures, torch.failures
    assert fake.fake_cuda_violations() == 0, fake.fake_cuda_last_violation()
    print("passed")


main()
