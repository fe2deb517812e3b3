"""Two-dimensional tensor parallelism: the best mesh by number of devices (Tensor3D), and by interconnect (ATP)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy

from autotp import Plan
from autotp.planner import candidate_meshes, plan_captured
from autotp.plans.families import Family, family
from autotp.plans.options import Options
from benchmarks.models import products
from benchmarks.tables import table
from costmodel import Topology, volumes
from passes.capture import Captured, capture

#: There are BATCH * SEQUENCE rows (tokens), and as many heads as the largest number of devices, since heads are not cut.
BATCH, SEQUENCE, HIDDEN, HEADS, ITEMSIZE = 4, 2048, 8192, 256, 2

TENSOR3D = (4, 8, 16, 32, 64, 256)

#: Machine -> (description, numbers of devices).
ATP: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "flat": ("one level, 20 GB/s and 5 µs between any two", (4, 8, 16, 32, 64, 128, 256)),
    "tpu-v4-torus": ("links of each device's own in three dimensions", (4, 8, 16, 32, 64, 128, 256)),
    "gb200-nvl72": ("one rack of NVLink", (4, 8, 16, 32, 64)),
    "dgx-a100": ("NVLink boxes of 8, a network adapter a device", (4, 8, 16, 32, 64, 128, 256)),
    "pcie-a100-nvlink": ("PCIe boxes of 8 with NVLink pairs, one network adapter a box", (4, 8, 16, 32, 64, 128, 256)),
    "pcie-a100": ("PCIe boxes of 8, one network adapter a box", (4, 8, 16, 32, 64, 128, 256)),
}


@dataclass(frozen=True, slots=True)
class Volume:
    """Elements that each device receives for one transformer layer, forward and backward.

    Attributes:
        planned: The count in the plan on a mesh of these two sizes; the planner chooses which axis splits the columns.
        closed: The closed form for ``q`` ways of columns and ``p`` ways of rows.
    """

    planned: float
    closed: float


@dataclass(frozen=True, slots=True)
class Split:
    """The communication of one transformer layer on one mesh, forward and backward.

    Attributes:
        mesh: The sizes of the mesh axes, outermost first.
        d1, d2: The numbers of ways in which the columns and rows of the first product are split.
        seconds: The communication time.
    """

    mesh: tuple[int, ...]
    d1: int
    d2: int
    seconds: float


@functools.cache
def _captured() -> tuple[Captured, Captured]:
    """Captured models of two and three layers, whose costs differ by exactly one layer."""
    two, three = (capture(*products(depth, HIDDEN, HEADS, BATCH, SEQUENCE)) for depth in (2, 3))
    return two, three


def _plans(name: str, topology: Topology, mesh: tuple[int, ...]) -> tuple[Plan, Plan]:
    """Plans of both models that minimize communication, since computation takes no time."""
    device = replace(topology.device, flops={"float32": 1e24}, memory_bandwidth=1e24)
    topology = replace(topology, device=device)
    chosen: Family = replace(family(name), roles=lambda axes: ["w" * axes])  # tensor-parallel axes only
    two, three = (
        plan_captured(captured, topology, Options(chosen, mesh=mesh, memory=math.inf, panels=1, schedule="none"))
        for captured in _captured()
    )
    return two, three


def closed_form(q: float, p: float) -> float:
    """Elements that each device receives for one layer on ``q`` ways of columns and ``p`` ways of rows."""
    values = {volumes.m: BATCH * SEQUENCE, volumes.h: HIDDEN, volumes.q: q, volumes.p: p}
    return float(volumes.LAYER["tensor3d"].subs(values))


def optimum() -> tuple[sympy.Symbol, sympy.Expr]:
    """The symbol G of the number of devices, and the q that minimizes traffic if q and p = G/q may be any real numbers."""
    devices = sympy.Symbol("G", positive=True)
    (best,) = sympy.solve(sympy.diff(volumes.LAYER["tensor3d"].subs(volumes.p, devices / volumes.q), volumes.q), volumes.q)
    return devices, best


def tensor3d(devices: int) -> dict[tuple[int, int], Volume]:
    """(q, p) -> the volume of a layer, for every pair whose product is ``devices``. Latency is 0: only traffic counts."""
    topology = Topology.flat(devices, latency=0.0)
    pairs = [(devices // p, p) for p in range(1, devices + 1) if devices % p == 0]
    planned = {}
    for q, p in pairs:
        if q >= p:
            two, three = _plans("tensor3d", topology, tuple(size for size in (p, q) if size > 1))
            found = [sum(op.bytes_moved for op in plan.operators) / ITEMSIZE for plan in (two, three)]
            planned[q, p] = planned[p, q] = found[1] - found[0]
    return {(q, p): Volume(planned[q, p], closed_form(q, p)) for q, p in pairs}


def machine(name: str, devices: int) -> Topology:
    """The topology of a machine, without the fitted overhead of collectives that presets have."""
    if name != "flat":
        found = Topology.load(name).resized(devices)
        return replace(found, levels=tuple(replace(level, overhead=0.0) for level in found.levels))
    return Topology.flat(devices, bandwidth=20e9, latency=5e-6, device=Topology.load("dgx-a100").device)


def atp(name: str, devices: int) -> list[Split]:
    """The communication of one layer on every mesh of one or two axes; the first mesh has one axis."""
    topology, found = machine(name, devices), []
    for mesh in candidate_meshes(devices, 2):
        two, three = _plans("atp", topology, mesh)
        columns = next(op for op in three.operators if op.module.endswith("layers.1.q")).strategy
        ways = dict(zip(three.mesh_axes, three.mesh_shape, strict=True))
        d1 = math.prod(ways[axis] for factor, axes in columns.items() if factor.startswith("n") for axis in axes)
        seconds = three.predicted.communication_seconds - two.predicted.communication_seconds
        found.append(Split(mesh, d1, devices // d1, seconds))
    return found


def least(splits: list[Split]) -> Split:
    """The split with the least communication time."""
    return min(splits, key=lambda split: split.seconds)


def tensor3d_section() -> str:
    rows = []
    devices, best_q = optimum()
    for count in TENSOR3D:
        found = tensor3d(count)
        for (q, p), volume in found.items():
            closed = min(volume.closed, found[p, q].closed)
            if not math.isclose(volume.planned, closed, rel_tol=1e-9):
                raise SystemExit(f"q = {q}, p = {p}: the plan moves {volume.planned:,.0f}, the closed form {closed:,.0f}")
        q, p = min(found, key=lambda pair: found[pair].closed)
        volume = found[q, p]
        rows.append([
            count, f"{q}, {p}", f"{float(best_q.subs(devices, count)):.1f}", f"{volume.planned / 1e6:,.1f}",
            f"{volume.closed / 1e6:,.1f}", f"{volume.planned / found[count, 1].planned:.3f}",
        ])  # fmt: skip
    header = ["devices", "best q, p", "best real q", "planned", "closed form", "over Megatron's (p = 1)"]
    return f"""## Tensor3D: the best mesh

