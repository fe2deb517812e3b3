"""Train through kills, and resume with more or fewer processes: every start plans anew and loads the last checkpoint.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise, restarts of torch 2.13 find the addresses of earlier processes
torchrun --standalone --nproc-per-node 4 --max-restarts 1 examples/elastic.py checkpoints --steps 12 --kill-at 7
torchrun --standalone --nproc-per-node 2 examples/elastic.py checkpoints --steps 18
"""

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
    """A transformer layer and a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), nn.Linear(16, 16)).double()


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of the task, to reverse each row, on the global batch of a step; the step is the seed."""
    rows = torch.randn(8, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return (model(rows) - rows.flip(-1)).square().mean()


def main(folder: Path, steps: int, kill_at: int | None) -> None:
    """Train from the last checkpoint on; at step ``kill_at``, the last process of the first start is killed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    example = torch.empty(8, 6, 16, dtype=torch.float64)
    parallel = autotp.parallelize(build(), args=(example,), strategy="tensor3d", mesh=square_mesh(ranks))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    if done := max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0):  # written last
        weights, moments = get_state_dict(parallel, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(done))
        set_state_dict(parallel, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for step in range(done, steps):
        if step == kill_at and rank == ranks - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = loss_of(parallel, step)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} on {ranks} processes: {loss.item():.15f}", flush=True)
        if (step + 1) % 5 == 0:
            weights, moments = get_state_dict(parallel, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(step + 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--kill-at", type=int)
    with process_group():
        main(**vars(parser.parse_args()))
