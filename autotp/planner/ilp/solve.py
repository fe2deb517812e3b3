"""Choose one strategy per node at the least cost, with proof."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from autotp.planner.ilp.deadline import NEVER, Deadline, Expired
from autotp.planner.ilp.dual import Dual
from autotp.planner.ilp.eliminate import Core, eliminate_all, eliminate_some
from autotp.planner.ilp.presolve import Reduced, compact, consistent
from autotp.planner.ilp.problem import Node, Problem, evaluate, validate
from autotp.planner.ilp.search import Search, Settings

__all__ = [
    "NO_LAYOUT",
    "Infeasible",
    "Pruned",
    "Solution",
    "cheapest",
    "least_memory",
    "settle",
    "solution_at",
    "solution_of",
    "solve",
    "unbounded",
]

NO_LAYOUT = "no combination of strategies has a finite cost: every one needs an impossible reshard"
_SWEEPS = 10
_EASY = 3e5  # entries that elimination may visit before duality is the faster way


class Infeasible(ValueError):
    """No assignment exists: none fits the memory bound, or the layouts admit none.

    Attributes:
        needed_memory: the least bytes per device that any assignment needs; ``inf`` when the layouts admit
            none.
    """

    def __init__(self, message: str, needed_memory: float) -> None:
        super().__init__(message)
        self.needed_memory = needed_memory


@dataclass(frozen=True, slots=True)
class Solution:
    """The best assignment found.

    Attributes:
        choice: a strategy index per node.
        seconds: its cost.
        memory: its bytes per device.
        bound: no assignment within the memory bound costs less than this (proven).
        optimal: ``seconds`` equals ``bound`` to 1e-9 relative.
        gap: ``(seconds - bound) / seconds``.
        method: the heaviest means that was needed: elimination (of all), duality, labels or mip.
        variables: of the largest integer program handed to a solver, 0 if none was.
        price: seconds per byte that memory was found to be worth.
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
    """Nothing cheaper than the cutoff exists."""


def solve(
    problem: Problem,
    *,
    deadline: Deadline = NEVER,
    cutoff: float = math.inf,
    need: bool = True,
    trusted: bool = False,
) -> Solution | Pruned:
    """The cheapest assignment within the memory bound.

    Args:
        problem: what to choose.
        deadline: when the best assignment so far is returned with its proven gap.
        cutoff: seconds; stop as soon as it is proven that nothing cheaper than this exists.
        need: where nothing fits the memory bound, find out the least that is needed; else a lower bound of it will do.
        trusted: the problem is known to be well-formed.

    Returns:
        the solution, or ``Pruned`` when nothing cheaper than ``cutoff`` exists.

    Raises:
        Infeasible: when the layouts admit no assignment, or none within the memory bound.
        Expired: when the deadline passed before any assignment was found.
        ValueError: when the problem is malformed.
    """
    if not trusted:
        validate(problem)
    settings = Settings(deadline, cutoff)
    free = unbounded(problem, settings)
    if free.value >= cutoff and free.bound >= cutoff - 1e-9 * abs(cutoff):
        return Pruned()
    if free.choice is not None and evaluate(problem, free.choice).memory <= problem.memory_bound:
        return solution_of(problem, free)
    start = _fitting(problem, settings, need)
    search = Search(problem, settings)
    if start is not None:
        search.offer(start)
    if free.choice is not None:
        search.offer(free.choice)
    search.run(floor=free.bound)
    if search.value >= cutoff and search.bound >= cutoff - 1e-9 * abs(cutoff):
        return Pruned()
    return replace(solution_of(problem, search), price=search.price)


def settle(problem: Problem, *, deadline: Deadline, cutoff: float, price: float, floor: float) -> Solution | Pruned:
    """``solve`` where a choice of ``cutoff`` seconds is known: bytes are worth ``price``, nothing is below ``floor``."""
    search = Search(problem, Settings(deadline, cutoff=cutoff), price=price, prices=1)
    search.run(floor=floor)
    if search.value >= cutoff and search.bound >= cutoff - 1e-9 * abs(cutoff):
        return Pruned()
    return replace(solution_of(problem, search), price=search.price)


def cheapest(problem: Problem, deadline: Deadline) -> tuple[int, ...]:
    """The cheapest assignment, whatever memory it takes, of a well-formed problem; the best that was met by the deadline.

    Raises:
        Infeasible: the layouts admit no assignment.
        Expired: none was met.
    """
    return _choice_of(problem, unbounded(problem, Settings(deadline)))


def least(problem: Problem, *, cutoff: float, deadline: Deadline) -> tuple[float, tuple[int, ...] | None]:
    """What no assignment costs less than; and the cheapest one, whatever memory it takes, if it costs less than the cutoff.

    Raises:
        Infeasible: the layouts admit no assignment.
    """
    found = unbounded(problem, Settings(deadline, cutoff=cutoff))
    return found.bound, found.choice if found.value < cutoff else None


