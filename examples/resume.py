"""Train with dropout, save, and resume on other devices with another plan, or in one process without autotp.

    torchrun --standalone --nproc-per-node 4 examples/resume.py tensor3d
    torchrun --standalone --nproc-per-node 2 examples/resume.py zero3
    python examples/resume.py

Each command resumes where the last one ended, with the losses of one uninterrupted run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import BertConfig, BertForMaskedLM

FOLDER, RANK = Path("checkpoints"), os.environ.get("RANK")


def batch(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step; the step is the seed."""
    ids = torch.randint(96, (8, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def main(strategy: str = "auto", steps: str = "4") -> None:
    """Train for some steps from the last checkpoint, if there is one, and save another."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model: Any = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4)).double().train()
    if RANK is not None:
        import autotp

        model = autotp.parallelize(model, kwargs=batch(0), strategy=strategy, dropout="as-single")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state() -> dict[str, Any]:
        random = {"cpu": torch.get_rng_state()} if RANK is None else autotp.RandomState()
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True), random=random)

    first = max((int(each.name) for each in FOLDER.glob("*")), default=0)
    if first:
        dcp.load(found := state(), checkpoint_id=FOLDER / str(first))
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        if RANK is None:
            torch.set_rng_state(found["random"]["cpu"])
    last = first + int(steps)
    for step in range(first, last):
        loss = model(**batch(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if RANK in (None, "0"):
            print(f"step {step}: {loss.item():.17g}")
    dcp.save(state(), checkpoint_id=FOLDER / str(last))
    if RANK is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
