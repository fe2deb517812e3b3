"""Prunes a backward graph for calls in which only some outputs have gradients: it omits nodes that only the others need.

Which nodes remain depends on the graph's edges alone, so that the graphs of all devices stay equal. Pruning leaves sums
with zeros; ``drop_zeros`` removes them depending on sizes.

Passing zeros as the missing gradients would be wrong: where the slope of a function is infinite, zero times it is not zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from passes.graph import below

__all__ = ["drop_zeros", "pruned"]

_aten = torch.ops.aten


def pruned(backward: fx.Graph, outputs: int, missing: frozenset[int]) -> fx.Graph:
    """The backward graph for calls in which some outputs have no gradient.

    It returns None as a gradient to which no present gradient contributes. Every node of a backward graph is linear in the
    gradients that it depends on, so a node that depends on missing gradients alone is zero.

    Args:
        backward: saved tensors, then gradients of the outputs -> gradients; all its placeholders are kept.
        outputs: how many gradients of outputs it takes.
        missing: the numbers, among these, of the gradients that are missing.
    """
    places = [node for node in backward.nodes if node.op == "placeholder"]
    tangents = places[len(places) - outputs :]
    without = {tangents[number] for number in missing}
    nothing = below(backward.nodes, without) - below(backward.nodes, set(tangents) - without)
    result = fx.Graph()
    values: dict[fx.Node, Any] = {}

    def value(node: fx.Node) -> Any:
        return _zeros(result, node) if node in nothing else values[node]

    for node in backward.nodes:
        if node.op == "placeholder":
            values[node] = result.placeholder(str(node.target))
            values[node].meta = dict(node.meta)
        elif node.op == "output":
            gradients: Any = node.args[0]
            result.output(tuple(values[g] if isinstance(g, fx.Node) and g not in nothing else None for g in gradients))
        elif node not in nothing:
            values[node] = result.node_copy(node, value)
    result.eliminate_dead_code()
    return result


def drop_zeros(graph: fx.Graph) -> None:
    """Replaces, in place, sums with zeros by the other term if it has the shape, dtype and strides of the sum."""
    for node in list(graph.nodes):
        if node.target is _aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
            left = [n for n in node.all_input_nodes if n.target is not _aten.zeros.default]
            if len(left) == 1 < len(node.all_input_nodes) and _same_memory(left[0], node):
                node.replace_all_uses_with(left[0])
    graph.eliminate_dead_code()


def _same_memory(one: fx.Node, other: fx.Node) -> bool:
    mine, its = one.meta["val"], other.meta["val"]
    return bool(mine.shape == its.shape and mine.dtype == its.dtype and mine.stride() == its.stride())


def _zeros(graph: fx.Graph, node: fx.Node) -> fx.Node:
    like: Any = node.meta["val"]
    assert isinstance(like, Tensor), f"{node} is not a tensor"
    shape = list(like.shape)
    found = graph.call_function(_aten.zeros.default, (shape,), {"dtype": like.dtype, "device": like.device})
    with like.fake_mode:  # type: ignore[attr-defined]
        found.meta = {"val": torch.zeros(shape, dtype=like.dtype, device=like.device)}
    return found
