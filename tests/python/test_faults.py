"""Faults that users of such software have reported, by their ids, seen from Python."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import Any, Callable, Iterator

import mlpo
import numpy as np
import pytest
import reference
import torch
from mlpo.torch import OffloadAdamW
from running_daemon import SMALL_BLOCKS, THREE_BUFFERS, Daemon, Layout
from torch.nn import Parameter

F = np.float32
BLOCKS_OF_64K = Layout(block=1 << 16, pool="8MiB")  # a block is 768 KiB


def pieces_of(size: int, numel: int) -> list[tuple[int, int, int]]:
    return [(first, min(size, numel - first), mlpo.VALUE) for first in range(0, numel, size)]


# ---- C01: one step count and one bias correction for all parts


def test_C01_closed_form_after_1000_steps(client: mlpo.Client) -> None:
    """g = 1, p = 0, lr = 2**-10: v = 0.001 after step 1, p = -0.9765625 and v = 0.63230 after 1000."""
    subgroup = client.subgroup("w", 1003)
    for step in range(1000):
        subgroup.grad[:] = 1
        subgroup.submit_grad().result(30)
        subgroup.submit_update(lr=2.0**-10, weight_decay=0.0).result(30)
        if step == 0:
            assert (subgroup.read_state()["exp_avg_sq"] == F(0.001)).all()
    state = subgroup.read_state()
    assert state["step"] == 1000
    assert np.abs(state["master"] + 0.9765625).max() <= 1e-5
    assert np.abs(state["exp_avg_sq"] - 0.63230).max() <= 1e-5


@pytest.mark.parametrize("parts, order", [(1, "up"), (2, "down"), (7, "shuffled"), (7, "up")])
def test_C01_every_split_and_order_is_bit_equal(daemon_of, connect_to, parts: int, order: str) -> None:
    """1,000,003 elements in 1, 2 and 7 subgroups, updates in any order: numpy's bits, also when betas change half way,
    when the step jumps by writing the state, and at step 10**6."""
    client = connect_to(daemon_of(BLOCKS_OF_64K))
    numel, steps = 1_000_003, 12
    random = np.random.default_rng(1)
    start = random.standard_normal(numel, F)
    expected = reference.Adam.start(start)
    bounds = np.linspace(0, numel, parts + 1).astype(int)
    groups = [client.subgroup(f"p{i}", b - a, initial=start[a:b]) for i, (a, b) in enumerate(zip(bounds, bounds[1:]))]
    shuffle = np.random.default_rng(2)
    for step in range(steps):
        jump = {2: 4, 8: 10**6 - 1}.get(step)
        if jump:
            expected.step = jump
            for subgroup in groups:
                subgroup.write_state(step=jump)
        gradient = random.standard_normal(numel, F)
        betas = (0.9, 0.999) if step < steps // 2 else (0.7, 0.9)
        expected.update(gradient, betas=betas)
        numbers = list(range(parts))
        if order == "down":
            numbers.reverse()
        elif order == "shuffled":
            shuffle.shuffle(numbers)
        for number in numbers:
            groups[number].grad[:] = gradient[bounds[number] : bounds[number + 1]]
            groups[number].submit_grad()
        for request in [groups[number].submit_update(betas=betas) for number in numbers]:
            request.result(60)
    for number, subgroup in enumerate(groups):
        part = slice(bounds[number], bounds[number + 1])
        state = subgroup.read_state()
        assert state["step"] == 10**6 + 3
        for name, value in (("master", expected.p), ("exp_avg", expected.m), ("exp_avg_sq", expected.v)):
            assert np.array_equal(state[name], value[part]), (number, name)


@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
def test_C01_each_step_is_within_1e6_of_fp64(client: mlpo.Client, step: int) -> None:
    """One step from the same inputs against FP64 arithmetic."""
    random = np.random.default_rng(step)
    p, g, m = (random.standard_normal(10_007, F) for _ in range(3))
    v = m**2 + random.random(10_007, F)
    subgroup = client.subgroup("w", p.size, initial=p)
    subgroup.write_state(step=step - 1, exp_avg=m, exp_avg_sq=v)
    subgroup.grad[:] = g
    subgroup.submit_grad()
    subgroup.submit_update(lr=1e-2, weight_decay=0.1).result(30)
    p, g, m, v = (x.astype(np.float64) for x in (p, g, m, v))
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    p = p * (1 - 1e-3) - 1e-2 / (1 - 0.9**step) * m / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    state = subgroup.read_state()
    for name, value in (("master", p), ("exp_avg", m), ("exp_avg_sq", v)):
        assert np.abs(state[name] - value).max() <= 1e-6 * np.abs(value).max(), name


def test_C01_two_jobs_interleaved(daemon_of, connect_to) -> None:
    """Two jobs with equal keys and ranks, step about: each has the bits of its own reference."""
    jobs = []
    for seed in range(2):
        random = np.random.default_rng(seed)
        start = random.standard_normal(50_001, F)
        client = connect_to(daemon_of(SMALL_BLOCKS))
        jobs.append((random, client.subgroup("w", start.size, initial=start), reference.Adam.start(start)))
    for step in range(10):
        for random, subgroup, expected in jobs[: 1 + step % 2] + jobs[step % 2 :]:
            gradient = random.standard_normal(50_001, F)
            subgroup.grad[:] = gradient
            subgroup.submit_grad()
            subgroup.submit_update().result(30)
            expected.update(gradient)
    for _, subgroup, expected in jobs:
        assert subgroup.read_state()["step"] == expected.step
        assert np.array_equal(subgroup.read_state()["master"], expected.p)


# ---- C03: every part of the gradient arrives


@pytest.mark.parametrize("size", [1, 4095, 4096, (1 << 20) - 1, (1 << 20) + 1])
def test_C03_gradient_in_pieces(daemon_of, connect_to, size: int) -> None:
    """Pieces of every size, in shuffled order and in several submissions: numpy's bits, and the sum of the whole."""
    client = connect_to(daemon_of(BLOCKS_OF_64K))
    numel = min(3 * size + 5, (2 << 20) + 77) if size > 1 else 2500
    random = np.random.default_rng(size)
    start, gradient = random.standard_normal(numel, F), random.standard_normal(numel, F)
    subgroup = client.subgroup("w", numel, initial=start)
    subgroup.grad[:] = gradient
    pieces = pieces_of(size, numel)
    random.shuffle(pieces)
    pieces = [(int(a), int(b), int(c)) for a, b, c in pieces]
    half = len(pieces) // 2
    requests = [subgroup.submit_grad(part) for part in (pieces[:half], pieces[half:]) if part]
    infos = [request.result(60) for request in requests]
    whole = client.subgroup("whole", numel)
    whole.grad[:] = gradient
    [last] = [info for info in infos if info.complete]  # the one that ended last, whichever was submitted last
    assert last.sum_of_squares == whole.submit_grad().result(60).sum_of_squares
    subgroup.submit_update().result(60)
    expected = reference.Adam.start(start)
    expected.update(gradient)
    assert np.array_equal(subgroup.param.numpy(), expected.p)


