#!/usr/bin/env python3
"""What deepspeed_zero3_nvme.py trains, with the optimizer's state in mlpo-daemon: the same model, data and settings.

    pip install -c python/constraints.txt "./python[deepspeed]"
    tests/bench/testbed up
    tests/bench/testbed run build/bin/mlpo-ctl run --memory 800MiB --path /tmp/mlpo-testbed/nvme/m \\
        --path /tmp/mlpo-testbed/pfs/m -- python tests/bench/deepspeed_mlpo.py

Prints the same JSON lines. A step's time goes until all parameters are back, so that backward_s + step_s is all that
the optimizer costs; with --next-forward it ends when updates are under way, and iteration_s alone compares. For each
iteration also how many subgroups' gradients had gone out when the backward pass ended, and how many were updated.
Exit code 77: DeepSpeed, torch or mlpo is not there.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import deepspeed_zero3_nvme as stock


def end_step(engine: Any, wait: bool) -> dict:
    if wait:
        engine.optimizer.wait()
    return {"sent_in_backward": engine.optimizer.sent_in_backward,
            "updated_in_backward": engine.optimizer.updated_in_backward}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stock.add_model(parser)
    parser.add_argument("--subgroup-elements", type=int, default=4 << 20, help="parameters in one of the daemon's")
    parser.add_argument("--update-in-backward", action="store_true",
                        help="updates follow their gradients at once; without clipping, then")  # fmt: skip
    parser.add_argument("--next-forward", action="store_true", help="updates go on in the next forward pass")
    arguments = parser.parse_args()
    if arguments.iterations < 2:
        parser.error("--iterations: 2 and more")
    try:
        import mlpo.deepspeed
    except ImportError as error:
        print(f"skipped: {error}; see the top of {sys.argv[0]}", file=sys.stderr)
        return 77
    arguments.device, arguments.dir, arguments.buffers = "cpu", "", 0
    settings = stock.config(arguments)
    settings["mlpo"] = {
        "subgroup_elements": arguments.subgroup_elements,
        "update_in_backward": arguments.update_in_backward,
        "step_waits": not arguments.next_forward,
    }
    if arguments.update_in_backward:
        settings["gradient_clipping"] = 0.0
    wait = not arguments.next_forward
    result = stock.measure(arguments, settings, mlpo.deepspeed.initialize, lambda engine: end_step(engine, wait))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
