"""Train a small GPT-2, byte by byte, on the sources of Python's own standard library.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py

The model is Hugging Face's, unmodified. The plan is printed, the model trained on all processes and then on
one, and the two loss curves compared.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from common import Task, arguments, run
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["batches", "build", "corpus"]

BATCH, SEQUENCE = 8, 128
LIMIT = 4_000_000


def corpus() -> Tensor:
    """The bytes of the standard library's modules, in the order of their names, as int64."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[:LIMIT]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def build() -> nn.Module:
    """GPT-2's architecture with 4 layers of width 128 over bytes, without dropout."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=SEQUENCE,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    # Transformers would fall back to this loss anyway, but with a warning on every rank.
    model.loss_type = "ForCausalLM"
    return model


def batches(data: Tensor, step: int) -> dict[str, Tensor]:
    """The global batch of one step: ``BATCH`` random windows of ``SEQUENCE`` bytes; the step is the seed."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - SEQUENCE, (BATCH,), generator=generator)
    windows = torch.stack([data[start : start + SEQUENCE] for start in starts.tolist()])
    return {"input_ids": windows, "labels": windows}


if __name__ == "__main__":
    options = arguments("Train a small GPT-2 on the standard library's sources.", steps=60)
    text = corpus()
    run(Task("GPT-2", build, lambda step: batches(text, step), lambda output: output.loss), options)
