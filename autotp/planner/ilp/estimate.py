"""A bound and a good choice quickly: is this problem worth solving exactly, next to others?

Without the memory bound a problem is easy (:mod:`autotp.planner.ilp.solve`). With a price on every byte instead it stays
easy, and

    min over choices of  seconds + price * (resting bytes - bound)

is below every choice that fits, at any price (Lagrange). The price is raised or lowered by cutting planes, as in
:mod:`autotp.planner.ilp.search`; choices met on the way that fit are candidates. What this leaves open is the duality gap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from autotp.planner.ilp.deadline import Deadline
from autotp.planner.ilp.dual import Dual
from autotp.planner.ilp.local import improve
from autotp.planner.ilp.presolve import compact, consistent
from autotp.planner.ilp.prices import next_price, priced
from autotp.planner.ilp.problem import Problem, evaluate
from autotp.planner.ilp.search import CLOSEST, Settings
from autotp.planner.ilp.solve import NO_LAYOUT, Infeasible, Solution, least_memory, solution_at, solution_of, unbounded

__all__ = ["Estimate", "Hasty", "estimate", "glance"]

_PRICES = 8
_CLOSE = 3e-4  # what another price could still add to the bound, relative, for it not to be worth the while
_SWEEPS = 4
_FREE = 0.5  # of the time: without the memory bound
_PRICE = 1 / 3  # of the time that is left: at each price


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a problem after a short look.

    Attributes:
        bound: no choice within the memory bound costs less (proven).
        solution: the best choice found that fits and costs less than the cutoff; None when there is none.
        settled: nothing below the cutoff is better than ``solution``.
        binds: without the memory bound something cheaper might exist, by more than `CLOSEST`.
        price: seconds per byte at which the bound was best.
    """

    bound: float
    solution: Solution | None
    settled: bool
    binds: bool
    price: float


def estimate(problem: Problem, *, deadline: Deadline, cutoff: float = math.inf, price: float = 0.0) -> Estimate:
    """A bound, and a choice where one is found, for a well-formed problem.

    Args:
        problem: what to choose.
        deadline: when to go on with what is known.
        cutoff: seconds; only what costs less is of interest.
        price: seconds per byte that memory is guessed to be worth; 0 where nothing is known.

    Raises:
        Infeasible: when the layouts admit no assignment, or, without a cutoff, where none is seen to fit.
    """
    settings = Settings(deadline, cutoff=cutoff)
    room = problem.memory_bound
    if math.isinf(cutoff) and math.isfinite(room):
        least = least_memory(problem, sweeps=_SWEEPS)
        if least > room:
            raise Infeasible(f"no choice fits {room:.6g} bytes: at least {least:.6g} are needed", least)
    free = unbounded(problem, replace(settings, deadline=deadline.part(_FREE)) if math.isfinite(room) else settings)
    if free.value >= cutoff and free.bound >= cutoff - 1e-9 * abs(cutoff):
        return Estimate(free.bound, None, True, False, price)
    if free.choice is not None and evaluate(problem, free.choice).memory <= room:
        found = solution_of(problem, free)
        return Estimate(found.bound, found, found.optimal, found.gap > CLOSEST, price)
    return _Prices(problem, settings, price).run(free.bound, free.choice)


def glance(problem: Problem, *, cutoff: float, price: float) -> float:
    """A lower bound on the seconds of a choice that fits, by a few sweeps of duality at this price per byte.

    Raises:
        Infeasible: when the layouts admit no assignment.
    """
    masks = [np.ones(len(node.cost), dtype=bool) for node in problem.nodes]
    if not consistent(problem, masks):
        raise Infeasible(NO_LAYOUT, math.inf)
    dual = Dual(problem if price else replace(problem, memory_bound=math.inf), 2 * cutoff, price=price)
    bound = -math.inf
    for _ in range(_SWEEPS):
        dual.rebalance()
        dual.sweep()
        bound = max(bound, dual.bound())
        if bound >= cutoff:
            break
    return bound


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
            raise Infeasible(NO_LAYOUT, math.inf)
        self.small = compact(problem, masks, bounded=True)

    def at(self, price: float) -> tuple[int, ...]:
        """The choice at so many seconds per byte."""
        dearer = replace(priced(self.small.problem, price), memory_bound=math.inf)
        dual = Dual(dearer, _most(dearer))
        for _ in range(_SWEEPS):
            dual.sweep()
            dual.rebalance()
        return self.small.restore(improve(dearer, dual.decode()))


def _most(problem: Problem) -> float:
    """Seconds that no choice takes more than."""
    total = sum(float(node.cost[np.isfinite(node.cost)].max()) for node in problem.nodes)
    for tensor in problem.tensors:
        total += float(np.where(np.isfinite(tensor.cost), tensor.cost, 0.0).max(axis=0).sum())
    return total


def _bound_at(problem: Problem, settings: Settings, price: float, limit: float) -> tuple[float, tuple[int, ...] | None]:
    """(bound at a price, the choice that is best there); only bounds below the limit are exact."""
    spent = price * problem.memory_bound if price else 0.0
    dearer = replace(priced(problem, price), memory_bound=math.inf)
    found = unbounded(dearer, replace(settings, cutoff=limit + spent, deadline=settings.deadline.part(_PRICE)))
    return found.bound - spent, found.choice


class _Prices:
    def __init__(self, problem: Problem, settings: Settings, price: float) -> None:
        self.problem, self.settings, self.price = problem, settings, price
        self.lines: list[tuple[float, float]] = []
        self.value = math.inf
        self.choice: tuple[int, ...] | None = None

    def run(self, bound: float, choice: tuple[int, ...] | None) -> Estimate:
        problem, best_price = self.problem, self.price
        if choice is not None:
            self.offer(choice)
        price = self.price or 0.1 * abs(bound) / max(problem.memory_bound, 1.0)
        for _ in range(_PRICES):
            limit = min(self.settings.cutoff, self.value)
            at, choice = _bound_at(problem, self.settings, price, limit)
            if at > bound:
                bound, best_price = at, price
            if bound >= limit * (1 - 1e-9) or choice is None or self.settings.deadline.over:
                break
            self.offer(choice)
            following = next_price(self.lines, price)
            if following is not None and self.at_most(following) < bound * (1 + _CLOSE):
                break
            if following is None or following <= 0 or abs(following - price) <= 1e-3 * max(following, price):
                break
            price = following
        return self.finish(bound, best_price)

    def at_most(self, price: float) -> float:
        """The bound at a price, from the choices met so far."""
        return min(seconds + price * slope for seconds, slope in self.lines)

    def offer(self, choice: tuple[int, ...]) -> None:
        found = evaluate(self.problem, choice)
        self.lines.append((found.seconds, found.memory - found.temporary - self.problem.memory_bound))
        if found.memory <= self.problem.memory_bound:
            better = improve(self.problem, choice, self.settings.deadline)
            value = evaluate(self.problem, better).seconds
            if value < self.value:
                self.value, self.choice = value, better

    def finish(self, bound: float, price: float) -> Estimate:
        cutoff = self.settings.cutoff
        settled = bound >= min(cutoff, self.value) * (1 - 1e-9)
        if self.choice is None or self.value >= cutoff:
            return Estimate(bound, None, settled, True, price)
        solution = replace(solution_at(self.problem, self.choice, bound, "duality"), price=price)
        return Estimate(bound, solution, settled, True, price)
