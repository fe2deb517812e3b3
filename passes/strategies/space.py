"""The strategies of an operator on all meshes with the same number of axes, as arrays.

On each axis, the layouts of operands and results depend only on the factor that the axis serves, not on the axis's size.
So the arrays are computed once for each number of axes; a mask selects the rows that exist on a mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.tensor.placement_types import Placement

from passes.graph import stays
from passes.layouts.codes import code_of, fitting, restoring, ways
from passes.rules.factors import Factor, Operator
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import rule_of
from passes.strategies.strategy import LINEAR_PREFIX, Allow, Effect, Strategy, effect

__all__ = ["Space", "space", "strategies", "uneven_matters"]


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """The strategies of one operator for a number of axes, as the rows of arrays; row 0 of `space` replicates.

    Attributes:
        operator: the operator.
        names: what an axis may serve: None, a factor or a linear pseudo-factor ``"+i"``.
        effects: the effect of an axis that serves each name.
        serves: ``[S, axes]`` indices into ``names``.
        wants, gradients: per operand, layout codes ``[S, axes]`` of the operand and of its gradient.
        results: per result, layout codes ``[S, axes]``.
    """

    operator: Operator
    names: tuple[str | None, ...]
    effects: tuple[Effect, ...]
    serves: np.ndarray
    wants: tuple[np.ndarray, ...]
    gradients: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, operator: Operator, names: Sequence[str | None], serves: np.ndarray) -> Space:
        """The strategies whose axes serve ``names[serves]``."""
        effects = tuple(effect(operator, name) for name in names)

        def columns(of: list[tuple[Placement, ...]]) -> tuple[np.ndarray, ...]:
            return tuple(np.array([code_of(p) for p in each], np.int64)[serves] for each in zip(*of, strict=True))

        wants, gradients, results = ([getattr(e, n) for e in effects] for n in ("wants", "gradients", "results"))
        return cls(operator, tuple(names), effects, serves, columns(wants), columns(gradients), columns(results))

    @classmethod
    def alone(cls, operator: Operator, strategy: Strategy) -> Space:
        """A space with one strategy, as row 0."""
        names = list(dict.fromkeys((None, *strategy.assignment)))
        return cls.of(operator, names, np.array([[names.index(name) for name in strategy.assignment]]))

    def assignment(self, row: int) -> tuple[str | None, ...]:
        """What each axis serves in the strategy of a row."""
        return tuple(self.names[i] for i in self.serves[row])

    def strategy(self, row: int) -> Strategy:
        """The strategy of a row."""
        return Strategy.of(self.assignment(row), [self.effects[i] for i in self.serves[row]])

    def axes_of(self, names: frozenset[str]) -> np.ndarray:
        """``[S, axes]``: whether an axis serves one of the given factors."""
        chosen = np.array([name in names for name in self.names])
        return chosen[self.serves]

    def ways(self, mesh: Sequence[int], *names: str) -> np.ndarray:
        """``[S]``: the number of parts into which the axes divide the given factors together."""
        return np.asarray(np.where(self.axes_of(frozenset(names)), np.array(mesh), 1).prod(axis=-1))

    def valid(self, mesh: tuple[int, ...]) -> np.ndarray:
        """``[S]``: whether a strategy exists on a mesh."""
        found = ~((np.array(mesh) == 1) & (self.serves != 0)).any(axis=-1)
        if self.operator.rule is None:
            return found
        table = rule_of(self.operator.node)
        assert table is not None
        divided = uneven_matters(self.operator)
        for index, name in enumerate(self.names):
            factor = self.operator.factors.get(name or "")
            if factor is None:
                continue
            count = np.where(self.serves == index, np.array(mesh), 1).prod(axis=-1)
            if factor.sole and factor.base not in divided:
                found &= (factor.size % count == 0) | (count <= factor.size)
            else:
                found &= factor.size % count == 0
        operands = [tuple(n.meta["val"].shape) for n in operands_of(self.operator.node)]
        outputs = [tuple(t.shape) for t in results_of(self.operator.node)]
        for shape, rows in (*zip(operands, self.wants, strict=True), *zip(outputs, self.results, strict=True)):
            found &= fitting(shape, rows, mesh)
        if stays(self.operator.node):  # as a DTensor, which joins shards in its own order
            found &= restoring(self.results[0], mesh)
        if table.shape is not None:
            uneven = sum((size % ways(self.results[0], d, mesh) != 0).astype(int) for d, size in enumerate(outputs[0]))
            found &= np.asarray(uneven) <= 1
        return found


def space(operator: Operator, axes: int, allow: Allow | None = None) -> Space:
    """All strategies of ``operator`` on ``axes`` axes.

    Args:
        operator: an operator with its cut rule.
        axes: the number of axes of the mesh.
        allow: whether an axis may serve a factor, or, for None, a linear pseudo-factor; all are allowed by default.
    """
    offered: list[tuple[str, Factor | None]] = []
    if operator.rule is not None:
        offered += [(f.name, f) for f in operator.factors.values() if f.offered]
        if operator.rule.linear and operator.sums:
            offered += [(LINEAR_PREFIX + str(i), None) for i in range(len(operator.rule.linear))]
    allowed = {(axis, name) for name, f in offered for axis in range(axes) if allow is None or allow(axis, f)}
    names = [None, *(name for name, _ in offered if any((axis, name) in allowed for axis in range(axes)))]
    choices = [[0, *(i for i, name in enumerate(names) if (axis, name) in allowed)] for axis in range(axes)]
    serves = np.array(list(itertools.product(*choices)), dtype=np.int64).reshape(math.prod(map(len, choices)), axes)
    return Space.of(operator, names, serves)


def strategies(operator: Operator, mesh: tuple[int, ...], allow: Allow | None = None) -> Iterator[Strategy]:
    """The strategies of an operator that exist on a mesh, the replicated one first; ``allow`` as for `space`."""
    found = space(operator, len(mesh), allow)
    return map(found.strategy, np.flatnonzero(found.valid(mesh)).tolist())


def uneven_matters(operator: Operator) -> frozenset[str]:
    """Base names of factors that must be divided evenly, as an argument of the operator states their local size."""
    table = rule_of(operator.node)
    assert table is not None
    divided = set((table.divide or {}).values())
    if table.shape is not None and operator.rule is not None:
        given = {f for dims in operator.rule.operands for dim in dims for f in dim}
        divided |= {f.base for f in operator.factors.values() if f.name not in given}
    return frozenset(divided)
