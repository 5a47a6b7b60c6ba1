"""One rank: accelerate_process.py FOLDER OVERLAP, of test_accelerate.py. Writes what each optimizer has trained."""

import pathlib
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from mlpo.torch import OffloadAdamW

HYPER = {"lr": 1e-2, "weight_decay": 0.1}

folder, overlap = pathlib.Path(sys.argv[1]), bool(int(sys.argv[2]))
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
assert accelerator.num_processes == 2
for name in ("ours", "torch"):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    if name == "ours":
        optimizer = OffloadAdamW(model.parameters(), **HYPER, shard_group=dist.group.WORLD, overlap=overlap)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
    model, prepared = accelerator.prepare(model, optimizer)
    if name == "ours":
        optimizer.attach_ddp(model)
    for step in range(16):
        seed = 10 * step + accelerator.process_index
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(seed))
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                if name == "ours":
                    optimizer.clip_grad_norm_(0.5)
                else:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
            prepared.step()
            prepared.zero_grad()
    if name == "ours":
        assert all(float(state["step"]) == 8 for state in optimizer.state.values()) and len(optimizer.state) == 4
        assert (optimizer.sent_in_backward > 0) == overlap or not optimizer.subgroups
    torch.save([p.detach() for p in model.parameters()], folder / f"{name}.{accelerator.process_index}")
accelerator.wait_for_everyone()
accelerator.end_training()
