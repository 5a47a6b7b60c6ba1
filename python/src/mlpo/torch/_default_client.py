"""The client of optimizers that are not given one: one for the process, since a rank has one session."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch

from .._client import Client, connect

_lock = threading.RLock()  # a finalizer that runs inside may release (DeepSpeed's engine has one)
_client: Client | None = None
_pid = 0
_users: weakref.WeakSet[Any] = weakref.WeakSet()


def acquire(user: object) -> Client:
    """Connects, or shares the connection of the optimizers before; `user` gives it back with release().

    A connection of which all users were dropped without that is closed here and not by finalizers, which run in the
    middle of anything and must not wait: the next user may have the same keys.
    """
    global _client, _pid
    with _lock:
        if _client is not None and _pid == os.getpid() and not _users:
            _client.close()
            _client = None
        if _client is None or _pid != os.getpid() or not _usable(_client):
            _client, _pid = _connect(), os.getpid()
            _users.clear()
        _users.add(user)
        return _client


def release(user: object, client: Client) -> None:
    """Closes the connection with its last user."""
    global _client
    with _lock:
        if client is not _client or _pid != os.getpid():
            return
        _users.discard(user)
        if _users:
            return
        _client = None
    client.close()


def _connect() -> Client:
    """Launchers that set no RANK (Lightning's own) have told torch.distributed."""
    distributed = torch.distributed
    if not os.environ.get("RANK") and distributed.is_available() and distributed.is_initialized():
        return connect(rank=distributed.get_rank(), world_size=distributed.get_world_size())
    return connect()


def _usable(client: Client) -> bool:
    try:
        client.check_alive()
    except OSError:
        return False
    return True
