"""Staging: an all_reduce over several mesh axes as reduce_scatter within, all_reduce between, all_gather within.

One ring through all devices takes the whole tensor over every link that it crosses. Where the innermost axis' links are
fast, its devices reduce first, each its own share; then only that share goes over the slower links, and comes back to all.
As collectives of their own the three overlap with those of other tensors: while one is between nodes, another is within
(Cho et al., "BlueConnect", SysML 2019).
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

#: (mesh axes, bytes of one device's tensor) -> whether to reduce it over the last of the axes first.
Faster = Callable[[tuple[int, ...], float], bool]

#: (place among a graph's nodes, how many axes, from the last on, are a stage of their own) of its all_reduces.
Stages = tuple[tuple[int, int], ...]


def stages(graph: fx.Graph, mesh: tuple[int, ...], faster: Faster) -> Stages:
    """Which of a traced graph's all_reduces go in stages.

    Args:
        graph: collectives are operators of `passes.overlap.primitives`.
        mesh: sizes of the axes.
        faster: whether an all_reduce is faster so.
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
    """Puts all_reduces of a traced graph in stages, in place.

    Args:
        graph: see ``stages``.
        mesh: sizes of the axes.
        chosen: of this graph, or of another device's with the same nodes.
        same_sizes: whether all devices' tensors have these sizes; else room is made for zeros in all, whose nodes stay the
            same.
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