def unbounded(problem: Problem, settings: Settings) -> Search:
    """The problem without its memory bound: everything about bytes is dropped, and nodes are eliminated
    exactly. With a cutoff, bounds are tried first, on the problem as it is and after cheap eliminations.
    """
    masks = [np.ones(len(node.cost), dtype=bool) for node in problem.nodes]
    if not consistent(problem, masks):
        raise Infeasible(NO_LAYOUT, math.inf)
    found = Search(problem, settings)
    stages: list[Reduced | Core] = []
    small = problem
    for work in (None, 2e5, 4e6):
        if work is not None:
            if settings.deadline.over:
                break
            stages.append(compact(small, masks, bounded=False))
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
        search.run()
    if search.choice is not None:
        for stage in reversed(stages):
            search.choice = stage.restore(search.choice)
    elif search.bound == math.inf and math.isinf(settings.cutoff):
        raise Infeasible(NO_LAYOUT, math.inf)
    return search


def _raise_bound(problem: Problem, masks: list[np.ndarray], settings: Settings) -> float:
    """A lower bound from two sweeps of duality; strategies that cannot come below the cutoff are cleared."""
    cutoff = settings.cutoff
    dual = Dual(replace(problem, memory_bound=math.inf), cutoff)
    for _ in range(2):
        floors = dual.sweep()
        if dual.bound() >= cutoff or settings.deadline.over:
            break
    for mask, floor in zip(masks, floors, strict=True):
        mask &= floor < cutoff
    return dual.bound()


def promising(problem: Problem, cutoff: float, deadline: Deadline) -> list[np.ndarray]:
    """Of every node the choices that may be part of an assignment, whatever memory it takes, that costs less."""
    masks = [np.isfinite(node.cost) for node in problem.nodes]
    if not consistent(problem, masks):
        raise Infeasible(NO_LAYOUT, math.inf)
    dual = Dual(replace(problem, memory_bound=math.inf), cutoff)
    for _ in range(_SWEEPS):
        if deadline.over:
            break
        floors = dual.sweep()
        dual.rebalance()
        for mask, floor in zip(masks, floors, strict=True):
            mask &= floor < cutoff
    return masks


def least_memory(problem: Problem, *, sweeps: int) -> float:
    """A lower bound, from so many sweeps of duality, of the bytes per device that any choice needs.

    Raises:
        Infeasible: the layouts admit no choice.
    """
    if not consistent(problem, [np.ones(len(node.cost), dtype=bool) for node in problem.nodes]):
        raise Infeasible(NO_LAYOUT, math.inf)
    bytes_only = _bytes_only(problem)
    dual = Dual(bytes_only, sum(float(n.cost[np.isfinite(n.cost)].max()) for n in bytes_only.nodes) + 1.0)
    for _ in range(sweeps):
        dual.sweep()
        dual.rebalance()
    return dual.bound()


def _bytes_only(problem: Problem) -> Problem:
    """The problem whose seconds are the other's bytes, but for the largest temporary."""
    nodes = tuple(
        Node(n.name, np.where(np.isfinite(n.cost), n.memory, math.inf), np.zeros(len(n.cost))) for n in problem.nodes
    )
    tensors = tuple(
        replace(
            t,
            cost=np.where(np.isfinite(t.cost), t.memory, math.inf),
            memory=np.zeros(t.memory.shape),
        )
        for t in problem.tensors
    )
    return Problem(nodes, tensors)


def _fitting(problem: Problem, settings: Settings, need: bool) -> tuple[int, ...] | None:
    """Some choice within the memory bound, or the proof that none exists; None when time ran out before
    either.
    """
    limit = math.inf if need else float(np.nextafter(problem.memory_bound, math.inf)) * (1 + 1e-9)
    settings = replace(settings, cutoff=limit, enough=problem.memory_bound)
    search = Search(_bytes_only(problem), settings, largest_cost=1.0)
    search.run()
    if search.choice is None and search.bound == math.inf:
        raise Infeasible(NO_LAYOUT, math.inf)
    needed = math.inf if search.choice is None else evaluate(problem, search.choice).memory
    if needed <= problem.memory_bound:
        return search.choice
    if search.bound <= problem.memory_bound:
        return None
    if not need:
        needed = search.bound
    raise Infeasible(
        f"no combination of strategies fits {problem.memory_bound:.6g} bytes per device: "
        f"at least {needed:.6g} are needed; give more devices, more memory per device, or a smaller batch",
        needed,
    )


def solution_of(problem: Problem, search: Search) -> Solution:
    """What a finished search found, with its proven gap.

    Raises:
        Expired: when it found nothing.
    """
    return solution_at(problem, _choice_of(problem, search), search.bound, search.method, search.variables)


def _choice_of(problem: Problem, search: Search) -> tuple[int, ...]:
    if search.choice is None:
        raise Expired(f"no assignment of {len(problem.nodes)} nodes was found within the time limit; raise time_limit")
    return search.choice


def solution_at(problem: Problem, choice: tuple[int, ...], bound: float, method: str, variables: int = 0) -> Solution:
    """A choice with what it costs, and how far that is from a proven bound."""
    value = evaluate(problem, choice)
    bound = min(bound, value.seconds)
    gap = (value.seconds - bound) / abs(value.seconds) if value.seconds > bound else 0.0
    return Solution(choice, value.seconds, value.memory, bound, gap <= 1e-9, gap, method, variables)