@pytest.mark.parametrize("fault", ["left out", "sent twice"])
def test_C03_a_piece_too_few_or_too_many_is_refused(daemon_of, connect_to, fault: str) -> None:
    """The update is refused, nothing changes, and after a discard the right pieces work."""
    client = connect_to(daemon_of(SMALL_BLOCKS))
    numel = 10_000
    subgroup = client.subgroup("w", numel, initial=np.ones(numel, F))
    pieces = pieces_of(999, numel)
    wrong = pieces[:4] + pieces[5:] if fault == "left out" else pieces + [pieces[4]]
    subgroup.grad[:] = 1
    with pytest.raises(mlpo.MlpoError) as caught:
        for piece in wrong:
            subgroup.submit_grad([piece]).result(30)
        subgroup.submit_update().result(30)
    assert caught.value.code == -4098 and "3996" in str(caught.value), "the range is not named"
    client.discard("user")
    state = subgroup.read_state()
    assert state["step"] == 0 and (state["master"] == 1).all() and not state["exp_avg"].any()
    subgroup.submit_grad(pieces).result(30)
    assert subgroup.submit_update().result(30) == 1


@pytest.mark.parametrize(
    "layout",
    [Layout(block=1024, pool="64MiB"), SMALL_BLOCKS, THREE_BUFFERS, Layout(paths=1, block=1024, pool="256KiB")],
)
def test_C03_50_steps_on_storage_are_those_in_memory(daemon_of, connect_to, layout: Layout) -> None:
    """50 steps of two subgroups with all, some and none of the state cached: numpy's bits."""
    client = connect_to(daemon_of(layout))
    random = np.random.default_rng(3)
    work = []
    for key, numel in (("a", 20_001), ("b", 7_777)):
        start = random.standard_normal(numel, F)
        work.append((client.subgroup(key, numel, initial=start), reference.Adam.start(start)))
    for _ in range(50):
        for subgroup, expected in work:
            gradient = random.standard_normal(subgroup.numel, F)
            subgroup.grad[:] = gradient
            subgroup.submit_grad()
            expected.update(gradient)
        for request in [subgroup.submit_update() for subgroup, _ in work]:
            request.result(60)
    for subgroup, expected in work:
        state = subgroup.read_state()
        for name, value in (("master", expected.p), ("exp_avg", expected.m), ("exp_avg_sq", expected.v)):
            assert np.array_equal(state[name], value), (subgroup.key, name)


