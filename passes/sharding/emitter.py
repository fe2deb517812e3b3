"""How the sharding pass writes nodes into its graph."""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.strategies.strategy import Strategy
from passes.world import ops
from passes.world.draws import Draw, drawn

__all__ = ["Emitter", "pack"]


class Emitter:
    """A sharded graph in the making.

    Attributes:
        graph: it.
        world: its node with the world, which stands behind the placeholders.
        wide: a captured tensor -> its partial sums, before they are rounded to a half.
    """

    world: fx.Node

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.wide: dict[tuple[fx.Node, int], fx.Node] = {}
        self._tracer = fx.proxy.GraphAppendingTracer(self.graph)
        self._seed: fx.Node | None = None
        self._draws: list[Draw | None] = []

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that calls a function."""
        return self.graph.call_function(target, args, kwargs)

    def random(self, node: fx.Node, strategy: Strategy, mesh: tuple[int, ...], args: Any, kwargs: Any) -> fx.Node:
        """A node that draws random numbers as a captured operator does, the same on devices that have the same part."""
        if self._seed is None:
            self._seed = self.call(ops.next_seed, self.world)
        self._draws.append(drawn(node, strategy.results[0], mesh))
        self._seed.args = (self.world, tuple(self._draws))
        salt, axes = len(self._draws) - 1, strategy.sharded
        return self.call(ops.seeded, self.world, self._seed, salt, axes, node.target, *args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A node to compute with."""
        return fx.Proxy(node, self._tracer)


def pack(*values: Any) -> tuple:
    """The results of an operator that was written as several nodes."""
    return values
