"""Saving and restoring need no memory by the size of the state: the daemon does both in a memory cgroup that has a
fifth more than training takes, and less than half of the state."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import time
from typing import Callable, Iterator, Optional

import mlpo
import pytest
import torch
from conftest import new_job
from running_daemon import Daemon, Layout

NUMEL = 64 << 20
STATE_BYTES = 12 * NUMEL
STREAMED = Layout(paths=2, pool="16MiB", block=1 << 16)


class MemoryCgroup:
    """Below the root's, version 1 or 2."""

    def __init__(self) -> None:
        top = pathlib.Path("/sys/fs/cgroup")
        self._unified = (top / "cgroup.controllers").exists()
        self._group = (top if self._unified else top / "memory") / f"mlpo-saving-{os.getpid()}"
        self._group.mkdir()

    def enter(self) -> None:
        (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def usage(self) -> int:
        return int((self._group / ("memory.current" if self._unified else "memory.usage_in_bytes")).read_text())

    def shared(self) -> int:
        """Bytes of shared memory: sessions' arenas, not files that were read or written."""
        text = (self._group / "memory.stat").read_text()
        return int(dict(line.split() for line in text.splitlines())["shmem"])

    def limit(self, size: Optional[int]) -> None:
        """None: no limit."""
        name, none = ("memory.max", "max") if self._unified else ("memory.limit_in_bytes", "-1")
        (self._group / name).write_text(none if size is None else str(size))

    def killed(self) -> int:
        text = (self._group / ("memory.events" if self._unified else "memory.oom_control")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def remove(self) -> None:
        deadline = time.monotonic() + 10
        while self._group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # its last process may not be gone yet
                self._group.rmdir()
            time.sleep(0.01)


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    made: Optional[MemoryCgroup] = None
    try:
        made = MemoryCgroup()
        made.limit(1 << 40)
        made.killed()
    except (OSError, KeyError) as error:
        if made is not None:
            made.remove()
        pytest.skip(f"skipped: no memory cgroup with a limit can be made here: {error}")
    yield made
    made.remove()


class Ranks:
    """Of one flat tensor, cut into as many ranges."""

    def __init__(self, connect: Callable[..., mlpo.Client], daemon: Daemon, ranks: int) -> None:
        job = new_job()
        self.clients = [connect(daemon, job=job, rank=rank, world_size=ranks) for rank in range(ranks)]
        self.subgroups = []
        for rank, client in enumerate(self.clients):
            first = NUMEL * rank // ranks
            spec = mlpo.TensorSpec("w", (NUMEL,), flat_range=(first, NUMEL * (rank + 1) // ranks - first))
            self.subgroups.append(client.subgroup("w", tensors=[spec], dtype="bfloat16"))
            self.subgroups[-1].grad.torch().zero_()  # its pages are this process's, not of the daemon's cgroup

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for subgroup in self.subgroups:
            subgroup.grad.torch().copy_(torch.randn(subgroup.numel, dtype=torch.bfloat16, generator=generator))
            subgroup.submit_grad().result(60)
        for request in [subgroup.submit_update(lr=1e-2) for subgroup in self.subgroups]:
            request.result(60)

    def digests(self) -> list[str]:
        """Of each array of the whole tensor."""
        arrays = {name: hashlib.sha256() for name in ("master", "exp_avg", "exp_avg_sq")}
        for subgroup in self.subgroups:
            state = subgroup.read_state()
            for name, digest in arrays.items():
                digest.update(state[name].data)  # type: ignore[literal-required]
        return [digest.hexdigest() for digest in arrays.values()]

    def close(self) -> None:
        for client in self.clients:
            client.close()


def test_c20_saving_and_restoring_stream_within_a_memory_limit(
    tmp_path: pathlib.Path, connect_to: Callable[..., mlpo.Client], group: MemoryCgroup
) -> None:
    """By four ranks, and into three."""
    place = tmp_path / "checkpoints"
    place.mkdir()
    with Daemon(tmp_path, STREAMED, enter=group.enter) as daemon:
        run = Ranks(connect_to, daemon, 4)
        for number in range(2):
            run.step(number)
        limit = group.usage() * 6 // 5
        assert 2 * limit <= STATE_BYTES, f"training and a fifth take {limit} bytes: this needs a larger state"

        group.limit(limit)
        saves = [client.checkpoint(str(place), "t", 2) for client in run.clients]
        assert any([saved.result(60) for saved in saves])
        group.limit(None)  # reading all of the state fills shared memory that training does not need
        saved = run.digests()
        run.close()
        held = group.shared()  # by this process, which has the closed sessions' memory mapped still

        group.limit(limit + held)
        other = Ranks(connect_to, daemon, 3)
        for client in other.clients:
            client.restore(str(place), timeout=60)
        group.limit(None)
        assert other.digests() == saved
        assert group.killed() == 0
        other.close()