# ---- C04: micro-steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("micro_steps, total", [(1, 1), (2, 3), (8, 20), (32, 80)])
def test_C04_all_micro_steps_count(daemon_of, connect_to, dtype: torch.dtype, micro_steps: int, total: int) -> None:
    """Backward passes of (j mod 4) + 1 add up: exp_avg is 0.1 * total; a parameter used in the first alone has 1.

    Between them another subgroup is updated, which drives this one's blocks out of the pool.
    """
    client = connect_to(daemon_of(THREE_BUFFERS))
    numel = 5000
    often, once = (Parameter(torch.zeros(numel, dtype=dtype)) for _ in range(2))
    optimizer = OffloadAdamW([often, once], client=client)
    other = client.subgroup("other", 20_000)
    for j in range(micro_steps):
        loss = (often * ((j % 4) + 1)).sum()
        if j == 0:
            loss = loss + once.sum()
        loss.backward()
        other.submit_grad([(0, other.numel, mlpo.ZERO)])
        other.submit_update().result(60)
    norm = float(torch.nn.utils.get_total_norm([often.grad.float()]))
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert norm == pytest.approx(total * numel**0.5, rel=1e-5)
    tenth = F(1 - 0.9)
    assert (state[0]["exp_avg"] == float(F(total) * tenth)).all() and (state[1]["exp_avg"] == float(tenth)).all()
    assert float(state[0]["step"]) == float(state[1]["step"]) == 1.0


# ---- C08: gradients that are not finite


@pytest.mark.parametrize("layout", [Layout(block=1024, pool="64MiB"), THREE_BUFFERS], ids=["in memory", "on storage"])
def test_C08_nothing_changes_and_it_is_counted(daemon_of, connect_to, layout: Layout) -> None:
    """inf in the first and NaN in the last element of the last subgroup, five steps in a row, rank 1 of 2: p, m, v and
    step stay, each raises and names the parameters, the skips show in the status, and there is a warning."""
    client = connect_to(daemon_of(layout), rank=1, world_size=2)
    params = [Parameter(torch.randn(size)) for size in (3000, 17, 2500)]
    named = list(zip(("first", "second", "last"), params))
    optimizer = OffloadAdamW(named, client=client, subgroup_elements=1000)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    before, values = optimizer.state_dict()["state"], [p.detach().clone() for p in params]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(5):
            for p in params:
                p.grad = torch.randn_like(p)
            params[2].grad[0], params[2].grad[-1] = float("inf"), float("nan")
            with pytest.raises(mlpo.NonFiniteGradientError, match="last") as caught:
                optimizer.step()
            assert caught.value.parameters == ("last",)
    assert sum("in a row" in str(warning.message) for warning in heard) == 1
    after = optimizer.state_dict()["state"]
    for key, entry in before.items():
        for name, value in entry.items():
            assert torch.equal(after[key][name], value), (key, name)
    assert all(torch.equal(p, q) for p, q in zip(params, values))
    [session] = [s for s in client.status()["sessions"] if s["job"] == client.job]
    assert session["skipped_steps"] == 5 and session["epoch"] == 1
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_C08_apply_is_what_torch_does(client: mlpo.Client) -> None:
    """nonfinite="apply" updates as torch would: NaN where the gradient was, the others as always."""
    p, q = (Parameter(torch.ones(3)) for _ in range(2))
    optimizer = OffloadAdamW([p], client=client, lr=0.1, nonfinite="apply")
    theirs = torch.optim.AdamW([q], lr=0.1, foreach=False)
    for w in (p, q):
        w.grad = torch.tensor([1.0, float("nan"), -1.0])
    optimizer.step()
    theirs.step()
    torch.testing.assert_close(p, q, rtol=1e-6, atol=0, equal_nan=True)
    assert p.isnan().tolist() == [False, True, False]


def test_C08_update_of_a_gradient_that_is_not_finite_is_refused(client: mlpo.Client) -> None:
    """Below the optimizer: GRAD reports it, UPDATE is refused with its own error, DISCARD ends the window."""
    subgroup = client.subgroup("w", 5000)
    subgroup.grad[:] = 1
    subgroup.grad[4999] = np.nan
    assert not subgroup.submit_grad().result(30).all_finite
    with pytest.raises(mlpo.NonFiniteGradientError):
        subgroup.submit_update().result(30)
    client.discard(reason="overflow")
    assert subgroup.read_state()["step"] == 0 and subgroup.epoch == 0


