"""Load weights into a model without memory, train it in bfloat16 with accumulated gradients, and write checkpoints.

torchrun --standalone --nproc-per-node 2 examples/train_from_meta.py
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

STEPS, MICRO_BATCHES, BATCH, TOKENS = 6, 4, 4, 16
ROWS = torch.arange(TOKENS) + torch.arange(STEPS * MICRO_BATCHES * BATCH)[:, None] % 16  # rows count up
SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
CONFIG = LlamaConfig(**SIZES, intermediate_size=128, use_cache=False)


def main(folder: Path) -> None:
    """Train from the weights in ``folder / "pretrained"``, and write checkpoints to ``folder``."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_rank() == 0:  # instead of a download
        LlamaForCausalLM(CONFIG).save_pretrained(folder / "pretrained")
    dist.barrier()

    micro_batches = [{"input_ids": ids, "labels": ids} for ids in ROWS.split(BATCH)]
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    parallel = autotp.parallelize(model, kwargs=micro_batches[0], precision="bf16-mixed", accumulate=MICRO_BATCHES)
    assert isinstance(parallel, autotp.DistributedModule)
    autotp.load_pretrained(parallel, folder / "pretrained")  # each rank reads only its own shards
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)  # the parameters are float32

    for number, batch in enumerate(micro_batches, start=1):
        last = number % MICRO_BATCHES == 0  # the gradients are reduced once per step
        with contextlib.nullcontext() if last else parallel.no_sync():
            loss = parallel(**batch).loss / MICRO_BATCHES
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            step = number // MICRO_BATCHES
            if dist.get_rank() == 0:
                print(f"step {step}: loss {MICRO_BATCHES * loss.item():.4f}")
            if step % 3 == 0:
                weights, moments = get_state_dict(parallel, optimizer)
                dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "trained"))
