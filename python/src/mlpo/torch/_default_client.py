"""The client of optimizers that are not given one: one for the process, since a rank has one session."""

from __future__ import annotations

import os
import threading

from .._client import Client, connect

_lock = threading.Lock()
_client: Client | None = None
_pid = 0
_users = 0


def acquire() -> Client:
    """Connects, or shares the connection of the optimizers before; to be given back with release()."""
    global _client, _pid, _users
    with _lock:
        if _client is None or _pid != os.getpid() or not _usable(_client):
            _client, _pid, _users = connect(), os.getpid(), 0
        _users += 1
        return _client


def release(client: Client) -> None:
    """Closes the connection with its last user."""
    global _client, _users
    with _lock:
        if client is not _client or _pid != os.getpid():
            return
        _users -= 1
        if _users:
            return
        _client = None
    client.close()


def _usable(client: Client) -> bool:
    try:
        client.check_alive()
    except OSError:
        return False
    return True
