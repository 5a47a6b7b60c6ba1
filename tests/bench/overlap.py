#!/usr/bin/env python3
"""What a step costs a training loop: step() alone, and with each way to hide the update behind the model's work.

    tests/bench/overlap.py --path DIR [--path DIR]... [--bin build/bin] [--rounds 3] [--steps 2]
    tests/bench/testbed up && tests/bench/testbed run build/venv/bin/python tests/bench/overlap.py \\
      --path /tmp/mlpo-testbed/nvme --path /tmp/mlpo-testbed/pfs

Trains the GPT of deploy/quickstart, made larger, on a daemon of its own whose pool holds a quarter of the state, so that
each step moves the rest; in turns, from the same weights with the same batches, with

    model                 no optimizer: the forward and backward passes, below which no step can be
    step                  gradients taken, sent and applied at step()
    overlap               overlap=True: taken and sent in the backward pass
    nowait                that, and step(wait=False) with attach_forward(): updates go on in the next forward pass
    in_backward           update_in_backward=True: updates begin in the backward pass
    in_backward,nowait    both

Prints a JSON line for each with the median of the rounds' seconds a step, their range, and the ratio to `step`: the
median of the rounds' ratios. All that train must end with the same bits: exit code 1 if they do not; 77 if torch or mlpo
is not there. Wants an otherwise idle machine: not part of the tests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

REPO = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "deploy"))
BLOCK = 256 << 10  # parameters
SUBGROUP = 1 << 20
WARM_UP = 2  # steps: the first registers, and the second is the first whose gradients leave in the backward pass
MODES: dict[str, dict[str, bool]] = {
    "model": {},
    "step": {},
    "overlap": {"overlap": True},
    "nowait": {"overlap": True, "wait": False},
    "in_backward": {"update_in_backward": True},
    "in_backward,nowait": {"update_in_backward": True, "wait": False},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--path", action="append", required=True, help="a path of the daemon; may be repeated")
    parser.add_argument("--bin", type=pathlib.Path, default=REPO / "build" / "bin", help="folder with the programs")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="windows of 128 bytes")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each mode")
    parser.add_argument("--steps", type=int, default=2, help="timed steps a turn")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # of the daemon's run
    return parser.parse_args()


class Training:
    """A fresh model, trained in one mode."""

    def __init__(self, asked: argparse.Namespace) -> None:
        import quickstart_train

        quickstart_train.WIDTH, quickstart_train.LAYERS = asked.width, asked.layers
        self._batch = asked.batch
        self._model = quickstart_train.model()
        self._groups = quickstart_train.groups
        self._text = quickstart_train.Text()

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self._model.parameters())

    def _passes(self, number: int) -> None:
        self._model.loss(self._text.windows(number, count=self._batch)).backward()

    def passes_s(self, steps: int) -> float:
        """Seconds of a step's passes alone."""
        for number in range(1 + steps):
            if number == 1:
                before = time.perf_counter()
            self._model.zero_grad()
            self._passes(number)
        return (time.perf_counter() - before) / steps

    def run(self, steps: int, wait: bool = True, **options: bool) -> tuple[float, str]:
        """Seconds a step, and a digest of the parameters after all."""
        import mlpo
        import torch
        from mlpo.torch import OffloadAdamW

        with mlpo.connect() as client:
            groups = self._groups(dict(self._model.named_parameters()))
            optimizer = OffloadAdamW(groups, client=client, subgroup_elements=SUBGROUP, **options)
            if not wait:
                optimizer.attach_forward(self._model)
            for number in range(WARM_UP + steps):
                if number == WARM_UP:
                    optimizer.wait()
                    before = time.perf_counter()
                optimizer.zero_grad()
                self._passes(number)
                optimizer.step(wait=wait)
            optimizer.wait()
            took = time.perf_counter() - before
            assert optimizer.updated_in_backward > 0 or "update_in_backward" not in options
            optimizer.close()
        digest = hashlib.sha256()
        for p in self._model.parameters():
            digest.update(p.detach().view(torch.int16).numpy())
        return took / steps, digest.hexdigest()


def inside(asked: argparse.Namespace) -> int:
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    digests = set()
    for number in range(asked.rounds):
        for mode in list(MODES) if number % 2 == 0 else reversed(MODES):
            training = Training(asked)
            if mode == "model":
                times[mode].append(training.passes_s(asked.steps))
                continue
            step_s, digest = training.run(asked.steps, **MODES[mode])
            times[mode].append(step_s)
            digests.add(digest)
    for mode, found in times.items():
        line = {
            "mode": mode,
            "parameters": training.parameters,
            "rounds": asked.rounds,
            "step_s": round(statistics.median(found), 3),
            "range_s": [round(min(found), 3), round(max(found), 3)],
            "ratio": round(statistics.median(mine / base for mine, base in zip(found, times["step"])), 3),
        }
        print(json.dumps(line), flush=True)
    if len(digests) != 1:
        print("overlap: the modes do not end with the same parameters", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    asked = arguments()
    try:
        import mlpo.torch  # noqa: F401
    except ImportError as missing:
        print(f"skipped: {missing}; deploy/quickstart makes an environment with mlpo and torch", file=sys.stderr)
        return 77
    if asked.inside:
        return inside(asked)
    paths = [argument for path in asked.path for argument in ("--path", path)]
    command = [
        asked.bin / "mlpo-ctl", "run", *paths, "--memory", str(Training(asked).parameters * 12 // 4), "--",
        sys.executable, __file__, *sys.argv[1:], "--inside",
    ]  # fmt: skip
    return subprocess.run(command, env={**os.environ, "MLPO_MEMORY__BLOCK": str(BLOCK)}).returncode


if __name__ == "__main__":
    sys.exit(main())
