"""Traffic: rewritten graphs move as much as the papers' closed forms say, and schemes have the properties they promise."""

import math

import pytest
import torch
from thinned import thinned

import autotp
from autotp.runtime.rewrite import rewrite
from benchmarks import volumes
from benchmarks.models import Transformer
from benchmarks.tables import DOCS
from passes.graph import note_of
from passes.layouts.reshard import Step
from passes.world import ops

HIDDEN, HEADS, BATCH, SEQUENCE = 64, 16, 2, 8


def planned(layers, mesh):
    torch.manual_seed(0)
    model = Transformer(layers, HIDDEN, HEADS).double()
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64)
    topology = autotp.Topology.flat(math.prod(mesh), bandwidth=1e9, latency=0.0)
    return model, x, autotp.plan(model, topology, (x,), strategy="tensor3d", mesh=mesh)


@pytest.mark.parametrize(
    "scheme", thinned(volumes.SCHEMES, 8, whole=True), ids=lambda s: f"{s[0]}-{'x'.join(map(str, s[2]))}"
)
@pytest.mark.parametrize("kind", thinned(["layer", "linears"], first=1, slow=1, whole=True))
def test_counted_elements_equal_the_closed_form(kind, scheme):
    name, roles, mesh, values = scheme
    found, names = volumes.counted(kind, name, roles, mesh)
    assert found == volumes.closed_form(kind, name, values)
    known = {"tensor3d": {"2D Tensor3D"} if len(mesh) > 1 else {"1D column", "1D row"}, "3d": {"3D"}}
    assert names == known.get(name, {"2.5D"} if len(mesh) > 2 else {"2D SUMMA"})


def test_the_documented_table_names_every_scheme():
    text = (DOCS / "volumes.md").read_text()
    for kind in ("linears", "layer"):
        for name, _, mesh, values in volumes.SCHEMES:
            row = next(
                line
                for line in text.splitlines()
                if line.startswith(f"| {name} ") and f" {'×'.join(map(str, mesh))} |" in line
            )
            assert f"{volumes.closed_form(kind, name, values):,.0f}" in row


@pytest.mark.parametrize(("q", "p"), thinned([(8, 4), (4, 1), (4, 2), (8, 2), (16, 4)], first=1, slow=4))
def test_the_planner_finds_the_better_orientation(q, p):
    """PAPERS: q = sqrt(3 p q) ways for columns; a mesh can be used in either orientation."""
    mesh = (q,) if p == 1 else (p, q)
    _, _, plan = planned(2, mesh)
    columns = next(op for op in plan.operators if op.module.endswith("layers.1.q")).strategy
    result = next(axes for factor, axes in columns.items() if factor.startswith("n"))
    ways = dict(zip(plan.mesh_axes, plan.mesh_shape, strict=True))
    assert math.prod(ways[axis] for axis in result) == q


def test_nothing_is_redistributed_between_layers():
    model, x, plan = planned(3, (2, 4))
    graph = rewrite(model, plan, (x,)).graph_module.graph
    tail = [n for n in graph.nodes if n.target in (ops.reshard, ops.gather)]
    inside = [n for n in tail if ".layers." in f".{note_of(n.args[1]).module}." and "val" in n.meta]
    kinds = {Step(*step).kind for n in inside for step in (*n.args[2], *n.args[3])}
    assert len(inside) >= 3 * 6
    assert kinds == {"all_reduce"}


def test_every_second_linear_swaps_the_axes():
    _, _, plan = planned(2, (2, 4))
    by_module = {op.module: op for op in plan.operators if op.target == "aten.linear.default"}

    def axis(module, kind):
        return next(axes for factor, axes in by_module[module].strategy.items() if factor.startswith(kind))

    for i in range(2):
        for one, other in (("q", "o"), ("up", "down"), ("q", "up")):
            a, b = f"layers.{i}.{one}", f"layers.{i}.{other}"
            if other == "up":
                assert axis(a, "n") == axis(b, "n")
            else:
                assert axis(a, "n") == axis(b, "k")
                assert axis(a, "k") == axis(b, "n")
