"""A backward graph for when only some outputs have gradients: what serves only the others' gradients is not run.

Which nodes stay depends on the graph's edges alone, so that all devices' graphs stay equal; sums of one term and zeros that
this leaves are removed by ``drop_zeros``, which looks at sizes.

Gradients of zeros would not do instead: where a function has an infinite slope, zero times that is not zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from passes.graph import below

__all__ = ["drop_zeros", "pruned"]

_aten = torch.ops.aten


def pruned(backward: fx.Graph, outputs: int, missing: frozenset[int]) -> fx.Graph:
    """The same gradients where some outputs have none; None where no other gradient flows to.

    Every node of a backward graph is linear in the gradients that it is made of, so what is made of missing ones alone is
    zero.

    Args:
        backward: what is saved, then gradients of the outputs -> gradients; its placeholders stay.
        outputs: how many outputs have a gradient.
        missing: the numbers of those without.
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
    """Leaves out, in place, sums of something and zeros where the sum is of the same shape, type and strides."""
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
