"""Step time by memory limit: python -m benchmarks.frontier [--write] (an hour)

`autotp calibrate` measures the machine first. For every model and number of processes, plans are made under decreasing
memory limits, from the memory of the fastest plan without recomputation down to a quarter of it, or to the least memory
that any plan needs. Some of them are run and measured, in turns with torch's own ways of recomputation.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

import autotp
from autotp.errors import MemoryBoundError
from autotp.planner import plan_captured
from autotp.plans.options import Options
from benchmarks.allocator import allocator, keeping_memory
from benchmarks.frontier_steps import CHECKPOINT, PLAIN
from benchmarks.models import trained
from benchmarks.tables import command, machine, table
from costmodel import Topology
from passes.capture import Captured, capture

MODELS = {
    "xl": "`xl` has 2 layers of the widths of GPT-2 XL (1,600 wide, 25 heads) and 8 sequences of 256 tokens.",
    "unet-wide": "`unet-wide` is a U-Net of width 64 with 8 images of 64 × 64.",
}
PROCESSES = (1, 2)
#: Memory limits, relative to the memory of the fastest plan without recomputation.
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
MEASURED = 4
_SAME = 1.005  # relative difference of memory that is ignored
PICTURE = "images/frontier.svg"


@dataclass(frozen=True, slots=True)
class Point:
    """A plan under a memory limit.

    ``name`` is empty if the plan is not measured; ``share`` is the limit relative to the memory of the fastest plan
    without recomputation.
    """

    name: str
    share: float
    plan: autotp.Plan


@dataclass(frozen=True, slots=True)
class Frontier:
    """The plans of a model for a number of processes, the least memory that any needs (bytes), and the measurements.

    ``measured`` maps ways, including the names of plans, to (bytes, seconds).
    """

    model: str
    processes: int
    points: tuple[Point, ...]
    least: float
    measured: Mapping[str, tuple[float, float]]


def planned(
    captured: Captured, topology: Topology, shares: Sequence[float] = SHARES
) -> tuple[list[tuple[float, autotp.Plan]], float]:
    """(share, plan) for every share for which there is a plan, and the least memory that any plan needs, in bytes."""

    def plan(**options: Any) -> autotp.Plan:
        return plan_captured(captured, topology, Options("auto", optimizer="sgd", **options))

    free = plan(recompute="none")
    whole, least, found = free.predicted.memory_bytes, 0.0, []
    for share in shares:
        try:
            found.append((share, plan(memory=share * whole, recompute="auto")))
        except MemoryBoundError as error:
            least = error.needed
            break
    if least and least < whole * found[-1][0]:
        found.append((least / whole, plan(memory=least, recompute="auto")))
    return found, min(found[-1][1].predicted.memory_bytes, least or float("inf"))


def some(plans: Sequence[tuple[float, autotp.Plan]], count: int = MEASURED) -> list[Point]:
    """Points for all plans. At most ``count`` distinct ones get a name: first, last, and some evenly between by memory."""
    distinct: dict[str, int] = {}
    for place, (_, plan) in enumerate(plans):
        distinct.setdefault(plan.hash, place)
    places = list(distinct.values())
    if len(places) > count:
        sizes = [plans[place][1].predicted.memory_bytes for place in places]
        wanted = [sizes[0] + (sizes[-1] - sizes[0]) * number / (count - 1) for number in range(count)]
        places = [min(places, key=lambda place: abs(plans[place][1].predicted.memory_bytes - size)) for size in wanted]
    return [Point(f"plan {place}" if place in places else "", *pair) for place, pair in enumerate(plans)]


def calibrated(processes: int, *options: str) -> Topology:
    """The topology of this machine with this number of processes (at least two), calibrated now."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "machine.toml"
        torchrun(processes, "autotp", "calibrate", "--output", str(file), *options)
        return Topology.load(file)


def measure(model: str, topology: Topology, processes: int, rounds: int, shares: Sequence[float] = SHARES) -> Frontier:
    """Plans and measures one model with this number of processes."""
    with tempfile.TemporaryDirectory() as scratch:
        plans, out = Path(scratch) / "plans", Path(scratch) / "out.json"
        module, args = trained(model)
        found, least = planned(capture(module, args), topology.resized(processes), shares)
        points = some(found)
        plans.mkdir()
        for point in points:
            if point.name:
                point.plan.save(plans / f"{point.name}.json")
        torchrun(processes, "benchmarks.frontier_steps", model, str(plans), str(out), "--rounds", str(rounds))
        figures = {name: (each["bytes"], each["seconds"]) for name, each in json.loads(out.read_text()).items()}
    return Frontier(model, processes, tuple(points), least, figures)


def torchrun(processes: int, module: str, *arguments: str) -> None:
    """Runs a module under torchrun with this number of processes on this machine.

    Raises:
        CalledProcessError: The job failed; its output was written to stderr.
    """
    given = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", module]
    variables = {**os.environ, **keeping_memory(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*given, *arguments], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout)
        done.check_returncode()


