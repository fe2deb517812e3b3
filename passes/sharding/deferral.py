"""Gradients that are not reduced yet: the programs of the inner steps of an accumulated one.

A value that depends on parameters alone is the same in every micro-batch. So its gradients may be added up over all
micro-batches where they arrive, and go the rest of their way once. `defer` cuts a sharded graph at every parameter, and
behind every reshard of such a value whose mirror communicates but does not cast: there a gradient is still the local sum of
what one device's readers gave, partial along the axes that would be reduced. In the graph of the inner steps the gradient
ends at the cut, in a placeholder of its own, where autograd adds up what arrives. Another graph is what lies between the
parameters and the cuts; its backward pass reduces the sums.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from passes.graph import above, annotate, differentiable, note_of
from passes.layouts.layout import Layout
from passes.layouts.reshard import COMMUNICATING, Step
from passes.world import ops

__all__ = ["Cut", "Deferred", "defer"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a gradient waits.

    Attributes:
        name: of the placeholder that stands for the value at the cut, and takes its gradient.
        value: the whole value, fake.
        layout: of the value; None: it is a parameter as it rests.
        parameters: names of the parameters that it depends on.
    """

    name: str
    value: Tensor
    layout: Layout | None
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deferred:
    """The graphs of an accumulated step.

    Attributes:
        inner: the sharded graph, whose gradients end at the cuts: a placeholder for each comes after the others, of the
            value's local shape, whose numbers nobody reads.
        last: the sharded graph, which returns the values at the cuts behind its outputs: what waits there is a gradient of
            these, and is reduced with the gradients of the last step.
        mirrors: parameters, then the same placeholders -> the values at the cuts, whose gradients go on to parameters. The
            numbers of these values mean nothing.
        cuts: in the graph's order.
    """

    inner: fx.GraphModule
    last: fx.GraphModule
    mirrors: fx.GraphModule
    cuts: tuple[Cut, ...]


def defer(sharded: fx.GraphModule, parameters: Collection[str]) -> Deferred:
    """Cuts a sharded graph.

    Args:
        sharded: see ``passes.sharding.shard.shard``; it may be unrolled and panelled.
        parameters: names of the placeholders that are parameters.
    """
    fixed = _fixed(sharded.graph, parameters)
    cuts = {node: _cut(node, fixed[node]) for node in fixed if _ends(node)}
    inner, last, mirrors = _inner(sharded.graph, cuts), _last(sharded.graph, cuts), _mirrors(sharded.graph, fixed, cuts)
    names = {name for cut in cuts.values() for name in cut.parameters}
    for unused in [n for n in mirrors.nodes if n.op == "placeholder" and n.target in set(parameters) - names]:
        mirrors.erase_node(unused)
    first, second, third = (fx.GraphModule(sharded, graph, class_name="Sharded") for graph in (inner, last, mirrors))
    return Deferred(first, second, third, tuple(cuts.values()))


def _fixed(graph: fx.Graph, parameters: Collection[str]) -> dict[fx.Node, tuple[str, ...]]:
    """The values that depend on parameters and nothing else, with the names of these parameters."""
    found: dict[fx.Node, tuple[str, ...]] = {}
    worlds: set[fx.Node] = set()
    for node in graph.nodes:
        sources = [n for n in node.all_input_nodes if n not in worlds]
        if node.op == "get_attr" or node.target is ops.chunked:
            worlds.add(node)
        elif node.op == "placeholder" and node.target in parameters:
            found[node] = (str(node.target),)
        elif node.op in ("call_function", "call_method") and sources and all(n in found for n in sources):
            found[node] = tuple(dict.fromkeys(name for n in sources for name in found[n]))
    return found


def _ends(node: fx.Node) -> bool:
    """Whether gradients of a value that depends on parameters alone wait here."""
    return differentiable(node.meta.get("val")) and (node.op == "placeholder" or _reduces(node))


def _reduces(node: fx.Node) -> bool:
    """Whether a node is a reshard whose gradient is reduced, in its own dtype: a sum in another waits as it rests."""
    if node.target not in (ops.reshard, ops.gather) or len(node.args) > 4:
        return False
    return any(Step(*s).kind in COMMUNICATING for s in node.args[3])  # type: ignore[misc, union-attr]


def _cut(node: fx.Node, parameters: tuple[str, ...]) -> Cut:
    layout = None if node.op == "placeholder" else note_of(node).layouts[0]
    return Cut(f"unreduced_{node.name}", node.meta["val"], layout, parameters)


def _inner(source: fx.Graph, cuts: Mapping[fx.Node, Cut]) -> fx.Graph:
    graph = fx.Graph()
    plain = {node: graph.node_copy(node) for node in source.nodes if node.op == "placeholder"}
    sinks = _sinks(graph, cuts)
    values: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], lambda n: values[n])).meta = dict(node.meta)
            continue
        if node not in plain:
            # A reshard whose gradient ends behind it hands none on.
            plain[node] = graph.node_copy(node, (plain if node in cuts else values).__getitem__)
        values[node] = plain[node]
        if node in cuts:
            values[node] = graph.call_function(ops.ending, (plain[node], sinks[node]))
            values[node].meta = dict(node.meta)
    graph.lint()
    return graph


def _last(source: fx.Graph, cuts: Collection[fx.Node]) -> fx.Graph:
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs: Any = graph.graph_copy(source, values)
    graph.output((*outputs, *(values[node] for node in cuts))).meta = dict(source.output_node().meta)
    graph.lint()
    return graph


def _mirrors(source: fx.Graph, fixed: Collection[fx.Node], cuts: Mapping[fx.Node, Cut]) -> fx.Graph:
    graph = fx.Graph()
    wanted = above(cuts)
    values = {n: graph.node_copy(n) for n in source.nodes if n in fixed and n.op == "placeholder"}
    sinks = _sinks(graph, cuts)
    for node in source.nodes:
        if node not in wanted or node in values:
            continue
        # What a reshard brings is not needed, but by others before a cut: only the gradient's way.
        read = any(user in fixed and user in wanted for user in node.users)
        if node in cuts and not read:
            world, value, _, backward = node.args
            args = values[world], values[value], sinks[node], backward  # type: ignore[index]
            values[node] = graph.call_function(ops.mirror, args, node.kwargs)
            values[node].meta = dict(node.meta)
        else:
            values[node] = graph.node_copy(node, lambda n: values[n])
    graph.output(tuple(values[node] for node in cuts))
    annotate(graph.output_node(), values=tuple(cut.value for cut in cuts.values()))
    graph.lint()
    return graph


def _sinks(graph: fx.Graph, cuts: Mapping[fx.Node, Cut]) -> dict[fx.Node, fx.Node]:
    found = {}
    for node, cut in cuts.items():
        found[node] = graph.placeholder(cut.name)
        found[node].meta = {"val": cut.value}
    return found
