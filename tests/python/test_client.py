"""The client's interface: views, requests, state, and what each wrong use says."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import time

import mlpo
import numpy as np
import pytest
import reference
import torch
from running_daemon import Daemon, Layout

F = np.float32


def step(subgroup: mlpo.Subgroup, gradient: np.ndarray, **hyper: float) -> mlpo.GradInfo:
    subgroup.grad[:] = gradient
    info = subgroup.submit_grad().result(timeout=30)
    subgroup.submit_update(**hyper).result(timeout=30)
    return info


@pytest.mark.parametrize("numel", [0, 1, 3, 1000, 1024, 4097, 3_000_001])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_update_is_the_promised_arithmetic_bit_by_bit(client: mlpo.Client, numel: int, dtype: str) -> None:
    """p, m, v and the parameter handed out equal numpy's, for any tail and type, three steps with scale and decay."""
    random = np.random.default_rng(numel)
    start = random.standard_normal(numel, F)
    subgroup = client.subgroup("w", numel, dtype=dtype, initial=start)
    expected = reference.Adam.start(start)
    for scale in (1.0, 0.3, 1 / 1024):
        gradient = reference.rounded(random.standard_normal(numel, F), dtype)
        info = step(subgroup, gradient, lr=1e-2, weight_decay=0.1, grad_scale=scale)
        raw = reference.upcast(gradient, dtype)
        expected.update(raw, lr=1e-2, weight_decay=0.1, grad_scale=scale)
        assert info.all_finite and info.complete
        assert info.sum_of_squares == pytest.approx(float(np.sum(raw.astype(np.float64) ** 2)), rel=1e-12)
        assert np.array_equal(subgroup.param.numpy(), reference.rounded(expected.p, dtype))
    state = subgroup.read_state()
    assert state["step"] == 3 and subgroup.epoch == 3
    for name, value in (("master", expected.p), ("exp_avg", expected.m), ("exp_avg_sq", expected.v)):
        assert np.array_equal(state[name], value), name


def test_views_are_the_slot_itself(client: mlpo.Client) -> None:
    """numpy, torch and the buffer protocol show the same bytes, and gradient and parameter share them."""
    subgroup = client.subgroup("w", 10, dtype="bfloat16")
    subgroup.grad.torch().fill_(1.5)
    assert subgroup.grad.numpy().dtype == np.uint16 and (subgroup.grad.numpy() == 0x3FC0).all()
    assert bytes(memoryview(subgroup.grad))[:2] == b"\xc0\x3f"
    assert subgroup.param.numpy().ctypes.data == subgroup.grad.numpy().ctypes.data
    assert subgroup.grad[2:5].torch().tolist() == [1.5] * 3
    with pytest.raises(TypeError, match="bit patterns"):
        subgroup.grad[:] = 0.5
    other = client.subgroup("mixed", 10, dtype="bfloat16", grad_dtype="float32")
    other.grad[:] = 0.5
    assert other.param.numpy().ctypes.data != other.grad.numpy().ctypes.data
    assert other.grad.torch().dtype == torch.float32 and other.param.torch().dtype == torch.bfloat16


def test_views_outlive_client_and_subgroup(daemon_of, connect_to) -> None:
    """Memory that a view shows stays mapped after close and after everything else was collected."""
    client = connect_to(daemon_of(Layout()))
    subgroup = client.subgroup("w", 1000, initial=np.ones(1000, F))
    step(subgroup, np.zeros(1000, F), weight_decay=0.0)
    array, tensor = subgroup.param.numpy(), subgroup.grad.torch()
    client.close()
    client.close()
    del client, subgroup
    gc.collect()
    assert array.sum() == 1000 and float(tensor.sum()) == 1000
    array[:] = 2
    assert float(tensor.sum()) == 2000


def test_closed_client_says_so(daemon_of, connect_to) -> None:
    """Every call after close() raises with the code for it."""
    client = connect_to(daemon_of(Layout()))
    subgroup = client.subgroup("w", 10)
    client.close()
    for call in (subgroup.submit_grad, subgroup.submit_update, subgroup.read_state, client.discard, client.check_alive,
                 lambda: client.subgroup("x", 1)):  # fmt: skip
        with pytest.raises(mlpo.MlpoError) as caught:
            call()
        assert caught.value.code == -4107


