"""What the nodes of a job tell each other of the paths that they share ([[path]] share = "measured").

Daemons know nothing of other nodes. Every few steps each node's figures (Client.share_figures) go to all others by an
all-gather in a process group of the trainer's ranks, and each node's daemon is told all of them
(Client.set_path_share). The figures are small, and may be late by a step or two: nobody waits for them. So a rank that
fails, or is slow, holds up no other one here; when the exchange ends, with a warning, the daemons go by what they have
been told before.

All ranks make their steps together, and `share` is alike on all nodes: the first exchange is waited for.
"""

from __future__ import annotations

import collections
import datetime
import errno
import json
import os
import time
import warnings
import weakref
from typing import Any, Optional

import torch

from .._client import Client
from .._errors import MlpoError

EVERY = 4  #: steps from one exchange to the next
_BYTES = 4096  # of what a rank says, filled up with blanks
_MOST_PATHS = 16  # that fit, whatever their names
_MOST_PENDING = 4  # exchanges that have begun and not ended
_PATIENCE = datetime.timedelta(minutes=10)  # for other ranks
_ASK_S = 10.0  # for a control connection, of which a user may have few at a time


def stepped(client: Client) -> None:
    """This rank has made a step, as all ranks do. Exchanges figures when it is time to; never raises because of it."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    if client not in _exchanges:
        _exchanges[client] = NodeExchange()
    _exchanges[client].stepped(client)


class NodeExchange:
    """One client's part in the exchange; for one thread at a time, as optimizers are."""

    def __init__(self) -> None:
        self._steps = 0
        self._ended = False
        self._warned = False
        self._group: Any = None
        self._daemon = ""
        self._leads = True  # speaks for its node; known after the first exchange
        # Works that have begun, each with what all ranks say.
        self._pending: collections.deque[tuple[Any, list[torch.Tensor]]] = collections.deque()
        self._busy_s: dict[tuple[str, str], float] = {}  # by daemon and path, as last told

    def stepped(self, client: Client) -> None:
        if self._ended:
            return
        self._steps += 1
        try:
            while self._pending and self._pending[0][0].is_completed():
                self._take(client)
            if self._steps % EVERY == 0:
                self._turn(client)
        except (OSError, RuntimeError, ValueError) as error:
            self._ended = True
            self._pending.clear()
            self._warn(f"and is not exchanged any more: {error}")

    def _turn(self, client: Client) -> None:
        if self._group is None:
            self._begin(client)
        elif len(self._pending) < _MOST_PENDING:
            self._send(self._said(client))

    def _begin(self, client: Client) -> None:
        """Makes the group, and exchanges figures for the first time; ends it all where there is nothing to exchange."""
        self._ended = True  # whatever ends this
        if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE"):
            return  # one node, says the launcher
        figures = _figures(client)
        if not figures["paths"]:
            return
        if len(figures["paths"]) > _MOST_PATHS:
            raise ValueError(f'{len(figures["paths"])} paths have share = "measured"; at most {_MOST_PATHS} may')
        self._daemon = figures["daemon"]
        try:
            self._group = torch.distributed.new_group(timeout=_PATIENCE, backend="gloo")
            self._send(_text(self._daemon, figures["paths"]))
            self._pending[0][0].wait()
        except RuntimeError as error:
            alike = "have all nodes' daemons the same paths with share = \"measured\", and do all ranks call step()?"
            raise RuntimeError(f"{error}; {alike}") from error
        self._ended = len(self._take(client)) == 1

    def _said(self, client: Client) -> str:
        if not self._leads:
            return _text(self._daemon, None)
        try:
            figures = _figures(client)
        except MlpoError as error:  # the others go on without this node's
            self._warn(f"this time: {error}")
            return _text(self._daemon, None)
        return _text(self._daemon, figures["paths"])

    def _send(self, text: str) -> None:
        mine = torch.tensor(list(text.encode().ljust(_BYTES)), dtype=torch.uint8, device="cpu")
        ranks = torch.distributed.get_world_size(self._group)
        said = [torch.empty(_BYTES, dtype=torch.uint8, device="cpu") for _ in range(ranks)]
        work = torch.distributed.all_gather(said, mine, group=self._group, async_op=True)
        self._pending.append((work, said))

    def _take(self, client: Client) -> dict[str, dict[str, list[float]]]:
        """Tells the daemon what the oldest exchange, which has ended, has brought; that is each node's paths."""
        work, said = self._pending.popleft()
        work.wait()  # raises what it has ended with
        told = [json.loads(each.numpy().tobytes()) for each in said]
        first = next(rank for rank, each in enumerate(told) if each["daemon"] == self._daemon)
        self._leads = first == torch.distributed.get_rank(self._group)
        nodes: dict[str, dict[str, list[float]]] = {}
        for each in told:
            if each["paths"] is not None:
                nodes.setdefault(each["daemon"], each["paths"])
        before = self._busy_s
        self._busy_s = {(daemon, path): of[1] for daemon, paths in nodes.items() for path, of in paths.items()}
        if self._leads:
            for path in nodes.get(self._daemon, {}):
                self._tell(client, path, nodes, before)
        return nodes

    def _tell(
        self,
        client: Client,
        path: str,
        nodes: dict[str, dict[str, list[float]]],
        before: dict[tuple[str, str], float],
    ) -> None:
        rows: list[list[float]] = []
        me = 0
        for daemon, paths in nodes.items():
            if path not in paths:
                continue
            if (daemon, path) not in before:
                return  # since when it has been busy will be known the next time
            if daemon == self._daemon:
                me = len(rows)
            seen, busy_s, others, step_bytes = paths[path]
            rows.append([seen, max(0.0, busy_s - before[daemon, path]), others, step_bytes])
        try:
            client.set_path_share(path, rows, me)
        except MlpoError as error:
            self._warn(f"for path {path}: {error}")

    def _warn(self, what: str) -> None:
        """Once: nothing is wrong but the speed."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"what this node sees of paths that nodes share is not told {what}. Training goes on, at most slower",
                RuntimeWarning,
                stacklevel=6,
            )


def _text(daemon: str, paths: Optional[dict[str, list[float]]]) -> str:
    """`paths`: None from a rank that does not speak for its node."""
    short = None if paths is None else {path: [float(f"{x:.9g}") for x in of] for path, of in paths.items()}
    return json.dumps({"daemon": daemon, "paths": short}, separators=(",", ":"))


def _figures(client: Client) -> dict[str, Any]:
    """This node's figures; without paths from a daemon that knows no shares."""
    deadline = time.monotonic() + _ASK_S
    while True:
        try:
            return client.share_figures()
        except MlpoError as error:
            if error.errno == errno.EPROTO and "no such method" in str(error):
                return {"daemon": "", "paths": {}}
            if error.errno != errno.EPROTO or "try later" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


_exchanges: weakref.WeakKeyDictionary[Client, NodeExchange] = weakref.WeakKeyDictionary()
