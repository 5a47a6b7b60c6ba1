"""Fixtures of tests/python and tests/trainers: daemons by layout, shared within a module, and clients of their own jobs."""

from __future__ import annotations

import itertools
import os
from typing import Callable, Iterator

import mlpo
import pytest
from running_daemon import Daemon, Layout

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