def test_state_of_one_tensor_and_of_a_range(client: mlpo.Client) -> None:
    """read_state and write_state agree for the whole, a tensor by name or index, and ranges; steps are per tensor."""
    specs = [mlpo.TensorSpec("a", (3, 5)), mlpo.TensorSpec("b", ()), mlpo.TensorSpec("c", (7,))]
    start = np.arange(23, dtype=F)
    subgroup = client.subgroup("w", tensors=specs, initial=start)
    whole = subgroup.read_state()
    assert whole["step"].tolist() == [0, 0, 0] and np.array_equal(whole["master"], start)
    subgroup.write_state(step=4, exp_avg=np.full(7, 2, F), tensor="c")
    subgroup.write_state(step=[1, 2, 9], exp_avg_sq=np.arange(23, dtype=F))
    subgroup.write_state(master=np.full(4, -1, F), first=14, count=4)
    assert subgroup.read_state("c")["step"] == 9 and (subgroup.read_state(2)["exp_avg"] == 2).all()
    assert subgroup.read_state("a", first=14)["master"].tolist() == [-1]
    assert subgroup.read_state(first=13, count=6)["master"].tolist() == [13, -1, -1, -1, -1, 18]
    assert subgroup.read_state(first=14, count=2)["step"].tolist() == [1, 2]
    assert subgroup.read_state(first=16, count=2)["step"] == 9
    again = subgroup.read_state()
    subgroup.write_state(**again)
    for name, value in subgroup.read_state().items():
        assert np.array_equal(value, again[name]), name
    with pytest.raises(IndexError, match="not inside"):
        subgroup.read_state("a", first=10, count=6)
    with pytest.raises(KeyError, match="no tensor"):
        subgroup.read_state("d")
    with pytest.raises(TypeError, match="float64"):
        subgroup.write_state(master=np.zeros(23))
    with pytest.raises(ValueError, match="22 elements"):
        subgroup.write_state(master=np.zeros(22, F))


def test_request_by_await_and_callback(client: mlpo.Client) -> None:
    """One result by result(), await and callbacks, from several threads; after the end a callback runs at once."""
    subgroup = client.subgroup("w", 100_000)
    subgroup.grad[:] = 1
    seen: list[float] = []
    called = threading.Event()
    request = subgroup.submit_grad()
    request.add_done_callback(lambda ended: (seen.append(ended.result(0).sum_of_squares), called.set()))
    threads = [threading.Thread(target=lambda: seen.append(request.result(30).sum_of_squares)) for _ in range(4)]
    for thread in threads:
        thread.start()

    async def wait() -> float:
        return (await request).sum_of_squares

    seen.append(asyncio.run(wait()))
    for thread in threads:
        thread.join(30)
    assert called.wait(30)
    assert seen == [100_000.0] * 6 and request.done()
    late: list[bool] = []
    request.add_done_callback(lambda ended: late.append(ended.done()))
    assert late == [True]


def test_windows_are_checked(client: mlpo.Client) -> None:
    """An update without gradient, and one whose pieces overlap or leave a gap, is refused and changes nothing."""
    subgroup = client.subgroup("w", 100, initial=np.ones(100, F))
    subgroup.grad[:] = 1
    for pieces in ([], [(0, 50, mlpo.VALUE)], [(0, 60, mlpo.VALUE), (50, 50, mlpo.VALUE)]):
        with pytest.raises(mlpo.MlpoError) as caught:
            if pieces:
                subgroup.submit_grad(pieces).result(30)
            subgroup.submit_update().result(30)
        assert caught.value.code == -4098, str(caught.value)  # MLPO_ERR_COVERAGE
        client.discard("user")
    state = subgroup.read_state()
    assert state["step"] == 0 and (state["master"] == 1).all() and subgroup.epoch == 0
    info = subgroup.submit_grad([(0, 30, mlpo.VALUE), (30, 70, mlpo.ZERO)]).result(30)
    assert info.sum_of_squares == 30 and info.complete


