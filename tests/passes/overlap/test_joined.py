"""Sums of products computed as one product: the same numbers, and only where it pays."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import autotp
from benchmarks.models import Transformer
from passes.overlap.join_products import join_products

aten = torch.ops.aten


def products(graph):
    return [n for n in graph.nodes if n.target is aten.mm.default]


def joined(function, *shapes):
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    module = make_fx(function, tracing_mode="fake")(*inputs)
    before = module(*inputs)
    join_products(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), before, rtol=1e-12, atol=1e-12)
    return module.graph


def test_a_sum_of_two():
    graph = joined(lambda a, b, c, d: a.t() @ b + c.t() @ d, (4, 32), (4, 48), (4, 32), (4, 48))
    assert len(products(graph)) == 1 and not [n for n in graph.nodes if n.target is aten.add.Tensor]


def test_a_sum_of_four_transposed():
    shapes = [(4, 32), (4, 48)] * 4

    def summed(*given):
        a, b, c, d = ((x.t() @ y).t() for x, y in zip(given[::2], given[1::2], strict=True))
        return a + b + c + d

    graph = joined(summed, *shapes)
    (node,) = products(graph)
    assert node.meta["val"].shape == (32, 48) and node.args[0].meta["val"].shape == (32, 16)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c, d: (a.t() @ b) + (c.t() @ d) * 2,
        lambda a, b, c, d: torch.add(a.t() @ b, c.t() @ d, alpha=2),
        lambda a, b, c, d: (lambda p: p + c.t() @ d + p.sum())(a.t() @ b),
    ],
    ids=["scaled", "alpha", "read elsewhere"],
)
def test_what_is_no_sum_of_products_stays(function):
    graph = joined(function, (4, 32), (4, 48), (4, 32), (4, 48))
    assert len(products(graph)) == 2


def test_many_rows_stay_apart():
    graph = joined(lambda a, b, c, d: a.t() @ b + c.t() @ d, (500, 8), (500, 8), (500, 8), (500, 8))
    assert len(products(graph)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [{"batch": 2}, {"batch": 4}])
def test_weights_gradients_of_chunks_are_one_product(chunks):
    model, x = Transformer(2, 256, 4).double(), torch.randn(8, 5, 256, dtype=torch.float64)
    topology = autotp.Topology.flat(2, bandwidth=1e9, latency=1e-6)
    plan = autotp.plan(model, topology, (x,), strategy="megatron-1d", chunks=chunks)
    model(x).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    simulated = autotp.simulate(model, plan, (x,), schedule="overlap")
    simulated(x).backward()
    for p, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-9, atol=1e-12)
    (compiled,) = simulated._compiled.values()
    rows = [n.args[0].meta["val"].shape[1] for n in products(compiled.graphs.backward)]
    assert rows.count(40) >= 12 and rows.count(40 // chunks["batch"]) <= 1, rows
