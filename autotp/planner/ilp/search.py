"""Find an optimum and prove it: dual bounds, pruning, and exact methods for the strategies that are left.

A strategy is pruned if the lower bound on its assignments (:class:`autotp.planner.ilp.dual.Dual`) exceeds the cost of the
best known assignment. The rest is settled by labels (:mod:`autotp.planner.ilp.labels`) if their tables stay small, by
elimination if that is cheap, and otherwise as one mixed-integer program (:mod:`autotp.planner.ilp.mip`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotp.planner.ilp import mip
from autotp.planner.ilp.deadline import Deadline, Expired
from autotp.planner.ilp.dual import Dual
from autotp.planner.ilp.eliminate import eliminate_all
from autotp.planner.ilp.labels import settle
from autotp.planner.ilp.local import improve
from autotp.planner.ilp.presolve import Reduced, compact, consistent
from autotp.planner.ilp.problem import Problem, evaluate

__all__ = ["CLOSEST", "Search", "Settings"]

# The maximum number of labels in the first attempt. If it fails, a limit on the cost rises in steps from the lower bound to
# the best known cost: pruning with a low limit leaves far fewer strategies, and a good assignment found this way also
# leaves few without a limit.
_QUICK = 100_000
_PARTS = (0.05, 0.2, 0.5, 1.0)
_SWEEPS = 60
_FEWER = 0.7  # the share of strategies left below which a new dual of these is faster than more sweeps
#: The relative gap below which the solver is not called: it accepts values within 1e-6 of an integer, and 1e-6 of a large
#: cost is more than this gap.
CLOSEST = 1e-7


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the search.

    Attributes:
        deadline: when to stop with the best assignment and bound so far.
        cutoff: seconds; assignments that cost this or more are not searched for.
        tolerance: the relative gap between the bound and the best cost at which the search ends.
        labels: the maximum number of labels in a table, see :mod:`autotp.planner.ilp.labels`.
        work: the maximum number of entries that exact elimination may visit; beyond it, the solver is called instead.
    """

    deadline: Deadline
    cutoff: float = math.inf
    tolerance: float = 2e-10
    labels: int = 2_000_000
    work: float = 2e9


@dataclass(slots=True)
class Space:
    """The strategies that are left, a lower bound on the assignments with each of them, and one on all of these."""

    alive: list[np.ndarray]
    floors: list[np.ndarray]
    bound: float

    def copy(self) -> Space:
        """A copy with its own arrays."""
        alive, floors = [mask.copy() for mask in self.alive], [floor.copy() for floor in self.floors]
        return replace(self, alive=alive, floors=floors)