def test_zero_and_skip_pieces_read_no_bytes(client: mlpo.Client) -> None:
    """ZERO is a gradient of 0 whatever is in the slot; SKIP leaves p, m, v and step of a tensor alone."""
    specs = [mlpo.TensorSpec("a", (10,)), mlpo.TensorSpec("b", (10,)), mlpo.TensorSpec("c", (10,))]
    subgroup = client.subgroup("w", tensors=specs, initial=np.ones(30, F))
    subgroup.grad[:] = np.nan
    subgroup.grad[:10] = 2
    info = subgroup.submit_grad([(0, 10, mlpo.VALUE), (10, 10, mlpo.ZERO), (20, 10, mlpo.SKIP)]).result(30)
    assert info.all_finite and info.sum_of_squares == 40
    subgroup.submit_update(lr=0.1, weight_decay=0.5).result(30)
    state = subgroup.read_state()
    assert state["step"].tolist() == [1, 1, 0]
    expected = [reference.Adam.start(np.ones(10, F)) for _ in range(2)]
    expected[0].update(np.full(10, 2, F), lr=0.1, weight_decay=0.5)
    expected[1].update(np.zeros(10, F), lr=0.1, weight_decay=0.5)
    assert np.array_equal(state["master"], np.concatenate([expected[0].p, expected[1].p, np.ones(10, F)]))


def test_bad_arguments_name_themselves(client: mlpo.Client) -> None:
    """Wrong types, hyper-parameters and keys are refused by name, before anything reaches the daemon."""
    with pytest.raises(TypeError, match="float64"):
        client.subgroup("w", 4, dtype="float64")
    with pytest.raises(TypeError, match="initial is of type float64"):
        client.subgroup("w", 4, initial=np.zeros(4))
    with pytest.raises(ValueError, match="its tensors have 3"):
        client.subgroup("w", 4, tensors=[mlpo.TensorSpec("a", (3,))])
    subgroup = client.subgroup("w", 4)
    with pytest.raises(mlpo.MlpoError) as caught:
        client.subgroup("w", 4)
    assert caught.value.errno == errno.EEXIST and "w" in str(caught.value)
    subgroup.submit_grad().result(30)
    for wrong in ({"lr": float("nan")}, {"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": float("inf")},
                  {"weight_decay": -0.1}, {"grad_scale": float("nan")}):  # fmt: skip
        with pytest.raises(mlpo.MlpoError) as caught:
            subgroup.submit_update(**wrong)
        assert caught.value.errno == errno.EINVAL, wrong
    assert subgroup.submit_update().result(30) == 1


