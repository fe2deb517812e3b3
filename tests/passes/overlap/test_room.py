"""The memory of a scheduled graph, computed from its nodes."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from passes.graph import annotate
from passes.overlap.launch import launches
from passes.overlap.memory import peak, peak_in
from passes.overlap.primitives import all_gather, all_reduce
from passes.overlap.schedule import reordered

SIZE = 4 * 8 * 8
aten = torch.ops.aten


def tensor(*shape):
    return torch.empty(shape, device="meta")


def chain():
    """x -> relu -> tanh -> view -> sum, and exp of relu at the end; returns the graph and these nodes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = [graph.call_function(aten.relu.default, (x,))]
    made.append(graph.call_function(aten.tanh.default, (made[0],)))
    made.append(graph.call_function(aten.view.default, (made[1], [64])))
    made.append(graph.call_function(aten.sum.default, (made[2],)))
    made.append(graph.call_function(aten.exp.default, (made[0],)))
    graph.output((made[3], made[4]))
    shapes = [(8, 8), (8, 8), (8, 8), (64,), (), (8, 8)]
    for node, shape in zip((x, *made), shapes, strict=True):
        node.meta["val"] = tensor(*shape)
    return graph, made


def test_a_result_is_held_until_its_last_reader_and_a_views_has_run():
    graph, _ = chain()
    assert peak(graph) == 2 * SIZE + 4  # relu, tanh (through its view), and the sum


def test_another_order_holds_more():
    graph, (relu, tanh, view, total, exp) = chain()
    assert peak_in(graph, [relu, exp, tanh, view, total]) == 3 * SIZE  # exp is an output, so it is held to the end
    assert peak_in(graph, [relu, tanh, view, total, exp]) == peak(graph)


def test_each_of_several_results_is_taken_at_once():
    """Python frees a tuple's tensors with the tuple: a late getitem would keep the other tensors alive."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    both = graph.call_function(aten.max.dim, (x, 1))
    first, second = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    exp, neg = (graph.call_function(aten.exp.default, (x,)), graph.call_function(aten.neg.default, (first,)))
    graph.output((neg, exp, second))
    found = [node.name for node in reordered(graph, [both, first, neg, exp, second]).nodes]
    assert found == [node.name for node in (x, both, first, second, neg, exp, *graph.find_nodes(op="output"))]


def test_what_a_backward_graph_is_given_counts_until_it_is_read():
    graph, _ = chain()
    annotate(next(iter(graph.nodes)), held=1000.0)
    assert peak(graph) == max(1000 + SIZE, 2 * SIZE + 4)


@pytest.mark.parametrize(("kind", "most"), [("sum", 2), ("gather", 4)])
def test_a_sum_is_left_where_the_summand_was_and_a_gathered_tensor_is_not(kind, most):
    graph = fx.Graph()
    x = graph.placeholder("x")
    exp = graph.call_function(aten.exp.default, (x,))
    args = (exp, [0], "sum") if kind == "sum" else (exp, 0, 2)
    moved = graph.call_function(all_reduce if kind == "sum" else all_gather, args)
    tanh = graph.call_function(aten.tanh.default, (moved,))
    graph.output((tanh,))
    for node in (x, exp):
        node.meta["val"] = tensor(8, 8)
    for node in (moved, tanh):
        node.meta["val"] = tensor(8, 8) if kind == "sum" else tensor(2, 8, 8)
    launched = launches(graph)
    order = [node for node in launched.nodes if node.op not in ("placeholder", "output")]
    assert peak_in(launched, order) == most * SIZE


def test_inputs_that_lie_in_one_memory_hold_it_until_the_last_is_read():
    graph = fx.Graph()
    first, second, other = (graph.placeholder(name) for name in ("first", "second", "other"))
    annotate(first, held=1000.0)
    annotate(second, within="first")
    exp = graph.call_function(aten.exp.default, (first,))
    tanh = graph.call_function(aten.tanh.default, (exp,))
    total = graph.call_function(aten.add.Tensor, (tanh, second))
    graph.output((total,))
    for node in (first, second, other, exp, tanh, total):
        node.meta["val"] = tensor(8, 8)
    assert peak(graph) == 1000 + 2 * SIZE
    annotate(second, within="")
    assert peak(graph) == 1000 + SIZE
