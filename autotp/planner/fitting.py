"""The best plan whose step fits the memory, whatever it recomputes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotp.costs.recompute import recomputed_by, undecided
from autotp.planner.assemble import EVEN
from autotp.planner.contest import Contest
from autotp.planner.folding import apart, folded
from autotp.planner.least_step import COUNTS, Searched, best_chunks, least_step
from autotp.planner.squeeze import squeeze
from costmodel.overlap import Weights

__all__ = ["Outcome", "best_of_ways"]

_TIGHTER = 5  # programs with ever less memory
_HOPE = 1.3
_CLOSE = 0.01  # relative; where a bound for steps in chunks can rise by less, it does not matter
_FEW = 40  # operators of a model whose layers are decided one by one


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found: the last contest, its best plan, and seconds that no plan is below (proven).

    ``plain``: the last contest in which recomputing was not to be decided. ``chunks``: of the plan; None: not looked at.
    """

    contest: Contest
    found: Searched
    floor: float
    plain: Contest
    chunks: Mapping[str, int] | None = None


def best_of_ways(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> Outcome:
    """The best plan over meshes and ways to recompute; recomputing is tried where memory is short.

    Raises:
        TimeoutError: when the time passed before any plan was found.
    """
    return _in_chunks(meshes, _of_ways(contest, meshes))


def _in_chunks(meshes: Sequence[tuple[int, ...]], outcome: Outcome) -> Outcome:
    """With the best plan in chunks, and what none is below in chunks either."""
    contest, best = outcome.plain.anew(math.inf), outcome.found.best
    options = contest.candidates.options
    asked = options.chunks
    most = max(COUNTS if asked is None else asked.values(), default=1)
    if best is None or not options.hides or most < 2 or best.panels != 1 or outcome.contest is not outcome.plain:
        return outcome  # the bound of plans with what is to be decided holds in chunks already

    chunks, shortest = best_chunks(best.priced, asked)

    def search(weights: Weights) -> Searched:
        nonlocal contest
        contest = replace(contest.anew(math.inf, weights), limit=shortest)
        contest.run(meshes)
        return Searched(contest.best, contest.bound, 0.0)

    depth = contest.candidates.model.depth
    met, floor = least_step(search, lambda one: one.priced.sums, depth, contest.deadline, options.accumulate, most, _CLOSE)
    for one in met:
        if one.best is not None and one.best.memory <= contest.allowed:
            cut, found = best_chunks(one.best.priced, asked)
            best, chunks, shortest = (one.best, cut, found) if found < shortest else (best, chunks, shortest)
    return replace(outcome, found=replace(outcome.found, best=best), floor=min(outcome.floor, floor), chunks=chunks)


def _of_ways(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> Outcome:
    """The best plan without chunks over meshes and ways to recompute."""
    options, model = contest.candidates.options, contest.candidates.model
    asked = options.recompute if options.trains else "none"
    way = recomputed_by(model, "none" if asked == "auto" else asked, checkpoints=asked == "auto")
    if way:
        model = replace(model, recomputed=way)
        contest = contest.of(folded(model))
    if asked != "auto":
        return _searched(contest, meshes)
    open_model = undecided(model)
    if not open_model.undecided:
        return _searched(contest, meshes)
    ample = _searched(contest, meshes, quick=True)
    if not ample.contest.short:
        return ample
    short = contest.of(folded(open_model) if len(model.operators) > _FEW else replace(open_model, stands=apart(model)))
    fastest = ample.contest.best  # though it does not fit
    first = [mesh for mesh in meshes if fastest is not None and mesh == fastest.prices.mesh]
    found = squeeze(short, [*first, *(mesh for mesh in meshes if mesh not in first)], ample.found.best, ample.floor)
    if found.best is None:
        found = _with_least(short, meshes, found.floor)
    return Outcome(short, found, found.floor, ample.contest)


def _searched(contest: Contest, meshes: Sequence[tuple[int, ...]], quick: bool = False) -> Outcome:
    """The best plan over meshes; if ``quick``, only if it fits whatever memory the program counts."""
    bound = contest.allowed

    def search(weights: Weights) -> Searched:
        nonlocal contest
        contest, found = (_ample if quick else fitting)(contest.anew(math.inf if quick else bound, weights), meshes)
        return found

    if not contest.candidates.options.hides:
        found = search(EVEN)
        return Outcome(contest, found, found.floor, contest)
    depth, options = contest.candidates.model.depth, contest.candidates.options
    met, floor = least_step(search, lambda one: one.priced.sums, depth, contest.deadline, options.accumulate)
    return Outcome(contest, met[0], floor, contest)


def _ample(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> tuple[Contest, Searched]:
    """The best plan of all, if it fits."""
    contest.run(meshes)
    best = contest.best
    contest.short |= best is None or best.memory > contest.allowed
    return contest, Searched(None if contest.short else best, contest.bound, 0.0)


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
        least = contest.least(meshes)
        if least is None or least.used > contest.allowed:
            raise
        return contest, Searched(contest.fastest_within(least), 0.0, least.used)
    if found.best is not None:
        return contest, found
    free = contest.anew(math.inf)
    free.run(meshes)
    return contest, _with_least(contest, meshes, free.bound)


def _with_least(contest: Contest, meshes: Sequence[tuple[int, ...]], floor: float) -> Searched:
    """The plan with the least memory, or a faster one that is met on the way from it, if it fits."""
    least = contest.least(meshes)
    if contest.candidates.options.family.name == "auto":
        # Tables of moments are not exact, and may lead past it: what shards all state takes little in any case.
        sharded = contest.within("zero3")
        other = sharded.least(meshes)
        if other is not None and (least is None or other.used < least.used):
            contest, least = sharded, other
    if least is None or least.used > contest.allowed:
        return Searched(None, floor, math.inf if least is None else least.used)
    best = contest.fastest_within(least)
    return Searched(best, min(floor, best.solution.seconds), best.memory)


def _fitting_by_sum(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> tuple[Contest, Searched]:
    """The last of the contests whose programs have about as much memory as is allowed."""
    contest.run(meshes)
    if contest.best is None and not math.isinf(contest.needed):
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
