"""Shared code of the examples: the process group, the training loop, and the comparison with one device."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import autotp
from autotp.cli.render import plan_table
from autotp.cli.terminal import make_console

__all__ = [
    "TOLERANCE",
    "Task",
    "arguments",
    "compare",
    "curve_table",
    "largest_difference",
    "run",
    "square_mesh",
]

#: The largest allowed relative difference between the two loss curves: float32 sums in a different order differ by less.
TOLERANCE = 1e-4

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Task:
    """A model to train, and its data.

    Attributes:
        name: The name in headings.
        build: Creates the model; called with a fixed seed, so that every call creates the same one.
        batch: Step number -> the global batch, as keyword arguments of the model, the same on every rank.
        loss: Extracts the loss, a scalar, from the output of the model.
        learning_rate: The learning rate of AdamW.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any], Tensor]
    learning_rate: float = 1e-3


def arguments(description: str, steps: int) -> argparse.Namespace:
    """Parse the options of all examples."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--topology", help="a preset's name or a TOML file (default: a guess at this machine)")
    parser.add_argument(
        "--strategy",
        default="tensor3d",
        help="a family, or auto (default: %(default)s; auto splits little of such a small model)",
    )
    parser.add_argument(
        "--mesh",
        help="sizes of the mesh axes, such as 2,2, or auto (default: two axes of similar size)",
    )
    parser.add_argument("--steps", type=int, default=steps, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")
    return parser.parse_args()


def square_mesh(devices: int) -> tuple[int, int]:
    """The two factors of a number that are closest to each other, the smaller one first."""
    small = max(size for size in range(1, math.isqrt(devices) + 1) if devices % size == 0)
    return small, devices // small


def run(task: Task, options: argparse.Namespace) -> None:
    """Train on all processes, then on one, and exit with 1 if the loss curves differ.

    Args:
        task: What to train.
        options: The result of ``arguments``.
    """
    with process_group() as device:
        rank = dist.get_rank()
        console = make_console(quiet=rank != 0)
        model = _build(task, options.seed, device)
        example = _moved(task.batch(0), device)
        parallel = autotp.parallelize(
            model,
            _topology(options.topology),
            kwargs=example,
            strategy=options.strategy,
            mesh=_mesh(options.mesh),
        )
        assert isinstance(parallel, autotp.DistributedModule)
        console.rule(f"{task.name} on {dist.get_world_size()} processes")
        console.print(plan_table(parallel.plan, limit=24))
        distributed, pace = train(task, parallel, options.steps, device, console, "distributed")

        # The other processes wait, so that they do not slow down the one that trains.
        difference = 0.0
        if rank == 0:
            plain = _build(task, options.seed, device)
            single, single_pace = train(task, plain, options.steps, device, console, "one device")
            difference = compare(task, distributed, single, console)
            console.print(f"seconds a step: {pace:.3f} distributed, {single_pace:.3f} on one device")
        dist.barrier()
    if not difference <= TOLERANCE:
        sys.exit(1)


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the processes that torchrun started, with NCCL if each has a GPU, otherwise with gloo on CPUs."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start it with: torchrun --standalone --nproc-per-node 4 {sys.argv[0]}")
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        # TensorFloat-32 keeps 10 bits, too few to compare curves to 1e-4.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def train(
    task: Task, model: nn.Module, steps: int, device: torch.device, console: Console, label: str
) -> tuple[list[float], float]:
    """Train a model with AdamW.

    Returns:
        The loss before each step, and the median time of a step in seconds.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    losses: list[float] = []
    seconds: list[float] = []
    progress = Progress(
        TextColumn(f"{label:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        console=console,
    )
    with progress:
        bar = progress.add_task(label, total=steps, loss=math.nan)
        for step in range(steps):
            start = time.perf_counter()
            loss = task.loss(model(**_moved(task.batch(step), device)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            progress.update(bar, advance=1, loss=losses[-1])
    return losses, sorted(seconds)[len(seconds) // 2] if seconds else 0.0


def largest_difference(curve: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two loss curves; NaN if one of them has a NaN."""
    pairs = zip(curve, reference, strict=True)
    differences = [abs(ours - theirs) / abs(theirs) if ours != theirs else 0.0 for ours, theirs in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)


def curve_table(curve: Sequence[float], reference: Sequence[float], rows: int = 12) -> Table:
    """A table of two loss curves side by side, reduced to a number of rows."""
    table = Table("step", "distributed", "one device", "relative difference", "loss", header_style="bold")
    for column in table.columns[:4]:
        column.justify = "right"
    last = len(curve) - 1
    shown = sorted({round(last * row / max(rows - 1, 1)) for row in range(rows)}) if curve else []
    top = max(map(abs, curve), default=1.0) or 1.0
    for step in shown:
        ours, theirs = curve[step], reference[step]
        bar = "█" * round(20 * abs(ours) / top) if math.isfinite(ours / top) else "?"
        difference = largest_difference([ours], [theirs])
        table.add_row(str(step), f"{ours:.6f}", f"{theirs:.6f}", f"{difference:.1e}", Text(bar, "cyan"))
    return table


def compare(task: Task, curve: Sequence[float], reference: Sequence[float], console: Console) -> float:
    """Print both loss curves and whether they agree; returns their largest relative difference."""
    difference = largest_difference(curve, reference)
    console.print(curve_table(curve, reference))
    verdict = ("the same curve", "green") if difference <= TOLERANCE else ("NOT the same curve", "red")
    figures = f"; largest relative difference {difference:.1e}, allowed {TOLERANCE:g}"
    console.print(Text.assemble(f"{task.name}: ", verdict, figures))
    return difference


def _build(task: Task, seed: int, device: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    return task.build().to(device).train()


def _moved(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _topology(name: str | None) -> autotp.Topology:
    if name is None:
        return autotp.Topology.local()
    return autotp.Topology.load(name).resized(dist.get_world_size())


def _mesh(text: str | None) -> tuple[int, ...] | None:
    if text == "auto":
        return None
    if text is None:
        return square_mesh(dist.get_world_size())
    return tuple(int(size) for size in text.split(","))
