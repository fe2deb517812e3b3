"""The fastest plan whose memory fits at every moment of a step, with what it keeps and what it recomputes.

Seconds and bytes are both weighted: of each pass the share of whatever limits it (`autotp.planner.least_step`), and of
every moment at which memory is short, a price of its bytes. Whatever the shares mu and the prices are,

    step  >=  min over choices  sum of mu * sides  +  sum over moments of price * (bytes - bound)              (1)

holds for every plan that fits, even if it treats layers differently for which the program makes one decision: the minimum
is a sum over layers. The right side is an integer program without a bound on memory, over strategies, layouts and what is
recomputed; its maximum over shares and prices is found by cutting planes, one for every choice met. At the maximum, a
mixture of choices has that value and fits on average. The plan mixes them too: the first layers, which the backward pass
reaches last, are treated as one choice says, and the rest as the other.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from autotp.costs.floor import least_seconds
from autotp.costs.step import Moment
from autotp.errors import BatchError
from autotp.planner.assemble import Assembled
from autotp.planner.candidates import Candidate
from autotp.planner.contest import Contest
from autotp.planner.describe import Found
from autotp.planner.ilp import NEVER, Deadline, Expired, Problem, least, minimax, promising, side_by_side
from autotp.planner.least_step import Searched, first_shares, most_chunks
from autotp.planner.mixing import Met, like, mix
from autotp.planner.moments import Moments
from autotp.planner.shares import Multipliers, Shares, next_shares
from costmodel import overlap

__all__ = ["squeeze"]

_log = logging.getLogger("autotp.plan")
_ROUNDS = 24
_FIRST = 0.1  # of a step: what all of the memory may cost at first
_FAR = 3.0  # by which factor the next price may differ from the best one
_SAME = 1e-6  # relative; less is no difference
_HOPELESS = 1e3  # times the fastest choice met: a step that no plan has, so that none fits
_SMALL = 4000  # choices of all nodes, and changes of layouts, together that a solver gets
_ANYTHING = 0.25  # of the time: for a plan that fits, where the first mesh has none, or to know that there is none
_CLOSELY = 8  # so many meshes' share of the time is left for looking closely
_SETTLING = 1.0  # seconds for the exact search of a small program

_Anything = Callable[[Deadline], Searched]


def squeeze(
    contest: Contest, meshes: Sequence[tuple[int, ...]], best: Found | None, floor: float, anything: _Anything
) -> Searched:
    """The fastest plan that fits, on any mesh.

    Args:
        contest: of the job.
        meshes: to look at, the first one first, until the time is over.
        best: a plan that fits, if one is known.
        floor: seconds that no plan without chunks is below on any of them, however much memory there is.
        anything: finds, until a deadline, a plan that fits, or what takes the least memory.
    """
    search = _Squeeze(contest)
    search.best = None if best is None else search.met(best)
    model, best_panels = contest.candidates.model, contest.candidates.panels[0]
    candidates = contest.candidates.over(meshes)  # where something may be recomputed, that saves more than panels
    every = [one for one in candidates if not model.undecided or one.panels == best_panels]
    if search.most > 1:
        prices = contest.candidates.prices((contest.candidates.topology.devices,))
        search.cut = least_seconds(model, prices, float(overlap.CHUNKED.subs(overlap.c, search.most)))
    known = floor if search.most == 1 else 0.0
    floors, others = [search.on(one, known, search.look) for one in every[:1]], every[1:]
    other = Searched(None, 0.0, math.inf)
    with suppress(Expired):
        if search.best is None:  # one that fits rules out most of the others, and there may be none
            other = anything(contest.deadline.within(_ANYTHING * contest.deadline.left))
            if other.best is not None:
                search.best, floors, others = search.met(other.best), [], every
            elif contest.key(meshes) in contest.leasts:
                return other

    def bounded(number: int) -> float:
        until = contest.deadline.within(contest.deadline.left / (len(others) - number + _CLOSELY))
        return search.on(others[number], known, partial(search.bounded, until=until))

    # All get a bound before any other is looked at closely, the most promising first: its plan rules most of them out.
    lows = side_by_side([partial(bounded, number) for number in range(len(others))], contest.deadline)
    if lows and min(lows) <= known < math.inf and not contest.deadline.over:  # there was no time for some
        with suppress(Expired, BatchError):
            known = max(known, search.contest.shared_step(meshes, search.point.prices))
    for low, number in sorted((max(known, low), number) for number, low in enumerate(lows)):
        floors.append(low if low >= search.good else max(low, search.on(others[number], low, search.look)))
    if search.best is None:
        return replace(other, floor=max(0.0, min(floors, default=math.inf)))
    floor = max(0.0, min([search.best.step, *floors]))
    return Searched(search.best.found.proven(search.best.step, floor), floor, search.best.found.memory)


@dataclass(frozen=True, slots=True)
class _Point:
    """Shares of what limits each pass, and prices of bytes at moments, at which (1) is evaluated."""

    shares: Shares = ()
    prices: Mapping[Moment, float] = field(default_factory=dict)


#: A program, the moments of its steps, the least sum (1), and the choice that has it, if that is of interest.
Solved = tuple[Assembled, Moments, float, tuple[int, ...] | None]


@dataclass(slots=True)
class _Squeeze:
    """A search over meshes; each begins at the point where the bound of one before was best.

    ``cut``: seconds that no plan in chunks is below on any of them.
    """

    contest: Contest
    best: Met | None = None
    point: _Point = _Point()
    cut: float = 0.0

    @property
    def room(self) -> float:
        return self.contest.allowed

    @property
    def good(self) -> float:
        """Seconds that a plan has to be below to be of interest."""
        return math.inf if self.best is None else self.best.step * (1 - self.contest.candidates.options.gap)

    @property
    def layers(self) -> int:
        """How many operators one of them decides for, at most."""
        model = self.contest.candidates.model
        copies = Counter(model.stands.values())
        return max((copies[node] for node in model.undecided), default=1)

    @property
    def most(self) -> int:
        """The chunks for which bounds have to hold."""
        return most_chunks(self.contest.candidates.options)

    def met(self, found: Found) -> Met:
        options, sums = self.contest.candidates.options, found.priced.sums
        step = sums.step(options.hides)
        return Met(found, sums.sides if options.hides else ((step,),), step)

    def on(self, candidate: Candidate, known: float, look: Callable[[Candidate], float]) -> float:
        """Seconds that none of a mesh's plans is below, as far as there is time."""
        try:
            return look(candidate)
        except BatchError:
            return math.inf
        except Expired:
            return known

    def bounded(self, candidate: Candidate, until: Deadline) -> float:
        """Seconds that none of a mesh's plans is below, by the best point known."""
        solved = self.solve(candidate, self.point, None, surely=True, until=until)
        if solved is None:
            return math.inf
        _, moments, floor, _ = solved
        return floor if self.most == 1 else min(floor, self.in_chunks(candidate, moments))

    def look(self, candidate: Candidate) -> float:
        """Looks for a better plan on a mesh; seconds that none of its plans is below."""
        first = self.solve(candidate, self.point, None, surely=True)
        if first is None:
            return math.inf
        _, moments, floor, _ = first
        if floor < self.good:
            floor = max(floor, self.steer(candidate, moments, first, surely=True))
        if floor < self.good:  # what is held for certain may be too little to go by
            point = self.point
            self.steer(candidate, moments, None, surely=False)
            self.point = point
        if floor < self.good and self.layers == 1:
            floor = max(floor, self.close(candidate, moments))
        if self.most > 1:
            low = self.in_chunks(candidate, moments)
            if low < self.good and self.layers == 1:
                low = max(low, self.close(candidate, moments, self.most))
            floor = min(floor, low)
        _log.debug("mesh %s: at least %.4g s", "x".join(map(str, candidate.mesh)), floor)
        return floor

    def in_chunks(self, candidate: Candidate, moments: Moments) -> float:
        """A lower bound on the seconds of plans in chunks, from one point alone."""
        if self.cut >= self.good:
            return self.cut
        solved = self.solve(candidate, self.point, moments, surely=True, chunks=self.most)
        return math.inf if solved is None else solved[2]

    def steer(self, candidate: Candidate, moments: Moments, solved: Solved | None, *, surely: bool) -> float:
        """Meets choices at ever better points and mixes them; seconds that no plan is below, of bytes held ``surely``.

        ``solved``: what is known at the first of them.
        """
        lines: dict[tuple[int, ...], Met] = {}
        high, point, within = -math.inf, self.point, self.contest.candidates.options.gap / 4
        mixture: Sequence[float] = ()
        for _ in range(_ROUNDS):
            if lines and self.contest.deadline.over:
                break
            solved = solved or self.solve(candidate, point, moments, surely=surely)
            if solved is None:
                break
            (assembled, _, value, choice), solved = solved, None
            if choice is None:
                break
            new = value > high * (1 + _SAME)
            if new:
                high, self.point = value, point
            hopeless = lines and high > _HOPELESS * min(one.step for one in lines.values())
            if hopeless or (choice in lines and not new):
                break
            if choice not in lines:
                lines[choice] = self.offer(self.contest.candidates.found(candidate, assembled, choice))
            point, following = self.follow(list(lines.values()))
            mixture = following.mixture
            if following.value * (1 - within) <= high and self.best is not None:
                break
        with suppress(Expired):
            self.mix(candidate, moments, list(lines.values()), mixture, high)
        return high

    def close(self, candidate: Candidate, moments: Moments, chunks: int = 1) -> float:
        """Settles a small program exactly; seconds that none of its plans is below."""
        assembled = self.at(self.point, chunks).assemble(candidate)
        answer = moments.program(self.point.prices, True, besides=assembled.problem)
        spent = sum(self.point.prices.values()) * self.room
        alive = promising(answer, self.good + spent, self.contest.deadline)
        if answer.variables(alive) > _SMALL:
            return 0.0
        groups, floor = self.contest.sides(candidate, chunks), 0.0
        for sharp in (True, False):
            floor = max(floor, self.settle(candidate, assembled, moments, groups, alive, sharp=sharp))
            if floor >= self.good:
                break
        return floor

    def settle(
        self,
        candidate: Candidate,
        assembled: Assembled,
        moments: Moments,
        groups: Sequence[Sequence[Problem]],
        alive: Sequence[np.ndarray],
        *,
        sharp: bool,
    ) -> float:
        """The fastest choice that fits, and seconds that none is below.

        Choices that do not fit are left out one by one, or, if ``sharp``, by all that tables know of their worst moments,
        which may leave out more.
        """
        surely = dict.fromkeys((*moments.usual, *self.point.prices), True)
        excluded: list[tuple[int, ...]] = []
        floor, deadline = 0.0, self.contest.deadline.within(_SETTLING)
        while not deadline.over:
            bounded = [(moments.program({moment: 1.0}, each), self.room) for moment, each in surely.items()]
            bound, choice = minimax(groups, bounded, alive, excluded, deadline=deadline)
            floor = max(floor, bound) if all(surely.values()) else floor
            if choice is None or bound >= self.good:
                break
            one = self.offer(self.contest.candidates.found(candidate, assembled, choice))
            worst = max(one.held, key=one.held.__getitem__)
            if one.held[worst] <= self.room:
                break
            if not sharp or surely.get(worst) is False:
                excluded.append(choice)
            surely[worst] = not sharp or worst not in surely
        return floor

    def solve(
        self,
        candidate: Candidate,
        point: _Point,
        moments: Moments | None,
        *,
        surely: bool,
        chunks: int = 1,
        until: Deadline = NEVER,
    ) -> Solved | None:
        """The least sum (1) and its choice, unless that is not below what is of interest; None where layouts admit none.

        Only with what choices hold ``surely`` is the sum a bound. ``until``: when the best bound so far is good enough.
        """
        spent, deadline = sum(point.prices.values()) * self.room, min(until, self.contest.deadline, key=lambda one: one.at)

        def ask(assembled: Assembled) -> tuple[Moments, float, tuple[int, ...] | None]:
            prices, panelled = self.contest.candidates.prices(candidate.mesh), candidate.panels != 1
            known = moments or Moments(assembled, prices, panelled, self.contest.deadline)
            weighed = known.program(point.prices, surely, besides=assembled.problem)
            value, choice = least(weighed, cutoff=self.good + spent, deadline=deadline)
            return known, value - spent, choice

        assembled, answer = self.at(point, chunks).ask(candidate, ask)
        return None if answer is None else (assembled, *answer)

    def at(self, point: _Point, chunks: int = 1) -> Contest:
        """The contest whose seconds are weighted as at a point."""
        options, depth = self.contest.candidates.options, self.contest.candidates.model.depth
        shares = point.shares or first_shares(options.accumulate)
        weights = overlap.weights(shares, depth, options.accumulate, chunks) if options.hides else None
        self.contest = self.contest.anew(weights)
        return self.contest

    def offer(self, found: Found) -> Met:
        if self.best is not None:
            self.contest.deadline.check()
        one = self.met(found)
        if found.memory <= self.room and (self.best is None or one.step < self.best.step):
            self.best = one
        return one

    def follow(self, lines: Sequence[Met]) -> tuple[_Point, Multipliers]:
        """Where the bound may be greatest, judged by the choices met, not far from where it was best."""
        centre = self.point.prices
        seen = dict.fromkeys((*centre, *(max(one.held, key=one.held.__getitem__) for one in lines)))
        first = _FIRST * min(one.step for one in lines) / self.room
        found = next_shares(
            [one.sides for one in lines],
            [[one.held.get(moment, 0.0) - self.room for moment in seen] for one in lines],
            [(centre.get(moment, 0.0) / _FAR, max(first, _FAR * centre.get(moment, 0.0))) for moment in seen],
        )
        return _Point(found.shares, dict(zip(seen, found.prices, strict=True))), found

    def mix(
        self, candidate: Candidate, moments: Moments, lines: Sequence[Met], parts: Sequence[float], floor: float
    ) -> None:
        """Mixes the choices of a mixture, where layers are identical, to plans that fit."""
        mixed = sorted(zip(parts, lines, strict=False), key=lambda pair: -pair[0])
        two = sorted((one for part, one in mixed[:2] if part > 0), key=lambda one: -one.found.memory)
        if self.layers == 1 or len(two) < 2:
            return
        found, known = partial(self.contest.candidates.found, candidate), set()
        for base in two:
            more, less = (like(base, one, moments, found, self.offer) for one in two)
            pair = more.found.solution.choice, less.found.solution.choice
            if floor < self.good and pair not in known:
                mix(more, less, moments, self.room, self.layers, self.contest.candidates.options.gap, self.offer)
            known.add(pair)
