"""torch.distributed.checkpoint: model and optimizer saved after half of the steps, and loaded into new ones.

    mlpo-ctl run --path /var/tmp --memory 256MiB -- torchrun --standalone --nproc-per-node 2 \\
        python/examples/resume_dcp.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mlpo.torch import OffloadAdamW
from tiny_lm import TinyLM, arguments, batch, device_of_rank, report
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def build(seed: int, name: str, device: torch.device) -> tuple[torch.nn.Module, OffloadAdamW]:
    torch.manual_seed(seed)
    model = TinyLM().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    # Two optimizers in one process need two names.
    return model, OffloadAdamW(model.parameters(), lr=3e-3, weight_decay=0.1, name=name)


def train(model: torch.nn.Module, optimizer: OffloadAdamW, steps: range, device: torch.device) -> float:
    loss = torch.zeros(())
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step, dist.get_rank(), device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 or step == steps[-1]:
            report(step, loss.item())
    return loss.item()


def main() -> None:
    options = arguments(__doc__).parse_args()
    device = device_of_rank()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    half = options.steps // 2

    model, optimizer = build(0, "first", device)
    train(model, optimizer, range(half), device)
    directory = [tempfile.mkdtemp(prefix="mlpo-example-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(directory)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(states, checkpoint_id=directory[0])
    went_on = train(model, optimizer, range(half, options.steps), device)

    other, resumed = build(1, "second", device)
    found = dict(zip(("model", "optimizer"), get_state_dict(other, resumed)))
    dcp.load(found, checkpoint_id=directory[0])
    set_state_dict(other, resumed, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    again = train(other, resumed, range(half, options.steps), device)
    if dist.get_rank() == 0:
        print(f"the resumed run ends at the same loss: {went_on == again}", flush=True)
    optimizer.close()
    resumed.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
