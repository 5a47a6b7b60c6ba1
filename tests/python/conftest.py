"""Fixtures: daemons by layout, shared within a module, and clients of a job of their own."""

from __future__ import annotations

import pathlib
import sys
from typing import Any, Callable

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import mlpo  # noqa: E402
import torch  # noqa: E402
from daemons import connect_to, daemon_of, new_job  # noqa: E402, F401 - two fixtures, and a name for tests
from mlpo.torch import OffloadAdamW  # noqa: E402
from running_daemon import SMALL_BLOCKS, Daemon, Layout  # noqa: E402

torch.set_num_threads(1)  # the models are tiny, and spinning threads starve the daemon on a busy machine


@pytest.fixture
def client(daemon_of: Callable[[Layout], Daemon], connect_to: Callable[..., mlpo.Client]) -> mlpo.Client:  # noqa: F811
    """A client of a daemon with two paths and a pool that holds all of a small state."""
    return connect_to(daemon_of(Layout()))


@pytest.fixture
def make(daemon_of, connect_to) -> Callable[..., OffloadAdamW]:  # noqa: F811
    """make(params, ...): an OffloadAdamW on a client of its own."""

    def get(params: Any, **options: Any) -> OffloadAdamW:
        return OffloadAdamW(params, client=connect_to(daemon_of(SMALL_BLOCKS)), **options)

    return get
