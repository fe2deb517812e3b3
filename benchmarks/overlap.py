"""Step times with and without overlap on emulated interconnects: python -m benchmarks.overlap [--write] (an hour)

For every model, family and number of ranks, three uplink rates: those at which the step's communication should take half as
long, as long, and twice as long as its computing. Computing alone and communicating alone are measured in the same runs.
Needs root, for network namespaces with rate-limited links.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotp.families import family
from autotp.planner import plan_captured
from benchmarks.allocator import allocator
from benchmarks.cluster import Cluster
from benchmarks.models import trained
from benchmarks.overlap_steps import WAYS
from benchmarks.tables import command, machine, table
from costmodel import Level, Topology
from passes.capture import capture

#: (model, family, mesh); every device is a node of its own.
CASES: tuple[tuple[str, str, tuple[int, ...]], ...] = tuple(
    (model, name, mesh)
    for model in ("gpt8", "unet")
    for name, mesh in (
        ("megatron-1d", (2,)),
        ("data", (2,)),
        ("zero3", (2,)),
        ("megatron-1d", (4,)),
        ("tensor3d", (2, 2)),
        ("data", (4,)),
        ("zero3", (4,)),
    )
)
RATIOS = (0.5, 1.0, 2.0)
#: bit/s: what a node's uplink is at most and at least, whatever the ratio asks for.
MOST, LEAST = 4e9, 20e6


@dataclass(frozen=True, slots=True)
class Cell:
    """One plan at one rate; seconds."""

    model: str
    name: str
    mesh: tuple[int, ...]
    rate: float
    times: dict[str, float]

    @property
    def floor(self) -> float:
        """What no schedule can undercut: the longer of computing alone and communicating alone."""
        return max(self.times["compute alone"], self.times["communication alone"])

    @property
    def best(self) -> str:
        """The quickest way to run it."""
        return min((way for way in WAYS if way in self.times), key=lambda way: self.times[way])


def emulated(ranks: int, rate: float) -> Topology:
    """So many nodes of one rank, with uplinks of ``rate`` bit/s."""
    return Topology(f"{ranks} nodes", Topology.load("cpu").device, (Level("network", ranks, rate / 8, 50e-6),), "gloo")


def measure(model: str, name: str, mesh: tuple[int, ...], ratios: Sequence[float], rounds: int) -> Iterator[Cell]:
    """One case at several rates."""
    ranks = math.prod(mesh)
    module, args = trained(model)
    captured = capture(module, args, None)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        unlimited = emulated(ranks, MOST)
        plan = plan_captured(captured, unlimited, family(name), mesh=mesh, panels=1)
        plan.save(place / "plan.json")
        with Cluster(unlimited) as cluster:
            quick = _run(cluster, model, place, 1, ["no overlap"])
        sent = sum(op.bytes_moved * 1.0 for op in plan.operators)
        for ratio in ratios:
            rate = min(MOST, max(LEAST, sent * 8 / (ratio * quick["compute alone"])))
            topology = emulated(ranks, rate)
            plan = plan_captured(captured, topology, family(name), mesh=mesh, panels=1)
            plan.save(place / "plan.json")
            with Cluster(topology) as cluster:
                yield Cell(model, name, mesh, rate, _run(cluster, model, place, rounds, list(WAYS)))


def _run(cluster: Cluster, model: str, place: Path, rounds: int, ways: Sequence[str]) -> dict[str, float]:
    out = place / "times.json"
    words = ["-m", "benchmarks.overlap_steps", model, str(place / "plan.json"), str(out), "--rounds", str(rounds)]
    cluster.run([*words, "--ways", *ways], timeout=900)
    found: dict[str, float] = json.loads(out.read_text())
    return found


def make() -> str:
    """Step times with and without overlap."""
    cells = []
    for model, name, mesh in CASES:
        for cell in measure(model, name, mesh, RATIOS, 3):
            cells.append(cell)
            print(model, name, mesh, f"{cell.rate / 1e6:.0f} Mbit/s", cell.best, cell.times, file=sys.stderr)
    return report(cells)


def report(cells: Sequence[Cell]) -> str:
    """The document."""
    rows = []
    for cell in cells:
        times, best = cell.times, cell.best
        rows.append(
            [
                cell.model,
                f"{cell.name} {'x'.join(map(str, cell.mesh))}",
                f"{cell.rate / 1e6:.0f}",
                *(f"{times[way]:.3f}" for way in ("compute alone", "communication alone", *WAYS)),
                best,
                f"{times[best] / cell.floor:.2f}",
                f"{times[best] / times['no overlap'] - 1:+.0%}",
            ]
        )
    header = ["model", "plan", "Mbit/s", "compute", "communication", *WAYS, "best", "of the floor", "gain"]
    return (
        "# Overlap\n\nSeconds of a step (forward and backward) by how it is run, on emulated clusters of nodes of one "
        "rank. The floor is the longer of computing alone and communicating alone, each measured in the same run; the gain "
        f"is the best way's over no overlap. Medians of six steps, taken in turns. {machine()}, {allocator()}. "
        "Made by `python -m benchmarks.overlap --write`, as root.\n\n" + table(header, rows)
    )


if __name__ == "__main__":
    command("overlap", "overlap.md", make)
