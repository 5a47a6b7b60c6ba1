"""A job of two ranks in one process that trains, saves every second step, and is killed at any moment.

Arguments: socket, directory of checkpoints, job. The daemon is another user's, as far as the clients know, which open
the files themselves. First it restores the newest checkpoint, if there is one. What it says, a line each: "restored
STEP" (0: nothing), "step STEP DIGEST" after each, of the whole state; "saved STEP" once a checkpoint is known to be
complete. It ends with NO_DAEMON if that dies, and well, between two saves, at SIGTERM.
"""

from __future__ import annotations

import errno
import hashlib
import signal
import sys
import warnings

import mlpo
import numpy as np

NUMEL = 60_013
RANKS = 2
TAGS = 3  # that are written over in turn
NO_DAEMON = 3


def shard(rank: int) -> tuple[int, int]:
    first = NUMEL * rank // RANKS
    return first, NUMEL * (rank + 1) // RANKS - first


def main(socket: str, directory: str, job: str) -> None:
    clients = [
        mlpo.connect(socket=socket, job=job, rank=rank, world_size=RANKS, timeout=30) for rank in range(RANKS)
    ]
    for client in clients:
        client.daemon_uid += 1
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    subgroups = []
    for rank, client in enumerate(clients):
        spec = mlpo.TensorSpec("w", (NUMEL,), flat_range=shard(rank))
        subgroups.append(client.subgroup(f"pack-{rank}", tensors=[spec], dtype="float32"))
    step = 0
    try:
        newest = clients[0].restore(directory, timeout=60)  # one decides for all: another may be complete meanwhile
    except mlpo.MlpoError as error:
        if error.errno != errno.ENOENT:
            raise
    else:
        for client in clients[1:]:
            client.restore(directory, newest.tag, attempt=newest.attempt, timeout=60)
        step = newest.step
    print(f"restored {step}", flush=True)
    if step > 0:
        say(step, subgroups)
    while not stop:
        step += 1
        gradient = np.random.default_rng(step).standard_normal(NUMEL, dtype=np.float32)
        updates = []
        for rank, subgroup in enumerate(subgroups):
            first, count = shard(rank)
            subgroup.grad[:] = gradient[first : first + count]
            subgroup.submit_grad().result(60)
            updates.append(subgroup.submit_update(lr=1e-2))
        for update in updates:
            update.result(60)
        say(step, subgroups)
        if step % 2 == 0:
            tag = f"slot-{step // 2 % TAGS}"
            saves = [client.checkpoint(directory, tag, step, overwrite=True) for client in clients]
            if any([saved.result(60) for saved in saves]):
                print(f"saved {step}", flush=True)


def say(step: int, subgroups: list[mlpo.Subgroup]) -> None:
    digest = hashlib.sha256()
    for subgroup in subgroups:
        state = subgroup.read_state()
        for name in ("master", "exp_avg", "exp_avg_sq", "step"):
            digest.update(np.asarray(state[name]).tobytes())
    print(f"step {step} {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "checkpoint .* was not saved")  # at the end, without a daemon
    try:
        main(*sys.argv[1:])
    except mlpo.MlpoError as error:
        if error.errno not in (errno.ECONNRESET, errno.ECONNREFUSED):
            raise
        sys.exit(NO_DAEMON)
