"""Step times with and without overlap on emulated interconnects: python -m benchmarks.overlap [--write] (two hours)

Measurements are stored in benchmarks/measured/overlap.json after every case, and the document is generated from this file.
An interrupted run loses only one case, and ``--only unet,megatron-1d`` repeats the cases with both names.

The models are a GPT of 8 layers, narrow with long sequences for the families that communicate parameters and wide with
short ones for those that communicate activations (so that the network is the bottleneck, not the CPUs that drive it), and a
U-Net. Every family and number of ranks has three uplink rates, at which the communication of a step should take half as
long, as long, and twice as long as its computation. Each of the two is also measured alone, in the same runs.
Needs root, for network namespaces with rate-limited links.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autotp.analysis.trace import scheduled, trainable
from autotp.planner import plan_captured
from autotp.plans.options import Options
from autotp.plans.plan import Plan
from benchmarks.allocator import allocator
from benchmarks.cluster import Cluster
from benchmarks.models import trained
from benchmarks.overlap_plot import drawn
from benchmarks.overlap_steps import WAYS
from benchmarks.phases import asking
from benchmarks.tables import command, machine, table
from costmodel import Level, Topology
from costmodel.text.files import write_atomically
from passes.capture import capture
from passes.overlap.schedule import Slot

#: (model, family, mesh); every device is a node of its own.
CASES: tuple[tuple[str, str, tuple[int, ...]], ...] = tuple(
    (model, name, mesh)
    for narrow, broad in (("deep", "wide"), ("unet", "unet"))
    for model, name, mesh in (
        (broad, "megatron-1d", (2,)),
        (narrow, "data", (2,)),
        (narrow, "zero3", (2,)),
        (broad, "megatron-1d", (4,)),
        (broad, "tensor3d", (2, 2)),
        (narrow, "data", (4,)),
        (narrow, "zero3", (4,)),
    )
)
RATIOS = (0.5, 1.0, 2.0)
ALONE = ("compute alone", "communication alone", "communication at once")
#: The wanted upper bounds: the best way relative to the floor, and the planner's choice relative to no overlap.
WANTED, NEVER_SLOWER = 1.15, 1.02
PLOT = "images/overlap.svg"
MEASURED = Path(__file__).parent / "measured" / "overlap.json"
ROUNDS = 3
#: The highest and lowest rate of a node's uplink in bit/s, for all ratios.
MOST, LEAST = 4e9, 20e6


@dataclass(frozen=True, slots=True)
class Cell:
    """The measurements of one plan at one rate (bit/s).

    ``times`` has seconds by way. ``shares`` are the predicted shares of the forward pass in the computation and in the
    communication of a step. ``run`` is the time at which the run that measured ``times`` began.
    """

    model: str
    name: str
    mesh: tuple[int, ...]
    rate: float
    chunks: dict[str, int]
    shares: tuple[float, float]
    times: dict[str, float]
    run: str = ""

    @property
    def case(self) -> tuple[str, str, tuple[int, ...]]:
        """The member of `CASES` that the cell belongs to."""
        return self.model, self.name, self.mesh

    @property
    def moving(self) -> float:
        """Seconds of communication alone: the faster of unmerged collectives in sequence and merged ones all at once."""
        return min(self.times["communication alone"], self.times["communication at once"])

    @property
    def floor(self) -> float:
        """A lower bound for all schedules, in seconds: the longer of computation alone and communication alone."""
        return max(self.times["compute alone"], self.moving)

    @property
    def plain(self) -> float:
        """Seconds of the longer of computation alone and unmerged collectives alone in sequence."""
        return max(self.times["compute alone"], self.times["communication alone"])

    @property
    def reach(self) -> float:
        """The sum of the floors of both passes in seconds, where computation includes the CPU time of communication."""
        compute, busy = self.times["compute alone"], self.times["core seconds"]
        passes = self.shares, tuple(1 - share for share in self.shares)
        return sum(max(c * compute + m * busy, m * self.moving) for c, m in passes)

    @property
    def best(self) -> str:
        """The fastest way to run the plan."""
        return min(WAYS, key=lambda way: self.times[way])


def emulated(ranks: int, rate: float) -> Topology:
    """A topology of ``ranks`` nodes of one rank each, with uplinks of ``rate`` bit/s."""
    return Topology(f"{ranks} nodes", Topology.load("cpu").device, (Level("network", ranks, rate / 8, 50e-6),), "gloo")


@functools.cache
def calibrated(ranks: int) -> Topology:
    """The calibrated topology of this machine with ``ranks`` nodes and links of the highest rate."""
    with tempfile.TemporaryDirectory() as scratch, Cluster(emulated(ranks, MOST)) as cluster:
        file = Path(scratch) / "machine.toml"
        cluster.run(["-m", "autotp", "calibrate", "--quick", "--output", str(file)], timeout=400)
        return Topology.load(file)


def measure(model: str, name: str, mesh: tuple[int, ...], ratios: Sequence[float], rounds: int) -> Iterator[Cell]:
    """Yields the measurements of one case at the rates of several ratios."""
    ranks = math.prod(mesh)
    module, args = trained(model)
    captured = capture(module, args, None)
    found = calibrated(ranks)
    with tempfile.TemporaryDirectory() as scratch, Cluster(emulated(ranks, MOST)) as cluster:
        place = Path(scratch)
        with asking(cluster, ["-m", "benchmarks.overlap_steps", model], place, timeout=2400) as ask:

            def steps(plan: Plan, ways: Sequence[str], rounds: int) -> dict[str, float]:
                plan.save(place / "plan.json")
                return ask(what="steps", plan=str(place / "plan.json"), ways=list(ways), rounds=rounds)

            plan = plan_captured(captured, found, Options(name, mesh=mesh, panels=1, chunks={}, schedule="none"))
            quick = steps(plan, [], 1)
            for ratio in ratios:
                rate = min(MOST, max(LEAST, quick["sent"] * 8 / (ratio * quick["compute alone"])))
                cluster.limit(rate)
                limited = _limited(found, rate / 8, ask(what="contention")["contention"])
                plan = plan_captured(captured, limited, Options(name, mesh=mesh, panels=1, schedule="overlap"))
                shares = _shares(scheduled(captured, replace(plan, chunks={}), trainable(module)))
                yield Cell(model, name, mesh, rate, dict(plan.chunks), shares, steps(plan, list(WAYS), rounds))


def _shares(halves: tuple[Sequence[Slot], Sequence[Slot]]) -> tuple[float, float]:
    """The shares of the forward pass in computation and in communication."""
    computing, moving = (
        [sum(slot.end - slot.begin for slot in half if (slot.lane == "compute") == device) for half in halves]
        for device in (True, False)
    )
    return computing[0] / sum(computing), moving[0] / sum(moving)


def _limited(found: Topology, bandwidth: float, contention: float) -> Topology:
    """A calibrated topology with its bandwidth limited (bytes/s); ``contention`` was measured at this limit."""
    (level,) = found.levels
    kinds = {kind: replace(one, bandwidth=min(one.bandwidth, bandwidth)) for kind, one in level.measured.items()}
    level = replace(level, bandwidth=min(level.bandwidth, bandwidth), measured=kinds, contention=contention)
    return replace(found, levels=(level,))


def make(write: bool, only: set[str]) -> tuple[str, dict[str, str]]:
    """Measures step times with and without overlap, and stores them."""
    run = time.strftime("%Y-%m-%d %H:%M")
    known = kept()
    for case in (case for case in CASES if only <= _names(case)):
        cells = []
        for cell in measure(*case, RATIOS, ROUNDS):
            cells.append(replace(cell, run=run))
            print(*case, f"{cell.rate / 1e6:.0f} Mbit/s", cell.best, cell.times, file=sys.stderr)
        known = [cell for cell in known if cell.case != case] + cells
        known.sort(key=lambda cell: (CASES.index(cell.case), -cell.rate))
        if write:
            MEASURED.parent.mkdir(exist_ok=True)
            write_atomically(MEASURED, json.dumps([asdict(cell) for cell in known], indent=1) + "\n")
    return report(known), {PLOT: plot(known)}


def _names(case: tuple[str, str, tuple[int, ...]]) -> set[str]:
    return {*case[:2], "x".join(map(str, case[2]))}


def _only(text: str) -> set[str]:
    wanted = set(text.split(","))
    if not any(wanted <= _names(case) for case in CASES):
        raise argparse.ArgumentTypeError(f"no case has all the names of {text}")
    return wanted


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command other than --write."""
    names = "names that a case must all have, of its model, family or mesh, such as wide,2x2"
    parser.add_argument("--only", type=_only, default=set(), help=names)


