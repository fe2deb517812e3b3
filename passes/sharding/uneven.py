"""Tensors whose parts do not have the same shape on all devices."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from passes.layouts.layout import Layout, local_shape
from passes.rules.shapes import operands_of, results_of
from passes.sharding.shard import Sharding

__all__ = ["lone", "uneven"]

Shape = tuple[int, ...]


def uneven(graph: fx.Graph, sharding: Sharding) -> Iterator[tuple[str, Shape, Shape]]:
    """(placeholder or operator, shape of the first device's part, of the last's) where these differ, in the graph's order.

    Args:
        graph: that was captured.
        sharding: its operators' strategies, and the layouts of its placeholders.
    """
    mesh = sharding.mesh
    last = [ways - 1 for ways in mesh]

    def parts(shape: Shape, layout: Layout) -> tuple[Shape, Shape]:
        return local_shape(shape, layout, mesh), local_shape(shape, layout, mesh, last)

    for node in graph.nodes:
        found = []
        if node.name in sharding.resting:
            found = [parts(tuple(node.meta["val"].shape), sharding.resting[node.name])]
        elif node.name in sharding.strategies:
            strategy = sharding.strategies[node.name]
            wanted = zip(operands_of(node), (want.layout for want in strategy.wants), strict=True)
            found = [parts(tuple(operand.meta["val"].shape), layout) for operand, layout in wanted]
            results = zip(results_of(node), strategy.results, strict=True)
            found += [parts(tuple(tensor.shape), layout) for tensor, layout in results]
        for first, end in found:
            if first != end:
                yield node.name, first, end


def lone(graph: fx.Graph, sharding: Sharding) -> list[str]:
    """Of ``uneven``, what has a dim with more than one element on the first device, and one or none on the last.

    There, a transposed tensor is contiguous: operators copy less, and autograd saves other tensors.
    """
    parts = uneven(graph, sharding)
    return list(dict.fromkeys(name for name, *ends in parts if any(b <= 1 < a for a, b in zip(*ends, strict=True))))
