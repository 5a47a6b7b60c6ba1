#!/usr/bin/env python3
"""Trains, saves beside two more steps, kills the daemon (-9), and makes these steps again from the checkpoint with a new
one: the state must have the same bits, all of it.

    tests/bench/comes_back.py --path DIR [--path DIR]... --target DIR [--parameters N] [--block N] [--pool SIZE] [--bin build/bin]

Prints one JSON object: same, and how long saving (with the steps beside it) and restoring took. Exit code 1: the bits
differ, or it failed; 77: mlpo is not there. The target is removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, Iterator

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

BEFORE, BESIDE = 2, 2  # steps
PATIENCE_S = 60


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--path", action="append", required=True, help="a path of the daemon; may be repeated")
    parser.add_argument("--target", type=pathlib.Path, required=True, help="the directory of checkpoints; it is made")
    parser.add_argument("--parameters", type=int, default=64 << 20)
    parser.add_argument("--block", type=int, default=1 << 18, help="parameters")
    parser.add_argument("--pool", default="256MiB")
    parser.add_argument("--bin", type=pathlib.Path, default=HERE.parents[1] / "build" / "bin")
    return parser.parse_args()


@contextlib.contextmanager
def killed_daemon(asked: argparse.Namespace, folder: pathlib.Path) -> Iterator[Any]:
    """A client of a daemon that is killed at the end, under its session."""
    import mlpo

    config, socket = folder / "mlpo.toml", str(folder / "mlpo.sock")
    lines = ["[memory]", f'pool = "{asked.pool}"', f"block = {asked.block}"]
    for path in asked.path:
        lines += ["[[path]]", f'directory = "{path}"']
    config.write_text("\n".join(lines) + "\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLPO_")}
    command = [asked.bin / "mlpo-daemon", "--config", config, "--socket", socket]
    daemon = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + PATIENCE_S
        client = None
        while client is None:
            try:
                client = mlpo.connect(socket=socket, job="comes-back", rank=0, world_size=1)
            except mlpo.MlpoError as error:
                late = daemon.poll() is not None or time.monotonic() > deadline
                if late or error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                    raise
                time.sleep(0.05)
        yield client
    finally:
        daemon.kill()
        daemon.wait()
    with contextlib.suppress(mlpo.MlpoError):  # its daemon has died
        client.close()


def main() -> int:
    asked = arguments()
    try:
        import mlpo  # noqa: F401
    except ImportError as missing:
        print(f"skipped: {missing}; deploy/quickstart makes an environment with mlpo", file=sys.stderr)
        return 77
    from checkpoint import Training

    found: dict[str, Any] = {"parameters": asked.parameters}
    asked.target.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            with killed_daemon(asked, pathlib.Path(folder)) as client:
                training = Training(client, asked.parameters)
                training.begin()
                for _ in range(BEFORE):
                    training.step()
                began = time.perf_counter()
                saved = client.checkpoint(str(asked.target), "one", BEFORE)
                for _ in range(BESIDE):
                    training.step()
                if not saved.result():
                    raise RuntimeError("a checkpoint of one rank is not complete")
                found["save_s"] = round(time.perf_counter() - began, 3)
                expected = training.digest()
            with killed_daemon(asked, pathlib.Path(folder)) as client:
                training = Training(client, asked.parameters)
                began = time.perf_counter()
                client.restore(str(asked.target))
                found["restore_s"] = round(time.perf_counter() - began, 3)
                for _ in range(BESIDE):
                    training.step()
                found["same"] = training.digest() == expected
    finally:
        shutil.rmtree(asked.target)
    print(json.dumps(found))
    return 0 if found["same"] else 1


if __name__ == "__main__":
    sys.exit(main())
