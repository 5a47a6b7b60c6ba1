"""Lightning: configure_optimizers() returns the optimizer. --output FILE saves a checkpoint at the end, --resume FILE
goes on from one.

    mlpo-ctl run --path /var/tmp --memory 256MiB -- python python/examples/train_lightning.py
    mlpo-ctl run --path /var/tmp --memory 256MiB -- python python/examples/train_lightning.py --devices 2
"""

from __future__ import annotations

from typing import Any

import torch
from mlpo.torch import OffloadAdamW
from tiny_lm import TinyLM, arguments, text
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl


class Module(pl.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.model = TinyLM()
        self.steps = steps

    def training_step(self, rows: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(rows[0])
        if self.global_step % 10 == 0 or self.global_step == self.steps - 1:
            self.print(f"step {self.global_step}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        several = self.trainer.world_size > 1
        optimizer = OffloadAdamW(
            self.model.named_parameters(), lr=3e-3, weight_decay=0.1,
            shard_group=torch.distributed.group.WORLD if several else None,  # DDP: divides the state over the ranks
        )  # fmt: skip
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--devices", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--output", help="a file for a checkpoint at the end")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    options = parser.parse_args()

    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_steps=options.steps,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = DataLoader(TensorDataset(text(16 * 60 * options.devices, seed=1)), batch_size=16)
    trainer.fit(Module(options.steps), batches, ckpt_path=options.resume)
    if options.output:
        trainer.save_checkpoint(options.output)


if __name__ == "__main__":
    main()
