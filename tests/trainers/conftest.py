"""Fixtures: those of tests/python that start daemons, and ranks that torchrun starts.

The lane is `tests/run --trainers`, with an environment of its own; tests of a framework that could not be had there are
skipped."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any, Callable

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

import mlpo  # noqa: E402
import torch  # noqa: E402
from daemons import connect_to, daemon_of, new_job  # noqa: E402, F401 - two fixtures, and a name for tests
from launching import run  # noqa: E402
from mlpo.torch import OffloadAdamW  # noqa: E402
from running_daemon import SMALL_BLOCKS, Daemon, Layout  # noqa: E402

torch.set_num_threads(1)  # the models are tiny, and spinning threads starve the daemon on a busy machine


@pytest.fixture
def client(daemon_of: Callable[[Layout], Daemon], connect_to: Callable[..., mlpo.Client]) -> mlpo.Client:  # noqa: F811
    """A client of a daemon whose pool holds a part of a small state."""
    return connect_to(daemon_of(SMALL_BLOCKS))


@pytest.fixture
def make(client: mlpo.Client) -> Callable[..., OffloadAdamW]:
    """make(params, ...): an OffloadAdamW on `client`."""

    def get(params: Any, **options: Any) -> OffloadAdamW:
        return OffloadAdamW(params, client=client, **options)

    return get


@pytest.fixture
def torchrun(daemon_of: Callable[[Layout], Daemon]) -> Callable[..., str]:  # noqa: F811
    """torchrun(script, *arguments, ranks=2): what the ranks have printed; fails if one has failed."""

    def get(script: pathlib.Path, *arguments: Any, ranks: int = 2) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        where = {"MLPO_SOCKET": daemon_of(SMALL_BLOCKS).socket, "MLPO_JOB": new_job(), "OMP_NUM_THREADS": "1"}
        return run([*command, str(script), *map(str, arguments)], os.environ | where)

    return get
