"""Unrolls virtual axes: turns a graph that is also sharded over them into one in which every chunk has its own nodes.

Values that are the same for all chunks keep one node. A reshard between chunks and the whole is one node that takes, or
returns, a list of the chunks' parts. The graph can be run like any sharded graph.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import Partial

from passes.graph import annotate, differentiable, note_of
from passes.layouts.layout import is_shard
from passes.layouts.reshard import Step
from passes.world import ops
from passes.world.world import LocalWorld

__all__ = ["unroll"]

Place = tuple[int, ...]
Steps = tuple[tuple, ...]


def unroll(module: fx.GraphModule, mesh: tuple[int, ...], chunks: tuple[int, ...]) -> fx.GraphModule:
    """Unrolls a graph that was sharded for a mesh followed by virtual axes into a graph for the mesh.

    Args:
        module: see ``passes.sharding.shard.shard``, for the mesh ``mesh + chunks``; parameters and inputs are whole along
            the virtual axes.
        mesh: sizes of the mesh axes.
        chunks: sizes of the virtual axes.
    """
    graph = _Unroller(module.graph, len(mesh), chunks).run()
    root = nn.Module()
    root.world = LocalWorld((1,) * len(mesh))
    result = fx.GraphModule(root, graph, class_name="Sharded")
    graph.lint()
    return result


class _Unroller:
    def __init__(self, source: fx.Graph, real: int, chunks: tuple[int, ...]) -> None:
        self.source, self.real, self.chunks = source, real, chunks
        self.graph = fx.Graph()
        self.axes: dict[fx.Node, frozenset[int]] = {}
        self.values: dict[fx.Node, dict[Place, fx.Node]] = {}
        self.worlds: dict[tuple[Place, ...], fx.Node] = {}

    def run(self) -> fx.Graph:
        nothing = (0,) * len(self.chunks)
        for node in self.source.nodes:
            if node.op in ("placeholder", "get_attr"):
                copy = self.graph.node_copy(node)
                self.put(node, frozenset(), {nothing: copy})
                self.world = copy if node.op == "get_attr" else getattr(self, "world", None)
            elif node.op == "output":
                last = self.graph.output(fx.node.map_arg(node.args[0], lambda n: self.values[n][nothing]))
                last.meta = dict(node.meta)
            elif node.target in (ops.reshard, ops.gather):
                self.reshard(node)
            elif node.target in (ops.all_sum, ops.all_reduce, ops.all_max):
                self.collective(node)
            else:
                self.operator(node)
        return self.graph

    def put(self, node: fx.Node, axes: frozenset[int], values: dict[Place, fx.Node]) -> None:
        self.axes[node], self.values[node] = axes, values

    def places(self, axes: frozenset[int]) -> list[Place]:
        """The coordinates of all chunks along some virtual axes; 0 on the others."""
        return list(itertools.product(*(range(n if a in axes else 1) for a, n in enumerate(self.chunks, self.real))))

    def at(self, node: fx.Node, place: Place) -> fx.Node:
        """A node's value for a chunk."""
        axes = self.axes[node]
        return self.values[node][tuple(c if a in axes else 0 for a, c in enumerate(place, self.real))]

    def _at(self, place: Place, node: fx.Node) -> fx.Node:
        return self.at(node, place)

    def world_of(self, places: Sequence[Place]) -> fx.Node:
        """The node that returns the world of some chunks."""
        key = tuple(places)
        if key not in self.worlds:
            with self.graph.inserting_after(self.world):
                self.worlds[key] = self.graph.call_function(ops.chunked, (self.world, self.chunks, key))
        return self.worlds[key]

    def virtual(self, axes: Iterable[int]) -> frozenset[int]:
        return frozenset(a for a in axes if a >= self.real)

    def crossed(self, steps: Steps) -> frozenset[int]:
        """The virtual axes along which steps run."""
        return self.virtual(axis for step in steps for axis in step[1])

    def operator(self, node: fx.Node) -> None:
        axes = frozenset().union(*(self.axes[n] for n in node.all_input_nodes))
        placed = node.target in (ops.offset, ops.seeded)
        if placed:
            axes |= self.virtual(node.args[2] if node.target is ops.offset else node.args[3])  # type: ignore[arg-type]
        found = {}
        for place in self.places(axes):
            found[place] = self.graph.node_copy(node, functools.partial(self._at, place))
            annotate(found[place], chunk=place)
            if placed and axes:
                found[place].args = (self.world_of([place]), *found[place].args[1:])
        self.put(node, axes, found)

    def collective(self, node: fx.Node) -> None:
        """Unrolls a sum or maximum inside an operator."""
        value: Any = node.args[1]
        step: Steps = (tuple(Step("all_reduce", tuple(node.args[2]))),)  # type: ignore[arg-type]
        virtual = self.crossed(step)
        if not virtual:
            return self.operator(node)
        before = self.axes[value] | virtual
        if node.target is ops.all_sum:  # each chunk uses the sum for its own part
            return self.across(node, value, before, before, step, step)
        op = "max" if node.target is ops.all_max else "sum"
        return self.across(node, value, before, before - virtual, step, (), op)

    def reshard(self, node: fx.Node) -> None:
        value: fx.Node = node.args[1]  # type: ignore[assignment]
        forward: Any = node.args[2]
        backward: Any = node.args[3]
        cast = node.args[4:]
        if not self.crossed((*forward, *backward)):
            return self.operator(node)
        note = note_of(node)
        (layout,), gradient = note.layouts, note.gradient
        assert gradient is not None
        after = frozenset(
            a
            for a in range(self.real, self.real + len(self.chunks))
            if is_shard(layout[a])
            or isinstance(layout[a], Partial)
            or (differentiable(node.meta["val"]) and isinstance(gradient[a], Partial))
        )
        mine = self.axes[value]
        if mine <= after and not self.crossed(forward):
            # A value that is the same for all chunks is moved once; its gradients are summed before they are moved.
            summed, rest = self.summed_first(backward)
            if summed is not None:
                source = value
                if forward or rest or cast:
                    moved = {}
                    for place in self.places(mine):
                        args = (self.world, self.at(value, place), forward, rest, *cast)
                        moved[place] = self.graph.call_function(node.target, args, node.kwargs)  # type: ignore[arg-type]
                        moved[place].meta = dict(node.meta)
                    source = node
                    self.put(node, mine, moved)
                return self.across(node, source, after, after, (), summed, cast=cast)
        crossed = mine | after | self.crossed((*forward, *backward))
        return self.across(node, value, crossed, after, forward, backward, cast=cast)

    def summed_first(self, steps: Steps) -> tuple[Steps | None, Steps]:
        """Splits steps into the sums along virtual axes and the rest; None if other steps run along virtual axes."""
        summed: list[int] = []
        rest = []
        for step in steps:
            virtual = self.virtual(step[1])
            if virtual and step[0] != "all_reduce":
                return None, ()
            summed += sorted(virtual)
            real = tuple(a for a in step[1] if a < self.real)
            if real:
                rest.append((step[0], real, *step[2:]))
        return ((tuple(Step("all_reduce", tuple(summed))),) if summed else ()), tuple(rest)

    def across(
        self,
        node: fx.Node,
        value: fx.Node,
        axes: frozenset[int],
        after: frozenset[int],
        forward: Steps,
        backward: Steps,
        op: str = "sum",
        cast: Sequence[Any] = (),
    ) -> None:
        """Emits a reshard along virtual axes, from the chunks of ``value`` to those along ``after``."""
        places, given, wanted = self.places(axes), self.places(self.axes[value]), self.places(after)
        spread = tuple(
            given.index(tuple(c if a in self.axes[value] else 0 for a, c in enumerate(p, self.real))) for p in places
        )
        kept = tuple(places.index(place) for place in wanted)
        parts = [self.values[value][place] for place in given]
        args = self.world_of(places), parts, forward, backward, spread, kept, op, *cast
        all_ = self.graph.call_function(ops.reshard_chunks, args, node.kwargs)
        all_.meta = dict(node.meta)
        found = {place: self.graph.call_function(operator.getitem, (all_, i)) for i, place in enumerate(wanted)}
        self.put(node, after, found)
