"""Graphs run node by node: hooks, the release of values, and devices whose graphs differ in numbers."""

import weakref

import pytest
import torch
from torch import fx, nn

from autotp.runtime.interpreter import Interpreter, Lockstep
from passes.world.ops import Parts, hosted
from passes.world.world import LocalWorld


@hosted
def noted(world, value, number):
    return Parts([world, value, number])


def graph_of(width, body):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((body(graph, x, width),))
    root = nn.Module()
    root.register_buffer("held", torch.ones(()))
    root.world = LocalWorld((1,))
    return fx.GraphModule(root, graph)


def test_a_hook_gives_every_nodes_value_and_no_value_is_held_longer_than_needed():
    def body(graph, x, width):
        return graph.call_function(torch.neg, (graph.call_function(torch.add, (x, width)),))

    alive, seen = [], []

    def hook(node, run):
        seen.append((node.name, [reference() is not None for reference in alive]))
        value = run() * 10 if node.name == "add" else run()
        if node.op == "call_function":
            alive.append(weakref.ref(value))
        return value

    given = [torch.zeros(2)]
    (found,) = Interpreter(graph_of(1, body), hook).boxed_run(given)
    assert found.tolist() == [-10, -10] and given == []
    assert seen == [("add", []), ("neg", [True]), ("output", [False, True])], "none outlives its last reader"


def test_devices_run_their_own_numbers_and_hosted_functions_once():
    def body(graph, x, width):
        world, held = graph.get_attr("world"), graph.get_attr("held")
        narrow = graph.call_function(torch.narrow, (x, 0, 0, width))
        total = graph.call_function(torch.add, (narrow, held), {"alpha": width})
        turned = graph.call_method("view", (total, [1, width]))
        return graph.call_function(noted, (world, turned, width))

    modules, world = [graph_of(width, body) for width in (1, 3)], LocalWorld((2,))
    nodes = zip(*(module.graph.nodes for module in modules), strict=True)
    each = {own[0]: own for own in nodes}
    ((seen, value, number),) = Lockstep(modules[0], world, each=each).run(Parts([torch.zeros(4), torch.zeros(4)]))
    assert seen is world and isinstance(value, Parts) and number == Parts([1, 3])
    assert [part.tolist() for part in value] == [[[1.0]], [[3.0, 3.0, 3.0]]]


def test_errors_are_the_operators_own():
    def body(graph, x, width):
        return graph.call_function(torch.narrow, (x, 0, 0, width))

    with pytest.raises(RuntimeError) as plain:
        torch.zeros(2).narrow(0, 0, 5)
    with pytest.raises(RuntimeError) as found:
        Interpreter(graph_of(5, body)).boxed_run([torch.zeros(2)])
    assert str(found.value) == str(plain.value)
