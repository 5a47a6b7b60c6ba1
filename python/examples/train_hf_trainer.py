"""Hugging Face Trainer: the optimizer's class and arguments are passed as optimizer_cls_and_kwargs. A Llama with random
weights and made data: nothing is downloaded. --output FOLDER saves after half of the steps, --resume goes on from it.

    mlpo-ctl run --path /var/tmp --memory 256MiB -- python python/examples/train_hf_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from mlpo.torch import OffloadAdamW
from tiny_lm import LENGTH, TOKENS, WIDTH, arguments, text
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self._rows = text(count, seed=1)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--output", help="a folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in the folder")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH + 1,
            bos_token_id=0, eos_token_id=1, pad_token_id=None,
        )  # fmt: skip
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output or tempfile.mkdtemp(prefix="mlpo-example-"),
            max_steps=options.steps,
            per_device_train_batch_size=16,
            weight_decay=0.1,  # the Trainer makes the param groups with it
            lr_scheduler_type="cosine",
            max_grad_norm=1.0,
            logging_steps=10,
            save_strategy="steps" if options.output else "no",
            save_steps=max(1, options.steps // 2),
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=True,
            seed=1,
        ),
        train_dataset=Rows(16 * options.steps),
        # Instead of the learning rate of TrainingArguments: lr is the optimizer's.
        optimizer_cls_and_kwargs=(OffloadAdamW, {"lr": 3e-3}),
    )
    trainer.train(resume_from_checkpoint=True if options.resume else None)
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    for step, loss in losses:
        print(f"step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
