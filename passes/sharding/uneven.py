"""Tensors whose local parts differ in shape between devices."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from passes.layouts.layout import Layout, local_shape
from passes.rules.shapes import operands_of, results_of
from passes.sharding.shard import Sharding

__all__ = ["lone", "uneven"]

Shape = tuple[int, ...]


def uneven(graph: fx.Graph, sharding: Sharding) -> Iterator[tuple[str, Shape, Shape]]:
    """Yields (placeholder or operator, local shape on the first device, on the last) where they differ, in graph order.

    Args:
        graph: a captured graph.
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
    """The names from ``uneven`` with a dim of more than one element on the first device, and of one or none on the last.

    On the last device, a transposed tensor is contiguous: operators copy less, and autograd saves other tensors.
    """
    parts = uneven(graph, sharding)
    return list(dict.fromkeys(name for name, *ends in parts if any(b <= 1 < a for a, b in zip(*ends, strict=True))))
