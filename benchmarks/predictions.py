"""Predicted and measured step times on emulated interconnects: python -m benchmarks.predictions [--write] (an hour)

On every interconnect, `autotp calibrate` runs first, and all plans are made and predicted with the topology file that it
writes, without overlap and with it. Then, the steps of the plans are timed in turns. Needs root, for network namespaces
with rate-limited links.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import autotp
from autotp.errors import AutotpError
from autotp.planner import plan_captured
from autotp.plans.options import Options
from autotp.validate import kendall
from benchmarks.allocator import allocator
from benchmarks.cluster import Cluster
from benchmarks.models import trained
from benchmarks.tables import command, machine, table
from costmodel import Level, Topology
from passes.capture import capture

#: name -> (ranks in a node, nodes, uplink in Mbit/s); one node has no uplink.
INTERCONNECTS: dict[str, tuple[int, int, int]] = {
    "flat, 4 ranks": (4, 1, 0),
    "2 nodes x 2, 200 Mbit/s": (2, 2, 200),
    "2 nodes x 2, 500 Mbit/s": (2, 2, 500),
    "2 nodes x 2, 1000 Mbit/s": (2, 2, 1000),
    "4 nodes x 1, 200 Mbit/s": (1, 4, 200),
    "4 nodes x 1, 800 Mbit/s": (1, 4, 800),
}
#: (family, mesh); None lets the planner choose.
PLANS: tuple[tuple[str, tuple[int, ...] | None], ...] = (
    ("data", (4,)),
    ("zero3", (4,)),
    ("atp", (4,)),
    ("megatron-1d", (4,)),
    ("megatron-1d", (2, 2)),
    ("megatron-sp", (4,)),
    ("megatron-sp", (2, 2)),
    ("tensor3d", (2, 2)),
    ("atp", (2, 2)),
    ("summa-2d", (2, 2)),
    ("summa-2d", (4,)),
    ("3d", (2, 2)),
    ("3d", (4,)),
    ("auto", (4,)),
    ("auto", (2, 2)),
    ("auto", None),
)
MODELS = ("gpt", "unet")
SCHEDULES = {"none": "without overlap", "overlap": "with overlap"}


@dataclass(frozen=True, slots=True)
class Point:
    """One plan on one interconnect, with the predicted and measured seconds of both passes together.

    ``names`` has the names of all `PLANS` that result in this plan.
    """

    interconnect: str
    schedule: str
    model: str
    names: tuple[str, ...]
    mesh: tuple[int, ...]
    predicted: float
    measured: float

    @property
    def plan(self) -> str:
        """The name of the plan in files."""
        return self.names[0]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def emulated(name: str) -> Topology:
    """The topology of the cluster to emulate."""
    ranks, nodes, rate = INTERCONNECTS[name]
    device = Topology.load("cpu").device
    inner = Level("loopback", ranks, 1e9, 50e-6)
    outer = Level("network", nodes, (rate or 1) * 1e6 / 8, 50e-6)
    levels = tuple(level for level in (inner, outer) if level.size > 1)
    return Topology(name, device, levels)


def measure(
    name: str,
    models: Sequence[str] = MODELS,
    rounds: int = 3,
    folder: Path | None = None,
    schedules: Sequence[str] = tuple(SCHEDULES),
) -> list[Point]:
    """Calibrates one interconnect, makes all plans for it, and times their steps."""
    points = []
    with tempfile.TemporaryDirectory() as scratch, Cluster(emulated(name)) as cluster:
        place = Path(scratch) if folder is None else folder
        place.mkdir(parents=True, exist_ok=True)
        calibrated = place / "calibrated.toml"
        if not calibrated.exists():
            cluster.run(["-m", "autotp", "calibrate", "--output", str(calibrated)], timeout=400)
        topology = Topology.load(calibrated)
        for schedule, model in itertools.product(schedules, models):
            plans, names = _plans(model, topology, schedule)
            into, out = place / f"{schedule}-{model}", place / f"{schedule}-{model}.times.json"
            into.mkdir(exist_ok=True)
            for label, plan in plans.items():
                plan.save(into / f"{label}.json")
            arguments = ["-m", "benchmarks.steps", model, str(into), str(out), "--rounds", str(rounds)]
            cluster.run([*arguments, "--schedule", schedule], timeout=900)
            times = json.loads(out.read_text())
            points += [
                Point(name, schedule, model, names[label], plan.mesh_shape, plan.predicted.passes_seconds, times[label])
                for label, plan in plans.items()
            ]
    return points


def _plans(model: str, topology: Topology, schedule: str) -> tuple[dict[str, autotp.Plan], dict[str, tuple[str, ...]]]:
    """Name -> distinct plan, and name -> all names of this plan."""
    module, args = trained(model)
    captured = capture(module, args, None)
    found: dict[str, autotp.Plan] = {}
    names: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for name, mesh in reversed(PLANS):  # `auto` first, so that its plan keeps this name
        label = name if mesh is None else f"{name} {'x'.join(map(str, mesh))}"
        try:
            plan = plan_captured(captured, topology, Options(name, mesh=mesh, schedule=schedule))
        except AutotpError as error:
            print(f"{model}: {label}: {error}", file=sys.stderr)
            continue
        if plan.hash not in first:
            first[plan.hash], found[label] = label, plan
        names.setdefault(first[plan.hash], []).append(label)
    return found, {label: tuple(same) for label, same in names.items()}


def _called(name: str, points: Sequence[Point]) -> Point | None:
    return next((p for p in points if name in p.names), None)


def make() -> str:
    """Compares predicted and measured step times of every family on six emulated interconnects."""
    points = []
    for name in INTERCONNECTS:
        points += measure(name)
        print(f"{name}: done", file=sys.stderr)
    return report(points)


def report(points: Sequence[Point]) -> str:
    """The text of the document: a summary by interconnect and model, then every plan."""
    points = sorted(points, key=lambda p: (list(SCHEDULES).index(p.schedule), list(INTERCONNECTS).index(p.interconnect)))
    summaries, every, atp = {}, {}, []  # type: dict[str, list[list[object]]], dict[str, list[list[str]]], list[list[str]]
    for (schedule, name, model), group in itertools.groupby(points, key=lambda p: (p.schedule, p.interconnect, p.model)):
        found = list(group)
        best = min(p.measured for p in found)
        auto, base = _called("auto", found), _called("megatron-1d 4", found)
        summaries.setdefault(schedule, []).append(
            [
                name,
                model,
                len(found),
                f"{statistics.median(abs(p.error) for p in found):.0%}",
                f"{kendall([p.predicted for p in found], [p.measured for p in found]):.2f}",
                f"{auto.measured / best - 1:+.0%}" if auto else "–",
                f"{base.measured / auto.measured - 1:+.0%}" if auto and base else "–",
            ]
        )
        one, two = _called("atp 4", found), _called("atp 2x2", found)
        if one and two and schedule == "none":
            pairs = (one.predicted, two.predicted), (one.measured, two.measured)
            says = ["(4, 1)" if flat < square else "(2, 2)" for flat, square in pairs]
            atp.append([name, model, *(f"{p.predicted:.3f} / {p.measured:.3f}" for p in (one, two)), *says])
        every.setdefault(schedule, []).extend(
            [
                name,
                model,
                ", ".join(p.names),
                "x".join(map(str, p.mesh)),
                f"{p.predicted:.3f}",
                f"{p.measured:.3f}",
                f"{p.error:+.0%}",
            ]
            for p in sorted(found, key=lambda p: p.measured)
        )
    header = [
        "interconnect",
        "model",
        "plans",
        "median error",
        "Kendall's tau",
        "auto over best",
        "gain over pure megatron-1d",
    ]
    columns = ["interconnect", "model", "plan", "mesh", "predicted s", "measured s", "error"]
    sections = "\n".join(_section(schedule, table(header, rows)) for schedule, rows in summaries.items())
    plans = "\n".join(f"## Every plan {SCHEDULES[schedule]}\n\n{table(columns, rows)}" for schedule, rows in every.items())
    return f"""# Predicted and measured

Generated by `python -m benchmarks.predictions --write`, as root ({machine()}, {allocator()}).

Step times (forward and backward) of plans of every family on emulated clusters: network namespaces with rate-limited
uplinks. On each, `autotp calibrate` ran first, and predictions are based only on the file that it wrote. A step is timed
from its beginning on the first rank to its end on the last one; times are medians of six steps, and the plans take turns.
The four ranks share the cores of the machine.

{sections}
## ATP's meshes

The family `atp`, with all ranks in tensor parallelism, on its two meshes; (4, 1) is Megatron's. Predicted / measured
seconds without overlap, and the faster mesh.

{table(["interconnect", "model", "(4, 1)", "(2, 2)", "predicted", "measured"], atp)}
{plans}"""


def _section(schedule: str, text: str) -> str:
    return f'## Plans {SCHEDULES[schedule]}\n\nPlanned for and run with `schedule="{schedule}"`.\n\n{text}'


if __name__ == "__main__":
    command("predictions", "predictions.md", make)
