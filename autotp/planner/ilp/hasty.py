"""A fast heuristic: good assignments without a proof, for any price of memory."""

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
    """Finds good assignments by a few dual sweeps and local search, for any price of memory.

    Args:
        problem: the problem.

    Raises:
        Infeasible: if no assignment has a finite cost.
    """

    def __init__(self, problem: Problem) -> None:
        masks = [np.ones(len(node.cost), dtype=bool) for node in problem.nodes]
        if not consistent(problem, masks):
            raise Infeasible(NO_LAYOUT)
        self.small = compact(problem, masks, sized=True)

    def at(self, price: float) -> tuple[int, ...]:
        """A good assignment, as a strategy index per node, if each byte of ``memory`` costs ``price`` seconds."""
        dearer = _priced(self.small.problem, price)
        dual = Dual(dearer, _most(dearer))
        for _ in range(_SWEEPS):
            dual.sweep()
            dual.rebalance()
        return self.small.restore(improve(dearer, dual.decode()))


def _priced(problem: Problem, price: float) -> Problem:
    """The problem with ``price`` seconds added per byte of ``memory``."""
    if not price:
        return problem
    nodes = tuple(replace(node, cost=node.cost + price * node.memory) for node in problem.nodes)
    tensors = tuple(replace(t, cost=t.cost + price * t.memory) for t in problem.tensors)
    return replace(problem, nodes=nodes, tensors=tensors)


def _most(problem: Problem) -> float:
    """An upper bound on the cost of every feasible assignment, in seconds."""
    total = sum(float(node.cost[np.isfinite(node.cost)].max()) for node in problem.nodes)
    for tensor in problem.tensors:
        total += float(np.where(np.isfinite(tensor.cost), tensor.cost, 0.0).max(axis=0).sum())
    return total
