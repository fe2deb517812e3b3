"""The strategies of an operator on all meshes with the same number of axes, as arrays.

What a strategy asks of operands and leaves in results depends, axis by axis, only on the factor that the axis serves, not
on the axis's size. So the arrays are made once for every number of axes; which rows exist on a mesh is a mask.
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
    """All strategies of one operator for a number of axes; row 0 replicates.

    Attributes:
        operator: the operator.
        names: what an axis may serve: None, factors, ``"+i"``.
        effects: of each of them.
        serves: ``[S, axes]`` indices into ``names``.
        wants, gradients: per operand, codes ``[S, axes]``.
        results: per result, codes ``[S, axes]``.
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
        """From what the axes of every strategy serve."""
        effects = tuple(effect(operator, name) for name in names)

        def columns(of: list[tuple[Placement, ...]]) -> tuple[np.ndarray, ...]:
            return tuple(np.array([code_of(p) for p in each], np.int64)[serves] for each in zip(*of, strict=True))

        wants, gradients, results = ([getattr(e, n) for e in effects] for n in ("wants", "gradients", "results"))
        return cls(operator, tuple(names), effects, serves, columns(wants), columns(gradients), columns(results))

    @classmethod
    def alone(cls, operator: Operator, strategy: Strategy) -> Space:
        """One strategy, as row 0."""
        names = list(dict.fromkeys((None, *strategy.assignment)))
        return cls.of(operator, names, np.array([[names.index(name) for name in strategy.assignment]]))

    def assignment(self, row: int) -> tuple[str | None, ...]:
        """Per axis the factor that it serves."""
        return tuple(self.names[i] for i in self.serves[row])

    def strategy(self, row: int) -> Strategy:
        """The strategy of a row."""
        return Strategy.of(self.assignment(row), [self.effects[i] for i in self.serves[row]])

    def axes_of(self, names: frozenset[str]) -> np.ndarray:
        """``[S, axes]``: whether the axis serves one of these factors."""
        chosen = np.array([name in names for name in self.names])
        return chosen[self.serves]

    def ways(self, mesh: Sequence[int], *names: str) -> np.ndarray:
        """``[S]``: into how many parts devices divide what these factors count together."""
        return np.asarray(np.where(self.axes_of(frozenset(names)), np.array(mesh), 1).prod(axis=-1))

    def valid(self, mesh: tuple[int, ...]) -> np.ndarray:
        """``[S]``: which strategies exist on a mesh."""
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
        if stays(self.operator.node):  # as a DTensor, which joins parts in an order of its own
            found &= restoring(self.results[0], mesh)
        if table.shape is not None:
            uneven = sum((size % ways(self.results[0], d, mesh) != 0).astype(int) for d, size in enumerate(outputs[0]))
            found &= np.asarray(uneven) <= 1
        return found


def space(operator: Operator, axes: int, allow: Allow | None = None) -> Space:
    """All strategies of ``operator`` on ``axes`` axes.

    Args:
        operator: with its cut rule.
        axes: of the mesh.
        allow: says whether an axis may serve a factor (None as a factor stands for partial sums passed through).
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
    """Base names of factors whose local size an argument of the operator gives, so that it must divide."""
    table = rule_of(operator.node)
    assert table is not None
    divided = set((table.divide or {}).values())
    if table.shape is not None and operator.rule is not None:
        given = {f for dims in operator.rule.operands for dim in dims for f in dim}
        divided |= {f.base for f in operator.factors.values() if f.name not in given}
    return frozenset(divided)
