"""OffloadAdamW in two rank processes: FSDP2's shards, DDP's replicas, torch's distributed checkpoint, save and load,
and the distance to training in FP64."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from typing import Callable

import pytest
import torch
from conftest import new_job
from running_daemon import SMALL_BLOCKS, Daemon

HERE = pathlib.Path(__file__).parent
DISTRIBUTED = (
    "fsdp2", "overlap", "update_in_backward", "checkpoint", "nonfinite", "scaler", "replicas", "pieces_by_hand",
    "layouts", "own_checkpoint", "loads_one_checkpoint", "one_rank_cannot_save",
    "saves_over_the_last_one",
)  # fmt: skip
DDP = (
    "overlap", "accumulation", "unused", "checkpointed", "update_in_backward", "attaching", "errors_in_buckets",
    "shard_group", "shard_group_saves", "shard_group_fails", "distance",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="skipped: this torch has no torch.distributed"
)


def run(script: pathlib.Path, cases: tuple[str, ...], daemon: Daemon, directory: pathlib.Path) -> list[str]:
    """What the two ranks print, which run all cases one after another, since starting torch takes the most time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLPO_")}
    environment |= {
        "MLPO_SOCKET": daemon.socket, "MLPO_JOB": new_job(), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    files = [directory / f"rank{rank}.log" for rank in range(2)]
    ranks = []
    try:
        for rank, path in enumerate(files):
            with path.open("w") as file:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, script, directory / "checkpoint", *cases],
                        env=environment | {"RANK": str(rank)}, stdout=file, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        for rank in ranks:
            rank.wait(timeout=300)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [path.read_text() for path in files]


@pytest.fixture(scope="module")
def outputs(daemon_of, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tuple[str, ...]], list[str]]:
    """outputs(script, cases): what its ranks have printed, run once."""
    found: dict[str, list[str]] = {}

    def get(script: str, cases: tuple[str, ...]) -> list[str]:
        if script not in found:
            found[script] = run(HERE / script, cases, daemon_of(SMALL_BLOCKS), tmp_path_factory.mktemp("distributed"))
        return found[script]

    return get


@pytest.mark.parametrize("case", DISTRIBUTED)
def test_two_ranks(outputs: Callable[..., list[str]], case: str) -> None:
    """Each case is described, and its assertions made, by its function in distributed_process.py."""
    found = outputs("distributed_process.py", DISTRIBUTED)
    assert all(f"{case} passed\n" in output for output in found), "\n\n".join(found)


@pytest.mark.parametrize("case", DDP)
def test_two_ranks_of_ddp(outputs: Callable[..., list[str]], case: str) -> None:
    """As above, in ddp_process.py."""
    found = outputs("ddp_process.py", DDP)
    assert all(f"{case} passed\n" in output for output in found), "\n\n".join(found)
