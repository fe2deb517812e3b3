"""Prove an optimum: bounds by duality, pruning, a split on the largest temporary, a solver for the rest.

The part of the memory that is a maximum, ``T = max temporary``, has no good linear relaxation. It is branched
on instead: on a piece ``lo <= T <= hi`` reshards above ``hi`` are impossible and ``lo`` bytes are known to be
taken. On each piece

    seconds >= max_{price >= 0} min_choices  seconds + price * (resting bytes - (bound - lo))   (1) _climb

where the inner minimum is bounded by :class:`autotp.planner.ilp.dual.Dual` and the price is found by cutting planes
in one dimension: every choice met is a line in the price, and the next price is where the lowest two lines
cross. Strategies whose own bound exceeds the best choice known go. What is left is settled by labels
(:mod:`autotp.planner.ilp.labels`) if they stay few; if not, the piece is split, and solved as a mixed-integer program
(:mod:`autotp.planner.ilp.mip`) when it cannot be, or is small.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autotp.planner.ilp import mip
from autotp.planner.ilp.dual import Dual
from autotp.planner.ilp.eliminate import eliminate_all
from autotp.planner.ilp.labels import settle
from autotp.planner.ilp.local import improve
from autotp.planner.ilp.pieces import Piece, Settings
from autotp.planner.ilp.presolve import Reduced, compact, consistent, undominated
from autotp.planner.ilp.prices import next_price, priced
from autotp.planner.ilp.problem import Problem, evaluate

__all__ = ["Search"]

# Rounds: first look only for what is better than a limit that leaves this many strategies. Pruning against
# a low limit leaves far less to the solver; if nothing is found the bound has risen to it, and if something
# is, it is the optimum.
_ROUNDS = (120, 240, 480, 960)
_PARTS = (0.05, 0.2)
_SWEEPS = 60


@dataclass(slots=True)
class Search:
    """Branch and bound for one problem and one objective.

    Attributes:
        problem: the problem, in full.
        settings: knobs.
        largest_cost: what each byte of the largest temporary adds to the objective.
        value: the best objective value found.
        choice: the choice that has it.
        bound: proven lower bound (after :meth:`run`).
        variables: of the largest program handed to a solver.
        pieces: how many pieces were looked at.
        method: the heaviest means that was needed: duality, labels, elimination or mip.
        price: seconds per byte to begin with, and afterwards that at which the bound at the root was best.
        prices: how many prices to try on each piece.
    """

    problem: Problem
    settings: Settings
    largest_cost: float = 0.0
    value: float = math.inf
    choice: tuple[int, ...] | None = None
    bound: float = -math.inf
    variables: int = 0
    pieces: int = 0
    method: str = "duality"
    limit: float = math.inf
    price: float = 0.0
    prices: int = 12
    lines: list[tuple[float, float]] = field(default_factory=list)

    def offer(self, choice: Sequence[int]) -> None:
        """Take ``choice`` if it is allowed and better than the best so far."""
        found = evaluate(self.problem, choice)
        value = found.seconds + self.largest_cost * found.temporary
        if math.isfinite(found.seconds):
            self.lines.append((found.seconds, found.memory - found.temporary))
        if found.memory <= self.problem.memory_bound and value < self.value:
            self.value, self.choice = value, tuple(choice)

    def target(self) -> float:
        """A bound that reaches this settles a piece (``inf``: only the lack of any choice does)."""
        best = min(self.value, self.settings.cutoff, self.limit)
        return best - self.settings.tolerance * abs(best) if math.isfinite(best) else math.inf

    def settle(self, choice: Sequence[int], method: str) -> None:
        """Accept ``choice`` as the optimum, found by ``method``."""
        self.offer(choice)
        self.method = method
        self.bound = self.value

    def run(self, *, floor: float = -math.inf) -> None:
        """Search until everything is settled or time is over; ``floor`` is a bound known beforehand."""
        masks = [np.isfinite(node.cost) for node in self.problem.nodes]
        temporaries = [t.temporary[np.isfinite(t.cost)].max(initial=0.0) for t in self.problem.tensors if t.uses]
        if math.isinf(self.problem.memory_bound) and not self.largest_cost:
            temporaries = []
        top = min(max(temporaries, default=0.0), self.problem.memory_bound)
        root = Piece(0.0, float(top), masks, [np.full(len(m), -math.inf) for m in masks], floor, self.price)
        self.bound = floor
        reduced = self._tighten(root)
        self.price = root.price
        if reduced is None:
            self.bound = min(self.value, max(floor, root.bound))
            return
        self.bound = max(floor, root.bound)
        for limit in self._limits(root):
            self.limit = limit
            closed = self._exhaust(root)
            self.limit = math.inf
            # What a limit has pruned may cost just as much as the limit, whatever the rest is bounded by.
            self.bound = max(self.bound, min(closed, limit, self.value))
            if self._over() or self.bound >= self.target():
                break

    def _limits(self, root: Piece) -> list[float]:
        """Rising limits that leave ever more strategies, the last being no limit."""
        floors = np.sort(np.concatenate([f[m] for f, m in zip(root.floors, root.alive, strict=True)]))
        target, limits, before = self.target(), [], 0
        some = [float(floors[count]) for count in _ROUNDS if count < 0.7 * len(floors)]
        if math.isfinite(target):
            some += [root.bound + part * (target - root.bound) for part in _PARTS]
        for limit in sorted(some):
            count = int(np.searchsorted(floors, limit))
            if root.bound < limit < target and 1.1 * before < count < 0.9 * len(floors):
                limits.append(limit)
                before = count
        return [*limits, math.inf]

    def _over(self) -> bool:
        return time.monotonic() > self.settings.deadline or self.value <= self.settings.enough

    def _exhaust(self, root: Piece) -> float:
        """Settle everything below ``limit``; the proven bound."""
        closed = math.inf
        stack = [root.copy()]
        while stack:
            piece = stack.pop()
            if piece.bound < self.target() and not self._over():
                self.pieces += 1
                reduced = self._tighten(piece)
                if reduced is not None and not self._over() and not self._label(piece, reduced):
                    parts = self._split(piece, reduced)
                    if parts:
                        stack.extend(sorted(parts, key=lambda p: -p.bound))
                        continue
                    self._finish(piece, reduced)
            closed = min(closed, piece.bound)
        return closed

    def _restricted(self, piece: Piece) -> Reduced | None:
        tensors = self.problem.tensors
        if math.isfinite(self.problem.memory_bound) or self.largest_cost:
            tensors = tuple(replace(t, cost=np.where(t.temporary > piece.high, math.inf, t.cost)) for t in tensors)
        limited = replace(self.problem, tensors=tensors)
        if not consistent(limited, piece.alive):
            return None
        return compact(limited, piece.alive, bounded=True)

    def _tighten(self, piece: Piece) -> Reduced | None:
        """Bound and prune until neither helps much; None when the piece is settled, its bound then saying
        at what.
        """
        size = math.inf
        dominated = False
        for mask, floor in zip(piece.alive, piece.floors, strict=True):
            mask &= floor < self.target()
        while True:
            reduced = self._restricted(piece)
            if reduced is None:
                piece.bound = self.target()
                return None
            before, size = size, sum(len(k) for k in reduced.kept)
            if size <= 0.9 * before:
                self._climb(piece, reduced)
                if piece.bound >= self.target():
                    return None
            elif dominated or not undominated(self.problem, piece.alive, bounded=True):
                return reduced
            else:
                dominated = True

    def _climb(self, piece: Piece, reduced: Reduced) -> None:
        """Raise the piece's bound by (1) and prune its strategies, better choices being offered on the
        way.
        """
        small = reduced.problem
        base = self.largest_cost * piece.low
        room = self.problem.memory_bound - piece.low
        price: float | None = piece.price
        for _ in range(self.prices):
            assert price is not None
            dual = Dual(replace(small, memory_bound=room), self._cap(small), price=price)
            self._ascend(piece, reduced, dual, base)
            if piece.bound >= self.target() or math.isinf(room) or self._over():
                return
            following = next_price([(seconds, resting - room) for seconds, resting in self.lines], price)
            if following is None and price == 0:
                following = 0.1 * abs(piece.bound) / max(room, 1.0)
            if (
                following is None
                or following * room > 1e3 * self._cap(small)
                or abs(following - price) <= 1e-6 * max(following, price)
            ):
                return
            price = following

    def _ascend(self, piece: Piece, reduced: Reduced, dual: Dual, base: float) -> None:
        """Sweep at one price until the bound reaches the target or hardly rises, and read choices off the
        messages.
        """
        last = -math.inf
        for number in range(1, _SWEEPS + 1):
            through = dual.sweep()
            bound = dual.bound() + base
            done = bound >= self.target()
            if done or number % 5 == 0:
                if bound > piece.bound:
                    piece.bound, piece.price = bound, dual.price
                self._prune(piece, reduced, through, base)
                slow = bound - last < 0.02 * (min(self.target(), self._cap(reduced.problem)) - bound)
                if done or (slow and number > 5):
                    break
                last = bound
                if math.isinf(self.value) and number == 5:
                    self._read(reduced, dual)
            dual.rebalance()
        if not done:
            self._read(reduced, dual)

    def _read(self, reduced: Reduced, dual: Dual) -> None:
        small = reduced.problem
        choice = improve(replace(priced(small, dual.price), memory_bound=math.inf), dual.decode())
        self.offer(reduced.restore(choice))
        if math.isfinite(small.memory_bound) and evaluate(small, choice).memory <= small.memory_bound:
            self.offer(reduced.restore(improve(small, choice)))

    def _cap(self, small: Problem) -> float:
        best = min(self.value, self.settings.cutoff)
        if math.isfinite(best):
            return best
        total = sum(float(node.cost.max()) for node in small.nodes)
        for tensor in small.tensors:
            total += float(np.where(np.isfinite(tensor.cost), tensor.cost, 0.0).max(axis=0).sum())
        return total

    def _prune(self, piece: Piece, reduced: Reduced, through: list[np.ndarray], base: float) -> None:
        for mask, floor, kept, bounds in zip(piece.alive, piece.floors, reduced.kept, through, strict=True):
            floor[kept] = np.maximum(floor[kept], bounds + base)
            mask &= floor < self.target()

    def _split(self, piece: Piece, reduced: Reduced) -> list[Piece]:
        small = reduced.problem
        cells = sum(t.cost.size for t in small.tensors) + sum(len(n.cost) for n in small.nodes)
        if cells <= self.settings.small:
            return []
        values = np.unique(np.concatenate([t.temporary[np.isfinite(t.cost)] for t in small.tensors] or [np.zeros(1)]))
        values = values[(values >= piece.low) & (values <= piece.high)]
        gain = (piece.price + self.largest_cost) * (piece.high - piece.low)
        best = min(self.value, self.settings.cutoff)
        if len(values) < 2 or (math.isfinite(best) and gain < 0.1 * (best - piece.bound)):
            return []
        # The lower half is resolved first: little is taken, so good choices turn up there.
        middle = int(np.searchsorted(values, (values[0] + values[-1]) / 2, side="right")) - 1
        middle = min(max(middle, 0), len(values) - 2)
        halves = []
        for low, high in ((piece.low, values[middle]), (values[middle + 1], piece.high)):
            halves.append(replace(piece.copy(), low=float(low), high=float(high)))
        return halves

    def _finish(self, piece: Piece, reduced: Reduced) -> None:
        """Hand the piece to the solver, which has tolerances: every choice it finds is priced exactly and
        excluded.
        """
        if math.isinf(self.problem.memory_bound) and not self.largest_cost:
            choice = eliminate_all(reduced.problem, budget=self.settings.work)
            if choice is not None:
                self.method = "elimination"
                self.offer(reduced.restore(choice))
                piece.bound = max(piece.bound, self.target())
                return
        self.method = "mip"
        found: list[tuple[int, ...]] = []
        for _ in range(30):
            small = self._trimmed(reduced.problem, piece)
            model = mip.build(small, self._cap(small), largest_cost=self.largest_cost, excluded=found)
            self.variables = max(self.variables, model.size)
            left = self.settings.deadline - time.monotonic()
            result = mip.run(model, time_limit=left, threads=self.settings.threads, solver=self.settings.solver)
            if result.choice is not None:
                self.offer(reduced.restore(result.choice))
                found.append(result.choice)
            # What is excluded has been offered, so the best value stands for it.
            piece.bound = max(piece.bound, min(result.bound, self.target()))
            if result.choice is None or not result.finished or result.bound >= self.target():
                break

    def _label(self, piece: Piece, reduced: Reduced) -> bool:
        """Settle the piece by labels if they stay few."""
        base = self.largest_cost * piece.low
        target = self.target() - base
        if not math.isfinite(target):
            return False
        room = self.problem.memory_bound - piece.low
        price = piece.price if math.isfinite(room) else 0.0
        dual = Dual(replace(reduced.problem, memory_bound=room), self._cap(reduced.problem), price=price)
        for _ in range(_SWEEPS):
            dual.sweep()
            dual.rebalance()
        settled, choice = settle(
            reduced.problem,
            dual,
            target=target,
            base=piece.low,
            largest_cost=self.largest_cost,
            limit=self.settings.labels,
        )
        if choice is not None:
            self.offer(reduced.restore(choice))
        if settled:
            if self.method == "duality":
                self.method = "labels"
            piece.bound = max(piece.bound, self.target())
        return settled

    def _trimmed(self, small: Problem, piece: Piece) -> Problem:
        """Without reshards that alone cost more than the best choice, which would only spoil the solver's
        scale.
        """
        room = self.target() - self.largest_cost * piece.low - sum(float(node.cost.min()) for node in small.nodes)
        tensors = tuple(replace(t, cost=np.where(t.cost > room, math.inf, t.cost)) for t in small.tensors)
        return replace(small, tensors=tensors)
