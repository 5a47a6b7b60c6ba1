"""FSDP2: each rank keeps the optimizer state of its shards in the daemon. Saves halfway, without stopping.

    mlpo-ctl run --path /var/tmp --memory 256MiB -- torchrun --standalone --nproc-per-node 2 \\
        python/examples/train_fsdp2.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from mlpo.torch import OffloadAdamW
from tiny_lm import TinyLM, arguments, batch, device_of_rank, report
from torch.distributed.fsdp import fully_shard


def main() -> None:
    options = arguments(__doc__).parse_args()
    device = device_of_rank()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = TinyLM().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    # overlap=True: gradients leave while the backward pass runs.
    optimizer = OffloadAdamW(model.named_parameters(), lr=3e-3, weight_decay=0.1, overlap=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)

    directory = [tempfile.mkdtemp(prefix="mlpo-example-") if rank == 0 else ""]
    dist.broadcast_object_list(directory)  # of a real run: a folder that all nodes see
    saved = None
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = model(batch(step, rank, device))
        loss.backward()
        optimizer.clip_grad_norm_(1.0)  # over all shards; torch.nn.utils' needs overlap=False
        optimizer.step()
        scheduler.step()
        if step % 10 == 0 or step == options.steps - 1:
            report(step, loss.item())
        if step == options.steps // 2:
            saved = optimizer.save(directory[0])  # the daemon writes it while training goes on

    if saved is not None:
        saved.result(300)
        dist.barrier()
        if rank == 0:
            print(f"saved {saved.tag} in {directory[0]}, complete: {saved.is_complete()}", flush=True)
    dist.barrier()
    if saved is not None:
        # Back to the middle of the run: masters, moments, step counts, and the parameters that follow from them.
        restored = optimizer.load(directory[0])
        report(restored.step, model(batch(options.steps, rank, device)).item())
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
