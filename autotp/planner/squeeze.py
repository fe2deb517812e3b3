"""The fastest plan that fits the memory at every moment of a step, including the decision what is recomputed.

The method is Lagrangian relaxation: in each pass, every side that may limit it (`autotp.planner.least_step`) has a share
mu, and at every moment at which memory is short, bytes have a price. For all shares mu and all prices,

    step  >=  min over choices  sum of mu * sides  +  sum over moments of price * (bytes - bound)              (1)

holds for every plan that fits, also for plans that treat identical layers differently, for which the program makes a single
decision: the minimum is a sum over layers. The right side is an integer program without a memory limit, over strategies,
layouts and recomputation. Its maximum over shares and prices is found by cutting planes, one for every choice met. At the
maximum, a mixture of choices has that value and fits on average. The plan mixes them too: the first layers, which the
backward pass reaches last, follow one choice, and the rest the other.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial

from autotp.costs.floor import least_seconds
from autotp.costs.step import Moment
from autotp.errors import BatchError
from autotp.planner.assemble import Assembled
from autotp.planner.candidates import Candidate
from autotp.planner.contest import Contest
from autotp.planner.describe import Found
from autotp.planner.exact import Short, settle
from autotp.planner.ilp import NEVER, Deadline, Expired, least, promising, side_by_side
from autotp.planner.least_step import Searched, first_shares, most_chunks
from autotp.planner.memory.moments import Moments
from autotp.planner.mixing import Met, like, mix
from autotp.planner.shares import Multipliers, Shares, next_shares
from costmodel import overlap

__all__ = ["squeeze"]

_log = logging.getLogger("autotp.plan")
_ROUNDS = 24
_FIRST = 0.1  # share of a step that all of the memory may cost at the first price
_FAR = 3.0  # the largest factor between the next price and the best one
_SAME = 1e-6  # relative; smaller differences are ignored
_HOPELESS = 1e3  # multiple of the shortest step met; a bound above it shows that no plan fits
_SMALL = 4000  # most variables (choices of all nodes, and reshards) of a program that is solved exactly
_ANYTHING = 0.25  # share of the time for finding any plan that fits, or that there is none, if the first mesh has none
_CLOSELY = 8  # the time of so many meshes is reserved for the search after the bounds
_SETTLING = 1.0  # seconds for each search of a small program's solution

_Anything = Callable[[Deadline], Searched]


def squeeze(
    contest: Contest, meshes: Sequence[tuple[int, ...]], best: Found | None, floor: float, anything: _Anything
) -> Searched:
    """Returns the fastest plan that fits, on any mesh, and a lower bound on the step time.

    Args:
        contest: of the job.
        meshes: to search, in this order, until the deadline.
        best: a plan that fits, if one is known.
        floor: a lower bound on the step time of plans without chunks on all meshes, regardless of memory, in seconds.
        anything: finds, until a deadline, a plan that fits, or else the plan with the least memory.
    """
    search = _Squeeze(contest)
    search.best = None if best is None else search.met(best)
    model, best_panels = contest.candidates.model, contest.candidates.panels[0]
    candidates = contest.candidates.over(meshes)  # recomputing, if possible, saves more than panels
    every = [one for one in candidates if not model.undecided or one.panels == best_panels]
    if search.most > 1:
        prices = contest.candidates.prices((contest.candidates.topology.devices,))
        search.cut = least_seconds(model, prices, float(overlap.CHUNKED.subs(overlap.c, search.most)))
    known = floor if search.most == 1 else 0.0
    floors, others = [search.on(one, known, search.look) for one in every[:1]], every[1:]
    other = Searched(None, 0.0, math.inf)
    with suppress(Expired):
        if search.best is None:  # a plan that fits rules out most candidates, and there may be none
            other = anything(contest.deadline.within(_ANYTHING * contest.deadline.left))
            if other.best is not None:
                search.best, floors, others = search.met(other.best), [], every
            elif contest.key(meshes) in contest.leasts:
                return other

    def bounded(number: int) -> float:
        until = contest.deadline.within(contest.deadline.left / (len(others) - number + _CLOSELY))
        return search.on(others[number], known, partial(search.bounded, until=until))

    # Bound all candidates first, then search them by rising bound: the plan of the first rules out most others.
    lows = side_by_side([partial(bounded, number) for number in range(len(others))], contest.deadline)
    if lows and min(lows) <= known < math.inf and not contest.deadline.over:  # some were not bounded in time
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
    """A point at which (1) is evaluated: shares of the sides of each pass, and prices of bytes at moments."""

    shares: Shares = ()
    prices: Mapping[Moment, float] = field(default_factory=dict)


#: A program, the moments of its steps, the minimum in (1), and its choice; None if that is not below the cutoff.
Solved = tuple[Assembled, Moments, float, tuple[int, ...] | None]


@dataclass(slots=True)
class _Squeeze:
    """A search over meshes; each begins at the point where the bound of an earlier one was best.

    ``cut``: a lower bound on the step time of chunked plans on all meshes, in seconds.
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
        """The cutoff: a plan with a longer step, in seconds, is of no interest."""
        return math.inf if self.best is None else self.best.step * (1 - self.contest.candidates.options.gap)

    @property
    def layers(self) -> int:
        """The largest number of undecided operators that are decided together: of identical layers."""
        model = self.contest.candidates.model
        copies = Counter(model.stands.values())
        return max((copies[node] for node in model.undecided), default=1)

    @property
    def most(self) -> int:
        """The number of chunks up to which bounds have to hold."""
        return most_chunks(self.contest.candidates.options)

    def met(self, found: Found) -> Met:
        options, sums = self.contest.candidates.options, found.priced.sums
        step = sums.step(options.hides)
        return Met(found, sums.sides if options.hides else ((step,),), step)

    def on(self, candidate: Candidate, known: float, look: Callable[[Candidate], float]) -> float:
        """The bound that ``look`` returns; ``known`` after the deadline; infinite if the mesh does not divide the batch."""
        try:
            return look(candidate)
        except BatchError:
            return math.inf
        except Expired:
            return known

    def bounded(self, candidate: Candidate, until: Deadline) -> float:
        """A lower bound on the step time of a candidate's plans, in seconds, at the best point known."""
        solved = self.solve(candidate, self.point, None, surely=True, until=until)
        if solved is None:
            return math.inf
        _, moments, floor, _ = solved
        return floor if self.most == 1 else min(floor, self.in_chunks(candidate, moments))

    def look(self, candidate: Candidate) -> float:
        """Searches a candidate for a better plan. Returns a lower bound on the step time of its plans, in seconds."""
        first = self.solve(candidate, self.point, None, surely=True)
        if first is None:
            return math.inf
        _, moments, floor, _ = first
        if floor < self.good:
            floor = max(floor, self.steer(candidate, moments, first, surely=True))
        if floor < self.good:  # lower bounds on bytes may be too low to find what fits
            point = self.point
            self.steer(candidate, moments, None, surely=False)
            self.point = point
        if floor < self.good and self.layers == 1:
            floor = max(floor, self.close(candidate, moments))
        if self.most > 1:
            low = self.in_chunks(candidate, moments, floor)
            if low < self.good and self.layers == 1:
                low = max(low, self.close(candidate, moments, self.most))
            floor = min(floor, low)
        _log.debug("mesh %s: at least %.4g s", "x".join(map(str, candidate.mesh)), floor)
        return floor

    def in_chunks(self, candidate: Candidate, moments: Moments, whole: float = 0.0) -> float:
        """A lower bound on the step time of chunked plans, in seconds; a close one only if it is below ``whole``."""
        if self.cut >= self.good:
            return self.cut
        solved, point = self.solve(candidate, self.point, moments, surely=True, chunks=self.most), self.point
        if solved is None:
            return math.inf
        low = solved[2]
        if low < min(whole, self.good):
            low = max(low, self.steer(candidate, moments, solved, surely=True, chunks=self.most))
            self.point = point
        return low

    def steer(
        self, candidate: Candidate, moments: Moments, solved: Solved | None, *, surely: bool, chunks: int = 1
    ) -> float:
        """Moves the point by cutting planes, and mixes the choices met. Returns the best value of (1), in seconds.

        If ``surely``, it is a lower bound on the step time of plans in ``chunks``. ``solved``: the solution at the first
        point, if known.
        """
        lines: dict[tuple[int, ...], Met] = {}
        high, point, within = -math.inf, self.point, self.contest.candidates.options.gap / 4
        first, mixture = point, ()  # type: tuple[_Point, Sequence[float]]

        @cache
        def held(choice: tuple[int, ...], moment: Moment) -> float:
            return moments.bytes(moment, choice, True) if surely else lines[choice].held.get(moment, 0.0)

        for _ in range(_ROUNDS):
            if lines and self.contest.deadline.over:
                break
            solved = solved or self.solve(candidate, point, moments, surely=surely, chunks=chunks)
            if solved is None:
                break
            (assembled, _, value, choice), solved = solved, None
            if choice is None:
                break
            new = value > high * (1 + _SAME)
            if new:
                high, self.point = value, point
            hopeless = lines and high > _HOPELESS * min(one.step for one in lines.values())
            if hopeless:
                self.point = first  # prices at which nothing fits give poor bounds on other meshes
            if hopeless or (choice in lines and not new):
                break
            if choice not in lines:
                one = self.offer(self.contest.candidates.found(candidate, assembled, choice))
                parts = one.found.priced.sums.at_least(chunks).sides if chunks > 1 else one.sides
                lines[choice] = replace(one, sides=parts)
            point, following = self.follow(lines, held)
            mixture = following.mixture
            if following.value * (1 - within) <= high and self.best is not None:
                break
        if chunks == 1:
            with suppress(Expired):
                self.mix(candidate, moments, list(lines.values()), mixture, high)
        return high

    def close(self, candidate: Candidate, moments: Moments, chunks: int = 1) -> float:
        """Solves a small program exactly. Returns a lower bound on the step time, in seconds; 0 if it is too large."""
        assembled = self.at(self.point, chunks).assemble(candidate)
        answer = moments.program(self.point.prices, True, besides=assembled.problem)
        spent = sum(self.point.prices.values()) * self.room
        alive = promising(answer, self.good + spent, self.contest.deadline)
        if answer.variables(alive) > _SMALL:
            return 0.0

        def offer(choice: tuple[int, ...]) -> Met:
            return self.offer(self.contest.candidates.found(candidate, assembled, choice))

        groups, floor = self.contest.sides(candidate, chunks), 0.0
        for sharp in (True, False):
            deadline = self.contest.deadline.within(_SETTLING)
            short = Short(moments, self.point.prices, self.room, alive)
            floor = max(floor, settle(groups, short, offer, lambda: self.good, deadline, sharp=sharp))
            if floor >= self.good:
                break
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
        """Minimizes the right side of (1); see `Solved`. None if the layouts admit no choice.

        The minimum is a lower bound only if ``surely``. ``until``: a deadline after which the best bound so far suffices.
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
        """The contest with the weights of a point's shares."""
        options, depth = self.contest.candidates.options, self.contest.candidates.model.depth
        shares = point.shares or first_shares(options.accumulate)
        weights = overlap.weights(shares, depth, options.accumulate, chunks) if options.hides else None
        self.contest = self.contest.anew(weights)
        return self.contest

    def offer(self, found: Found) -> Met:
        if self.best is not None:
            self.contest.deadline.check()
        one = self.met(found)
        if (self.best is None or one.step < self.best.step) and one.fits(self.room):
            self.best = one
        return one

    def follow(
        self, lines: Mapping[tuple[int, ...], Met], held: Callable[[tuple[int, ...], Moment], float]
    ) -> tuple[_Point, Multipliers]:
        """The next point: the maximum of the cutting planes of the choices met, near the best point so far.

        ``held``: the bytes of a choice at a moment in (1): lower bounds, or what it holds, which leads to plans.
        """
        centre = self.point.prices
        seen = dict.fromkeys((*centre, *(one.most for one in lines.values())))
        first = _FIRST * min(one.step for one in lines.values()) / self.room

        found = next_shares(
            [one.sides for one in lines.values()],
            [[held(choice, moment) - self.room for moment in seen] for choice in lines],
            [(centre.get(moment, 0.0) / _FAR, max(first, _FAR * centre.get(moment, 0.0))) for moment in seen],
        )
        return _Point(found.shares, dict(zip(seen, found.prices, strict=True))), found

    def mix(
        self, candidate: Candidate, moments: Moments, lines: Sequence[Met], parts: Sequence[float], floor: float
    ) -> None:
        """Tries plans in which some of the identical layers follow one choice of a mixture, and the rest another."""
        mixed = sorted(zip(parts, lines, strict=False), key=lambda pair: -pair[0])
        two = sorted((one for part, one in mixed[:2] if part > 0), key=lambda one: -one.held[one.most])
        if self.layers == 1 or len(two) < 2:
            return
        found, known = partial(self.contest.candidates.found, candidate), set()
        for base in two:
            more, less = (like(base, one, moments, found, self.offer) for one in two)
            pair = more.found.solution.choice, less.found.solution.choice
            if floor < self.good and pair not in known:
                mix(more, less, moments, self.room, self.layers, self.contest.candidates.options.gap, self.offer)
            known.add(pair)
