"""The peak memory of a scheduled graph, from the sizes of its nodes.

A result is live until all nodes that read it or a view of it have run, the operand of a collective until the wait, and the
outputs of the graph until its end. A result that an operator writes over its operand (`passes.overlap.inplace`) takes no
memory. Not counted are tensors that are in memory anyway, such as parameters and the inputs of the forward pass, and the
workspaces of kernels.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor, fx

from passes.graph import note_of
from passes.overlap.aliasing import source_of
from passes.overlap.inplace import inplace
from passes.overlap.launch import launch, local, wait
from passes.overlap.schedule import reordered

__all__ = ["peak", "peak_in"]


def peak_in(graph: fx.Graph, order: Iterable[fx.Node]) -> float:
    """`peak` of a copy of a graph with its nodes, except for placeholders and the output, in another order."""
    arranged = reordered(graph, order)
    inplace(arranged)
    return peak(arranged)


def peak(graph: fx.Graph) -> float:
    """The peak memory of a graph, in bytes.

    Args:
        graph: in its final form, after `passes.overlap.inplace`; see ``passes.overlap.launch.launches``. Notes on the
            inputs of a backward graph say how many bytes they hold.
    """
    nodes = list(graph.nodes)
    roots: dict[fx.Node, fx.Node] = {}
    sizes: dict[fx.Node, float] = {}
    made: dict[fx.Node, float] = defaultdict(float)
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = _memory_of(node)
        roots[node] = node if source is None else roots[source]
        sizes[node] = _size(node) if source is None else 0.0
        made[node.all_input_nodes[0] if node.target is operator.getitem else node] += sizes[node]
        for read in _read(node):
            last[roots[read]] = node
        last.setdefault(roots[node], node)
    ends: dict[fx.Node, float] = defaultdict(float)
    for root, node in last.items():
        ends[node] += sizes[root]
    held = most = 0.0
    for node in nodes:
        held += made[node]
        most = max(most, held)
        held -= ends[node]
    return most


def _memory_of(node: fx.Node) -> fx.Node | None:
    """The node in whose memory a node's result lies; None if it has its own."""
    if node.target is wait:
        return node.all_input_nodes[0]
    if node.target is launch:
        return node.args[2] if node.args[1] == "all_reduce_" else None  # type: ignore[return-value]
    source = source_of(node)
    if node.target is operator.getitem and source is not None and source_of(source) is None and source.target is not wait:
        return None  # each of several results that are not views has its own memory
    if source is None or node.target is not local:
        return source
    before, after = source.meta["val"], node.meta["val"]
    stays = node.args[1] != "own" and before.shape == after.shape and before.stride() == after.stride()
    return source if stays else None


def _size(node: fx.Node) -> float:
    if node.op == "placeholder":
        return note_of(node).held
    if node.target is launch:
        collective = note_of(node).collective
        return float(collective.meta["val"].nbytes) if collective is not None else 0.0
    value = node.meta.get("val")
    return float(value.nbytes) if isinstance(value, Tensor) else 0.0


def _read(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node needs: its inputs and, for a wait, the operands of its collective too."""
    if node.target is wait:
        (begun,) = node.all_input_nodes
        return [begun, *begun.all_input_nodes]
    return node.all_input_nodes