def behind(frontier: Frontier) -> list[str]:
    """Lines on ways of torch that beat all measured plans with no more memory, or need less memory than all of them."""
    plans = [frontier.measured[point.name] for point in frontier.points if point.name]
    names, found = {point.name for point in frontier.points}, []
    for way, (size, seconds) in frontier.measured.items():
        fitting = [time for held, time in plans if held <= size * _SAME]
        if way in names:
            continue
        if not fitting:
            found.append(f"{way}: no plan takes as little memory, {size / 1e6:.0f} MB")
        elif min(fitting) > seconds:
            found.append(f"{way}: {seconds:.3f} s, {min(fitting) / seconds - 1:.1%} less than the fastest plan")
    return found


def drawn(frontiers: Sequence[Frontier]) -> str:
    """An SVG with the predicted frontier as a line and measurements as marks, per model and number of processes."""
    with matplotlib.rc_context({"svg.hashsalt": "frontier", "font.size": 8}):
        figure = Figure(figsize=(8, 3.2 * -(-len(frontiers) // 2)), layout="constrained")
        panels: Any = figure.subplots(-(-len(frontiers) // 2), min(2, len(frontiers)), squeeze=False)
        for axes, frontier in zip(panels.flat, frontiers, strict=False):
            predicted = [point.plan.predicted for point in frontier.points]
            line = [one.memory_bytes / 1e6 for one in predicted], [one.passes_seconds for one in predicted]
            axes.plot(*line, drawstyle="steps-pre", marker=".", label="predicted")
            for kind, mark in (("plan", "o"), (PLAIN, "s"), (CHECKPOINT, "D"), ("budget", "^")):
                some = [figures for name, figures in frontier.measured.items() if name.startswith(kind)]
                label = {"plan": "plans, measured", "budget": "activation_memory_budget"}.get(kind, kind)
                axes.plot([held / 1e6 for held, _ in some], [time for _, time in some], mark, ms=4, ls="", label=label)
            axes.set_title(f"{frontier.model}, {frontier.processes} process{'es' if frontier.processes > 1 else ''}")
            axes.set_xlabel("MB of a device")
            axes.set_ylabel("seconds of a step")
            axes.set_ylim(bottom=0)
            axes.grid(lw=0.3)
        figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def rows(frontier: Frontier) -> list[list[str]]:
    """A table row for every distinct plan, and for every other way."""
    where = f"{frontier.model}, {frontier.processes}"
    found = []
    distinct = {point.plan.hash: point for point in reversed(frontier.points)}  # the largest share of each plan
    for point in reversed(distinct.values()):
        size, seconds = frontier.measured.get(point.name, (0.0, 0.0))
        predicted, recomputed = point.plan.predicted, len(point.plan.recomputed)
        found.append(
            [
                where,
                f"autotp, {point.share:.0%}",
                f"{recomputed} of {len(point.plan.operators)}",
                f"{predicted.memory_bytes / 1e6:.0f}",
                f"{size / 1e6:.0f}" if size else "",
                f"{predicted.passes_seconds:.3f}",
                f"{seconds:.3f}" if seconds else "",
            ]
        )
    names = {point.name for point in frontier.points}
    for way, (size, seconds) in frontier.measured.items():
        if way not in names:
            found.append([where, way, "", "", f"{size / 1e6:.0f}", "", f"{seconds:.3f}"])
    return found


def report(frontiers: Sequence[Frontier]) -> tuple[str, dict[str, str]]:
    """The text of the page, and its picture."""
    lines = [f"- {one.model}, {one.processes}: {way}" for one in frontiers for way in behind(one)]
    said = "\n".join(lines) or "- none"
    models = "\n".join(said for name, said in MODELS.items() if any(one.model == name for one in frontiers))
    header = ["model, processes", "way", "recomputed", "predicted MB", "measured MB", "predicted s", "measured s"]
    text = f"""# Memory against speed

Generated by `python -m benchmarks.frontier --write` ({machine()}, {allocator()}).

How long a step takes under a lower memory limit: the fastest plan for every memory limit, from the memory of the fastest
plan that recomputes nothing (100 %) down to a quarter of it, or to the least that any plan needs. `autotp calibrate` has
measured the machine first. A step is a forward and a backward pass; memory is the largest sum of the sizes of all live
tensors of a process, with parameters and gradients, without an optimizer. Beside the plans, on the same batch
(data-parallel on 2 processes): the model as it is, with `torch.utils.checkpoint` around every block, and cut by
AOTAutograd's partitioner with `torch._functorch.config.activation_memory_budget` from 1 to 0, with the kernels of
eager mode. All take turns in one run; times are medians.

{models}

![Seconds of a step against bytes](images/frontier.svg)

Ways that are faster than every measured plan that takes no more memory, or take less memory than all of them:

{said}

{table(header, [row for frontier in frontiers for row in rows(frontier)])}"""
    return text, {PICTURE: drawn(frontiers)}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--processes", nargs="*", type=int, default=PROCESSES)
    parser.add_argument("--rounds", type=int, default=2)


def make(models: Sequence[str], processes: Sequence[int], rounds: int, write: bool) -> tuple[str, dict[str, str]]:
    """Measures step time by memory limit for every model and number of processes."""
    topology = calibrated(max(2, *processes))
    found = []
    for model in models:
        for count in processes:
            found.append(measure(model, topology, count, rounds))
            print(f"{model} on {count}: done", file=sys.stderr)
    return report(found)


if __name__ == "__main__":
    command("frontier", "frontier.md", make, options)
