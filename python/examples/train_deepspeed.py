"""DeepSpeed ZeRO-3: mlpo.deepspeed.initialize() in place of deepspeed.initialize(). Saves halfway, and goes back there.

    mlpo-ctl run --path /var/tmp --memory 256MiB -- torchrun --standalone --nproc-per-node 2 \\
        python/examples/train_deepspeed.py
"""

from __future__ import annotations

import tempfile

import mlpo.deepspeed
import torch
import torch.distributed as dist
from tiny_lm import TinyLM, arguments, batch, report

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "steps_per_print": 1_000_000,
}


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.manual_seed(0)
    model = TinyLM()
    engine, *_ = mlpo.deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    rank = dist.get_rank()

    directory = [tempfile.mkdtemp(prefix="mlpo-example-") if rank == 0 else ""]
    dist.broadcast_object_list(directory)  # of a real run: a folder that all nodes see
    for step in range(options.steps):
        loss = engine(batch(step, rank, engine.device))
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 or step == options.steps - 1:
            report(step, loss.item())
        if step == options.steps // 2:
            engine.save_checkpoint(directory[0])

    # Back to the middle of the run: masters, moments, step counts, and the parameters that follow from them.
    engine.load_checkpoint(directory[0])
    report(engine.global_steps, engine(batch(options.steps, rank, engine.device)).item())
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
