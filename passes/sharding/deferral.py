"""Defers the reduction of gradients in a step that accumulates them over several micro-batches.

A value that depends on parameters alone is the same in every micro-batch. So its gradients can be summed locally over all
micro-batches, and be reduced once. `defer` cuts a sharded graph at every parameter, and after every reshard of such a value
whose mirror communicates but does not cast: there, a gradient is still the sum of the contributions of one device's
consumers, partial along the axes over which it will be reduced. In the graph of the inner steps, the gradient ends at the
cut, in a placeholder in which autograd accumulates it. Another graph has the nodes between the parameters and the cuts; its
backward pass reduces the sums.
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
    """A place in the graph at which gradients are accumulated before they are reduced.

    Attributes:
        name: the name of the placeholder that stands for the value at the cut, and receives its gradient.
        value: the fake tensor of the whole value.
        layout: the layout of the value; None for a parameter in its layout at rest.
        parameters: names of the parameters that the value depends on.
    """

    name: str
    value: Tensor
    layout: Layout | None
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deferred:
    """The graphs of a step with gradient accumulation.

    Attributes:
        inner: the sharded graph, with gradients that end at the cuts. After its other placeholders, it has one for each
            cut, of the value's local shape, whose elements are never read.
        last: the sharded graph, which also returns the values at the cuts, after its outputs. The accumulated gradients are
            passed as gradients of these values, and are reduced together with the gradients of the last micro-batch.
        mirrors: parameters, then the same placeholders -> the values at the cuts; its backward pass takes their gradients
            to the parameters. The elements of these values are meaningless.
        cuts: the cuts, in the graph's order.
    """

    inner: fx.GraphModule
    last: fx.GraphModule
    mirrors: fx.GraphModule
    cuts: tuple[Cut, ...]


def defer(sharded: fx.GraphModule, parameters: Collection[str]) -> Deferred:
    """Cuts a sharded graph where gradients can be accumulated before they are reduced.

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
    """The values that depend on parameters alone, with the names of these parameters."""
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
    """Whether there is a cut at a node whose value depends on parameters alone."""
    return differentiable(node.meta.get("val")) and (node.op == "placeholder" or _reduces(node))


def _reduces(node: fx.Node) -> bool:
    """Whether a node is a reshard that reduces its gradient without a cast; if it casts, the gradient waits at rest."""
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
            # The gradient of a reshard with a cut ends after it: its operands get none, and it reads them uncut.
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
        # Only the backward steps of a reshard are needed, unless other nodes before a cut read its result.
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
