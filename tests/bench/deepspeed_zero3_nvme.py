#!/usr/bin/env python3
"""The peer to beat: stock DeepSpeed ZeRO-3 with its optimizer's state on NVMe, on the CPU, run as its users run it.

    pip install torch==2.13.0 numpy ninja py-cpuinfo packaging setuptools wheel
    DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed==0.19.8     # needs libaio-dev
    tests/bench/testbed up
    tests/bench/testbed run python tests/bench/deepspeed_zero3_nvme.py --dir /tmp/mlpo-testbed/nvme/ds

The first run compiles DeepSpeed's operators (minutes). If a run is killed while they compile, remove
~/.cache/torch_extensions/*/*/lock, or the next one waits for ever.

Prints a JSON line for each iteration (seconds), and a last one with the medians of those after the first. Traffic for each
parameter and iteration: 4 bytes written in the backward pass (FP32 gradient), 16 read and 12 written in the step.
Exit code 77: DeepSpeed or torch is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import signal
import statistics
import sys
import time
from typing import Any, Callable

# One process, no accelerator.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29511")

ROWS_PER_BATCH = 4


def config(arguments: argparse.Namespace) -> dict:
    nvme = {
        "device": "nvme",
        "nvme_path": arguments.dir,
        "buffer_count": arguments.buffers,
        "pipeline_read": True,
        "pipeline_write": True,
    }
    return {
        "train_micro_batch_size_per_gpu": ROWS_PER_BATCH,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": int(arguments.sub_group_size),
            "reduce_bucket_size": 5_000_000,
            "stage3_prefetch_bucket_size": 5_000_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 20_000_000,
            "stage3_max_reuse_distance": 20_000_000,
            "offload_optimizer": nvme if arguments.device == "nvme" else {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
        "aio": {
            "block_size": 8 << 20,
            "queue_depth": 16,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def memory_bytes(name: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def add_model(parser: argparse.ArgumentParser) -> None:
    """What is trained, and for how long."""
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2048, help="parameters = layers * hidden^2")
    parser.add_argument("--sub-group-size", type=float, default=2e7)
    parser.add_argument("--iterations", type=int, default=5, help="2 and more; the first does not count")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="folder for the swap files, removed at the end")
    parser.add_argument("--device", choices=["nvme", "cpu"], default="nvme",
                        help="cpu: state stays in host memory; its backward is the arithmetic that any way must do")  # fmt: skip
    add_model(parser)
    parser.add_argument("--buffers", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.iterations < 2:
        parser.error("--iterations: 2 and more")
    try:
        import deepspeed
        import torch  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}; see the top of {sys.argv[0]}", file=sys.stderr)
        return 77
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder goes
    os.makedirs(arguments.dir, exist_ok=True)
    try:
        result = measure(arguments, config(arguments), deepspeed.initialize)
    finally:
        shutil.rmtree(arguments.dir, ignore_errors=True)
    print(json.dumps(result))
    return 0


def measure(
    arguments: argparse.Namespace,
    settings: dict,
    initialize: Callable[..., Any],
    end_step: Callable[[Any], dict] = lambda engine: {},
) -> dict:
    """Trains, and returns the medians. `initialize` is deepspeed.initialize or stands for it. end_step(engine) waits for
    what a step has left to do, counted with it, and what it returns is added to the iteration's line."""
    import deepspeed
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                torch.nn.Linear(arguments.hidden, arguments.hidden, bias=False) for _ in range(arguments.layers)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return x

    rows = []
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Net()
    parameters = sum(p.numel() for p in model.parameters())
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=settings)
    x = torch.randn(ROWS_PER_BATCH, arguments.hidden, dtype=torch.bfloat16)
    for iteration in range(arguments.iterations):
        t0 = time.perf_counter()
        loss = (engine(x).float() ** 2).mean()
        t1 = time.perf_counter()
        engine.backward(loss)
        t2 = time.perf_counter()
        engine.step()
        more = end_step(engine)
        t3 = time.perf_counter()
        rows.append((t1 - t0, t2 - t1, t3 - t2))
        line = {"iteration": iteration, "loss": loss.item(), **more}
        print(json.dumps({**line, "forward_s": t1 - t0, "backward_s": t2 - t1, "step_s": t3 - t2}), flush=True)
    forward_s, backward_s, step_s = (statistics.median(row[i] for row in rows[1:]) for i in range(3))
    result = {"parameters": parameters, "forward_s": forward_s, "backward_s": backward_s, "step_s": step_s}
    result["iteration_s"] = forward_s + backward_s + step_s
    result["parameters_per_s"] = parameters / (backward_s + step_s)
    result["memory"] = {"locked_bytes": memory_bytes("VmLck"), "peak_resident_bytes": memory_bytes("VmHWM")}
    result["deepspeed"], result["torch"] = deepspeed.__version__, torch.__version__
    return result


if __name__ == "__main__":
    sys.exit(main())
