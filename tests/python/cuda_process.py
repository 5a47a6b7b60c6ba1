"""Uses mlpo.cuda on the stand-in for the CUDA runtime, which is preloaded: cuda_process.py SOCKET. Prints "passed".

Not in pytest's process: torch's libraries want the real runtime.
"""

import contextlib
import ctypes
import errno
import gc
import math
import sys
import types
import warnings

import mlpo
import mlpo.cuda
import numpy as np
from stand_in_torch import Stream, Tensor, fake


def raises(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), f"{error} does not have {text!r}"
        return error
    raise AssertionError(f"nothing was raised; {kind} with {text!r} was expected")


def train(client, numel=10_000):
    """Three steps, with and without torch-like streams, against the arithmetic of a step of sign."""
    subgroup = client.subgroup("w", numel)
    side = mlpo.cuda.attach(client)
    info = side.info()
    assert info.pinned_bytes == info.arena_bytes > 0 and info.stream_waits and info.pin_error == ""
    slot = side.slot(subgroup)
    stream, other = Stream(), Stream()
    fake.fake_cuda_delays(1000, ctypes.c_uint64(1))
    param = Tensor(np.full(numel, 7, np.float32), "float32")
    raises(mlpo.MlpoError, "holds no parameters", lambda: slot.copy_param(param))
    for step in range(1, 4):
        grad = Tensor(np.full(numel, step, np.float32), "float32")
        half = numel // 2
        if step == 1:
            info = slot.copy_grad(grad, stream=stream).result(timeout=30)
        else:  # in pieces: the second half is zero
            ahead = Tensor(grad.array[:half], "float32")
            info = slot.copy_grad([(0, half, ahead), (half, half, mlpo.ZERO)], stream=other).result(timeout=30)
        assert info.complete and info.all_finite
        assert info.sum_of_squares == step * step * (numel if step == 1 else half)
        update = subgroup.submit_update(lr=1, betas=(0, 0), eps=1e-30, weight_decay=0)
        slot.copy_param(param, stream=stream)
        slot.wait(stream=other)
        stream.synchronize()
        assert (param.array[:half] == -step).all() and (param.array[half:] == -1).all(), param.array
        assert update.result(timeout=30) == step
    tail = Tensor(np.zeros(10, np.float32), "float32")
    slot.copy_param(tail, numel - 10, stream=stream.cuda_stream)
    stream.synchronize()
    assert (tail.array == -1).all()
    # A failed update: nothing is copied, the request says why.
    slot.copy_grad(Tensor(np.full(numel, math.inf, np.float32), "float32"), stream=stream).result(timeout=30)
    update = subgroup.submit_update()
    try:
        slot.copy_param(param, stream=stream)
    except mlpo.MlpoError as error:
        assert error.errno == errno.ENODATA  # it had failed already
    stream.synchronize()
    assert (param.array[half:] == -1).all()
    raises(mlpo.NonFiniteGradientError, "", update.result)
    subgroup.discard()
    return side, slot, subgroup, param


def wrong_use(client, side, slot, param):
    numel = param.numel()
    raises(TypeError, "bfloat16", lambda: slot.copy_grad(Tensor(np.zeros(numel, np.uint16), "bfloat16")))
    raises(ValueError, "elements", lambda: slot.copy_grad(Tensor(np.zeros(5, np.float32), "float32")))
    raises(mlpo.MlpoError, "of a subgroup of", lambda: slot.copy_param(param, 1))
    cpu = Tensor(np.zeros(numel, np.float32), "float32")
    cpu.is_cuda = False
    raises(ValueError, "not on a CUDA device", lambda: slot.copy_grad(cpu))
    raises(mlpo.MlpoError, "device 9", lambda: mlpo.cuda.attach(client, 9))
    slot.close()
    slot.close()
    raises(mlpo.MlpoError, "closed", lambda: slot.wait())
    side.close()
    raises(mlpo.MlpoError, "closed", side.info)


