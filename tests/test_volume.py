"""Bytes counted while a rewritten Tensor3D layer runs, against the closed form of arXiv 2305.13525."""

import math
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autotp
from autotp.rewrite import rewrite
from passes import ops
from passes.reshard import Step
from passes.world import LocalWorld

HIDDEN, HEADS, BATCH, SEQUENCE = 64, 16, 2, 8
FACTOR = 4  # of the MLP


class CountingWorld(LocalWorld):
    """Adds up what one device receives in every collective, in elements, by kind."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.elements = defaultdict(float)

    def _count(self, kind, part, axes, share):
        ways = math.prod(self.mesh_shape[a] for a in axes)
        self.elements[kind] += share(ways) * part.numel()

    def all_reduce(self, parts, axes, op="sum"):
        self._count("all_reduce", parts[0], axes, lambda n: 2 * (n - 1) / n)
        return super().all_reduce(parts, axes, op)

    def all_gather(self, parts, axis):
        self._count("all_gather", parts[0], (axis,), lambda n: n - 1)
        return super().all_gather(parts, axis)

    def reduce_scatter(self, parts, axis):
        self._count("reduce_scatter", parts[0], (axis,), lambda n: (n - 1) / n)
        return super().reduce_scatter(parts, axis)

    def all_to_all(self, parts, axis):
        self._count("all_to_all", parts[0], (axis,), lambda n: (n - 1) / n)
        return super().all_to_all(parts, axis)


class Layer(nn.Module):
    """A transformer layer's matrix products, as the paper counts them: no norm, no bias."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up = nn.Linear(HIDDEN, FACTOR * HIDDEN, bias=False)
        self.down = nn.Linear(FACTOR * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        def heads(t):
            return t.unflatten(-1, (HEADS, HIDDEN // HEADS)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def planned(layers, mesh):
    torch.manual_seed(0)
    model = Stack(layers).double()
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, dtype=torch.float64)
    topology = autotp.Topology.flat(math.prod(mesh), bandwidth=1e9, latency=0.0)
    return model, x, autotp.plan(model, topology, (x,), strategy="tensor3d", mesh=mesh)


def counted(layers, mesh):
    model, x, plan = planned(layers, mesh)
    world = CountingWorld(mesh)
    autotp.simulate(model, plan, (x,), world=world)(x).backward()
    return world.elements, plan


def closed_form(q, p):
    """PAPERS: V = (8 B h / G) [(q - 1) + 3 (p - 1)] elements a layer, forward and backward."""
    return 8 * BATCH * SEQUENCE * HIDDEN / (q * p) * ((q - 1) + 3 * (p - 1))


@pytest.mark.parametrize(("q", "p"), [(4, 1), (2, 2), (4, 2), (8, 2), (8, 4), (16, 4)])
def test_counted_elements_equal_the_closed_form(q, p):
    mesh = (q,) if p == 1 else (p, q)
    two, _ = counted(2, mesh)
    three, plan = counted(3, mesh)
    per_layer = {kind: three[kind] - two[kind] for kind in three}
    assert {kind for kind, n in per_layer.items() if n} == {"all_reduce"}
    operators = {op.name: op for op in plan.operators}
    columns = next(op for op in operators.values() if op.module.endswith("layers.1.q")).strategy
    result = next(axes for factor, axes in columns.items() if factor.startswith("n"))
    ways = {name: size for name, size in zip(plan.mesh_axes, plan.mesh_shape, strict=True)}
    q_used = math.prod(ways[axis] for axis in result)
    p_used = math.prod(mesh) // q_used
    assert sum(per_layer.values()) == closed_form(q_used, p_used)
    if mesh != (2, 2):
        assert (q_used, p_used) == (q, p), "the planner did not find the better orientation of the two"


def test_nothing_is_redistributed_between_layers():
    model, x, plan = planned(3, (2, 4))
    graph = rewrite(model, plan, (x,)).graph_module.graph
    tail = [n for n in graph.nodes if n.target in (ops.reshard, ops.gather)]
    inside = [n for n in tail if ".layers." in f".{n.args[1].meta.get('module', '')}." and "val" in n.meta]
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
