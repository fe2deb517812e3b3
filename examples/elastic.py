"""Training that survives kills, and goes on with more or fewer processes.

    torchrun --standalone --nproc-per-node 4 --max-restarts 1 examples/elastic.py checkpoints --steps 12 --kill-at 7
    torchrun --standalone --nproc-per-node 2 examples/elastic.py checkpoints --steps 18

Every start makes a plan for the processes that there are, and loads the last whole checkpoint, whatever plan wrote it.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import process_group, square_mesh
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autotp


def build() -> nn.Module:
    """A layer of a transformer, and what stands behind it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), nn.Linear(16, 16)).double()


def batch(step: int) -> Tensor:
    """The global batch of a step, whose number is the seed."""
    return torch.randn(8, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def main(options: argparse.Namespace) -> None:
    """Train from the last checkpoint on."""
    ranks, folder = dist.get_world_size(), Path(options.folder)
    parallel = autotp.parallelize(build(), args=(batch(0),), strategy="tensor3d", mesh=square_mesh(ranks))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    done = max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)  # which is written last
    if done:
        weights, moments = get_state_dict(parallel, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(done))
        set_state_dict(parallel, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for step in range(done, options.steps):
        if step == options.kill_at and dist.get_rank() == ranks - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = (parallel(batch(step)) - batch(step).flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} on {ranks} processes: {loss.item():.15f}", flush=True)
        if (step + 1) % options.every == 0:
            weights, moments = get_state_dict(parallel, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(step + 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train, and go on where an earlier start ended.")
    parser.add_argument("folder", help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--kill-at", type=int, help="the step at which the first start loses its last process")
    with process_group():
        main(parser.parse_args())