def kernels():
    values = np.arange(-500, 500, dtype=np.float32) / 3
    out = Tensor(np.zeros(2000, np.float16), "float16")
    mlpo.cuda.pack([Tensor(values, "float32"), Tensor(2 * values, "float32")], out, 0.5)
    total, finite = Tensor(np.zeros(1, np.float64), "float64"), Tensor(np.zeros(1, np.int32), "int32")
    mlpo.cuda.norm([Tensor(values, "float32")], total, finite)
    assert fake.cudaStreamSynchronize(None) == 0
    assert (out.array == (np.concatenate([values, 2 * values]) * np.float32(0.5)).astype(np.float16)).all()
    assert math.isclose(total.array[0], float(np.sum(values.astype(np.float64) ** 2)), rel_tol=1e-12)
    assert finite.array[0] == 1


def devices(client):
    """Two GPUs: a slot's tensors and streams are its side's, those of a kernel are on one device, which is current."""
    current, streams = [0], {0: Stream(), 1: Stream()}
    asked = []

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        assert fake.cudaSetDevice(index) == 0
        yield
        current[0] = before
        assert fake.cudaSetDevice(before) == 0

    def current_stream(of=None):
        asked.append((of, current[0]))
        return streams[current[0] if of is None else of]

    def on(index, values, dtype="float32"):
        tensor = Tensor(values, dtype)
        tensor.device = types.SimpleNamespace(index=index)
        return tensor

    numel = 1000
    ones = np.ones(numel, np.float32)
    total, finite = on(1, np.zeros(1, np.float64), "float64"), on(1, np.zeros(1, np.int32), "int32")
    cuda = types.SimpleNamespace(device=device, current_stream=current_stream)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
    try:
        subgroup = client.subgroup("on 1", numel)
        with mlpo.cuda.attach(client, 1) as side:
            slot = side.slot(subgroup)
            raises(ValueError, "on CUDA device 0", lambda: slot.copy_grad(on(0, ones)))
            raises(ValueError, "on CUDA device 0", lambda: slot.copy_param(on(0, ones)))
            slot.copy_grad(on(1, ones)).result(timeout=30)
            update = subgroup.submit_update()
            slot.copy_param(on(1, ones))
            slot.wait()
            update.result(timeout=30)
            assert asked == [(1, 0)] * 3, asked
        asked.clear()
        raises(ValueError, "[0, 1]", lambda: mlpo.cuda.pack([on(1, ones), on(0, ones)], on(1, np.zeros(2 * numel))))
        raises(ValueError, "[0, 1]", lambda: mlpo.cuda.norm([on(0, ones)], total, finite))
        assert asked == []
        mlpo.cuda.pack([on(1, ones)], on(1, ones))
        mlpo.cuda.norm([on(1, ones)], total, finite)
        assert asked == [(1, 1)] * 2 and current == [0], (asked, current)
        streams[1].synchronize()
        assert total.array[0] == numel and finite.array[0] == 1
    finally:
        del sys.modules["torch"]


def unpinned_and_collected(client):
    """Where pinning fails one warning says so; what is dropped without close() is freed in its order."""
    subgroup = client.subgroup("v", 1000)
    fake.fake_cuda_fail(b"cudaHostRegister", 1, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        side = mlpo.cuda.attach(client)
    assert len(caught) == 1 and "ulimit -l" in str(caught[0].message), caught
    assert side.info().pinned_bytes == 0
    side.pin()
    assert side.info().pinned_bytes == side.info().arena_bytes
    slot = side.slot(subgroup)
    slot.copy_grad(Tensor(np.ones(1000, np.float32), "float32"), stream=Stream())
    del side, slot, subgroup
    gc.collect()


def main():
    assert mlpo.cuda.available(), mlpo.cuda.why_not()
    with mlpo.connect(socket=sys.argv[1], job="cuda-python") as client:
        side, slot, subgroup, param = train(client)
        wrong_use(client, side, slot, param)
        del side, slot, subgroup
        kernels()
        devices(client)
        unpinned_and_collected(client)
    assert fake.fake_cuda_violations() == 0, fake.fake_cuda_last_violation()
    print("passed")


main()
