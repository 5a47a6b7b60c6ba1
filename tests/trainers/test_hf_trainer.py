"""Hugging Face's Trainer with optimizer_cls_and_kwargs, beside its own AdamW; its checkpoints."""

from __future__ import annotations

import pathlib
from typing import Any, Callable, Optional

import mlpo
import pytest
import torch
from mlpo.torch import OffloadAdamW

transformers = pytest.importorskip(
    "transformers", reason="skipped: transformers is not installed (tests/run --trainers says why)"
)
pytest.importorskip("accelerate", reason="skipped: the Trainer needs accelerate, which is not installed")

LR, DECAY = 3e-3, 0.1


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self._rows = torch.randint(32, (160, 12), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def trainer(folder: pathlib.Path, optimizer: Optional[tuple[type, dict[str, Any]]], **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=12, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    arguments = {
        "max_steps": 8, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": LR,
        "weight_decay": DECAY, "lr_scheduler_type": "linear", "max_grad_norm": 0.5, "save_strategy": "steps",
        "save_steps": 4, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "seed": 1,
    } | options  # fmt: skip
    return transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=transformers.TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=Rows(),
        optimizer_cls_and_kwargs=optimizer,
    )


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def ours(client: mlpo.Client) -> Callable[..., tuple[type, dict[str, Any]]]:
    """What to pass; each optimizer on the client has a name of its own."""
    count = iter(range(1000))
    return lambda **options: (OffloadAdamW, {"lr": LR, "client": client, "name": str(next(count)), **options})


def test_trains_as_its_own_adamw_does(ours: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    stock = trainer(tmp_path / "stock", None, optim="adamw_torch")
    mine = trainer(tmp_path / "mine", ours())
    for each in (stock, mine):
        each.train()
    for p, q in zip(values(mine.model), values(stock.model)):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    histories = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (mine, stock)]
    assert len(histories[0]) == 8 and histories[0] == pytest.approx(histories[1], rel=1e-3)
    optimizer = mine.optimizer.optimizer
    assert isinstance(optimizer, OffloadAdamW)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, DECAY}


def test_goes_on_from_its_checkpoint(ours: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """With the bits of the run that did not stop; and torch's AdamW takes the state that was saved."""
    whole = trainer(tmp_path, ours())
    whole.train()
    resumed = trainer(tmp_path, ours())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for p, q in zip(values(resumed.model), values(whole.model)):
        assert torch.equal(p, q)
    stock = trainer(tmp_path / "stock", None, optim="adamw_torch")
    stock.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for p, q in zip(values(stock.model), values(whole.model)):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_overlap_has_the_same_bits(ours: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """Without the Trainer's clipping, which reads .grad: that raises, and says what to do."""
    ends = []
    for options in ({}, {"overlap": True, "gradient_accumulation_steps": 2}):
        each = trainer(tmp_path, ours(**options), max_grad_norm=0.0, save_strategy="no")
        each.train()
        ends.append(values(each.model))
    assert each.optimizer.optimizer.sent_in_backward > 0
    assert all(torch.equal(p, q) for p, q in zip(*ends))
    clipped = trainer(tmp_path, ours(**options), save_strategy="no")
    with pytest.raises(RuntimeError, match=r"optimizer\.clip_grad_norm_\(\)"):
        clipped.train()
