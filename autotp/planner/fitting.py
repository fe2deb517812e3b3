"""The best plan whose step fits the memory, whatever it recomputes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autotp.costs.model import depth_of
from autotp.costs.recompute import recomputed_by
from autotp.planner.assemble import EVEN
from autotp.planner.contest import Contest
from autotp.planner.folding import folded
from autotp.planner.least_step import Searched, least_step
from costmodel.overlap import Weights

__all__ = ["Outcome", "best_of_ways"]

_TIGHTER = 5  # programs with ever less memory
_HOPE = 1.3
#: Ways to recompute, in the order in which they are tried: more than the first where memory is short.
_WAYS = ("none", "full", "selective")
_LEAST = "full"  # of all ways, it takes the least memory


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found: the last contest, its best plan, and seconds that no plan is below (proven)."""

    contest: Contest
    found: Searched
    floor: float

    def step(self) -> tuple[bool, float]:
        """What makes one better: whether nothing fits; and then the bytes that it takes, or the seconds of a step."""
        best = self.found.best
        if best is None:
            return True, self.found.used
        return False, best.priced.sums.step(self.contest.candidates.options.hides)


def best_of_ways(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> Outcome:
    """The best plan over meshes and ways to recompute; recomputing is tried where memory is short.

    Raises:
        TimeoutError: when the time passed before any plan was found.
    """
    options = contest.candidates.options
    model = contest.candidates.model
    asked = options.recompute if options.trains else "none"

    def recomputing(way: str | Sequence[str]) -> Contest:
        """Made when its turn comes: with ample memory nothing but the first way is asked for."""
        if way == "none":
            return contest
        return contest.of(folded(replace(model, recomputed=recomputed_by(model, way))))

    if asked != "auto":
        return _searched(recomputing(asked), meshes)
    outcomes: list[Outcome] = []
    begun = time.perf_counter()
    for way in _WAYS:
        now, fits = time.perf_counter(), any(outcome.found.best is not None for outcome in outcomes)
        # What can only improve on a plan may take as long as it took to find one.
        deadline = min(contest.deadline, now + (now - begun)) if fits else contest.deadline
        if fits and now > contest.deadline:
            break
        with suppress(TimeoutError):
            outcomes.append(_searched(replace(recomputing(way), thorough=False, deadline=deadline), meshes))
        if outcomes and not outcomes[0].contest.short:
            # Where memory is no obstacle but nothing was found, recomputing does not help.
            return outcomes[0] if outcomes[0].found.best is not None else _searched(contest, meshes)
    best = min(outcomes, key=Outcome.step, default=None)
    if best is None or best.found.best is None:
        return _searched(recomputing(_LEAST), meshes)
    proven = [outcome.floor for outcome in outcomes if outcome.found.best is not None]
    if len(proven) < len(_WAYS):  # where no plan was found, there may be one; it takes longer than with ample memory
        proven.append(_searched(replace(contest, memory=math.inf, allowed=math.inf), meshes).floor)
    return replace(best, floor=min(*proven, best.step()[1]))


def _searched(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> Outcome:
    bound = contest.allowed

    def search(weights: Weights) -> Searched:
        nonlocal contest
        contest, found = fitting(contest.anew(bound, weights), meshes)
        return found

    if not contest.candidates.options.hides:
        found = search(EVEN)
        return Outcome(contest, found, found.floor)
    depth, options = depth_of(contest.candidates.model), contest.candidates.options
    found, floor = least_step(search, lambda one: one.priced.sums, depth, contest.deadline, options.accumulate)
    return Outcome(contest, found, floor)


def fitting(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> tuple[Contest, Searched]:
    """The last contest, and its best plan if a step of it fits.

    The program counts gradients beside all saved activations, as when gradients of several batches are added up. A step has
    a worst moment, which may take more or less: what it takes more is kept free, and where nothing fits by the sum, a plan
    may fit by the step. Where programs with less memory and with more come to nothing, the plan with the least memory
    decides whether there is any, and with it begins the search for one.
    """
    try:
        contest, found = _fitting_by_sum(contest, meshes)
    except TimeoutError:
        least = contest.least(meshes) if contest.thorough else None
        if least is None or least.used > contest.allowed:
            raise
        return contest, Searched(contest.fastest_within(least), 0.0, least.used)
    if found.best is not None or not contest.thorough:
        return contest, found
    least = contest.least(meshes)
    if least is None or least.used > contest.allowed:
        return contest, replace(found, used=math.inf if least is None else least.used)
    best = contest.fastest_within(least)
    free = contest.anew(math.inf)
    free.run(meshes)
    return contest, Searched(best, min(free.bound, best.solution.seconds), best.memory)


def _fitting_by_sum(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> tuple[Contest, Searched]:
    """The last of the contests whose programs have about as much memory as is allowed."""
    contest.run(meshes)
    if contest.best is None and contest.thorough and not math.isinf(contest.needed):
        contest = contest.anew(_HOPE * contest.allowed)
        contest.run(meshes)
    floor, used = contest.bound, 0.0
    for left in reversed(range(_TIGHTER)):
        if contest.best is None:
            break
        used = contest.best.memory
        if used <= contest.allowed:
            return contest, Searched(contest.best, floor, used)
        if not left or time.perf_counter() > contest.deadline:
            break
        contest = contest.anew(contest.memory - (used - contest.allowed))
        contest.run(meshes)
    return contest, Searched(None, floor, used)
