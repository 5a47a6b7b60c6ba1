#!/usr/bin/env python3
"""mlpo's Adam beside DeepSpeedCPUAdam, each with its conversions: a 16-bit gradient in, a 16-bit parameter out.

    pip install torch==2.13.0 numpy ninja py-cpuinfo packaging setuptools wheel
    DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed==0.19.8
    tests/bench/adam_peer.py [--bin build/bin] [--params 64] [--threads N] [--pairs 7]

Both update the same memory, an mmap that holds p, m and v in FP32, gradient and parameter, and take turns on it with
the same number of threads; who begins changes from pair to pair. mlpo makes one pass, gradient scale included.
DeepSpeed's time is given twice: `stage3` is what ZeRO-3 with offloaded optimizer does to a subgroup (0.19.8,
runtime/zero/stage3.py): gradients upcast by `.to(torch.float32)` and copied into the FP32 gradient, that multiplied by
1 / loss scale, DeepSpeedCPUAdam.step(), and the FP32 parameter copied into the 16-bit one; `least` is what it cannot
do without: upcast in one pass (none for FP32 gradients), step and downcast. The bound is on `least`. Before that both
make one update from equal state, and the results are compared.

Prints a JSON line for each pair of types: seconds as median and range, ratios of each pair likewise. Exit code 1:
below the bound, or the two disagree; 77: DeepSpeed or torch is not there. The first run compiles DeepSpeed's operator
(minutes). Wants an otherwise idle machine: not part of the tests.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import pathlib
import statistics
import subprocess
import sys
import time

REPO = pathlib.Path(__file__).resolve().parents[2]
BOUND = 1.25
TYPES = (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16"))
PIECE = 16 << 20  # elements of one parameter's gradient, as stage 3 upcasts them
SETTLE_S = 0.05  # OpenMP's threads spin for a while after their work


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bin", type=pathlib.Path, default=REPO / "build" / "bin", help="folder with mlpo-bench")
    parser.add_argument("--params", type=int, default=64, help="parameters, in 2^20")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side")
    parser.add_argument("--pairs", type=int, default=7, help="turns of each side")
    return parser.parse_args()


class Memory:
    """p, m, v, gradient and parameter, mapped by both sides. Gradient and parameter are one place if their sizes are."""

    def __init__(self, torch, count: int, grad: str, dtype: str) -> None:
        self.count, self.grad_name, self.dtype_name = count, grad, dtype
        grad_type, param_type = getattr(torch, grad), getattr(torch, dtype)
        param_at = 12 * count + (0 if grad_type.itemsize == param_type.itemsize else grad_type.itemsize * count)
        self.descriptor = os.memfd_create("adam-peer")
        os.ftruncate(self.descriptor, param_at + param_type.itemsize * count)
        self._map = mmap.mmap(self.descriptor, 0)

        def view(kind, offset):
            return torch.frombuffer(self._map, dtype=kind, count=count, offset=offset)

        self.p, self.m, self.v = (view(torch.float32, 4 * index * count) for index in range(3))
        self.grad, self.param = view(grad_type, 12 * count), view(param_type, param_at)
        torch.manual_seed(1)
        self.p.normal_(0, 0.02)
        self.m.normal_(0, 1e-3)
        self.v.uniform_(1e-8, 1e-5)
        self.gradient = (torch.randn(count) * 1e-2).to(grad_type)


class Mlpo:
    """mlpo-bench, which updates the memory at each line."""

    def __init__(self, program: pathlib.Path, memory: Memory, threads: int) -> None:
        command = [
            program, "adam-turns", "--memory", f"/proc/self/fd/{memory.descriptor}", "--params", str(memory.count),
            "--grad", memory.grad_name, "--dtype", memory.dtype_name, "--workers", str(threads),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[memory.descriptor]
        )
        self.is_ = json.loads(self._answer())

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"mlpo-bench ended with {self._process.wait()}")
        return line

    def update(self, step: int) -> float:
        self._process.stdin.write(f"{step}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self._process.stdin.close()
        if self._process.wait(60) != 0:
            sys.exit(f"mlpo-bench ended with {self._process.returncode}")


class DeepSpeed:
    """DeepSpeedCPUAdam on the memory, with an FP32 gradient of its own."""

    def __init__(self, torch, cpu_adam, memory: Memory) -> None:
        self._torch, self._memory = torch, memory
        self._param = torch.nn.Parameter(memory.p)
        self._grad32 = torch.zeros(memory.count)
        self._adam = cpu_adam([self._param], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
        self._state = {"step": 0, "exp_avg": memory.m, "exp_avg_sq": memory.v}

    def _upcast(self, as_stage3: bool) -> None:
        grad, grad32 = self._memory.grad, self._grad32
        if not as_stage3:
            if grad.dtype != self._torch.float32:
                grad32.copy_(grad)
            return
        for piece, into in zip(grad.split(PIECE), grad32.split(PIECE)):
            into.copy_(piece.to(dtype=self._torch.float32), non_blocking=True)
        grad32.mul_(1.0 / 1.0)

    def update(self, step: int, as_stage3: bool) -> dict[str, float]:
        """Seconds of each part."""
        times = [time.perf_counter()]
        self._upcast(as_stage3)
        times.append(time.perf_counter())
        direct = not as_stage3 and self._memory.grad.dtype == self._torch.float32
        self._param.grad = self._memory.grad if direct else self._grad32
        self._state["step"] = step - 1
        self._adam.state[self._param] = self._state
        self._adam.step()
        times.append(time.perf_counter())
        self._memory.param.copy_(self._memory.p)
        times.append(time.perf_counter())
        parts = [after - before for before, after in zip(times, times[1:])]
        return {**dict(zip(("upcast_s", "step_s", "downcast_s"), parts)), "total_s": times[-1] - times[0]}


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 5),
        "min": round(min(values), 5),
        "max": round(max(values), 5),
    }


def compare(memory: Memory, mlpo: Mlpo, peer: DeepSpeed) -> dict[str, float]:
    """One update by each from equal state: the largest differences, of p and m relative to how far they moved."""
    tensors = {"p": memory.p, "m": memory.m, "v": memory.v}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    memory.grad.copy_(memory.gradient)
    mlpo.update(100)
    ours = {name: tensor.clone() for name, tensor in tensors.items()}
    our_param = memory.param.clone()
    for name, tensor in tensors.items():
        tensor.copy_(before[name])
    memory.grad.copy_(memory.gradient)
    peer.update(100, as_stage3=True)
    found = {}
    for name, tensor in tensors.items():
        moved = float((ours[name] - before[name]).abs().max())
        found[name] = float((tensor - ours[name]).abs().max()) / moved
    rounding = float((our_param.float() - memory.param.float()).abs().max() / our_param.float().abs().max())
    return {**found, "param": rounding}


def measure(torch, cpu_adam, asked: argparse.Namespace, grad: str, dtype: str) -> bool:
    memory = Memory(torch, asked.params << 20, grad, dtype)
    mlpo = Mlpo(asked.bin / "mlpo-bench", memory, asked.threads)
    peer = DeepSpeed(torch, cpu_adam, memory)
    differences = compare(memory, mlpo, peer)
    # A twentieth of the largest move would be another formula; the last places are where roundings differ.
    agree = max(differences["p"], differences["m"], differences["v"]) < 1e-3 and differences["param"] < 1e-2

    ours, least, stage3, parts = [], [], [], []
    step = 100
    for number in range(asked.pairs):
        for side in ("mlpo", "least", "stage3") if number % 2 == 0 else ("stage3", "least", "mlpo"):
            step += 1
            memory.grad.copy_(memory.gradient)  # where the parameters are, as a trainer does
            time.sleep(SETTLE_S)
            if side == "mlpo":
                ours.append(mlpo.update(step))
            else:
                found = peer.update(step, as_stage3=side == "stage3")
                (stage3 if side == "stage3" else least).append(found["total_s"])
                if side == "least":
                    parts.append(found)
    mlpo.close()
    ratios = [theirs / mine for theirs, mine in zip(least, ours)]
    kept = agree and statistics.median(ratios) >= BOUND
    one_pass = memory.grad.element_size() + memory.param.element_size() + 24
    print(
        json.dumps(
            {
                "grad": grad,
                "dtype": dtype,
                "parameters": memory.count,
                "threads": asked.threads,
                "target": mlpo.is_["target"],
                "pairs": asked.pairs,
                "mlpo_s": spread(ours),
                "mlpo_bytes_per_s": round(one_pass * memory.count / statistics.median(ours)),
                "deepspeed_least_s": spread(least),
                "deepspeed_least_parts_s": {
                    name: round(statistics.median(part[name] for part in parts), 5)
                    for name in ("upcast_s", "step_s", "downcast_s")
                },
                "deepspeed_stage3_s": spread(stage3),
                "ratio_least": spread(ratios),
                "ratio_stage3": spread([theirs / mine for theirs, mine in zip(stage3, ours)]),
                "bound": BOUND,
                "differences": {name: float(f"{value:.2g}") for name, value in differences.items()},
                "verdict": "pass" if kept else "FAIL" if agree else "FAIL: the two disagree",
            }
        ),
        flush=True,
    )
    return kept


def main() -> int:
    asked = arguments()
    if asked.params < 1 or asked.threads < 1 or asked.pairs < 1:
        print("adam_peer: --params, --threads and --pairs must be positive", file=sys.stderr)
        return 64
    if not (asked.bin / "mlpo-bench").exists():
        print(f"adam_peer: {asked.bin / 'mlpo-bench'} is missing: build the project, or give --bin", file=sys.stderr)
        return 1
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    try:
        import torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError as missing:
        print(f"skipped: {missing}; see the head of {pathlib.Path(__file__).name} for what to install", file=sys.stderr)
        return 77
    torch.set_num_threads(asked.threads)
    torch.set_grad_enabled(False)
    return 0 if all([measure(torch, DeepSpeedCPUAdam, asked, *types) for types in TYPES]) else 1


if __name__ == "__main__":
    sys.exit(main())
