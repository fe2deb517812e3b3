"""Good choices at once, without proof, at any price of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotp.planner.ilp.dual import Dual
from autotp.planner.ilp.local import improve
from autotp.planner.ilp.presolve import compact, consistent
from autotp.planner.ilp.problem import Problem
from autotp.planner.ilp.solve import NO_LAYOUT, Infeasible

__all__ = ["Hasty"]

_SWEEPS = 4


class Hasty:
    """Choices that a few sweeps of duality show, at whatever price of memory.

    Args:
        problem: what to choose.

    Raises:
        Infeasible: when the layouts admit no assignment.
    """

    def __init__(self, problem: Problem) -> None:
        masks = [np.ones(len(node.cost), dtype=bool) for node in problem.nodes]
        if not consistent(problem, masks):
            raise Infeasible(NO_LAYOUT)
        self.small = compact(problem, masks, sized=True)

    def at(self, price: float) -> tuple[int, ...]:
        """The choice at so many seconds per byte."""
        dearer = _priced(self.small.problem, price)
        dual = Dual(dearer, _most(dearer))
        for _ in range(_SWEEPS):
            dual.sweep()
            dual.rebalance()
        return self.small.restore(improve(dearer, dual.decode()))


def _priced(problem: Problem, price: float) -> Problem:
    """The problem with ``price`` seconds added per resting byte."""
    if not price:
        return problem
    nodes = tuple(replace(node, cost=node.cost + price * node.memory) for node in problem.nodes)
    tensors = tuple(replace(t, cost=t.cost + price * t.memory) for t in problem.tensors)
    return replace(problem, nodes=nodes, tensors=tensors)


def _most(problem: Problem) -> float:
    """Seconds that no choice takes more than."""
    total = sum(float(node.cost[np.isfinite(node.cost)].max()) for node in problem.nodes)
    for tensor in problem.tensors:
        total += float(np.where(np.isfinite(tensor.cost), tensor.cost, 0.0).max(axis=0).sum())
    return total