def kept() -> list[Cell]:
    """The stored measurements of all cases in `CASES`."""
    if not MEASURED.exists():
        return []
    known = json.loads(MEASURED.read_text())
    found = [Cell(**(data | {key: tuple(data[key]) for key in ("mesh", "shares")})) for data in known]
    return [cell for cell in found if cell.case in CASES]


def plot(cells: Sequence[Cell]) -> str:
    """An SVG of the times of all ways in all cells, relative to the floor."""
    rows = []
    for cell in cells:
        label = f"{cell.model} {cell.name} {'×'.join(map(str, cell.mesh))}, {cell.rate / 1e6:.0f} Mbit/s"
        rows.append((label, {way: cell.times[way] / cell.floor for way in WAYS}, cell.reach / cell.floor))
    return drawn(rows, WANTED)


def report(cells: Sequence[Cell]) -> str:
    """The text of the document."""
    rows = []
    for cell in cells:
        times, best = cell.times, cell.best
        rows.append(
            [
                cell.model,
                f"{cell.name} {'x'.join(map(str, cell.mesh))}",
                f"{cell.rate / 1e6:.0f}",
                *(f"{times[way]:.3f}" for way in (*ALONE, *WAYS)),
                f"{cell.moving / times['compute alone']:.2f}",
                ", ".join(f"{count} {kind}" for kind, count in cell.chunks.items()) or "none",
                best,
                f"{times[best] / cell.floor:.2f}",
                f"{times[best] / cell.reach:.2f}",
                f"{times[best] / times['no overlap'] - 1:+.0%}",
                cell.run,
            ]
        )
    header = [
        "model",
        "plan",
        "Mbit/s",
        *ALONE,
        *WAYS,
        "communication / compute",
        "planned chunks",
        "best",
        "of the floor",
        "of what passes reach",
        "gain",
        "run",
    ]
    return f"""# Overlap

Generated by `python -m benchmarks.overlap --write`, as root ({machine()}, {allocator()}).

The time of a step (forward and backward), in seconds, for each way of running it, on emulated clusters of nodes with one
rank each. Times are medians of three steps; the ways take turns. `run` is the time at which the run that measured the row
began. The floor is the larger of the time of computation alone and that of communication alone, both measured in the same
run; the gain is that of the best way over no overlap. Communication alone is timed in two ways, of which the faster one
counts: the collectives one after the other, unmerged, and all at once, merged as in the schedule. The rates are chosen so
that the bytes alone take half as long as computation, as long, and twice as long, but at most {MOST / 1e6:.0f} Mbit/s. The
CPU time per message is added to this, so communication takes longer, especially if there is little computation per byte.

`deep` and `wide` are GPTs of 8 layers, both with a batch of 8 sequences: with width 256 and 256 tokens, which suits the
families that communicate parameters, and with width 1024 and 32 tokens, which suits those that communicate activations.
`unet` is a U-Net with 8 images.

No step can reach the floor if one pass has most of the communication and the other most of the computation, because the
backward pass begins after the forward pass has ended. Data parallelism communicates only in the backward pass, so at equal
rates it takes at least a third longer than the floor; if activations are communicated (megatron-1d, tensor3d), the forward
pass has a third of the computation and half of the communication. Communication also takes CPU time, and all cores compute
here. Therefore, a second bound is given, *what passes reach*: the sum of the floors of both passes, in which the time that
communication alone keeps the cores busy (including the kernel's work) is added to computation. The shares of the forward
pass are predicted.

![The time of every way relative to the floor, cell by cell]({PLOT})

{_summary(cells)}
{table(header, rows)}"""


