"""Prove an optimum: bounds by duality, pruning, a split on the largest temporary, and a solver for what remains.

The part of the memory that is a maximum, ``T = max temporary``, has no good linear relaxation. It is branched on instead:
on a piece ``lo <= T <= hi`` reshards above ``hi`` are impossible and ``lo`` bytes are known to be taken. On each piece

    seconds >= max over price >= 0 of  min over choices of  seconds + price * (resting bytes - (bound - lo))        (1) climb

where the inner minimum is bounded by :class:`autotp.ilp.dual.Dual` and the price is found by cutting planes in one
dimension: every choice met is a line in the price, and the next price is where the lowest two lines cross. Strategies
whose own bound exceeds the best choice known go; a piece that is still open is split, or, when small enough, solved
as a mixed-integer program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autotp.ilp import mip
from autotp.ilp.dual import Dual
from autotp.ilp.local import improve
from autotp.ilp.presolve import Reduced, compact, consistent, undominated
from autotp.ilp.problem import Problem, evaluate

__all__ = ["Search", "Settings"]

# Rounds: first look only for what is better than a limit that leaves this many strategies. Pruning against a low limit
# leaves far less to the solver; if nothing is found the bound has risen to it, and if something is, it is the optimum.
_ROUNDS = (120, 240, 480, 960)


@dataclass(frozen=True, slots=True)
class Settings:
    """Knobs of the search.

    Attributes:
        deadline: on the monotonic clock.
        threads: for solvers that take a count.
        cutoff: objective values at or above this are of no interest.
        tolerance: relative; a piece is done when its bound is this close to the best value.
        small: most cells of a piece that is handed to the solver without further splitting.
        enough: stop as soon as a choice of at most this value is found.
        solver: which one.
    """

    deadline: float
    threads: int = 2
    cutoff: float = math.inf
    tolerance: float = 2e-10
    small: int = 4000
    enough: float = -math.inf
    solver: str = "highs"


@dataclass(slots=True)
class _Piece:
    """A part of the search space: a range of the largest temporary, the strategies left, and bounds through each."""

    low: float
    high: float
    alive: list[np.ndarray]
    floors: list[np.ndarray]
    bound: float
    price: float = 0.0

    def copy(self) -> _Piece:
        alive, floors = [mask.copy() for mask in self.alive], [floor.copy() for floor in self.floors]
        return replace(self, alive=alive, floors=floors)


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
    """

    problem: Problem
    settings: Settings
    largest_cost: float = 0.0
    value: float = math.inf
    choice: tuple[int, ...] | None = None
    bound: float = -math.inf
    variables: int = 0
    pieces: int = 0
    limit: float = math.inf
    lines: list[tuple[float, float]] = field(default_factory=list)

    def offer(self, choice: Sequence[int]) -> None:
        """Take ``choice`` if it is allowed and better than the best so far."""
        found = evaluate(self.problem, choice)
        resting = evaluate(_without_temporaries(self.problem), choice).memory
        value = found.seconds + self.largest_cost * (found.memory - resting)
        if math.isfinite(found.seconds):
            self.lines.append((found.seconds, resting))
        if found.memory <= self.problem.memory_bound and value < self.value:
            self.value, self.choice = value, tuple(choice)

    def target(self) -> float:
        """A bound that reaches this settles a piece (``inf``: only the lack of any choice does)."""
        best = min(self.value, self.settings.cutoff, self.limit)
        return best - self.settings.tolerance * abs(best) if math.isfinite(best) else math.inf

    def settle(self, choice: Sequence[int]) -> None:
        """Accept ``choice`` as the optimum."""
        self.offer(choice)
        self.bound = self.value

    def run(self, *, floor: float = -math.inf) -> None:
        """Search until everything is settled or time is over; ``floor`` is a bound known beforehand."""
        masks = [np.isfinite(node.cost) for node in self.problem.nodes]
        temporaries = [
            t.temporary[np.isfinite(t.cost)].max(initial=0.0) for t in self.problem.tensors if t.uses
        ]
        if math.isinf(self.problem.memory_bound) and not self.largest_cost:
            temporaries = []
        top = min(max(temporaries, default=0.0), self.problem.memory_bound)
        root = _Piece(0.0, float(top), masks, [np.full(len(m), -math.inf) for m in masks], floor)
        self.bound = floor
        if self._tighten(root) is None:
            self.bound = min(self.value, max(floor, root.bound))
            return
        self.bound = max(floor, root.bound)
        for limit in self._limits(root):
            self.limit = limit
            closed = self._exhaust(root)
            self.limit = math.inf
            self.bound = max(self.bound, min(closed, self.value))
            if self._over() or self.bound >= self.target():
                break

    def _limits(self, root: _Piece) -> list[float]:
        """Rising limits that leave ever more strategies, the last being no limit."""
        floors = np.sort(np.concatenate([f[m] for f, m in zip(root.floors, root.alive, strict=True)]))
        limits = []
        for count in _ROUNDS:
            if count < 0.7 * len(floors) and root.bound < floors[count] < self.target():
                limits.append(float(floors[count]))
        return [*limits, math.inf]

    def _over(self) -> bool:
        return time.monotonic() > self.settings.deadline or self.value <= self.settings.enough

    def _exhaust(self, root: _Piece) -> float:
        """Settle everything below ``limit``; the proven bound."""
        closed = math.inf
        stack = [root.copy()]
        while stack:
            piece = stack.pop()
            if piece.bound < self.target() and not self._over():
                self.pieces += 1
                reduced = self._tighten(piece)
                if reduced is not None and not self._over():
                    parts = self._split(piece, reduced)
                    if parts:
                        stack.extend(sorted(parts, key=lambda p: -p.bound))
                        continue
                    self._finish(piece, reduced)
            closed = min(closed, piece.bound)
        return closed

    def _restricted(self, piece: _Piece) -> Reduced | None:
        tensors = self.problem.tensors
        if math.isfinite(self.problem.memory_bound) or self.largest_cost:
            tensors = tuple(
                replace(t, cost=np.where(t.temporary > piece.high, math.inf, t.cost)) for t in tensors
            )
        limited = replace(self.problem, tensors=tensors)
        if not consistent(limited, piece.alive):
            return None
        return compact(limited, piece.alive, bounded=True)

    def _tighten(self, piece: _Piece) -> Reduced | None:
        """Bound and prune until neither helps much; None when the piece is settled, its bound then saying at what."""
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

    def _climb(self, piece: _Piece, reduced: Reduced) -> None:
        """Raise the piece's bound by (1) and prune its strategies, better choices being offered on the way."""
        small = reduced.problem
        base = self.largest_cost * piece.low
        room = self.problem.memory_bound - piece.low
        bounded = math.isfinite(room)
        prices = [piece.price]
        tried = 0
        while prices and tried < 12:
            price = prices.pop()
            tried += 1
            dual = Dual(replace(small, memory_bound=room), self._cap(small), price=price)
            bound, through = _ascend(dual, self.target() - base)
            if bound + base > piece.bound:
                piece.bound, piece.price = bound + base, price
            self._prune(piece, reduced, through, base)
            if piece.bound >= self.target():
                return
            choice = improve(replace(_priced(small, price), memory_bound=math.inf), dual.decode())
            self.offer(reduced.restore(choice))
            if not bounded:
                return
            if evaluate(small, choice).memory <= self.problem.memory_bound:
                self.offer(reduced.restore(improve(small, choice)))
            following = _next_price([(seconds, resting - room) for seconds, resting in self.lines], price)
            if following is None and price == 0:
                following = 0.1 * abs(bound) / max(room, 1.0)
            if following is not None and abs(following - price) > 1e-6 * max(following, price):
                prices.append(following)

    def _cap(self, small: Problem) -> float:
        best = min(self.value, self.settings.cutoff)
        if math.isfinite(best):
            return best
        total = sum(float(node.cost.max()) for node in small.nodes)
        for tensor in small.tensors:
            total += float(np.where(np.isfinite(tensor.cost), tensor.cost, 0.0).max(axis=0).sum())
        return total

    def _prune(self, piece: _Piece, reduced: Reduced, through: list[np.ndarray], base: float) -> None:
        for mask, floor, kept, bounds in zip(piece.alive, piece.floors, reduced.kept, through, strict=True):
            floor[kept] = np.maximum(floor[kept], bounds + base)
            mask &= floor < self.target()

    def _split(self, piece: _Piece, reduced: Reduced) -> list[_Piece]:
        small = reduced.problem
        cells = sum(t.cost.size for t in small.tensors) + sum(len(n.cost) for n in small.nodes)
        if cells <= self.settings.small:
            return []
        values = np.unique(
            np.concatenate([t.temporary[np.isfinite(t.cost)] for t in small.tensors] or [np.zeros(1)])
        )
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

    def _finish(self, piece: _Piece, reduced: Reduced) -> None:
        """Hand the piece to the solver, which has tolerances: every choice it finds is priced exactly and excluded."""
        found: list[tuple[int, ...]] = []
        for _ in range(30):
            small = self._trimmed(reduced.problem, piece)
            model = mip.build(
                small, self._cap(small), largest_cost=self.largest_cost, excluded=found, cutoff=self.target()
            )
            self.variables = max(self.variables, model.size)
            left = self.settings.deadline - time.monotonic()
            result = mip.run(
                model, time_limit=left, threads=self.settings.threads, solver=self.settings.solver
            )
            if result.choice is not None:
                self.offer(reduced.restore(result.choice))
                found.append(result.choice)
            # What is excluded has been offered, so the best value stands for it.
            piece.bound = max(piece.bound, min(result.bound, self.target()))
            if result.choice is None or not result.finished or result.bound >= self.target():
                break

    def _trimmed(self, small: Problem, piece: _Piece) -> Problem:
        """Without reshards that alone cost more than the best choice, which would only spoil the solver's scale."""
        room = (
            self.target()
            - self.largest_cost * piece.low
            - sum(float(node.cost.min()) for node in small.nodes)
        )
        tensors = tuple(replace(t, cost=np.where(t.cost > room, math.inf, t.cost)) for t in small.tensors)
        return replace(small, tensors=tensors)