A transformer layer of {BATCH * SEQUENCE:,} tokens and hidden size {HIDDEN}, whose weights are split q ways along their
columns and p ways along their rows, with the two swapped in every second layer (arXiv 2305.13525). The method is [paper];
the optimum and its table were [derived] from it, and are reproduced here. *Planned* is the number of elements, in millions,
that each device receives for a layer in the plan of strategy `tensor3d`, if traffic alone decides. Every mesh of these
numbers of devices was planned, and the traffic of each plan equals the closed form of `costmodel/volumes.py`. Nothing is
fitted. For real q and p, the closed form is smallest at q = `{best_q}` for G devices.

{table(header, rows)}"""


def atp_section() -> str:
    counts = sorted({count for _, sizes in ATP.values() for count in sizes})
    winners, overhead = [], []
    for name, (words, sizes) in ATP.items():
        found = {count: atp(name, count) for count in sizes}
        best = {count: least(splits) for count, splits in found.items()}
        cells = [f"{best[n].d1}, {best[n].d2} on {'×'.join(map(str, best[n].mesh))}" if n in best else "" for n in counts]
        winners.append([name, words, *cells])
        times = [
            f"{best[n].seconds * 1e3:.2f} ({best[n].seconds / found[n][0].seconds:.2f})" if n in best else ""
            for n in counts
        ]
        overhead.append([name, *times])
    return f"""## ATP: the interconnect chooses the mesh

The same layer with strategy `atp` on every mesh of one or two axes (arXiv 2301.08658; d1 ways along columns, d2 along rows;
d2 = 1 is Megatron). The paper reports that choosing the mesh by the interconnect gains 37 to 64 % on specific
interconnects, and that the overhead decreases with scale [paper abstract]. Nothing is fitted; the presets of autotp are
used, and every plan minimizes communication. The first table has the d1, d2 with the least communication and their mesh,
outermost axis first; the second has the time of this communication in ms for a layer, forward and backward, and in
parentheses its ratio to that of Megatron on the same number of devices.

If every device has its own links, the time decreases with the number of devices from 8 on (it is the same for 4 and 8, by
the formula above). On boxes, it increases when the first box is full, because its devices then share one uplink, and
decreases again from 64 devices on: the claim does not hold across this boundary. Compared with Megatron on the same number
of devices, it is never slower. If pairs of devices have the fastest link (pcie-a100-nvlink), d2 = 2 uses it even within one
box.

{table(["machine", "", *map(str, counts)], winners)}
{table(["machine", *map(str, counts)], overhead)}"""
