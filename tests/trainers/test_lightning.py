"""Lightning with configure_optimizers(), beside torch's AdamW; its checkpoints; two processes of DDP."""

from __future__ import annotations

import pathlib
from typing import Any, Callable

import pytest
import torch
from mlpo.torch import OffloadAdamW
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip(
    "pytorch_lightning", reason="skipped: pytorch-lightning is not installed (tests/run --trainers says why)"
)

STEPS = 6
Of = Callable[..., torch.optim.Optimizer]


class Module(pl.LightningModule):
    def __init__(self, of: Of, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
        self.of, self.options = of, options
        self.made: Any = None

    def training_step(self, rows: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.layers(rows[0]).square().mean()

    def configure_optimizers(self) -> dict[str, Any]:
        self.made = self.of(self.layers.parameters(), lr=1e-2, weight_decay=0.1, **self.options)
        scheduler = torch.optim.lr_scheduler.StepLR(self.made, 2, 0.5)
        return {"optimizer": self.made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rows() -> DataLoader:
    x = torch.randn(8 * STEPS, 7, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=8)


def fit(module: Module, epochs: int = 1, resume: Any = None, **options: Any) -> Any:
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **{"gradient_clip_val": 0.5, **options},
    )  # fmt: skip
    trainer.fit(module, rows(), ckpt_path=resume)
    return trainer


def values(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@pytest.fixture
def ours(make: Of) -> Of:
    """Each optimizer on the client has a name of its own."""
    count = iter(range(1000))
    return lambda params, **options: make(params, name=str(next(count)), **options)


def test_trains_as_torch_does(ours: Of) -> None:
    mine, stock = Module(ours), Module(torch.optim.AdamW)
    for module in (mine, stock):
        fit(module)
    for p, q in zip(values(mine), values(stock)):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert mine.made.param_groups[0]["lr"] == stock.made.param_groups[0]["lr"] < 1e-2
    # Lightning has moved all of its state to the CPU at the end, and it is still there.
    assert isinstance(mine.made, OffloadAdamW) and len(mine.made.state) == 4
    a, b = (module.made.state_dict()["state"] for module in (mine, stock))
    for index, entry in b.items():
        for name, value in entry.items():
            torch.testing.assert_close(a[index][name], value, rtol=1e-5, atol=1e-7)


def test_goes_on_from_its_checkpoint(ours: Of, tmp_path: pathlib.Path) -> None:
    """Saved after one epoch, the second one has the bits of a run of two; torch's AdamW takes the state too."""
    whole = Module(ours)
    fit(whole, epochs=2)
    first = Module(ours)
    fit(first).save_checkpoint(tmp_path / "saved.ckpt")
    resumed = Module(ours)
    fit(resumed, epochs=2, resume=tmp_path / "saved.ckpt")
    assert all(float(state["step"]) == 2 * STEPS for state in resumed.made.state.values())
    for p, q in zip(values(resumed), values(whole)):
        assert torch.equal(p, q)
    stock = Module(torch.optim.AdamW)
    fit(stock, epochs=2, resume=tmp_path / "saved.ckpt")
    for p, q in zip(values(stock), values(whole)):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_overlap_has_the_same_bits(ours: Of) -> None:
    ends = []
    for options in ({}, {"overlap": True}):
        module = Module(ours, **options)
        fit(module, epochs=2, gradient_clip_val=None)
        ends.append(values(module))
    assert module.made.sent_in_backward > 0
    assert all(torch.equal(p, q) for p, q in zip(*ends))
    with pytest.raises(RuntimeError, match=r"optimizer\.clip_grad_norm_\(\)"):
        fit(Module(ours, overlap=True))


def test_two_processes_save_one_state(torchrun: Callable[..., str], tmp_path: pathlib.Path) -> None:
    """DDP with shard_group: Lightning brings the state together by itself, and torch's AdamW goes on from it."""
    torchrun(pathlib.Path(__file__).with_name("lightning_process.py"), tmp_path)
    ours, theirs = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("ours", "torch"))
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=1e-5, atol=1e-6)
    a, b = (each["optimizer_states"][0]["state"] for each in (ours, theirs))
    assert a.keys() == b.keys() and len(b) == 4
    for index, entry in b.items():
        for name, value in entry.items():
            torch.testing.assert_close(a[index][name], value, rtol=1e-5, atol=1e-7)