@dataclass(slots=True)
class Search:
    """Bounds, pruning and a solver for one problem.

    Attributes:
        problem: the problem, in full.
        settings: the settings.
        value: the cost of the best assignment found, in seconds; ``inf`` if there is none.
        choice: the best assignment found.
        bound: the proven lower bound in seconds (after :meth:`run`).
        variables: the number of variables of the largest program passed to the solver.
        method: the most expensive method used: duality, labels, elimination or mip.
        limit: seconds; a temporary cutoff.
    """

    problem: Problem
    settings: Settings
    value: float = math.inf
    choice: tuple[int, ...] | None = None
    bound: float = -math.inf
    variables: int = 0
    method: str = "duality"
    limit: float = math.inf

    def offer(self, choice: Sequence[int]) -> None:
        """Take ``choice`` if it is better than the best so far."""
        value = evaluate(self.problem, choice).seconds
        if value < self.value:
            self.value, self.choice = value, tuple(choice)

    def target(self) -> float:
        """The lower bound that settles the search, in seconds (``inf``: only a proof of infeasibility settles it)."""
        best = min(self.value, self.settings.cutoff, self.limit)
        return best - self.settings.tolerance * abs(best) if math.isfinite(best) else math.inf

    def settle(self, choice: Sequence[int], method: str) -> None:
        """Accept ``choice`` as the optimum, found by ``method``."""
        self.offer(choice)
        self.method = method
        self.bound = self.value

    def run(self, among: Sequence[np.ndarray] | None = None) -> None:
        """Search until the problem is settled or the deadline passes; ``among``: per node, the strategies to consider."""
        masks = [np.isfinite(node.cost) for node in self.problem.nodes]
        for mask, interest in zip(masks, among or masks, strict=True):
            mask &= interest
        root = Space(masks, [np.full(len(m), -math.inf) for m in masks], -math.inf)
        reduced = self._tighten(root)
        if reduced is not None and not self.settings.deadline.over and not self._label(root, reduced, _QUICK):
            self._rounds(root)
        self.bound = min(self.value, max(self.bound, root.bound))

    def _rounds(self, root: Space) -> None:
        """Search below limits that rise until the problem is settled, finally without a limit."""
        for part in _PARTS:
            if self.settings.deadline.over:
                return
            self.limit = root.bound + part * (self.target() - root.bound) if part < 1 else math.inf
            space = root.copy()
            reduced = self._tighten(space)
            if reduced is not None and not self.settings.deadline.over:
                self._close(space, reduced)
            # Assignments pruned by the limit may cost as little as the limit, even if the bound of the rest is higher.
            self.bound = max(self.bound, min(space.bound, self.limit, self.value))
            last, self.limit = math.isinf(self.limit), math.inf
            if last or self.bound >= self.target() or self._closest(root.bound):
                return

    def _closest(self, bound: float) -> bool:
        best = min(self.value, self.settings.cutoff)
        return math.isfinite(best) and best - bound <= CLOSEST * abs(best)

    def _tighten(self, space: Space) -> Reduced | None:
        """Bound and prune until few strategies are pruned. Returns the reduced problem; None if the space is settled, with
        its bound at the target or above.
        """
        size = math.inf
        for mask, floor in zip(space.alive, space.floors, strict=True):
            mask &= floor < self.target()
        while True:
            if not consistent(self.problem, space.alive):
                space.bound = self.target()
                return None
            reduced = compact(self.problem, space.alive)
            before, size = size, sum(len(k) for k in reduced.kept)
            if size > 0.9 * before or (math.isfinite(before) and self.settings.deadline.over):
                return reduced
            self._ascend(space, reduced, Dual(reduced.problem, self._cap(reduced.problem)))
            if space.bound >= self.target():
                return None

    def _ascend(self, space: Space, reduced: Reduced, dual: Dual) -> None:
        """Sweep until the bound reaches the target or hardly rises, and decode assignments from the messages."""
        last, size = -math.inf, sum(map(len, reduced.kept))
        for number in range(1, _SWEEPS + 1):
            bound, through = dual.sweep()
            done, over = bound >= self.target(), self.settings.deadline.over
            if done or over or number % 5 == 0:
                space.bound = max(space.bound, bound)
                self._prune(space, reduced, through)
                if sum(int(mask.sum()) for mask in space.alive) < _FEWER * size:
                    break
                slow = bound - last < 0.02 * (min(self.target(), self._cap(reduced.problem)) - bound)
                if done or over or (slow and number > 5):
                    break
                last = bound
                if math.isinf(self.value) and number == 5:
                    self._read(reduced, dual)
            dual.rebalance()
        if not done:
            self._read(reduced, dual)

    def _read(self, reduced: Reduced, dual: Dual) -> None:
        self.offer(reduced.restore(improve(reduced.problem, dual.decode(), self.settings.deadline)))

    def _cap(self, small: Problem) -> float:
        best = min(self.value, self.settings.cutoff)
        if math.isfinite(best):
            return best
        total = sum(float(node.cost.max()) for node in small.nodes)
        for tensor in small.tensors:
            total += float(np.where(np.isfinite(tensor.cost), tensor.cost, 0.0).max(axis=0).sum())
        return total

    def _prune(self, space: Space, reduced: Reduced, through: list[np.ndarray]) -> None:
        for mask, floor, kept, bounds in zip(space.alive, space.floors, reduced.kept, through, strict=True):
            floor[kept] = np.maximum(floor[kept], bounds)
            mask &= floor < self.target()

    def _close(self, space: Space, reduced: Reduced) -> None:
        if not self._label(space, reduced, self.settings.labels):
            self._finish(space, reduced)

    def _label(self, space: Space, reduced: Reduced, most: int) -> bool:
        """Settle the reduced problem by labels, at most ``most`` per table. Returns whether it is settled."""
        small, target = reduced.problem, self.target()
        if not math.isfinite(target):
            return False
        dual = Dual(small, self._cap(small))
        for _ in range(_SWEEPS):
            if self.settings.deadline.over:
                return False
            dual.sweep()
            dual.rebalance()
        settled, choice = settle(
            small,
            dual,
            target=target,
            limit=min(most, self.settings.labels),
            deadline=self.settings.deadline,
        )
        if choice is not None:
            self.offer(reduced.restore(choice))
        if settled:
            if self.method == "duality":
                self.method = "labels"
            space.bound = max(space.bound, self.target())
        return settled

    def _finish(self, space: Space, reduced: Reduced) -> None:
        """Settle the reduced problem by elimination, or else by the solver. The solver has tolerances, so each assignment
        that it finds is evaluated exactly, and then excluded.
        """
        choice = eliminate_all(reduced.problem, budget=self.settings.work, deadline=self.settings.deadline)
        if choice is not None:
            self.method = "elimination"
            self.offer(reduced.restore(choice))
            space.bound = max(space.bound, self.target())
            return
        if self._closest(space.bound):
            return
        self.method = "mip"
        found: list[tuple[int, ...]] = []
        for _ in range(30):
            small = self._trimmed(reduced.problem)
            try:
                model = mip.build(small, self._cap(small), excluded=found, deadline=self.settings.deadline)
                result = mip.run(model, deadline=self.settings.deadline)
            except Expired:
                break
            self.variables = max(self.variables, model.size)
            if result.choice is not None:
                self.offer(reduced.restore(result.choice))
                found.append(result.choice)
            # Excluded assignments have been offered, so the best value covers them.
            space.bound = max(space.bound, min(result.bound, self.target()))
            if result.choice is None or not result.finished or result.bound >= self.target():
                break

    def _trimmed(self, small: Problem) -> Problem:
        """The problem without reshards that no assignment below the target uses: they only worsen the solver's scaling."""
        room = self.target() - sum(float(node.cost.min()) for node in small.nodes)
        tensors = tuple(replace(t, cost=np.where(t.cost > room, math.inf, t.cost)) for t in small.tensors)
        return replace(small, tensors=tensors)
