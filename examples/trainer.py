"""Fine-tune a small Llama with transformers' Trainer, distributed over all processes.

torchrun --standalone --nproc-per-node 2 examples/trainer.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import autotp
from autotp.integrations.trainer import Trainer

BATCH, TOKENS = 8, 32


def main() -> None:
    """Train for three epochs, and evaluate."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(TOKENS) + torch.arange(64)[:, None]]
    batch = {"input_ids": torch.zeros(BATCH, TOKENS, dtype=torch.int64), "num_items_in_batch": torch.tensor(1.0)}
    parallel = autotp.parallelize(model, kwargs=batch | {"labels": batch["input_ids"]})
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH, learning_rate=1e-2,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = Trainer(parallel, args, train_dataset=rows, eval_dataset=rows[:BATCH])
        trainer.train()
        trainer.accelerator.print(f"evaluation: {trainer.evaluate()['eval_loss']:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
