"""Staging: splits an all_reduce over several mesh axes into a reduce_scatter over the innermost axis, an all_reduce over
the others, and an all_gather over the innermost axis.

A ring through all devices sends the whole tensor over every link in it. If the links of the innermost axis are fast, its
devices first reduce one share of the tensor each; then only the shares are sent over the slower links, and are gathered at
the end. As separate collectives, the three overlap with those of other tensors: while one runs between nodes, another runs
within nodes (Cho et al., "BlueConnect", SysML 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from passes.graph import annotate, emit, note_of
from passes.overlap.primitives import all_gather, all_reduce, reduce_scatter

__all__ = ["Faster", "Stages", "stage", "stages"]

_aten = torch.ops.aten

#: (mesh axes, bytes of one device's tensor) -> whether reducing it over the last of the axes first is faster.
Faster = Callable[[tuple[int, ...], float], bool]

#: (index among a graph's nodes, number of axes, from the last one on, that become stages of their own) per all_reduce.
Stages = tuple[tuple[int, int], ...]


def stages(graph: fx.Graph, mesh: tuple[int, ...], faster: Faster) -> Stages:
    """Chooses the all_reduces of a traced graph to split into stages.

    Args:
        graph: its collectives are operators of `passes.overlap.primitives`.
        mesh: sizes of the axes.
        faster: whether an all_reduce is faster in stages.
    """
    found = []
    for place, node in enumerate(graph.nodes):
        if node.target is not all_reduce or node.args[2] != "sum":
            continue
        axes, volume, inner = tuple(node.args[1]), float(node.meta["val"].nbytes), 0
        while len(axes) > 1 and faster(axes, volume):
            volume /= mesh[axes[-1]]
            axes, inner = axes[:-1], inner + 1
        if inner:
            found.append((place, inner))
    return tuple(found)


def stage(graph: fx.Graph, mesh: tuple[int, ...], chosen: Stages, *, same_sizes: bool = True) -> None:
    """Splits all_reduces of a traced graph into stages, in place.

    Args:
        graph: see ``stages``.
        mesh: sizes of the axes.
        chosen: the stages of this graph, or of another device's graph with the same nodes.
        same_sizes: whether the tensors of all devices have the same sizes; otherwise nodes that pad are added to all
            stages, so that the graphs of all devices keep the same nodes.
    """
    nodes = list(graph.nodes)
    for place, inner in chosen:
        node = nodes[place]
        with graph.inserting_before(node):
            before = node.prev
            node.replace_all_uses_with(_staged(graph, node.args[0], tuple(node.args[1]), inner, mesh, same_sizes))
        while (before := before.next) is not node:
            annotate(before, at=note_of(node).at)
        graph.erase_node(node)


def _staged(
    graph: fx.Graph, value: Any, axes: Sequence[int], inner: int, mesh: tuple[int, ...], same_sizes: bool
) -> fx.Node:
    if not inner:
        return emit(graph, all_reduce, value, list(axes), "sum")
    shape = list(value.meta["val"].shape)
    count, ways = math.prod(shape), mesh[axes[-1]]
    missing = -count % ways
    padded = missing > 0 or not same_sizes
    flat = emit(graph, _aten.reshape.default, value, [-1])
    if padded:
        flat = emit(graph, _aten.constant_pad_nd.default, flat, [0, missing])
    share = emit(graph, reduce_scatter, emit(graph, _aten.view.default, flat, [ways, -1]), axes[-1])
    summed = _staged(graph, share, axes[:-1], inner - 1, mesh, same_sizes)
    flat = emit(graph, _aten.view.default, emit(graph, all_gather, summed, axes[-1], ways), [-1])
    if padded:
        flat = emit(graph, _aten.slice.Tensor, flat, 0, 0, count)
    return emit(graph, _aten.view.default, flat, shape)
