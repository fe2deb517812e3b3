"""Regions of scheduled graphs: what they contain, and that graphs with outlined regions compute the same."""

import operator
import random

import pytest
import torch
from overlapping import prepared, random_durations
from thinned import thinned
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen

from passes.overlap.launch import launch, wait
from passes.overlap.outline import boxed, key_of, outline
from passes.overlap.schedule import Limits, reordered


class Eager(nn.Module):
    """Runs a region's graph in eager mode."""

    def __init__(self, graph):
        super().__init__()
        graph.set_codegen(_BoxedCodeGen())
        self.graph, self.run, self.calls = graph, fx.GraphModule({}, graph), 0

    def forward(self, operands):
        self.calls += 1
        results = self.run(operands)
        assert not operands, "operands are let go"
        return results


def outlined(function, *args):
    """Traces a function and outlines its regions; returns the module and the regions' modules."""
    module = make_fx(function, tracing_mode="fake")(*args)
    known = {}
    outline(module.graph, module, lambda graph: known.setdefault(key_of(graph), Eager(graph)))
    module.graph.lint()
    module.recompile()
    return module, list(known.values())


def equal(module, function, *args):
    for mine, theirs in zip(module(*args), function(*args), strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_what_is_read_outside_is_given_and_its_views_are_taken_outside():
    def function(x):
        y = (x * 2).sin()
        return [y.t(), y.t().reshape(-1)[2:], x.t(), (y + 1).view(-1)]

    x = torch.randn(4, 6)
    module, (region,) = outlined(function, x)
    equal(module, function, x)
    given, *_ = (node.args[0] for node in region.graph.nodes if node.op == "output")
    targets = [node.target for node in given]
    assert torch.ops.aten.sin.default in targets and torch.ops.aten.t.default not in targets
    storages = {result.untyped_storage().data_ptr() for result in region.run([x])}
    assert len(storages) == len(given) and x.untyped_storage().data_ptr() not in storages
    assert module.graph.find_nodes(op="call_function", target=torch.ops.aten.t.default), "of x, and of y"


def test_boundaries_are_what_draws_changes_tensors_or_is_attention():
    def function(x):
        a = (x + 1).exp()
        b = torch.nn.functional.scaled_dot_product_attention(a, a, a) if a.dim() == 4 else torch.rand_like(a)
        return [(b * 2).tanh()]

    for x in (torch.randn(1, 2, 4, 8), torch.randn(3, 4)):
        module, regions = outlined(function, x)
        assert [region.calls for region in regions] == [0, 0]
        calls = [str(node.target) for node in module.graph.nodes if node.op in ("call_module", "call_function")]
        assert any("attention" in name or "rand" in name for name in calls)
        assert sum("region" in name for name in calls) == 2
        if x.dim() == 4:
            equal(module, function, x)


def test_one_operator_is_no_region():
    module, regions = outlined(lambda x: [x.t().view(-1) + 1], torch.randn(1, 4))
    assert not regions and not module.graph.find_nodes(op="call_module")


def test_results_of_an_operator_with_several_stay_with_it():
    def function(x, w):
        normed, mean, _ = torch.native_layer_norm(x, (8,), w, w, 1e-5)
        first, second = (normed * 2).split(4, dim=1)
        return [first.sin(), second, mean]

    args = torch.randn(4, 8), torch.randn(8)
    module, (_,) = outlined(function, *args)
    equal(module, function, *args)


def test_equal_layers_have_one_region():
    def function(x, *weights):
        for weight in weights:
            x = torch.nn.functional.scaled_dot_product_attention(*[(x @ weight).tanh() * 2] * 3)
        return [x]

    x, weights = torch.randn(1, 2, 4, 8), [torch.randn(8, 8) for _ in range(3)]
    module, regions = outlined(function, x, *weights)
    assert len(regions) == 1 and len(module.graph.find_nodes(op="call_module", target="region_0")) == 3
    equal(module, function, x, *weights)
    assert regions[0].calls == 3


def test_keys_tell_shapes_strides_and_arguments_apart():
    def key(function, *args):
        module = make_fx(function, tracing_mode="fake")(*args)
        return key_of(module.graph)

    x = torch.randn(4, 4)
    base = key(lambda x: [x + 1], x)
    assert base == key(lambda other: [other + 1], x.clone())
    others = [(lambda x: [x + 2], x), (lambda x: [x - 1], x), (lambda x: [x + 1], x.t()), (lambda x: [x + 1], x[:2])]
    assert len({base, *(key(*other) for other in others)}) == 5


@pytest.mark.parametrize("strategy", ["megatron-1d", "data"])
@pytest.mark.parametrize("seed", thinned(range(2), whole=True))
def test_collectives_stay_where_the_schedule_has_them(strategy, seed):
    """Collectives keep their order, and each region lies between two launches or waits, or the graph's ends."""
    graphs, _ = prepared(strategy)
    made = graphs((0,))
    for graph, slots in zip(
        (made.forward, made.backward), made.slots(random_durations(seed), Limits(slack=random.random())), strict=True
    ):
        order = [slot.node for slot in slots]
        plain, arranged = reordered(graph, order), reordered(graph, order)
        root = nn.Module()
        outline(arranged, root, Eager)
        arranged.lint()
        moves = [n.name for n in plain.nodes if n.target in (launch, wait)]
        assert moves == [n.name for n in arranged.nodes if n.target in (launch, wait)]
        number = {node.name: i for i, node in enumerate(plain.nodes)}
        for call in arranged.find_nodes(op="call_module"):
            assert call.args[0].target is boxed
            inside = [node for node in root.get_submodule(call.target).graph.nodes if node.op == "call_function"]
            places = [number[node.name] for node in inside if node.target is not operator.getitem]
            assert not [name for name in moves if min(places) < number[name] < max(places)]
