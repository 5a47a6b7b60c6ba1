"""One rank: lightning_process.py FOLDER, of test_lightning.py. Trains with each optimizer and has Lightning save it."""

import pathlib
import sys

import pytorch_lightning as pl
import torch
from mlpo.torch import OffloadAdamW
from torch.utils.data import DataLoader, TensorDataset

HYPER = {"lr": 1e-2, "weight_decay": 0.1}


class Module(pl.LightningModule):
    def __init__(self, ours: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
        self.ours = ours

    def training_step(self, rows, index):
        return self.layers(rows[0]).square().mean()

    def configure_optimizers(self):
        if self.ours:
            return OffloadAdamW(self.layers.parameters(), **HYPER, shard_group=torch.distributed.group.WORLD)
        return torch.optim.AdamW(self.layers.parameters(), **HYPER)


torch.set_num_threads(1)
for name in ("ours", "torch"):
    x = torch.randn(96, 7, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(Module(name == "ours"), DataLoader(TensorDataset(x), batch_size=8, shuffle=False))
    trainer.save_checkpoint(pathlib.Path(sys.argv[1]) / f"{name}.ckpt")
