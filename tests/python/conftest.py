"""Fixtures: daemons by layout, shared within a module, and clients of a job of their own."""

from __future__ import annotations

import itertools
import os
import pathlib
import sys
from typing import Any, Callable, Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import mlpo  # noqa: E402
import torch  # noqa: E402
from mlpo.torch import OffloadAdamW  # noqa: E402
from running_daemon import SMALL_BLOCKS, Daemon, Layout  # noqa: E402

torch.set_num_threads(1)  # the models are tiny, and spinning threads starve the daemon on a busy machine

_jobs = itertools.count()


def new_job() -> str:
    """A job's name that no other test has."""
    return f"test-{os.getpid()}-{next(_jobs)}"


@pytest.fixture(scope="module")
def daemon_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Layout], Daemon]]:
    """daemon_of(layout): a running daemon, started at first use and stopped after the module."""
    running: dict[Layout, Daemon] = {}

    def get(layout: Layout) -> Daemon:
        if layout not in running:
            running[layout] = Daemon(tmp_path_factory.mktemp("daemon"), layout)
        return running[layout]

    yield get
    failures = []
    for daemon in running.values():
        try:
            daemon.stop()
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


@pytest.fixture
def connect_to() -> Iterator[Callable[..., mlpo.Client]]:
    """connect_to(daemon, **options): a client that is closed after the test; its job is new unless given."""
    clients: list[mlpo.Client] = []

    def get(daemon: Daemon, **options: object) -> mlpo.Client:
        options.setdefault("job", new_job())
        clients.append(mlpo.connect(socket=daemon.socket, **options))  # type: ignore[arg-type]
        return clients[-1]

    yield get
    for client in clients:
        client.close()


@pytest.fixture
def client(daemon_of: Callable[[Layout], Daemon], connect_to: Callable[..., mlpo.Client]) -> mlpo.Client:
    """A client of a daemon with two paths and a pool that holds all of a small state."""
    return connect_to(daemon_of(Layout()))


@pytest.fixture
def make(daemon_of, connect_to) -> Callable[..., OffloadAdamW]:
    """make(params, ...): an OffloadAdamW on a client of its own."""

    def get(params: Any, **options: Any) -> OffloadAdamW:
        return OffloadAdamW(params, client=connect_to(daemon_of(SMALL_BLOCKS)), **options)

    return get
