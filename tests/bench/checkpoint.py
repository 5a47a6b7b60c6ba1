#!/usr/bin/env python3
"""What a checkpoint costs training: how long it stalls, what steps take while the state is copied, and how many bytes.

    tests/bench/checkpoint.py --path DIR [--path DIR]... --target DIR [--persistent DIR] [--bin build/bin]
    tests/bench/testbed up && tests/bench/testbed run build/venv/bin/python tests/bench/checkpoint.py \\
      --path /tmp/mlpo-testbed/nvme --path /tmp/mlpo-testbed/pfs --target /tmp/mlpo-testbed/pfs/checkpoints \\
      --write-limits 265e6 180e6 --pool 768MiB

Trains one rank's state of --parameters on a daemon of its own, saves it once while steps go on, and restores it. What
is restored is compared, all of it, with the state of the same steps made and read before. Prints one JSON object:

    stall_s           from the checkpoint's begin to the moment when the next UPDATE may go on (the state is taken)
    stall_bound_s     dirty bytes / the sum of the paths' write limits (--write-limits): times 1.1 is allowed
    grad_s, usual_grad_s    the longest that a gradient submitted meanwhile waited, and one of the steps before: 0.1 s
                      more is allowed
    step_s, drain_step_s, ratio    steps before, and while it is copied; the ratio may be 1.15
    drain_s, bound_s  how long copying took, and what the daemon had said that it would take at most
                      (what is missing of these could not be seen: the copy was over before)
    copied_bytes, to_copy_bytes, state_bytes    the first two must be equal: all of the state without --persistent, with
                      it what lies on the other paths when it is taken
    folder_copy_s     beside it, in the same run and with training stopped: a copy of as many bytes by dd with direct
                      I/O from the first path to the target, as one saves a folder of DeepSpeed's NVMe offload
    restore_s

Exit code 1: a bound is broken, or what was restored is not what was saved; 77: mlpo is not there. Wants an otherwise
idle machine: not part of the tests.
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
import threading
import time
from typing import Any

REPO = pathlib.Path(__file__).resolve().parents[2]
SUBGROUP = 16 << 20
STEPS = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--path", action="append", required=True, help="a path of the daemon; may be repeated")
    parser.add_argument("--persistent", action="append", default=[], help="one of them that is persistent")
    parser.add_argument("--target", type=pathlib.Path, required=True, help="the directory of checkpoints; it is made")
    parser.add_argument("--write-limits", type=float, nargs="*", default=[], help="bytes/s of each path, as limited")
    parser.add_argument("--parameters", type=int, default=256 << 20)
    parser.add_argument("--block", type=int, default=1 << 20, help="parameters")
    parser.add_argument("--pool", default="768MiB")
    parser.add_argument("--bin", type=pathlib.Path, default=REPO / "build" / "bin", help="folder with the programs")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # of the daemon's run
    return parser.parse_args()


def status(asked: argparse.Namespace) -> Any:
    ctl = [asked.bin / "mlpo-ctl", "status", "--json"]
    return json.loads(subprocess.run(ctl, check=True, timeout=60, stdout=subprocess.PIPE).stdout)


class Training:
    """One rank, whose gradients are random and always the same."""

    def __init__(self, client: Any, parameters: int) -> None:
        import numpy as np

        self._gradient = np.random.default_rng(1).standard_normal(SUBGROUP, dtype=np.float32).astype(np.float16)
        self.gradient_s = 0.0  # the longest wait of the last step
        self.subgroups = []
        for first in range(0, parameters, SUBGROUP):
            count = min(SUBGROUP, parameters - first)
            self.subgroups.append(client.subgroup(f"s{first // SUBGROUP}", count, dtype="float16"))

    def begin(self) -> None:
        """From the same state each time."""
        import numpy as np

        for index, subgroup in enumerate(self.subgroups):
            master = np.random.default_rng([2, index]).standard_normal(subgroup.numel, dtype=np.float32)
            none = np.zeros(subgroup.numel, np.float32)
            subgroup.write_state(step=0, master=master, exp_avg=none, exp_avg_sq=none)

    def step(self) -> float:
        began = time.perf_counter()
        self.gradient_s = self.gradients()
        for request in [subgroup.submit_update(lr=1e-3) for subgroup in self.subgroups]:
            request.result()
        return time.perf_counter() - began

    def gradients(self) -> float:
        """The longest that one waited."""
        longest, waiting = 0.0, []
        for subgroup in self.subgroups:
            subgroup.grad[:] = self._gradient[: subgroup.numel]
            waiting.append((time.perf_counter(), subgroup.submit_grad()))
        for began, request in waiting:
            request.result()
            longest = max(longest, time.perf_counter() - began)
        return longest

    def digest(self) -> str:
        """Of all of the state."""
        digest = hashlib.sha256()
        for subgroup in self.subgroups:
            state = subgroup.read_state()
            for name in ("master", "exp_avg", "exp_avg_sq"):
                digest.update(state[name].data)
            digest.update(str(state["step"]).encode())
        return digest.hexdigest()


def to_copy(asked: argparse.Namespace, told: Any, state_bytes: int) -> int:
    """Of the state that has just been taken what does not lie on persistent paths, by the daemon's account of each."""
    persistent = {os.path.realpath(path) for path in asked.persistent}
    lies = {path["directory"]: path["scratch_bytes"] + path["checkpoint_bytes"] for path in told["paths"]}
    others = sum(held for directory, held in lies.items() if os.path.realpath(directory) not in persistent)
    return round(state_bytes * others / sum(lies.values()))  # extents have room for more than the state, all alike