def test_connecting_fails_with_what_to_do(daemon_of, connect_to, tmp_path, monkeypatch) -> None:
    """No daemon, no job, a job with a slash, a second live session of a rank: each its own error."""
    daemon: Daemon = daemon_of(Layout())
    with pytest.raises(mlpo.MlpoError) as caught:
        mlpo.connect(socket=str(tmp_path / "none.sock"), job="j")
    assert caught.value.errno in (errno.ENOENT, errno.ECONNREFUSED) and "none.sock" in str(caught.value)
    for name in ("MLPO_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for job in (None, "a/b", "a\nb", ""):
        with pytest.raises(mlpo.MlpoError) as caught:
            mlpo.connect(socket=daemon.socket, job=job)
        assert caught.value.errno == errno.EINVAL and "job" in str(caught.value).lower()
    first = connect_to(daemon)
    with pytest.raises(mlpo.MlpoError) as caught:
        mlpo.connect(socket=daemon.socket, job=first.job, timeout=1)
    assert caught.value.errno == errno.EADDRINUSE
    first.close()
    connect_to(daemon, job=first.job, timeout=10)


def test_what_is_not_offered_is_refused(client: mlpo.Client) -> None:
    with pytest.raises(ValueError, match="sgd"):
        client.subgroup("w", 1).submit_update(mode="sgd")


def test_dead_daemon_ends_every_wait(tmp_path) -> None:
    """kill -9 of the daemon: a waiting thread, an await-like callback and later calls have their error within 2 s."""
    daemon = Daemon(tmp_path, Layout())
    try:
        client = mlpo.connect(socket=daemon.socket, job="orphan")
        subgroup = client.subgroup("w", 10)
        subgroup.submit_grad().result(30)
        daemon.pause()
        request = subgroup.submit_update()
        ends: list[tuple[float, int]] = []
        called = threading.Event()

        def wait() -> None:
            error = request.exception()
            ends.append((time.monotonic(), getattr(error, "code", 0)))

        waiting = [threading.Thread(target=wait) for _ in range(3)]
        for thread in waiting:
            thread.start()
        request.add_done_callback(lambda _: called.set())
        time.sleep(0.3)
        killed = time.monotonic()
    finally:
        daemon.kill()
    for thread in waiting:
        thread.join(10)
    assert len(ends) == 3 and all(at - killed < 2 and code == -4108 for at, code in ends), (killed, ends)
    assert called.wait(2)
    for call in (client.check_alive, subgroup.submit_grad, subgroup.read_state, client.discard):
        with pytest.raises(mlpo.MlpoError) as caught:
            call()
        assert caught.value.code == -4108
    client.close()


def test_status_shows_the_session(client: mlpo.Client) -> None:
    """status() is the daemon's, with this session in it."""
    client.subgroup("w", 1234)
    status = client.status()
    assert status["state"] == "ready"
    mine = [session for session in status["sessions"] if session["job"] == client.job]
    assert len(mine) == 1 and mine[0]["rank"] == 0 and mine[0]["parameters"] == 1234
    assert client.lost_wakeups == 0


def test_few_slots_for_many_gradients(daemon_of, connect_to) -> None:
    """keep=True: all gradients are given before the first update; the arena holds a few; bits are the reference's."""
    numel, count = 30_011, 12
    random = np.random.default_rng(5)
    with connect_to(daemon_of(Layout()), arena=1 << 20) as client:
        starts = [random.standard_normal(numel, F) for _ in range(count)]
        kept = [
            client.subgroup(
                f"k{i}",
                numel,
                dtype="bfloat16",
                grad_dtype="float32" if i % 3 else None,
                initial=start,
                keep=True,
            )
            for i, start in enumerate(starts)
        ]
        expected = [reference.Adam.start(start) for start in starts]
        for _ in range(2):
            gradients, requests = [], []
            for subgroup in kept:
                gradients.append(reference.rounded(random.standard_normal(numel, F), subgroup.grad_dtype))
                subgroup.lend(timeout=30)[:] = gradients[-1]
                requests.append(subgroup.submit_grad())
            assert all(request.result(timeout=30).complete for request in requests)
            for subgroup, gradient, adam in zip(kept, gradients, expected):
                with pytest.raises(RuntimeError, match="has no slot now"):
                    subgroup.param
                subgroup.submit_update(lr=1e-2).result(timeout=30)
                adam.update(reference.upcast(gradient, subgroup.grad_dtype), lr=1e-2)
                assert np.array_equal(subgroup.param.numpy(), reference.rounded(adam.p, "bfloat16"))
                subgroup.give_back()
        for subgroup, adam in zip(kept, expected):
            assert np.array_equal(subgroup.read_state()["exp_avg_sq"], adam.v)


def test_lent_slots_that_nobody_gives_back(daemon_of, connect_to) -> None:
    """Who waits for a slot is told who holds how much; wrong uses say what to do; a discard gives slots back."""
    with connect_to(daemon_of(Layout()), arena=1 << 20) as client:
        kept = [client.subgroup(f"k{i}", 60_000, keep=True) for i in range(4)]
        with pytest.raises(mlpo.MlpoError, match="no slot now: mlpo_slot_lend"):
            kept[0].submit_grad()
        for subgroup in kept[:3]:
            subgroup.lend()
        with pytest.raises(mlpo.MlpoError, match="3 slots have 720384 of") as error:
            kept[3].lend(timeout=0.2)
        assert error.value.errno == errno.ETIMEDOUT
        kept[0].submit_grad([(0, 10, mlpo.Kind.VALUE)]).result(timeout=30)
        with pytest.raises(mlpo.MlpoError, match="discard") as error:
            kept[0].give_back()
        assert error.value.errno == errno.EBUSY
        client.discard()
        kept[3].lend(timeout=30)
        waiter = threading.Timer(0.3, kept[1].give_back)
        waiter.start()
        kept[0].lend(timeout=30)
        waiter.join()
        with pytest.raises(mlpo.MlpoError, match="a slot of the subgroup needs") as error:
            client.subgroup("large", 1 << 20, keep=True)
        assert error.value.errno == errno.EDQUOT
    with connect_to(daemon_of(Layout())) as client:
        with pytest.raises(mlpo.MlpoError, match="connect with arena_bytes") as error:
            client.subgroup("k", 10, keep=True)
        assert error.value.errno == errno.EINVAL