def _without_temporaries(problem: Problem) -> Problem:
    tensors = tuple(replace(t, temporary=np.zeros_like(t.temporary)) for t in problem.tensors)
    return replace(problem, tensors=tensors)


def _priced(problem: Problem, price: float) -> Problem:
    if not price:
        return problem
    nodes = tuple(replace(node, cost=node.cost + price * node.memory) for node in problem.nodes)
    tensors = tuple(replace(t, cost=t.cost + price * t.memory[None, :]) for t in problem.tensors)
    return replace(problem, nodes=nodes, tensors=tensors)


def _ascend(dual: Dual, target: float, *, most: int = 60) -> tuple[float, list[np.ndarray]]:
    """Sweep until the bound reaches the target or hardly rises; the bound, and bounds through every strategy."""
    last = bound = -math.inf
    through: list[np.ndarray] = []
    for number in range(most):
        through = dual.sweep()
        bound = dual.bound()
        if bound >= target:
            break
        if number % 5 == 4:
            if math.isfinite(target) and bound - last < 0.02 * (target - bound):
                break
            last = bound
        dual.rebalance()
    return bound, through


def _next_price(lines: list[tuple[float, float]], price: float) -> float | None:
    """Where ``min over lines of seconds + price * slope`` is greatest; the price to raise to when no line falls."""
    falling = [line for line in lines if line[1] < 0]
    rising = [line for line in lines if line[1] > 0]
    if not rising:
        return price / 16 if price > 0 else None
    if not falling:
        return price * 8 if price > 0 else None
    best, at = -math.inf, 0.0
    candidates = [0.0] + [(f[0] - r[0]) / (r[1] - f[1]) for f in falling for r in rising]
    for candidate in candidates:
        if candidate >= 0:
            value = min(line[0] + candidate * line[1] for line in lines)
            if value > best:
                best, at = value, candidate
    return at
