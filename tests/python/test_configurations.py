"""The same bits whatever the number of paths, the pool, the I/O engine, the instruction set, and the neighbours."""

from __future__ import annotations

import hashlib
import itertools
import os
import pathlib
import subprocess
import sys

import mlpo
import numpy as np
import pytest
import reference
from mlpo.torch import OffloadAdamW
from models import build, groups, record
from running_daemon import SMALL_BLOCKS, Daemon, Layout, lacks

F = np.float32
HOLDINGS = {
    "in memory": Layout(paths=1, pool="64MiB", block=1024),
    "one path": Layout(paths=1, pool="96KiB", block=1024),
    "two paths": Layout(paths=2, pool="96KiB", block=1024),
    "three buffers": Layout(paths=2, pool="36KiB", block=1024),
}


@pytest.mark.parametrize("target", ["avx512", "avx2", "scalar"])
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("holding", HOLDINGS)
def test_same_bits_in_every_configuration(tmp_path: pathlib.Path, holding: str, engine: str, target: str) -> None:
    """5 steps of three subgroups with odd tails: p, m, v and the handed-out parameter equal numpy's, byte by byte."""
    why = lacks(target)
    if why:
        pytest.skip(why)
    base = HOLDINGS[holding]
    with Daemon(tmp_path, Layout(base.paths, base.pool, base.block, engine, target)) as daemon:
        with mlpo.connect(socket=daemon.socket, job="same-bits") as client:
            random = np.random.default_rng(11)
            work = []
            for key, numel, dtype in (("a", 30_011, "bfloat16"), ("b", 1_025, "float16"), ("c", 9_999, "float32")):
                start = random.standard_normal(numel, F)
                work.append((client.subgroup(key, numel, dtype=dtype, initial=start), reference.Adam.start(start)))
            for step in range(5):
                requests = []
                for subgroup, expected in work:
                    gradient = reference.rounded(random.standard_normal(subgroup.numel, F), subgroup.dtype)
                    subgroup.grad[:] = gradient
                    assert subgroup.submit_grad().result(60).all_finite
                    expected.update(reference.upcast(gradient, subgroup.dtype), lr=1e-2 / (step + 1))
                for subgroup, _ in work:
                    requests.append(subgroup.submit_update(lr=1e-2 / (step + 1)))
                for request, (subgroup, expected) in zip(requests, work):
                    request.result(60)
                    assert np.array_equal(subgroup.param.numpy(), reference.rounded(expected.p, subgroup.dtype))
            for subgroup, expected in work:
                state = subgroup.read_state()
                for name, value in (("master", expected.p), ("exp_avg", expected.m), ("exp_avg_sq", expected.v)):
                    assert np.array_equal(state[name], value), (subgroup.key, name)
            status = client.status()
            assert {path["engine"] for path in status["paths"]} == {engine}
            moved = sum(path["written_bytes"] for path in status["paths"])
            if holding != "in memory":
                assert moved > 3 * 4 * 30_011, "storage was not used"


def test_packing_changes_no_bit(daemon_of, connect_to) -> None:
    """Training a model by itself for 20 steps: equal state whatever shares a subgroup."""
    digests = set()
    for elements in (1, 100, 1500, 1 << 24):
        model = build(3)
        optimizer = OffloadAdamW(groups(model), client=connect_to(daemon_of(SMALL_BLOCKS)), subgroup_elements=elements)
        record(20, model, optimizer)
        digests.add(digest(optimizer))
    assert len(digests) == 1


def test_ranks_at_once_train_as_alone(daemon_of) -> None:
    """2 and 4 rank processes of one job at once, with a small pool: each has the bits of its run alone."""
    daemon = daemon_of(SMALL_BLOCKS)
    rounds = [["two:0", "two:1"], ["four:0", "four:1", "four:2", "four:3"]]
    processes = [[_ranks(daemon, [rank]) for rank in ranks] for ranks in rounds]
    together = [_train(group) for group in processes]
    [alone] = _train([_ranks(daemon, [f"alone{rank}:{rank}" for rank in range(4)])])
    assert len(set(alone)) == 4, "each rank trains something else"
    for ended in together:
        assert [digests for [digests] in ended] == alone[: len(ended)]


def _ranks(daemon: Daemon, ranks: list[str]) -> subprocess.Popen[str]:
    here = pathlib.Path(__file__).parent / "rank_process.py"
    environment = {**os.environ, "MLPO_SOCKET": daemon.socket, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, here, *ranks], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def _train(processes: list[subprocess.Popen[str]]) -> list[list[str]]:
    """Lets processes that are ready go at once; the digests that each prints."""
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        ended = [process.communicate(timeout=300) for process in processes]
        assert all(process.returncode == 0 for process in processes), [error for _, error in ended]
        return [output.split() for output, _ in ended]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def digest(optimizer: OffloadAdamW) -> str:
    """Of all state and parameters of an optimizer."""
    total = hashlib.sha256()
    saved = optimizer.state_dict()
    for key, entry in sorted(saved["state"].items()):
        for name in sorted(entry):
            total.update(f"{key}{name}".encode())
            total.update(entry[name].contiguous().numpy().tobytes())
    for param in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        total.update(param.detach().float().numpy().tobytes())
    return total.hexdigest()
