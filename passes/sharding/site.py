"""The context of an operator in a sharded graph, for its lowering."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from passes.graph import place_of
from passes.rules.factors import Operator
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import rule_of
from passes.sharding.emitter import Emitter
from passes.strategies.strategy import Strategy
from passes.world import ops

__all__ = ["Site"]


class Site:
    """Implements `passes.rules.lowering.At`.

    Args:
        emitter: emits the nodes of the sharded graph.
        operator: the captured operator that is being lowered.
        strategy: its strategy.
        mesh: sizes of the mesh axes.
    """

    def __init__(self, emitter: Emitter, operator: Operator, strategy: Strategy, mesh: tuple[int, ...]) -> None:
        self._emitter, self._operator, self._strategy, self._mesh = emitter, operator, strategy, mesh
        self._node = operator.node

    @property
    def target(self) -> Any:
        """The operator that is being lowered."""
        return self._node.target

    def _names(self, *factors: str) -> tuple[str, ...]:
        return tuple(f.name for f in self._operator.factors.values() if f.base in factors)

    def axes(self, *factors: str) -> tuple[int, ...]:
        """The mesh axes that shard any of the factors."""
        return self._strategy.axes(*self._names(*factors))

    def ways(self, *factors: str) -> int:
        """The number of parts into which these axes shard the factors."""
        return math.prod(self._mesh[axis] for axis in self.axes(*factors))

    def size(self, factor: str) -> int:
        """The whole size of a factor."""
        return math.prod(f.size for f in self._operator.factors.values() if f.base == factor)

    @property
    def inner(self) -> tuple[int, ...]:
        """The mesh axes that shard inner factors."""
        rule = self._operator.rule
        return self._strategy.axes(*rule.inner) if rule else ()

    @property
    def reduced(self) -> tuple[int, ...]:
        """The mesh axes that shard reduced factors, or factors in ``Rule.contiguous``."""
        rule = self._operator.rule
        table = rule_of(self._node)
        located = self.axes(*table.contiguous) if table is not None else ()
        return tuple(sorted({*self._strategy.axes(*rule.reduced), *located})) if rule else ()

    def whole(self, operand: int) -> tuple[int, ...]:
        """The whole shape of a tensor operand."""
        return tuple(operands_of(self._node)[operand].meta["val"].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in: that of the result, but float32 for half precision."""
        dtype = self._result.dtype
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype

    @property
    def _result(self) -> torch.Tensor:
        return results_of(self._node)[0]

    def wide(self, value: fx.Proxy) -> fx.Proxy:
        """An operand, or a value of its dtype, cast to ``dtype``."""
        return value if operands_of(self._node)[0].meta["val"].dtype == self.dtype else value.to(self.dtype)

    def rounded(self, value: fx.Proxy) -> fx.Proxy:
        """The result, computed in ``dtype``, cast to its own dtype."""
        return value if self._result.dtype == self.dtype else value.to(self._result.dtype)

    def partial(self, value: fx.Proxy) -> fx.Proxy:
        """``rounded`` for a possible partial sum; reshards that reduce it read the unrounded value, and round last."""
        rounded = self.rounded(value)
        if rounded is not value:
            self._emitter.wide[(self._node, 0)] = value.node
        return rounded

    def _collective(self, op: Any, value: fx.Proxy, axes: tuple[int, ...]) -> fx.Proxy:
        if not axes:
            return value
        return self._emitter.proxy(self._emitter.call(op, self._emitter.world, value.node, axes, at=place_of(self._node)))

    def sum(self, value: fx.Proxy, axes: tuple[int, ...]) -> fx.Proxy:
        """All-reduce whose gradient is all-reduced too."""
        return self._collective(ops.all_sum, value, axes)

    def reduce(self, value: fx.Proxy, axes: tuple[int, ...]) -> fx.Proxy:
        """All-reduce whose gradient is already whole."""
        return self._collective(ops.all_reduce, value, axes)

    def max(self, value: fx.Proxy, axes: tuple[int, ...]) -> fx.Proxy:
        """All-reduce by maximum, without gradient."""
        return self._collective(ops.all_max, value, axes)

    def offset(self, size: int, axes: tuple[int, ...], like: fx.Proxy) -> fx.Proxy:
        """Where this device's part of a dim begins."""
        return self._emitter.proxy(self._emitter.call(ops.offset, self._emitter.world, size, axes, like.node))

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> fx.Proxy:
        """A node that calls a local function."""
        plain: Any = fx.node.map_aggregate([args, kwargs], lambda a: a.node if isinstance(a, fx.Proxy) else a)
        return self._emitter.proxy(self._emitter.call(function, *plain[0], **plain[1]))

    def random(self, draws: bool, *args: Any, **kwargs: Any) -> fx.Proxy:
        """A node that calls the operator itself, which may draw random numbers."""
        if not draws:
            return self.call(self.target, *args, **kwargs)
        plain = [a.node if isinstance(a, fx.Proxy) else a for a in args]
        return self._emitter.proxy(self._emitter.random(self._node, self._strategy, self._mesh, plain, kwargs))
