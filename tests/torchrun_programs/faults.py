"""Ranks that do different things, or nothing any more: what the others are told. `FOUND` lines are what a rank got."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import autotp

LIMIT = 6.0
rank = 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.blocks(x).square().mean()


def made(**options):
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    return autotp.parallelize(Model(), None, (x,), strategy="megatron-1d", mesh=(dist.get_world_size(),), **options), x


def evaluated(parallel, x):
    parallel.eval()
    with torch.no_grad():
        found = parallel(x)
    parallel.train()
    return found


def new_call():
    """One rank makes a call that it has made before, the others a new one."""
    parallel, x = made()
    parallel(x).backward()
    parallel(x).backward() if rank == 0 else evaluated(parallel, x)
    time.sleep(LIMIT)
    parallel(x)


def known_call():
    """Calls that all ranks have made before, but not in one order."""
    parallel, x = made(schedule="none")
    for _ in range(2):
        parallel(x).backward()
        evaluated(parallel, x)
    parallel(x).backward() if rank == 0 else evaluated(parallel, x)
    time.sleep(LIMIT)
    parallel(x)


def stopped():
    """A rank stops."""
    parallel, x = made()
    parallel(x).backward()
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        parallel(x).backward()
    finally:
        os.kill(pids[1], signal.SIGKILL)  # the launcher would wait for half a minute


def late():
    """A rank is busy elsewhere, and comes after all: nothing is wrong."""
    parallel, x = made()
    parallel(x).backward()
    if rank == 1:
        time.sleep(LIMIT / 2)
    parallel(x).backward()
    print("FOUND nothing", flush=True)


def gone():
    """A rank ends in the midst of a step."""
    parallel, x = made()
    parallel(x).backward()
    if rank == 1:
        os._exit(0)
    parallel(x).backward()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    rank = dist.get_rank()
    begin = time.monotonic()
    try:
        globals()[sys.argv[1]]()
    except autotp.AutotpError as error:
        operator = getattr(error, "operator", "")
        print(f"FOUND {rank} {type(error).__name__} [{operator}] {time.monotonic() - begin:.1f} {error}", flush=True)
    time.sleep(0.5)  # the others have their own say before the launcher ends them
    os._exit(0)
