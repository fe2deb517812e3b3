"""What `debug=True` reports of wrong numbers; each case is a module of its own."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import autotp


class Model(nn.Module):
    """Like a real model, except for a root and for a buffer that it adds, which may differ between ranks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x, y):
        return self.norm(self.blocks(x) * y.sqrt() + self.shift).square().mean() + self.blocks(x * y).abs().sqrt().mean()


def made(strategy, **options):
    torch.manual_seed(0)
    args = torch.rand(8, 8), torch.zeros(8, 8) + 0.5
    ranks = dist.get_world_size()
    return autotp.parallelize(Model(), None, args, strategy=strategy, mesh=(ranks,), **options), args


def refused(said, call):
    try:
        call()
    except autotp.AutotpError as error:
        assert all(word in str(error) for word in said), error
        return
    raise AssertionError(f"nobody said {said}")


def right(strategy, schedule):
    parallel, args = made(strategy, debug=True, schedule=schedule)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        parallel(*args).backward()
        optimizer.step()
    with torch.no_grad():
        parallel(*args)


def wrong(strategy, schedule):
    parallel, (x, y) = made(strategy, debug=True, schedule=schedule)
    parallel(x, y).backward()
    refused(["output 0", "NaN", "the first operator", "operator sqrt has"], lambda: parallel(x, -y).backward())
    with torch.no_grad():
        for parameter in parallel.blocks.parameters():
            parameter.zero_()
    refused(["the gradient of parameter blocks.", "the first", "of operator abs_1 has"], lambda: parallel(x, y).backward())
    parallel, args = made(strategy, debug=True, schedule=schedule)
    parallel(*args).backward()
    refused(["the gradient of output 0 differs"], lambda: (parallel(*args) * (1 + dist.get_rank())).backward())
    if strategy == "megatron-1d":  # the batch is replicated, so every rank computes what follows
        parallel.shift[0] += dist.get_rank()
        refused(["differs between ranks 0 and 1", "operator add differs"], lambda: parallel(*args).backward())


def seconds():
    found = []
    for debug in (False, True):
        parallel, args = made("megatron-1d", debug=debug)
        times = []
        for _ in range(40):
            begin = time.perf_counter()
            parallel(*args).backward()
            times.append(time.perf_counter() - begin)
        found.append(statistics.median(times[5:]))
    if dist.get_rank() == 0:
        print(f"a step takes {found[0] * 1e3:.1f} ms, with debug=True {found[1] * 1e3:.1f} ms")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for strategy, schedule in (("megatron-1d", "overlap"), ("data", "none")):
        right(strategy, schedule)
        wrong(strategy, schedule)
    seconds()
    if dist.get_rank() == 0:
        print("passed")
    dist.destroy_process_group()
