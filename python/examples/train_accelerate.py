"""Accelerate: the optimizer is passed to prepare() as any other. By itself, or with several processes.

    mlpo-ctl run --path /var/tmp --memory 256MiB -- python python/examples/train_accelerate.py
    mlpo-ctl run --path /var/tmp --memory 256MiB -- torchrun --standalone --nproc-per-node 2 \\
        python/examples/train_accelerate.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from mlpo.torch import OffloadAdamW
from tiny_lm import TinyLM, arguments, text
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    options = arguments(__doc__).parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)

    torch.manual_seed(0)
    model = TinyLM()
    # DDP keeps all parameters on each rank: shard_group divides the state among them.
    several = accelerator.num_processes > 1
    optimizer = OffloadAdamW(
        model.named_parameters(), lr=3e-3, weight_decay=0.1, shard_group=dist.group.WORLD if several else None
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=options.steps)
    # Two batches a step and process.
    rows = text(16 * 2 * options.steps * accelerator.num_processes, seed=1)
    batches = DataLoader(TensorDataset(rows), batch_size=16)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)

    step = 0
    for (tokens,) in batches:
        with accelerator.accumulate(model):
            loss = model(tokens)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            if step % 10 == 0 or step == options.steps - 1:
                accelerator.print(f"step {step}: loss {loss.item():.4f}", flush=True)
            step += 1

    optimizer.optimizer.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