# ---- C18: weights that are replaced after the optimizer exists

Replace = Callable[[Parameter, torch.Tensor], None]


def _load(p: Parameter, value: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.p = p
    module.load_state_dict({"p": value})


def _in_place(p: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        p.copy_(value)


REPLACEMENTS: dict[str, Replace] = {
    "load_state_dict": _load,
    "data.copy_": lambda p, value: _in_place(p.data, value),  # moves no version counter
    "data =": lambda p, value: setattr(p, "data", value.clone()),
    "copy_": _in_place,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("how", REPLACEMENTS)
@pytest.mark.parametrize("shape", [(70, 30), (3,)])
def test_C18_replaced_weights_count(
    daemon_of, connect_to, how: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Weights of 1.0 are replaced by 2.0: a step with lr = 0 gives 2.0, one with lr > 0 starts there."""
    w = Parameter(torch.ones(shape, dtype=dtype))
    optimizer = OffloadAdamW([w], client=connect_to(daemon_of(SMALL_BLOCKS)), lr=0.0, weight_decay=0.0)
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert (w == 1).all()
    REPLACEMENTS[how](w, torch.full(shape, 2.0, dtype=dtype))
    optimizer.step()
    assert (w == 2).all()
    optimizer.param_groups[0]["lr"] = 2.0**-3
    optimizer.step()
    assert torch.allclose(w.float(), torch.tensor(1.875), rtol=4e-3)
    assert optimizer.state_dict()["state"][0]["step"] == 3


def test_C18_one_element_replaced_keeps_the_others_bits(client: mlpo.Client) -> None:
    """The masters of elements that were not replaced keep the bits that rounding to 16 bits hides."""
    w = Parameter(torch.randn(1000).bfloat16())
    optimizer = OffloadAdamW([w], client=client)
    for _ in range(3):
        w.grad = torch.randn(1000).bfloat16()
        optimizer.step()
    before = optimizer.state_dict()["state"][0]["master"]
    assert not torch.equal(before, before.bfloat16().float())
    w.data[17] = 5.0
    optimizer.reload_masters()
    after = optimizer.state_dict()["state"][0]["master"]
    assert after[17] == 5 and torch.equal(torch.cat([after[:17], after[18:]]), torch.cat([before[:17], before[18:]]))


def test_C18_replaced_before_the_first_step_and_while_skipped(client: mlpo.Client) -> None:
    """Values count from the first step on, also those set while a parameter had no gradient."""
    a, b = (Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = OffloadAdamW([a, b], client=client, lr=0.0)
    a.data.fill_(3.0)
    a.grad = torch.ones_like(a)
    optimizer.step()
    b.data.zero_()
    b.grad = torch.ones_like(b)
    optimizer.step()
    assert (a == 3).all() and (b == 0).all()


# ---- C27: blocking calls and the GIL


def test_C27_waiting_threads_do_not_hold_the_interpreter(daemon_of, connect_to) -> None:
    """8 threads in every waiting call while 8 others allocate tensors, 5 s: all get on, and memory stays flat."""
    client = connect_to(daemon_of(SMALL_BLOCKS))
    end = time.monotonic() + 5
    counts: list[int] = [0] * 16
    failures: list[BaseException] = []

    def waits(number: int) -> None:
        subgroup = client.subgroup(f"w{number}", 3000)
        while time.monotonic() < end:
            subgroup.grad[:] = 1
            subgroup.submit_grad().result(30)
            subgroup.submit_update().result(30)
            subgroup.write_state(**subgroup.read_state())
            counts[number] += 1

    def allocates(number: int) -> None:
        while time.monotonic() < end:
            torch.ones(10_000)
            counts[number] += 1

    def guarded(run: Callable[[int], None], number: int) -> None:
        try:
            run(number)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(waits if i < 8 else allocates, i)) for i in range(16)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    early = _resident_bytes()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and not failures, failures
    assert min(counts[:8]) >= 5 and min(counts[8:]) >= 5, counts
    assert _resident_bytes() - early < 64 << 20


def test_C27_deadlines_are_kept(tmp_path: pathlib.Path) -> None:
    """Against a daemon that stands still: TimeoutError of both kinds after the timeout, and the request goes on."""
    with Daemon(tmp_path, Layout()) as daemon, mlpo.connect(socket=daemon.socket, job="deadline") as client:
        subgroup = client.subgroup("w", 10)
        subgroup.submit_grad().result(30)
        daemon.pause()
        request = subgroup.submit_update()
        for timeout in (0.0, 0.05, 0.5):
            began = time.monotonic()
            with pytest.raises(mlpo.TimeoutError) as caught:
                request.result(timeout)
            assert timeout <= time.monotonic() - began < timeout + 0.5
            assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, mlpo.MlpoError)
        assert not request.done()
        daemon.resume()
        assert request.result(30) == 1


@pytest.mark.parametrize("call", ["result", "read_state", "discard", "step", "connect"])
def test_C27_ctrl_c_within_a_second(tmp_path: pathlib.Path, call: str) -> None:
    """SIGINT to a process whose main thread waits for a daemon that stands still: KeyboardInterrupt within 1 s."""
    with Daemon(tmp_path, Layout()) as daemon:
        here = pathlib.Path(__file__).parent / "interrupted_process.py"
        child = subprocess.Popen(
            [sys.executable, here, daemon.socket, call], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        deadline = threading.Timer(60, child.kill)  # ends the reads below
        deadline.start()
        try:
            assert child.stdout is not None and child.stdin is not None
            assert child.stdout.readline() == "ready\n"
            daemon.pause()
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.stdout.readline() == "waiting\n"
            time.sleep(0.5)
            sent = time.monotonic()
            child.send_signal(signal.SIGINT)
            word, arrived = child.stdout.readline().split()
            assert word == "interrupted" and float(arrived) - sent < 1
            daemon.resume()
            assert child.wait(30) == 0
        finally:
            deadline.cancel()
            deadline.join()
            daemon.resume()
            child.kill()
            child.communicate()


# ---- C28: fork


def test_C28_forked_children_are_told_and_the_parent_is_whole(daemon_of, connect_to) -> None:
    """8 children forked with requests in flight call the client, then exit or are killed; the parent's bits hold."""
    client = connect_to(daemon_of(SMALL_BLOCKS))
    random = np.random.default_rng(28)
    start = random.standard_normal(50_000, F)
    subgroup, expected = client.subgroup("w", start.size, initial=start), reference.Adam.start(start)
    request: Any = None
    calls: list[Callable[[], Any]] = [
        lambda: subgroup.grad, lambda: subgroup.param, lambda: subgroup.epoch,
        subgroup.submit_grad, subgroup.submit_update,
        subgroup.read_state, client.discard, client.status, client.close, lambda: client.subgroup("x", 1),
        lambda: request.result(5), lambda: request.done(),
    ]  # fmt: skip
    for step in range(8):
        gradient = random.standard_normal(start.size, F)
        subgroup.grad[:] = gradient
        subgroup.submit_grad()
        request = subgroup.submit_update()
        expected.update(gradient)
        child = os.fork()
        if child == 0:
            _exit_as_child(calls, kill=step % 2 == 1)
        _, status = os.waitpid(child, 0)
        if step % 2:
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        else:
            assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, "a call of the child did not say it was forked"
        request.result(30)
    state = subgroup.read_state()
    for name, value in (("master", expected.p), ("exp_avg", expected.m), ("exp_avg_sq", expected.v)):
        assert np.array_equal(state[name], value), name
    client.check_alive()


def _exit_as_child(calls: list[Callable[[], Any]], kill: bool) -> None:
    """Leaves with the number of calls that did not raise the error of a forked client."""
    wrong = 0
    for call in calls:
        try:
            call()
            wrong += 1
        except mlpo.MlpoError as error:
            wrong += error.code != -4106
        except BaseException:  # noqa: BLE001
            wrong += 1
    if kill and not wrong:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(wrong)


def test_C28_workers_of_a_data_loader(daemon_of, connect_to) -> None:
    """Training with forked DataLoader workers: each ends by itself, and the session is as if alone."""
    client = connect_to(daemon_of(SMALL_BLOCKS))
    w = Parameter(torch.zeros(100))
    optimizer = OffloadAdamW([w], client=client, weight_decay=0.0)
    expected = reference.Adam.start(np.zeros(100, F))
    data = torch.arange(16, dtype=torch.float32)
    for _ in range(2):
        for batch in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"):
            w.grad = batch.sum().repeat(100)
            optimizer.step()
            expected.update(w.grad.numpy(), weight_decay=0.0)
    assert np.array_equal(w.detach().numpy(), expected.p)


def _resident_bytes() -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS in /proc/self/status")


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    """What a test starts ends with it; the client's own threads are named mlpo-."""
    yield
    left = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    assert not left
