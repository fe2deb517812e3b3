"""Choose one strategy per node at the least cost, with a proof of optimality or a gap."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autotp.planner.ilp.deadline import NEVER, Deadline, Expired
from autotp.planner.ilp.dual import Dual
from autotp.planner.ilp.eliminate import Core, eliminate_all, eliminate_some
from autotp.planner.ilp.presolve import Reduced, compact, consistent
from autotp.planner.ilp.problem import Problem, evaluate, validate
from autotp.planner.ilp.search import Search, Settings

__all__ = ["NO_LAYOUT", "Infeasible", "Pruned", "Solution", "cheapest", "least", "promising", "solution_at", "solve"]

NO_LAYOUT = "no combination of strategies has a finite cost: every one needs an impossible reshard"
_SWEEPS = 10
_EASY = 3e5  # maximum number of entries that elimination may visit; beyond it, duality is faster


class Infeasible(ValueError):
    """No assignment has a finite cost: each one needs an impossible reshard."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The best assignment found.

    Attributes:
        choice: a strategy index per node.
        seconds: its cost.
        memory: its bytes per device.
        bound: a proven lower bound on the cost of all assignments, in seconds.
        optimal: whether ``seconds`` equals ``bound`` to 1e-9 relative.
        gap: ``(seconds - bound) / seconds``.
        method: the most expensive method used: elimination (of all nodes), duality, labels or mip.
        variables: the number of variables of the largest integer program passed to a solver, 0 if none was.
        price: the price of memory at which it was found, in seconds per byte.
    """

    choice: tuple[int, ...]
    seconds: float
    memory: float
    bound: float
    optimal: bool
    gap: float
    method: str
    variables: int
    price: float = 0.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """No assignment below the cutoff was found. ``bound``: a proven lower bound on the cost of all, in seconds."""

    bound: float


def solve(
    problem: Problem, *, deadline: Deadline = NEVER, cutoff: float = math.inf, trusted: bool = False
) -> Solution | Pruned:
    """Find the cheapest assignment.

    Args:
        problem: the problem.
        deadline: when to return the best assignment so far, with its proven gap.
        cutoff: seconds; stop as soon as it is proven that no assignment costs less than this.
        trusted: whether the problem is known to be well-formed, so that it is not validated.

    Returns:
        the solution, or ``Pruned`` if no assignment below ``cutoff`` was found.

    Raises:
        Infeasible: if no assignment has a finite cost.
        Expired: if the deadline passed before any assignment was found.
        ValueError: if the problem is malformed.
    """
    if not trusted:
        validate(problem)
    found = _searched(problem, Settings(deadline, cutoff))
    if found.value >= cutoff and math.isfinite(cutoff):
        return Pruned(found.bound)
    return solution_at(problem, _choice_of(problem, found), found.bound, found.method, found.variables)


def cheapest(problem: Problem, deadline: Deadline) -> tuple[int, ...]:
    """The cheapest assignment of a well-formed problem, or the best one found by the deadline.

    Raises:
        Infeasible: no assignment has a finite cost.
        Expired: the deadline passed before any assignment was found.
    """
    return _choice_of(problem, _searched(problem, Settings(deadline)))


def least(problem: Problem, *, cutoff: float, deadline: Deadline) -> tuple[float, tuple[int, ...] | None]:
    """A lower bound on the cost of all assignments, in seconds, and the best assignment found, if it is below the cutoff.

    Raises:
        Infeasible: no assignment has a finite cost.
    """
    found = _searched(problem, Settings(deadline, cutoff=cutoff))
    return found.bound, found.choice if found.value < cutoff else None


def _searched(problem: Problem, settings: Settings) -> Search:
    """Run a search to its end. Nodes are eliminated exactly. With a cutoff, lower bounds are tried first, on the whole
    problem and after cheap eliminations.
    """
    masks = [np.ones(len(node.cost), dtype=bool) for node in problem.nodes]
    if not consistent(problem, masks):
        raise Infeasible(NO_LAYOUT)
    found = Search(problem, settings)
    stages: list[Reduced | Core] = []
    small = problem
    for work in (None, 2e5, 4e6):
        if work is not None:
            if settings.deadline.over:
                break
            stages.append(compact(small, masks))
            stages.append(eliminate_some(stages[-1].problem, work=work, deadline=settings.deadline))
            small = stages[-1].problem
            masks = [np.ones(len(node.cost), dtype=bool) for node in small.nodes]
        if math.isfinite(settings.cutoff):
            found.bound = max(found.bound, _raise_bound(small, masks, settings))
            if found.bound >= settings.cutoff or not consistent(small, masks):
                found.bound = max(found.bound, settings.cutoff)
                return found
    search = Search(small, settings)
    choice = eliminate_all(small, budget=_EASY, deadline=settings.deadline)
    if choice is not None:
        search.settle(choice, "elimination")
    else:
        search.run(masks)
    if search.choice is not None:
        for stage in reversed(stages):
            search.choice = stage.restore(search.choice)
    elif search.bound == math.inf and math.isinf(settings.cutoff):
        raise Infeasible(NO_LAYOUT)
    return search


def _raise_bound(problem: Problem, masks: list[np.ndarray], settings: Settings) -> float:
    """A lower bound by two dual sweeps. Clears the strategies in ``masks`` that no assignment below the cutoff can use."""
    cutoff = settings.cutoff
    dual = Dual(problem, cutoff)
    for _ in range(2):
        bound, floors = dual.sweep()
        if bound >= cutoff or settings.deadline.over:
            break
    for mask, floor in zip(masks, floors, strict=True):
        mask &= floor < cutoff
    return bound


def promising(problem: Problem, cutoff: float, deadline: Deadline) -> list[np.ndarray]:
    """Per node, a mask of the strategies that assignments below the ``cutoff``, in seconds, may use.

    Raises:
        Infeasible: no assignment has a finite cost.
    """
    masks = [np.isfinite(node.cost) for node in problem.nodes]
    if not consistent(problem, masks):
        raise Infeasible(NO_LAYOUT)
    dual = Dual(problem, cutoff)
    for _ in range(_SWEEPS if math.isfinite(cutoff) else 0):
        if deadline.over:
            break
        _, floors = dual.sweep()
        dual.rebalance()
        for mask, floor in zip(masks, floors, strict=True):
            mask &= floor < cutoff
    return masks


def _choice_of(problem: Problem, search: Search) -> tuple[int, ...]:
    if search.choice is None:
        raise Expired(f"no assignment of {len(problem.nodes)} nodes was found within the time limit; raise time_limit")
    return search.choice


def solution_at(problem: Problem, choice: tuple[int, ...], bound: float, method: str, variables: int = 0) -> Solution:
    """The `Solution` with this assignment: its cost, and its gap to a proven lower bound in seconds."""
    value = evaluate(problem, choice)
    bound = min(bound, value.seconds)
    gap = (value.seconds - bound) / abs(value.seconds) if value.seconds > bound else 0.0
    return Solution(choice, value.seconds, value.memory, bound, gap <= 1e-9, gap, method, variables)