def _summary(cells: Sequence[Cell]) -> str:
    """A paragraph on how many cells meet the wanted bounds."""

    def within(bound: str) -> int:
        return sum(cell.times[cell.best] <= WANTED * getattr(cell, bound) for cell in cells)

    over = [cell.times[cell.best] / cell.reach for cell in cells]
    slower = [cell for cell in cells if cell.times["as planned"] > NEVER_SLOWER * cell.times["no overlap"]]
    every = len(CASES) * len(RATIOS)
    missing = f" {every - len(cells)} more were not measured." if len(cells) < every else ""
    forced = max(times[way] / times["no overlap"] for times in (cell.times for cell in cells) for way in WAYS)
    gain = statistics.median(cell.times["no overlap"] / cell.times[cell.best] for cell in cells)
    return (
        f"In {within('plain')} of {len(cells)} cells, the best way takes at most {WANTED:g} times the larger of "
        f"computation alone and communication alone with collectives one after the other; in {within('floor')}, if "
        f"merged collectives all at once count where they are faster. In {within('reach')}, it takes at most {WANTED:g} "
        f"times what passes reach (median {statistics.median(over):.2f}, at most {max(over):.2f}). The median gain of the "
        f"best way over no overlap is {gain:.2f}. The planner's choice is more than 2 % slower than no overlap in "
        f"{len(slower)} cells; with small chunks, other ways take up to {forced:.2f} times as long as no overlap."
        f"{missing}\n"
    )


if __name__ == "__main__":
    command("overlap", "overlap.md", make, options)
