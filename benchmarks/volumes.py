"""Counts the traffic of rewritten graphs while they run, and compares it with the closed forms of the papers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import autotp
from autotp.planner import plan_captured
from autotp.plans.families import family
from autotp.plans.options import Options
from benchmarks.models import Chain, Transformer
from benchmarks.tables import command, table
from costmodel import volumes
from passes.capture import capture
from passes.world.pending import Pending
from passes.world.world import LocalWorld

BATCH, SEQUENCE, HIDDEN, HEADS, INNER = 128, 1, 64, 16, 128

#: (family, roles of the mesh axes, mesh, values of the closed form's symbols); Tesseract's meshes as [q, q, d].
SCHEMES = [
    *(
        ("tensor3d", "ww", (p, q), {"q": q, "p": p}) if p > 1 else ("tensor3d", "w", (q,), {"q": q, "p": 1})
        for q, p in ((4, 1), (4, 2), (8, 2), (8, 4), (16, 4))
    ),
    *(
        ("tesseract-2.5d", "dmn", (d, q, q), {"q": q, "d": d})
        if d > 1
        else ("tesseract-2.5d", "mn", (q, q), {"q": q, "d": 1})
        for q, d in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1))
    ),
    ("3d", "mww", (2, 2, 2), {"q": 2}),
    ("3d", "mww", (4, 4, 4), {"q": 4}),
]


class CountingWorld(LocalWorld):
    """Runs every device of a mesh in this process and adds up the elements that one device receives.

    Attributes:
        elements: Kind of collective -> elements received in a ring: 2 (n-1)/n of the tensor for an all-reduce over n
            devices, (n-1)/n for the other kinds (of the full result for an all-gather).
    """

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        super().__init__(mesh_shape)
        self.elements: dict[str, float] = defaultdict(float)

    @property
    def total(self) -> float:
        """The total number of received elements."""
        return sum(self.elements.values())

    def _count(self, kind: str, axes: tuple[int, ...], sent: float) -> None:
        ways = math.prod(self.mesh_shape[axis] for axis in axes)
        self.elements[kind] += sent * (ways - 1) / ways

    def all_reduce(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """See ``World.all_reduce``."""
        self._count("all_reduce", axes, 2 * parts[0].numel())
        return super().all_reduce(parts, axes, op)

    def all_gather(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_gather``."""
        self._count("all_gather", (axis,), parts[0].numel() * self.mesh_shape[axis])
        return super().all_gather(parts, axis)

    def reduce_scatter(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.reduce_scatter``."""
        self._count("reduce_scatter", (axis,), parts[0].numel())
        return super().reduce_scatter(parts, axis)

    def all_to_all(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_to_all``."""
        self._count("all_to_all", (axis,), parts[0].numel())
        return super().all_to_all(parts, axis)


def closed_form(kind: str, name: str, values: Mapping[str, int]) -> float:
    """Elements that one device receives for a pair of linear layers or a transformer layer, by the closed form."""
    known = {getattr(volumes, symbol): value for symbol, value in values.items()}
    rows = {volumes.m: BATCH * SEQUENCE}
    if kind == "layer":
        return float(volumes.LAYER[name].subs(known | rows | {volumes.h: HIDDEN}))
    shapes = ((HIDDEN, INNER), (INNER, HIDDEN))
    swapped = [known, known | {volumes.q: values["p"], volumes.p: values["q"]} if "p" in values else known]
    pairs = zip(shapes, swapped, strict=True)
    return sum(float(volumes.LINEAR[name].subs(s | rows | {volumes.k: k, volumes.n: n})) for (k, n), s in pairs)


def counted(kind: str, name: str, roles: str, mesh: tuple[int, ...]) -> tuple[float, set[str]]:
    """Elements that one device receives for one pair or layer, forward and backward, and the names of the schemes.

    Computed as the difference between models of three and of two layers, to exclude the first and last operators.
    """
    totals, names = [], set()
    for depth in (2, 3):
        torch.manual_seed(0)
        model: nn.Module = Transformer(depth, HIDDEN, HEADS) if kind == "layer" else Chain(depth, HIDDEN, INNER)
        x = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64)
        topology = autotp.Topology.flat(math.prod(mesh), bandwidth=1e9, latency=0.0)
        chosen = replace(family(name), roles=lambda axes: [roles])
        panels = 1 if name == "tensor3d" else 2
        plan = plan_captured(
            capture(model.double(), (x,)), topology, Options(chosen, mesh=mesh, panels=panels, schedule="none")
        )
        names |= {op.scheme for op in plan.operators if op.module.startswith("layers.1") and op.bound_bytes}
        world = CountingWorld(mesh)
        autotp.simulate(model, plan, (x,), world=world)(x).backward()
        totals.append(world.total)
    return totals[1] - totals[0], names


def make() -> str:
    """Counts the traffic of every scheme and compares it with its closed form."""
    rows = []
    for name, roles, mesh, values in SCHEMES:
        shape = ", ".join(f"{symbol} = {value}" for symbol, value in values.items())
        cells: list[object] = [name, shape, "×".join(map(str, mesh))]
        for kind in ("linears", "layer"):
            found, names = counted(kind, name, roles, mesh)
            expected = closed_form(kind, name, values)
            if found != expected:
                raise SystemExit(f"{name} {mesh} {kind}: counted {found:,.0f}, but the closed form is {expected:,.0f}")
            cells += [f"{found:,.0f}", f"{expected:,.0f}"]
        rows.append([*cells, ", ".join(sorted(names))])
    header = ["family", "", "mesh", "linears: counted", "closed form", "layer: counted", "closed form", "named"]
    forms = "".join(
        f"- **{name}**: one linear `{volumes.LINEAR[name]}`; a transformer layer `{volumes.LAYER[name]}`\n"
        for name in volumes.LINEAR
    )
    return f"""# What the schemes communicate: counted and by formula

Generated by `python -m benchmarks.volumes --write`; the command fails if a count differs from its formula.

Elements that one device receives, forward and backward, while the rewritten graph of a model runs under
`autotp.simulate` (float64, {BATCH} × {SEQUENCE} tokens). *Linears* is one pair of linear layers, {HIDDEN} to {INNER}
and back; *layer* is a transformer layer of hidden size {HIDDEN} with {HEADS} heads (query, key and value share one
gathered input, as with a fused projection). SUMMA, 2.5D and 3D use 2 panels; without panels, the gathered input is
kept for the backward pass, and the factor 3 of `m*k` becomes 2. The sources of the formulas are in
`costmodel/volumes.py`.

{forms}
{table(header, rows)}"""


if __name__ == "__main__":
    command("volumes", "volumes.md", make)
