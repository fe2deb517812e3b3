"""Compares the predicted memory of plans with the allocated memory of steps: python -m benchmarks.memory [--write]

One process runs the first device of every plan, with fake collectives that exchange no data: the memory of a device does
not depend on the values that it receives.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import autotp
from autotp import AutotpError
from benchmarks.allocated import Allocated
from benchmarks.models import trained
from benchmarks.tables import command, table

#: Model -> the families and meshes that are planned.
SETTINGS: Mapping[str, Sequence[tuple[str, tuple[int, ...]]]] = {
    "gpt": [("zero3", (4,)), ("megatron-sp", (2, 2)), ("tensor3d", (2, 2)), ("auto", (4,))],
    "llama": [("zero3", (4,)), ("megatron-sp", (4,)), ("tensor3d", (2, 2)), ("summa-2d", (2, 2))],
    "unet": [("zero3", (4,)), ("megatron-sp", (2, 2)), ("tensor3d", (2, 2)), ("data", (4,))],
    "vit": [("zero3", (4,)), ("megatron-1d", (2, 2)), ("megatron-sp", (4,)), ("3d", (2, 2, 2))],
}
RECOMPUTE = ("none", "selective", "full", "auto")
#: The memory limit for ``auto``, relative to the memory of the plan without recomputation.
SHORT = 0.85
#: The time limit of planning in seconds.
LIMIT = 20.0
STEPS = 2


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """A fake process group, in which this process is rank 0 and no other rank exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def allocated(model: nn.Module, args: Sequence[Any], plan: autotp.Plan, schedule: str = "none") -> int:
    """The peak of live tensors of a device in a training step, in bytes, including the optimizer's state."""
    with pretended(plan.devices):
        parallel = autotp.parallelize(model, args=args, plan=plan, schedule=schedule)
        optimizer = torch.optim.AdamW(parallel.parameters(), foreach=False)
        parallel(*args).backward()  # the first step traces the graphs with fake tensors
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
    """[family, mesh, predicted bytes, allocated bytes] for every family and mesh with a plan."""
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


def plans(
    model: nn.Module, args: Sequence[Any], family: str, mesh: tuple[int, ...]
) -> Iterator[tuple[str, str | None, autotp.Plan]]:
    """Yields (recomputation, precision, plan), with overlap, for every combination for which there is a plan."""
    topology = autotp.Topology.load("dgx-h100").resized(torch.Size(mesh).numel())
    for precision in (None, "bf16-mixed"):
        needed = math.inf
        for recompute in RECOMPUTE:
            memory = SHORT * needed if recompute == "auto" else None
            options: dict[str, Any] = {
                "recompute": recompute,
                "precision": precision,
                "memory": memory,
                "time_limit": LIMIT,
            }
            try:
                plan = autotp.plan(model, topology, args, strategy=family, mesh=mesh, **options)
            except AutotpError:
                continue
            needed = plan.predicted.memory_bytes if recompute == "none" else needed
            # With more memory, schedules would use more than the plan predicts.
            yield recompute, precision, replace(plan, memory_bound=plan.predicted.memory_bytes)


def make() -> str:
    """Compares predicted and allocated memory, with overlap, by model, family, recomputation and precision."""
    rows, errors = [], []
    for title, settings in SETTINGS.items():
        model, args = trained(title)
        for family, mesh in settings:
            for recompute, precision, plan in plans(model, args, family, mesh):
                predicted, measured = plan.predicted.memory_bytes, allocated(model, args, plan, "overlap")
                errors.append(predicted / measured - 1)
                shape, figures = "×".join(map(str, mesh)), (f"{predicted / 1e6:.1f}", f"{measured / 1e6:.1f}")
                rows.append([title, family, shape, recompute, precision or "float32", *figures, f"{errors[-1]:+.1%}"])
    sizes = [abs(error) for error in errors]
    return f"""# Memory

Generated by `python -m benchmarks.memory --write`.

The predicted memory of a device (`Plan.predicted.memory_bytes`), compared with the largest sum of the sizes of all live
tensors during a training step with AdamW, measured operator by operator. Both include parameters, gradients, optimizer
state, buffers, inputs, saved activations, what is recomputed for the backward pass, temporarily gathered tensors and
messages; neither includes workspaces inside kernels and collectives. Plans are made and run with overlap. A prediction
includes 2.5% for it: parameters gathered early, and messages of several tensors. Each plan's memory limit is set to its
own prediction, and its schedule stays within that; with more memory, schedules would use more.

Recomputation is `none`, `selective`, `full`, or what `auto` finds with {SHORT:.0%} of the memory that `none` takes. The
vision transformer has dropout.

For {len(rows)} plans, the median error is {statistics.median(sizes):.1%} and the largest {max(sizes):.1%}. Plans that
allocate more than predicted: {sum(error < 0 for error in errors) or "none"}.

{table(["model", "strategy", "mesh", "recompute", "precision", "predicted MB", "allocated MB", "error"], rows)}"""


if __name__ == "__main__":
    command("memory", "memory.md", make)
