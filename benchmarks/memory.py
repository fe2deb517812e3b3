"""The memory that plans predict beside what their steps allocate: python -m benchmarks.memory [--write]

One process runs the first device of every plan, with collectives that exchange nothing: what a device allocates does not
depend on what the others send.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import autotp
from autotp import FAMILIES, AutotpError
from benchmarks.allocated import Allocated
from benchmarks.models import trained
from benchmarks.tables import command, table

MESHES = ((4,), (2, 2), (2, 2, 2))
STEPS = 2


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """A process group of so many ranks, of which only the first exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def allocated(model: nn.Module, args: Sequence[Any], plan: autotp.Plan, schedule: str = "none") -> int:
    """Most bytes of tensors alive at once in a training step of a device, the optimizer's state being there already."""
    with pretended(plan.devices):
        parallel = autotp.parallelize(model, args=args, plan=plan, schedule=schedule)
        optimizer = torch.optim.AdamW(parallel.parameters(), foreach=False)
        parallel(*args).backward()  # the first step makes the graphs, of tensors without memory
        optimizer.step()
        optimizer.zero_grad()
        watch = Allocated()
        state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
        for tensor in (*state, *parallel.parameters(), *parallel.buffers(), *args):
            watch.add(tensor)
        with watch:
            for _ in range(STEPS):
                watch.reset()
                parallel(*args).backward()
                optimizer.step()
                optimizer.zero_grad()
        return watch.peak


def compared(
    model: nn.Module, args: Sequence[Any], names: Sequence[str], meshes: Sequence[tuple[int, ...]]
) -> list[list[Any]]:
    """(family, mesh, predicted bytes, allocated bytes) of every family that has a plan on a mesh."""
    rows = []
    for mesh in meshes:
        devices = torch.Size(mesh).numel()
        topology = autotp.Topology.load("dgx-h100").resized(devices)
        for name in names:
            try:
                plan = autotp.plan(model, topology, args, strategy=name, mesh=mesh, schedule="none")
            except AutotpError:
                continue
            rows.append([name, mesh, plan.predicted.memory_bytes, allocated(model, args, plan)])
    return rows


def make() -> str:
    """Predicted and allocated memory of every family on meshes of one to three axes."""
    rows, errors = [], []
    for title in ("gpt", "llama", "unet"):
        model, args = trained(title)
        for name, mesh, predicted, found in compared(model, args, list(FAMILIES), MESHES):
            error = predicted / found - 1
            errors.append(abs(error))
            shape = "×".join(map(str, mesh))
            rows.append([title, name, shape, f"{predicted / 1e6:.1f}", f"{found / 1e6:.1f}", f"{error:+.0%}"])
    return f"""# Memory

Made by `python -m benchmarks.memory --write`.

Predicted bytes of a device (`Plan.predicted.memory_bytes`) beside the most bytes of tensors that were alive at once in a
step of AdamW, watched operator by operator. Both count parameters, gradients, optimizer state, buffers, inputs, what the
backward pass keeps and what is gathered for a while; neither counts workspaces inside kernels and collectives. Planned and
run without overlap (`schedule="none"`).

Of {len(rows)} plans the median error is {statistics.median(errors):.0%}, the largest {max(errors):.0%}.

{table(["model", "strategy", "mesh", "predicted MB", "allocated MB", "error"], rows)}"""


if __name__ == "__main__":
    command("memory", "memory.md", make)
