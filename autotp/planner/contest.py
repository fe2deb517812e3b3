"""Which candidate wins: every mesh gets a short look, then the most promising ones are settled exactly.

A candidate is a mesh, a restriction of the search to a family's roles of its axes, and a way with panels. The short look
(:func:`autotp.planner.ilp.estimate`) bounds its cost from below and often finds its optimum too. The best choice met
becomes the cutoff of all later looks, and what memory was found to be worth on one mesh is where the next one begins.
Candidates that stay open are solved by rising bound until no bound is below the best plan's cost, which is the proof.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autotp.costs.model import Model
from autotp.costs.moment import Moment
from autotp.errors import BatchError
from autotp.planner.assemble import EVEN, Assembled
from autotp.planner.candidates import Candidate, Candidates, check_batch
from autotp.planner.describe import Found
from autotp.planner.ilp import (
    CLOSEST,
    Deadline,
    Expired,
    Infeasible,
    Pruned,
    Solution,
    estimate,
    glance,
    least_memory,
    settle,
    solve,
)
from autotp.planner.least_memory import Least, Smallest, smallest
from autotp.planner.moments import Moments
from autotp.plans.families import Restriction
from costmodel.overlap import Weights

__all__ = ["Contest"]

T = TypeVar("T")
_log = logging.getLogger("autotp.plan")
_LOOK = 1 / 8  # of the time that is left, at least, for the short look at one of several meshes
_FITTING = 1 / 4  # of the time that is left: for whether anything fits
_CLOSE = 1e-4  # of the bytes that no plan takes less than: what is so close to them is not improved


@dataclass(frozen=True, slots=True)
class Open:
    """A candidate that is not settled: seconds that it is not below (proven), and seconds per byte at which that holds."""

    bound: float
    candidate: Candidate
    price: float


@dataclass(slots=True)
class Contest:
    """The best plan of a model over meshes.

    Attributes:
        candidates: the integer programs.
        memory: bytes that a program may count on each device.
        allowed: bytes that a step may take on each device.
        deadline: when the search ends with what is known.
        weights: what seconds count, by what may hide them; costs and bounds are then weighted sums.
        limit: seconds from which on a choice is of no interest.
        best: the cheapest choice that fits.
        needed: bytes that the smallest choice met needs, where none fits.
        indivisible: why the batch does not fit a mesh.
        assembling, solving: seconds in building integer programs, and in the solver.
        open: candidates that are not settled.
        prices: seconds that a byte was worth when last looked at, by panels.
        leasts, floors: what takes the least memory, and bytes that nothing takes less than, by meshes, once somebody asked;
            the same for all bounds and weights.
        short: whether memory may have kept out a faster choice; of all contests that this one was made from, too.
    """

    candidates: Candidates
    memory: float
    allowed: float
    deadline: Deadline
    weights: Weights = EVEN
    limit: float = math.inf
    best: Found | None = None
    needed: float = math.inf
    indivisible: BatchError | None = None
    assembling: float = 0.0
    solving: float = 0.0
    open: list[Open] = field(default_factory=list)
    prices: dict[int | None, float] = field(default_factory=dict)
    loosened: set[Candidate] = field(default_factory=set)
    leasts: dict[tuple[tuple[int, ...], ...], Least | None] = field(default_factory=dict)
    floors: dict[tuple[tuple[int, ...], ...], float] = field(default_factory=dict)
    short: bool = False

    @property
    def cutoff(self) -> float:
        """Seconds of the best choice so far, or beyond which none is of interest."""
        return self.limit if self.best is None else self.best.solution.seconds

    @property
    def bound(self) -> float:
        """Seconds that no plan is below (proven)."""
        return min((entry.bound for entry in self.open), default=self.cutoff)

    def anew(self, memory: float, weights: Weights | None = None) -> Contest:
        """A contest that has not begun, for other bytes that a program may count, or other weights."""
        fresh = replace(
            self, memory=memory, best=None, needed=math.inf, indivisible=None, open=[], prices={}, loosened=set()
        )
        return fresh if weights is None else replace(fresh, weights=weights)

    def of(self, model: Model) -> Contest:
        """A contest that has not begun, for other constraints."""
        return self.posing(replace(self.candidates, model=model, structures={}))

    def within(self, strategy: str) -> Contest:
        """A contest that has not begun, for a family of strategies."""
        options = replace(self.candidates.options, strategy=strategy)
        return self.posing(replace(self.candidates, options=options, structures={}))

    def posing(self, candidates: Candidates) -> Contest:
        """A contest that has not begun, of other programs."""
        return replace(self.anew(self.allowed), candidates=candidates, leasts={}, floors={})

    def admits(self, meshes: Sequence[tuple[int, ...]]) -> bool:
        """Whether there is a choice at all on some mesh, as far as layouts and a bound on its memory show."""
        for candidate in self.candidates.over(meshes):
            problem = self.anew(math.inf).assemble(candidate).problem
            with suppress(Infeasible):
                if least_memory(problem, sweeps=5) <= self.allowed:
                    return True
        return self.some_fits(meshes)

    def run(self, meshes: Sequence[tuple[int, ...]]) -> None:
        """Looks at every mesh, then settles what is open, by rising bound, until it cannot win.

        Where the plan with the least memory does not fit, nothing is settled.

        Raises:
            Expired: when the time passed before any choice was found.
        """
        share = max(_LOOK, 1 / max(1, sum(1 for _ in self.candidates.restrictions(meshes))))
        for bound, mesh, restriction in self._promising(meshes):
            for count in self.candidates.panels:
                candidate = Candidate(mesh, restriction, count)
                try:
                    if not self._look(candidate, share):
                        break
                    self.short = True
                except Expired:
                    self.open.append(Open(bound, candidate, 0.0))
        if self.best is None and math.isinf(self.limit):
            with suppress(Expired):
                if not replace(self, deadline=self.deadline.part(_FITTING)).some_fits(meshes):
                    return
        late: list[Open] = []
        self.open.sort(key=lambda entry: entry.bound)
        while self.open and self.open[0].bound < self.cutoff * (1 - CLOSEST) and not self.deadline.over:
            entry = self.open.pop(0)
            bound = entry.bound
            with suppress(Expired):
                bound = max(bound, self._settle(entry))
            late.append(replace(entry, bound=bound))
        self.open = [entry for entry in (*late, *self.open) if entry.bound < self.cutoff]
        if self.best is None and math.isinf(self.limit):
            self.deadline.check(self.bound)

    def some_fits(self, meshes: Sequence[tuple[int, ...]]) -> bool:
        """Whether the plan with the least memory does."""
        least = self.least(meshes, self.allowed)
        return least is not None and least.used <= self.allowed

    def _promising(self, meshes: Sequence[tuple[int, ...]]) -> Iterator[tuple[float, tuple[int, ...], Restriction]]:
        """Meshes with the roles of their axes, balanced ones first; where memory is short, by what a glance promises."""
        pairs = sorted(self.candidates.restrictions(meshes), key=lambda pair: max(pair[0]))
        number = 0
        while number < len(pairs) and (self.best is None or not self.prices):
            yield 0.0, *pairs[number]
            number += 1
        left = [(self._glance(mesh, restriction), mesh, restriction) for mesh, restriction in pairs[number:]]
        for entry in sorted(left, key=lambda entry: entry[0]):
            if entry[0] < self.cutoff:
                yield entry

    def _glance(self, mesh: tuple[int, ...], restriction: Restriction) -> float:
        """Seconds that a mesh is not below, with or without panels."""
        panels = self.candidates.options.panels
        candidate, price = Candidate(mesh, restriction, panels), self.prices.get(panels or 1, 0.0)
        try:
            _, bound = self.ask(
                candidate,
                lambda a: glance(a.problem, cutoff=self.cutoff, price=price),
                either=price if panels is None else None,
            )
        except BatchError as error:
            self.indivisible = error
            return math.inf
        except Expired:
            return 0.0
        return math.inf if bound is None else bound

    def _look(self, candidate: Candidate, share: float) -> bool:
        """A bound for a candidate, and perhaps a choice, in a share of the time; whether panels might do better."""
        self.deadline.check()
        price = self.prices.get(candidate.panels, 0.0)
        try:
            assembled, found = self.ask(
                candidate,
                lambda a: estimate(a.problem, deadline=self.deadline.part(share), cutoff=self.cutoff, price=price),
            )
        except BatchError as error:
            self.indivisible = error
            return False
        if found is None:
            return True
        if found.price and (found.solution is not None or found.settled):
            self.prices[candidate.panels] = found.price
        fits = found.solution is None or self._offer(candidate, assembled, found.solution)
        _log.debug(
            "mesh %s%s: at least %.4g s%s",
            "x".join(map(str, candidate.mesh)),
            f" {candidate.restriction.roles}" if candidate.restriction.roles else "",
            found.bound,
            "" if found.solution is None else f", {found.solution.seconds:.4g} s found",
        )
        if not (found.settled and fits):
            self.open.append(Open(found.bound, candidate, found.price))
        return found.binds

    def _settle(self, entry: Open) -> float:
        """Solves a candidate exactly; seconds that it is not below."""

        def ask(assembled: Assembled) -> Solution | Pruned:
            problem = assembled.problem
            if self.best is None or not entry.price:
                return solve(problem, deadline=self.deadline, cutoff=self.cutoff, need=False, trusted=True)
            return settle(problem, deadline=self.deadline, cutoff=self.cutoff, price=entry.price, floor=entry.bound)

        assembled, found = self.ask(entry.candidate, ask)
        if not isinstance(found, Solution):
            return math.inf
        fits = self._offer(entry.candidate, assembled, found)
        return math.inf if found.optimal and fits else found.bound

    def _offer(self, candidate: Candidate, assembled: Assembled, solution: Solution) -> bool:
        """Takes a choice if it is the best so far; whether it fits where the program may have hoped for panels in vain."""
        if solution.seconds >= self.cutoff:
            return True
        found = self.candidates.found(candidate, assembled, solution)
        if candidate.panels != 1 and found.memory > self.allowed:
            self.needed = min(self.needed, found.memory)
            return False
        self.best = found
        return True

    def _in_order(self, meshes: Sequence[tuple[int, ...]]) -> list[Candidate]:
        """All programs, those without panels, of which more is certain, first."""
        return sorted(self.candidates.over(meshes), key=lambda one: one.panels != 1)

    def shared(self, meshes: Sequence[tuple[int, ...]]) -> float:
        """Bytes that no plan takes less than, closer: if every device had just its share of whatever is there."""
        for candidate in () if tuple(meshes) in self.floors else self._in_order(meshes):
            with suppress(BatchError, Infeasible):
                assembled = self.assemble(candidate)
                prices = self.candidates.prices(candidate.mesh)
                moments = Moments(assembled, prices, False, self.deadline, shared=True)
                self.floors[tuple(meshes)] = max(map(moments.least, moments.usual))
                break
        return self.floors.setdefault(tuple(meshes), 0.0)

    def least(self, meshes: Sequence[tuple[int, ...]], enough: float = 0.0, tries: int | None = None) -> Least | None:
        """The plan with the least memory on any mesh, or of so many ``tries``; or one that takes at most ``enough``."""
        key = tuple(meshes)
        if key not in self.leasts:
            best, floor = None, self.shared(meshes)
            for candidate in self._in_order(meshes)[:tries]:
                try:
                    found = self._least_of(candidate, math.inf if best is None else best.used, floor, tries)
                except Expired:
                    if best is None:
                        raise
                    return best
                best = found if best is None or (found is not None and found.used < best.used) else best
                if best is not None and best.used <= max(floor * (1 + _CLOSE), enough):
                    break
            if best is not None and (tries is not None or floor * (1 + _CLOSE) < best.used <= enough):
                return best
            self.leasts[key] = best
        return self.leasts[key]

    def _least_of(self, candidate: Candidate, known: float, floor: float, rounds: int | None) -> Least | None:
        """The choice of a candidate that takes the least memory, unless that is far above what is known."""

        def ask(assembled: Assembled) -> tuple[Moments, Smallest | None]:
            problem = replace(assembled.frugal.problem, memory_bound=math.inf)
            prices = self.candidates.prices(candidate.mesh)
            moments = Moments(assembled.frugal, prices, candidate.panels != 1, self.deadline)

            def held(choice: tuple[int, ...]) -> Mapping[Moment, float]:
                return self.candidates.found(candidate, assembled, choice).held

            return moments, smallest(problem, moments, held, self.deadline, known, floor, rounds)

        try:
            assembled, found = self.ask(candidate, ask)
        except BatchError as error:
            self.indivisible = error
            return None
        if found is None or found[1] is None:
            return None
        return Least(candidate, assembled, found[0], found[1])

    def ask(
        self, candidate: Candidate, ask: Callable[[Assembled], T], *, either: float | None = None
    ) -> tuple[Assembled, T | None]:
        """A candidate's program, and what a solver says of it; None when nothing fits.

        A family that only all-reduces may have no way to hand a partial sum on; then it may scatter after all.
        """
        assembled = self.assemble(candidate, either=either)
        check_batch(assembled)
        begun = self.deadline.clock()
        try:
            return assembled, ask(assembled)
        except Infeasible as error:
            self.needed = min(self.needed, error.needed_memory)
            if assembled.structure.chosen.family.scatters or math.isfinite(error.needed_memory):
                return assembled, None
        finally:
            self.solving += self.deadline.clock() - begun
        self.loosened.add(candidate)
        return self.ask(candidate, ask, either=either)

    def assemble(self, candidate: Candidate, *, either: float | None = None) -> Assembled:
        """A candidate's integer program."""
        begun = self.deadline.clock()
        scatters = candidate in self.loosened
        try:
            return self.candidates.assemble(
                candidate, self.memory, self.deadline, weights=self.weights, either=either, scatters=scatters
            )
        finally:
            self.assembling += self.deadline.clock() - begun
