"""The plan with the least memory.

Its memory is that of the worst moment of a step, and which moment that is depends on the plan. So

    least bytes  =  min over plans  max over moments  bytes            (1)

is at least  max over shares of moments  min over plans  of the bytes weighted by the shares. The inner minimum is an
integer program without a memory limit, which is easy (`autotp.planner.ilp.eliminate`). The shares are found by cutting
planes, like those of devices and network in `autotp.planner.least_step`: every plan met adds a line, and its worst moment
another share. Seconds at a low price break ties between equal bytes, and lead to other plans nearby. Footprints measure the
plans met. The search ends at a choice that takes no more than the lower bound for all choices, and on a mesh that cannot do
better than another one; a hasty search also ends where the tables, which are close, promise nothing better. Without
``enough``, nothing here depends on the memory limit that is asked for, so the same plan is found for all limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotp.costs.step import Moment
from autotp.planner.assemble import Assembled
from autotp.planner.candidates import Candidate, Candidates
from autotp.planner.describe import Found
from autotp.planner.ilp import Deadline, Expired, Problem, cheapest, evaluate
from autotp.planner.memory.moments import Moments
from autotp.planner.shares import next_shares

__all__ = ["Least", "Smallest", "quicker", "smallest"]

Choice = tuple[int, ...]

_ROUNDS = 10
_FAR = 1.15  # multiple of ``enough``; the search ends if tables, which are not exact, promise more, and more than ``known``
_PRICES = 10
_SAME = 1e-6  # relative; smaller differences are ignored
#: The weights of a step's seconds relative to its bytes.
_TRADES = (1e-6, 0.03)


@dataclass(frozen=True, slots=True)
class Smallest:
    """The choice with the least memory of all that were met, its bytes, and the shares of moments at which it was met."""

    choice: Choice
    used: float
    shares: Mapping[Moment, float]


@dataclass(frozen=True, slots=True)
class Least:
    """The plan with the least memory of all candidates: its candidate, its program, and its choice with its bytes."""

    candidate: Candidate
    assembled: Assembled
    moments: Moments
    found: Smallest

    @property
    def used(self) -> float:
        """Bytes on each device at the worst moment."""
        return self.found.used

    def quickest(self, assembled: Assembled, candidates: Candidates, allowed: float, deadline: Deadline) -> Found:
        """The fastest plan met that fits, from this one on, at falling prices; ``assembled``: the program for seconds."""
        choice = quicker(
            assembled.problem,
            self.moments,
            self.found,
            lambda choice: evaluate(assembled.problem, choice).seconds,
            lambda choice: candidates.found(self.candidate, assembled, choice).memory <= allowed,
            deadline,
        )
        return candidates.found(self.candidate, assembled, choice)


def smallest(
    problem: Problem,
    moments: Moments,
    measure: Callable[[Choice], Mapping[Moment, float]],
    deadline: Deadline,
    known: float = math.inf,
    floor: float = 0.0,
    enough: float = 0.0,
    rounds: int | None = None,
) -> Smallest | None:
    """Returns the choice with the least memory; None if, by the tables, no choice takes less than ``known``.

    Args:
        problem: the cost of choices, without a memory limit.
        moments: of the steps of its choices.
        measure: returns the bytes of a choice at every moment.
        deadline: when the search ends with the best choice so far.
        known: bytes of another choice, such as one on another mesh.
        floor: a lower bound on the bytes of all choices.
        enough: bytes that suffice; choices that take far more, and more than ``known``, are of no interest.
        rounds: the most rounds of cutting planes; with fewer than the default, the search is hasty.

    Raises:
        Infeasible: the layouts admit no choice.
        Expired: the deadline passed before any choice was met.
    """
    seen = list(moments.usual)
    floor = max(floor, *(moments.least(moment) for moment in seen))
    start, promised = max(map(moments.cheapest, seen), key=lambda pair: pair[1])
    rounds = min(_ROUNDS, rounds or _ROUNDS)
    hasty = rounds < _ROUNDS
    if known <= floor * (1 + _SAME) or (hasty and moments.panelled and known <= promised):
        return None
    shares: Sequence[float] = [1.0 / len(seen)] * len(seen)
    met: dict[Choice, Mapping[Moment, float]] = {}
    best: Smallest | None = None
    if not hasty:
        start = cheapest(problem, deadline)
        met[start] = measure(start)
        promised = max(met[start].values())
        best = Smallest(start, promised, dict(zip(seen, shares, strict=True)))
    unit = promised / max(evaluate(problem, start).seconds, 1e-12)
    for _ in range(rounds):
        if best is not None and deadline.over:
            break
        weights = dict(zip(seen, shares, strict=True))
        news = False
        for share in _TRADES:
            try:
                choice = cheapest(moments.program(weights, besides=problem, price=share * unit), deadline)
            except Expired:
                if best is None:
                    raise
                continue
            if choice in met:
                continue
            if share == _TRADES[0]:
                promised = sum(weight * moments.bytes(moment, choice) for moment, weight in weights.items())
                if promised > max(known, _FAR * enough):
                    return best
            news = True
            met[choice] = measure(choice)
            worst = max(met[choice], key=met[choice].__getitem__)
            if best is None or met[choice][worst] < best.used:
                best = Smallest(choice, met[choice][worst], weights)
            if best.used <= floor * (1 + _SAME):
                return best
            if worst not in seen:
                seen.append(worst)
        if not news:
            break
        (shares,) = next_shares([([held.get(moment, 0.0) for moment in seen],) for held in met.values()]).shares
    return best


def quicker(
    problem: Problem,
    moments: Moments,
    least: Smallest,
    seconds: Callable[[Choice], float],
    fits: Callable[[Choice], bool],
    deadline: Deadline,
) -> Choice:
    """Returns the cheapest choice that fits, of ``least`` and those met at falling prices of the bytes at its moments.

    Args:
        problem: the cost of choices, without a memory limit.
        moments: of the steps of its choices.
        least: the choice with the least memory, which fits.
        seconds: returns the cost of a choice.
        fits: whether a choice fits.
        deadline: when the search ends with the best choice so far.
    """
    best, low, high = least.choice, 0.0, seconds(least.choice) / least.used
    for _ in range(_PRICES):
        price = high if not low else (low * high) ** 0.5
        try:
            prices = {moment: price * share for moment, share in least.shares.items()}
            choice = cheapest(moments.program(prices, besides=problem), deadline)
        except Expired:
            break
        if fits(choice):
            high = price if low else price / 8
            best = min(best, choice, key=seconds)
        else:
            low, high = price, (high if low else 64 * price)
    return best
