"""DDP: gradients are taken as DDP reduces them, and each rank keeps the state of a part of the parameters.

    mlpo-ctl run --path /var/tmp --memory 256MiB -- torchrun --standalone --nproc-per-node 2 \\
        python/examples/train_ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from mlpo.torch import OffloadAdamW
from tiny_lm import TinyLM, arguments, batch, device_of_rank, report
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = arguments(__doc__).parse_args()
    device = device_of_rank()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(0)
    # gradient_as_bucket_view=True: gradients are not kept twice.
    model = DistributedDataParallel(TinyLM().to(device), gradient_as_bucket_view=True)
    optimizer = OffloadAdamW(
        model.named_parameters(), lr=3e-3, weight_decay=0.1, overlap=True, shard_group=dist.group.WORLD
    )
    optimizer.attach_ddp(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)

    for step in range(options.steps):
        optimizer.zero_grad()
        with model.no_sync():  # two passes a step, of which DDP reduces the sum
            (model(batch(2 * step, dist.get_rank(), device)) / 2).backward()
        loss = model(batch(2 * step + 1, dist.get_rank(), device))
        (loss / 2).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        if step % 10 == 0 or step == options.steps - 1:
            report(step, loss.item())

    held = sum(subgroup.numel for subgroup in optimizer.subgroups)
    print(f"rank {dist.get_rank()} keeps the state of {held} parameters", flush=True)
    # The state as torch.optim.AdamW has it, on rank 0, for torch.save().
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        print(f"state of {len(optimizer.state_dict()['state'])} tensors", flush=True)
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