def copy_folder(source: pathlib.Path, target: pathlib.Path, size: int) -> float:
    """Seconds that dd takes for so many bytes of the daemon's files below a path, without the page cache."""
    copy = target / "copied"
    left, taken = size >> 20, 0.0
    for file in sorted(source.glob("mlpo/*/*/*/*/state")):
        blocks = min(left, file.stat().st_size >> 20)
        if blocks == 0:
            continue
        began = time.perf_counter()
        command = ["dd", f"if={file}", f"of={copy}", "bs=8M", f"count={blocks // 8}", "iflag=direct", "oflag=direct"]
        subprocess.run([*command, "conv=fdatasync", "status=none"], check=True)
        taken += time.perf_counter() - began
        left -= blocks
        copy.unlink()
    return taken * (size >> 20) / max(1, (size >> 20) - left)  # a path may hold less than all


def inside(asked: argparse.Namespace) -> int:
    import mlpo

    asked.target.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"parameters": asked.parameters, "pool": asked.pool, "persistent": len(asked.persistent)}
    with mlpo.connect() as client:
        training = Training(client, asked.parameters)
        for again in range(2):  # first for what its state is then: reading that would change what is in memory
            training.begin()
            training.step()
            steps = [(training.step(), training.gradient_s) for _ in range(STEPS)]
            if not again:
                expected = training.digest()
        found["step_s"] = statistics.median(taken for taken, _ in steps)
        found["usual_grad_s"] = max(waited for _, waited in steps)
        pool = status(asked)["pool"]
        dirty = pool["dirty_blocks"] * pool["buffer_bytes"]
        began = time.perf_counter()
        saved = client.checkpoint(str(asked.target), "bench", 1)
        found["grad_s"] = training.gradients()
        found["state_bytes"] = saved.snapshot.result()
        found["stall_s"] = time.perf_counter() - began
        if asked.write_limits:
            found["stall_bound_s"] = dirty / sum(asked.write_limits)
        found["to_copy_bytes"] = to_copy(asked, status(asked), found["state_bytes"])  # before the next UPDATE
        began = time.perf_counter()
        ended: list[float] = []

        def wait() -> None:  # it ends in the middle of a step
            if saved.result():
                ended.append(time.perf_counter())

        waiting = threading.Thread(target=wait)
        waiting.start()
        while waiting.is_alive():
            running = status(asked)["checkpoints"]["running"]
            if running and running[0]["phase"] == "copying":
                found["bound_s"] = running[0]["bound_s"] + time.perf_counter() - began
                break
            time.sleep(0.01)
        client.discard()
        during: list[float] = []
        while waiting.is_alive():
            during.append(training.step())
        waiting.join()
        if not ended:
            print("checkpoint: the save failed", file=sys.stderr)
            return 1
        found["drain_s"] = ended[0] - began
        if during:
            found["drain_step_s"] = statistics.median(during)
            found["ratio"] = found["drain_step_s"] / found["step_s"]
        found["copied_bytes"] = status(asked)["checkpoints"]["copied_bytes"]
        found["folder_copy_s"] = copy_folder(pathlib.Path(asked.path[0]), asked.target, found["state_bytes"])
        began = time.perf_counter()
        client.restore(str(asked.target), "bench")
        found["restore_s"] = time.perf_counter() - began
        same = training.digest() == expected
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}))
    broken = [] if same else ["what was restored is not what was saved"]
    if found["stall_s"] > 1.1 * found.get("stall_bound_s", found["stall_s"]):
        broken.append("the stall")
    if found.get("ratio", 0) > 1.15:
        broken.append("steps while it is copied")
    if found["drain_s"] > max(found.get("bound_s", 0), 1.0):
        broken.append("the end of the copying")
    # Blocks at the ends of subgroups may be smaller, and their extents not by as much.
    alike = not asked.persistent or (asked.parameters % asked.block == 0 and SUBGROUP % asked.block == 0)
    slack = 0 if alike else 12 * asked.block
    if abs(found["copied_bytes"] - found["to_copy_bytes"]) > slack:
        broken.append("copied bytes")
    if found["grad_s"] > found["usual_grad_s"] + 0.1:
        broken.append("gradients while the state is taken")
    for each in broken:
        print(f"checkpoint: broken: {each}", file=sys.stderr)
    return 1 if broken else 0


def main() -> int:
    asked = arguments()
    try:
        import mlpo  # noqa: F401
    except ImportError as missing:
        print(f"skipped: {missing}; deploy/quickstart makes an environment with mlpo", file=sys.stderr)
        return 77
    if asked.inside:
        return inside(asked)
    config = asked.target.parent / "mlpo-bench-checkpoint.toml"
    lines = ["[memory]", f'pool = "{asked.pool}"', f"block = {asked.block}"]
    for index, path in enumerate(asked.path):
        lines += ["[[path]]", f'directory = "{path}"', f"persistent = {str(path in asked.persistent).lower()}"]
        if asked.write_limits:
            lines += [f"write_limit = {asked.write_limits[index]:.0f}"]
    config.write_text("\n".join(lines) + "\n")
    trainer = [sys.executable, __file__, *sys.argv[1:], "--inside"]
    command = [asked.bin / "mlpo-ctl", "run", "--config", config, "--", *trainer]
    try:
        return subprocess.run(command, env=dict(os.environ)).returncode
    finally:
        config.unlink()


if __name__ == "__main__":
    sys.exit(main())
