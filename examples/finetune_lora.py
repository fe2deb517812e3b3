"""Fine-tune a small Llama with peft's LoRA, validate after every epoch, and save the merged model.

torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import autotp

BATCH, TOKENS, EPOCHS = 8, 16, 3
ROWS = torch.arange(TOKENS) + torch.randperm(96, generator=torch.Generator().manual_seed(0))[:, None]  # rows count up
TRAINING, VALIDATION = ROWS[:80], ROWS[80:]


def build() -> PeftModel:
    """The model with adapters; for a real model, load the base with ``from_pretrained``."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=128, use_cache=False))
    return get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.05))


def main() -> None:
    """Train only the adapters; the weights of the base model are frozen."""
    parallel = autotp.parallelize(build(), kwargs={"input_ids": ROWS[:BATCH], "labels": ROWS[:BATCH]})
    optimizer = torch.optim.AdamW([each for each in parallel.parameters() if each.requires_grad], lr=2e-2)
    for epoch in range(EPOCHS):
        parallel.train()
        for ids in TRAINING.split(BATCH):
            loss = parallel(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        parallel.eval()  # no dropout: the first call creates another program over the same parameters
        with torch.no_grad():
            losses = [parallel(input_ids=ids, labels=ids).loss for ids in VALIDATION.split(BATCH)]
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: validation loss {torch.stack(losses).mean().item():.4f}")

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(parallel, options=whole)  # returned on rank 0 only; every rank must call it
    if dist.get_rank() == 0:
        tuned = build()
        tuned.load_state_dict(weights)
        tuned.merge_and_unload().save_pretrained(sys.argv[1] if len(sys.argv) > 1 else "finetuned")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
