"""DeepSpeed ZeRO-3 with mlpo on a GPU against stock and an FP64 run; run by tests/device/check. What of it needs no
GPU, and more of it, is in tests/trainers."""

from __future__ import annotations

import os
import pathlib
import socket
import statistics
import subprocess
import sys
from typing import Any, Optional

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[0] / "python"))
sys.path.insert(0, str(HERE))

import mlpo.cuda  # noqa: E402
import torch  # noqa: E402
from device_results import put  # noqa: E402
from running_daemon import Daemon, Layout  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)
if not mlpo.cuda.available():
    pytest.skip(mlpo.cuda.why_not(), allow_module_level=True)
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (MLPO_WHEELS of tests/device/check)")

SEEDS = (1, 2, 3, 4, 5)
STEPS = 50


def run(
    kind: str, folder: pathlib.Path, seeds: tuple[int, ...], daemon: Optional[Daemon] = None, job: str = "job"
) -> dict[int, dict[str, Any]]:
    """Results by seed; AssertionError with what the process printed if it fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLPO_")}
    environment |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1", "NCCL_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cuda",
    }  # fmt: skip
    if daemon is not None:
        environment |= {"MLPO_SOCKET": daemon.socket, "MLPO_JOB": job}
    out = folder / f"{kind}-{job}.pt"
    command = [sys.executable, str(HERE / "zero3_process.py"), kind, str(out), str(STEPS), *map(str, seeds)]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, f"{kind} ended with {ended.returncode}:\n{ended.stdout[-6000:]}"
    results: dict[int, dict[str, Any]] = torch.load(out, weights_only=False)
    return results


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """L2 over all parameters with gradients. (Stock's AdamW decays the others, too.)"""
    return float(sum((a[name] - b[name]).square().sum() for name in b if not name.startswith("unused")) ** 0.5)


def test_fifty_steps_are_as_near_to_fp64_as_stock_s(tmp_path: pathlib.Path) -> None:
    """Parameters and losses, by the median over the seeds of the ratio to stock's distance; and a second run with mlpo
    has the same bits."""
    with Daemon(tmp_path, Layout(block=1024, pool="256KiB")) as daemon:
        ours = run("mlpo", tmp_path, SEEDS, daemon, "first")
        again = run("mlpo", tmp_path, SEEDS[:1], daemon, "second")
    stock, exact = run("stock", tmp_path, SEEDS), run("exact", tmp_path, SEEDS)
    first, second = ours[SEEDS[0]], again[SEEDS[0]]
    assert first["losses"] == second["losses"]
    for name, master in first["masters"].items():
        assert torch.equal(master, second["masters"][name]), name
    parameters, losses = [], []
    for seed in SEEDS:
        away = [distance(found[seed]["masters"], exact[seed]["masters"]) for found in (ours, stock)]
        assert away[1] > 0
        parameters.append(away[0] / away[1])
        wanted = torch.tensor(exact[seed]["losses"], dtype=torch.float64)
        off = [
            float((torch.tensor(found[seed]["losses"], dtype=torch.float64) - wanted).norm()) for found in (ours, stock)
        ]
        losses.append(off[0] / max(off[1], 1e-12))
        assert sum(ours[seed]["losses"][-5:]) < 0.8 * sum(ours[seed]["losses"][:5]), "it learns nothing"
    seconds = {
        name: statistics.median(second for seed in SEEDS for second in found[seed]["seconds"][5:])
        for name, found in (("mlpo", ours), ("stock", stock))
    }
    put(
        "zero3", steps=STEPS, parameters_to_stocks_distance=round(statistics.median(parameters), 3),
        losses_to_stocks_distance=round(statistics.median(losses), 3),
        mlpo_step_s=round(seconds["mlpo"], 5), stock_step_s=round(seconds["stock"], 5),
    )  # fmt: skip
    assert statistics.median(parameters) <= 1.5, parameters
    assert statistics.median(losses) <= 1.5, losses
