"""Emits the nodes of a sharded graph."""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.strategies.strategy import Strategy
from passes.world import ops
from passes.world.draws import Draw, drawn

__all__ = ["Emitter", "pack"]


class Emitter:
    """A sharded graph under construction.

    Attributes:
        graph: the graph.
        world: its node with the world, which comes after the placeholders.
        wide: a captured tensor -> the node with its partial sums before they are rounded to half precision.
    """

    world: fx.Node

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.wide: dict[tuple[fx.Node, int], fx.Node] = {}
        self._tracer = fx.proxy.GraphAppendingTracer(self.graph)
        self._seed: fx.Node | None = None
        self._draws: list[Draw | None] = []

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """Emits a node that calls a function."""
        return self.graph.call_function(target, args, kwargs)

    def random(self, node: fx.Node, strategy: Strategy, mesh: tuple[int, ...], args: Any, kwargs: Any) -> fx.Node:
        """Emits a random operator for a captured one; devices that have the same part draw the same numbers."""
        if self._seed is None:
            self._seed = self.call(ops.next_seed, self.world)
        self._draws.append(drawn(node, strategy.results[0], mesh))
        self._seed.args = (self.world, tuple(self._draws))
        salt, axes = len(self._draws) - 1, strategy.sharded
        return self.call(ops.seeded, self.world, self._seed, salt, axes, node.target, *args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A proxy of a node; computing with it emits nodes."""
        return fx.Proxy(node, self._tracer)


def pack(*values: Any) -> tuple:
    """A tuple of the results of an operator that was emitted as several nodes."""
    return values
