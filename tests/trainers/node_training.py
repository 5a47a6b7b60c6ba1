"""One rank of a job on several nodes, started by torchrun: node_training.py CASE ARGUMENT... (the functions below)."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from mlpo.torch import OffloadAdamW
from torch.distributed.fsdp import fully_shard


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 64, generator=generator), torch.randn(8, 8, generator=generator)


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    whole = torch.nn.Sequential(
        torch.nn.Linear(64, 301), torch.nn.Tanh(), torch.nn.Linear(301, 257, bias=False), torch.nn.Tanh(),
        torch.nn.Linear(257, 8),
    )  # fmt: skip
    for layer in whole:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    return fully_shard(whole)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def digest(module: torch.nn.Module) -> str:
    """Of the whole parameters' bytes. Collective."""
    sha = hashlib.sha256()
    for param in module.parameters():
        sha.update(param.full_tensor().detach().contiguous().numpy().tobytes())  # type: ignore[attr-defined]
    return sha.hexdigest()


def files_below(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def train(steps: str, shared: str) -> None:
    """FSDP2 over all ranks of all nodes. Says what the parameters are then, and what is on the shared directory."""
    module = model()
    optimizer = OffloadAdamW(module.named_parameters(), lr=1e-3)
    losses = []
    for step in range(int(steps)):
        optimizer.zero_grad()
        x, y = batch(step, dist.get_rank())
        loss = torch.nn.functional.mse_loss(module(x), y)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    say(digest=digest(module), losses=losses, files=files_below(pathlib.Path(shared) / "mlpo"), rank=dist.get_rank())
    dist.barrier()  # all have looked before any session ends
    optimizer.close()


def train_on(directory: str) -> None:
    """Saves after three steps, says so, and trains until it is killed, or another rank is."""
    module = model()
    optimizer = OffloadAdamW(module.named_parameters(), lr=1e-3)
    step = 0
    while True:
        optimizer.zero_grad()
        x, y = batch(step, dist.get_rank())
        torch.nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
        step += 1
        if step == 3:
            optimizer.save(directory).result(120)
            dist.barrier()
            say(saved=digest(module))
        time.sleep(0.01)


def go_on(directory: str) -> None:
    """Loads what there is, with however many ranks, and makes a step."""
    module = model()
    optimizer = OffloadAdamW(module.named_parameters(), lr=1e-3)
    restored = optimizer.load(directory)
    loaded = digest(module)
    x, y = batch(restored.step, 0)
    torch.nn.functional.mse_loss(module(x), y).backward()
    optimizer.step()
    say(loaded=loaded, step=restored.step, changed=digest(module) != loaded)
    optimizer.close()


def updates(parameters: str, steps: str, path: str) -> None:
    """Bare steps on state of this rank's own: no model, and so nothing but the paths to wait for. Says when each step
    ended on the last rank, and what the daemon thinks of the path."""
    pieces = 8
    params = [torch.nn.Parameter(torch.zeros(int(parameters) // pieces, dtype=torch.bfloat16)) for _ in range(pieces)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradient = torch.randn(int(parameters) // pieces, generator=generator).to(torch.bfloat16)
    optimizer = OffloadAdamW(params, lr=1e-3, replicas=True, subgroup_elements=int(parameters) // pieces)
    ends = []
    for _ in range(int(steps)):
        for param in params:
            param.grad = gradient
        optimizer.step()
        dist.barrier()
        ends.append(time.monotonic())
    assert optimizer.client is not None
    (seen,) = [each for each in optimizer.client.status()["paths"] if each["name"] == path]
    say(periods=[after - before for before, after in zip(ends, ends[1:])], share=seen["node_share"])
    dist.barrier()
    optimizer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size()
    globals()[sys.argv[1]](*sys.argv[2:])
    dist.destroy_process_group()
