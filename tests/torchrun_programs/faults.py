"""Ranks that diverge, or stop, and what the others are told. A `FOUND` line is what a rank was told."""

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


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)
        self.block = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.head(self.block(self.embed(ids))).flatten(0, 1), labels.flatten())


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
    """One rank makes a call that it has made before, the others make a new one."""
    parallel, x = made()
    parallel(x).backward()
    parallel(x).backward() if rank == 0 else evaluated(parallel, x)
    time.sleep(LIMIT)
    parallel(x)


def known_call():
    """All ranks have made the calls before, but make them in different orders."""
    parallel, x = made(schedule="none")
    for _ in range(2):
        parallel(x).backward()
        evaluated(parallel, x)
    parallel(x).backward() if rank == 0 else evaluated(parallel, x)
    time.sleep(LIMIT)
    parallel(x)


def freezes():
    """One rank freezes a parameter."""
    parallel, x = made()
    parallel(x).backward()
    if rank == 1:
        next(parallel.parameters()).requires_grad_(False)
    parallel(x).backward()
    time.sleep(LIMIT)
    parallel(x)


def stopped():
    """A rank is stopped some time after its last call."""
    parallel, x = made()
    parallel(x).backward()
    time.sleep(LIMIT / 8)
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        parallel(x).backward()
    finally:
        os.kill(pids[1], signal.SIGKILL)  # the launcher would wait for half a minute


def late():
    """A rank is busy elsewhere and arrives late: no error."""
    parallel, x = made()
    parallel(x).backward()
    if rank == 1:
        time.sleep(LIMIT / 2)
    parallel(x).backward()
    print("FOUND nothing\n", end="", flush=True)  # in one write, as ranks share the output


def language(strategy, schedule="overlap"):
    torch.manual_seed(0)
    model, ids = Language().double(), torch.randint(48, (8, 32))
    return model, autotp.parallelize(model, None, (ids, ids), strategy=strategy, schedule=schedule), ids


def raised(call, *args):
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def say(what, found):
    print(f"FOUND {rank} {what}: {found}\n", end="", flush=True)  # in one write, as ranks share the output


def one_fails(strategy, schedule):
    """A token is out of range in rank 1's part of the batch; no operator is sharded along the vocabulary."""
    model, parallel, ids = language(strategy, schedule)
    _, another, _ = language(strategy, schedule)
    for module in (parallel, another):
        module(ids, ids).backward()
    wrong = ids.clone()
    wrong[7, 5] = 48
    begin = time.monotonic()
    say("failing", raised(parallel, wrong, ids))
    say("prompt", time.monotonic() - begin < 5)
    for what, module in (("next", parallel), ("another", another)):
        say(what, raised(module, ids, ids))
    say("new", raised(language, strategy))
    dist.destroy_process_group()
    say("anew", (language(strategy)[1](ids, ids) - model(ids, ids)).abs().item() < 1e-12)


def all_fail(strategy, schedule):
    """The token is out of range in every part: all ranks raise alike and go on, as they do if a hook raises on all."""
    model, parallel, ids = language(strategy, schedule)
    parallel(ids, ids).backward()
    wrong = ids.clone()
    wrong[:, 5] = 48
    say("failing", raised(parallel, wrong, ids))
    hook = parallel.head.weight.register_hook(lambda gradient: 1 // 0)
    say("backward", raised(parallel(ids, ids).backward))
    hook.remove()
    say("next", (parallel(ids, ids) - model(ids, ids)).abs().item() < 1e-12)


def backward_fails(strategy, schedule):
    """The backward pass of rank 1 ends early, in a hook that runs outside of the module's functions."""
    _, parallel, ids = language(strategy, schedule)
    parallel(ids, ids).backward()
    if rank == 1:
        parallel.head.weight.register_hook(lambda gradient: 1 // 0)
    say("failing", raised(parallel(ids, ids).backward))
    say("next", raised(parallel, ids, ids))


def gone():
    """A rank exits during a step."""
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
        globals()[sys.argv[1]](*sys.argv[2:4])
    except autotp.AutotpError as error:
        operator = getattr(error, "operator", "")
        print(
            f"FOUND {rank} {type(error).__name__} [{operator}] {time.monotonic() - begin:.1f} {error}\n", end="", flush=True
        )
    time.sleep(0.5)  # the other ranks report before the launcher ends them
    os._exit(0)
