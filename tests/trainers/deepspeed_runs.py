"""Starts training runs with DeepSpeed in processes of their own, and compares what came out of them."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

import torch

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 600
OPTIMIZER = {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01}

Result = dict[str, Any]  # of a seed: losses by step, masters, moments and weights by name, ...


def ds_config(**changes: Any) -> dict[str, Any]:
    """A DeepSpeed configuration: several sub-groups and buckets, parameters of which some stay gathered, the default of
    clipping to 1.0. `changes` go over it; of "zero_optimization" key by key."""
    zero = {
        "stage": 3, "sub_group_size": 600, "reduce_bucket_size": 700, "stage3_prefetch_bucket_size": 300,
        "stage3_param_persistence_threshold": 40, "offload_optimizer": {"device": "cpu"},
    }  # fmt: skip
    zero.update(changes.pop("zero_optimization", {}))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        # torch_adam: stock would compile its own otherwise.
        "optimizer": {"type": "AdamW", "params": {**OPTIMIZER, "torch_adam": True}},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }
    return {**config, **changes}


@dataclass
class Run:
    """What deepspeed_process.py is told."""

    config: dict[str, Any] = field(default_factory=ds_config)
    mlpo: Optional[dict[str, Any]] = None  # the "mlpo" block; None: stock DeepSpeed
    steps: int = 50
    seeds: tuple[int, ...] = (1,)
    passes: int = 1
    unmanaged: bool = False
    zero_init: bool = False
    spoil: bool = False  # fill slots with NaN between steps
    streams: bool = False  # copies as on a GPU, with threads for its streams


def launch(
    program: str, argument: str, ranks: int, environment: Optional[dict[str, str]] = None, timeout: float = TIMEOUT_S
) -> list[tuple[int, str]]:
    """Runs a program of this folder as `ranks` ranks; exit codes and what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {key: value for key, value in os.environ.items() if not key.startswith("MLPO_")}
    common |= {
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    } | (environment or {})  # fmt: skip
    processes, files = [], []
    try:
        for rank in range(ranks):
            files.append(tempfile.TemporaryFile("w+"))
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, str(HERE / program), argument]
            processes.append(subprocess.Popen(command, env=own, stdout=files[-1], stderr=subprocess.STDOUT))
        ended = []
        for process, file in zip(processes, files):
            code = process.wait(timeout)
            file.seek(0)
            ended.append((code, file.read()))
            if code != 0:  # the others would wait for it
                timeout = 60
        return ended
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for file in files:
            file.close()


def train(run: Run, ranks: int, folder: pathlib.Path, daemon: Any = None, job: str = "job") -> dict[int, Result]:
    """Results by seed. AssertionError with what the ranks printed if one fails."""
    out = folder / f"{job}.pt"
    environment = {} if daemon is None else {"MLPO_SOCKET": daemon.socket, "MLPO_JOB": job}
    argument = json.dumps({**asdict(run), "out": str(out)})
    ended = launch("deepspeed_process.py", argument, ranks, environment)
    tails = "\n".join(f"rank {rank}: {code}\n{text[-4000:]}" for rank, (code, text) in enumerate(ended))
    assert all(code == 0 for code, _ in ended), tails
    results: dict[int, Result] = torch.load(out, weights_only=False)
    return results


def is_used(name: str) -> bool:
    return not name.startswith("unused")


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """L2 over all parameters that have gradients. (Stock's AdamW decays the others, as if their gradient were 0.)"""
    names = [name for name in b if is_used(name)]
    return float(sum(((a[name].double() - b[name].double()) ** 2).sum() for name in names) ** 0.5)


def differing(a: Result, b: Result) -> list[str]:
    """What is not bit-equal."""
    found = [] if a["losses"] == b["losses"] else ["losses"]
    for what in ("masters", "weights"):
        found += [f"{what} {name}" for name in a[what] if not torch.equal(a[what][name], b[what][name])]
    for name, (m, v) in a["moments"].items():
        if not (torch.equal(m, b["moments"][name][0]) and torch.equal(v, b["moments"][name][1])):
            found.append(f"moments {name}")
    return found
