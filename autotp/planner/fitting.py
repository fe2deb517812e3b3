"""The best plan whose step fits the memory, whatever it recomputes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autotp.costs.floor import least_bytes
from autotp.costs.recompute import recomputed_by, undecided
from autotp.errors import AutotpError, BatchError
from autotp.planner.assemble import EVEN, Assembled
from autotp.planner.candidates import Candidate
from autotp.planner.contest import Contest
from autotp.planner.describe import Found
from autotp.planner.folding import apart, folded
from autotp.planner.ilp import Deadline, Expired, evaluate, hasty
from autotp.planner.least_memory import Least, quicker
from autotp.planner.least_step import Searched, best_chunks, least_step, most_chunks
from autotp.planner.squeeze import squeeze
from costmodel.overlap import Weights

__all__ = ["Fit", "Outcome", "best_of_ways", "floor_of", "fit_of", "ways"]

_HURRY = 100  # times as long as the analysis: who has less time gets an answer in haste first
_SEARCH = 0.75  # of the time: for plans without chunks
_ROUND = 0.5  # of the time that is left: for plans by other shares of what limits a step, each time
_TIGHTER = 5  # programs with ever less memory
_HOPE = 1.3
_SLIGHT = 0.01  # relative; where a bound for steps in chunks can rise by less, it does not matter
_TIGHT = 0.5  # of the memory: where a bound that is easily too low takes more, a closer one is looked at
_CLOSE = 0.8  # of the memory: where the closer bound takes more, the plan with the least memory is looked for first
_EFFORT = 4_000  # operators of all programs that are tried for what a job takes that is known not to fit
_MANY = 10  # tries with which families are tried too
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


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a job fits, None where that is not known; and bytes that a plan takes, or that no plan takes less than."""

    fits: bool | None
    bytes: float


def best_of_ways(contest: Contest, meshes: Sequence[tuple[int, ...]], analysis: float) -> Outcome:
    """The best plan over meshes and ways to recompute; recomputing is tried where memory is short.

    Args:
        contest: of the job.
        meshes: to look at.
        analysis: seconds that the analysis of the model took, which say how long other things take.

    Raises:
        Expired: when the time passed before any plan was found.
    """
    deadline = contest.deadline
    first = _in_haste(contest, meshes) if deadline.left < _HURRY * analysis else None
    try:
        outcome = _of_ways(replace(contest, deadline=deadline.part(_SEARCH)), meshes)
    except Expired:
        first = first or _in_haste(contest, meshes)
        if first is None:
            raise
        return first
    if outcome.found.best is None and outcome.found.smallest is None and deadline.over:
        first = first or _in_haste(contest, meshes)
    outcome = replace(outcome, plain=replace(outcome.plain, deadline=deadline))
    return _in_chunks(meshes, outcome if first is None else _shorter(first, outcome))


def _shorter(first: Outcome, outcome: Outcome) -> Outcome:
    """What a search found, or what was known before if that is shorter."""
    hides = outcome.contest.candidates.options.hides
    known, best = first.found.best, outcome.found.best
    assert known is not None
    if best is not None and best.priced.sums.step(hides) <= known.priced.sums.step(hides):
        return outcome
    return replace(first, floor=outcome.floor if best is not None else 0.0)


def _in_haste(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> Outcome | None:
    """A plan that fits, whatever the time, on the mesh with the fewest axes; None where haste finds none."""
    plain, short = ways(contest)
    tried = [plain]
    if short is not plain:  # then what is cheap to recompute may be what is too much
        model = replace(short.candidates.model, undecided={})
        tried.append(plain.of(folded(replace(model, recomputed=recomputed_by(model, "selective")))))
    for one in tried:
        for mesh, restriction in sorted(one.candidates.restrictions(meshes), key=lambda pair: len(pair[0])):
            candidate = Candidate(mesh, restriction, one.candidates.panels[0])
            with suppress(BatchError):
                found = _hasty_on(one, candidate)
                if found is not None:
                    return Outcome(plain, Searched(found, 0.0, found.memory), 0.0, one)
                if contest.deadline.over:
                    break
    return None


def _hasty_on(contest: Contest, candidate: Candidate) -> Found | None:
    """A choice of a candidate that fits."""
    free = replace(contest.anew(math.inf), deadline=Deadline(clock=contest.deadline.clock))

    def quick(assembled: Assembled) -> Found | None:
        choices = hasty(assembled.problem, enough=contest.allowed)
        every = (free.candidates.found(candidate, assembled, choice) for choice in choices)
        return next((found for found in every if found.memory <= contest.allowed), None)

    return free.ask(candidate, quick)[1]


def _in_chunks(meshes: Sequence[tuple[int, ...]], outcome: Outcome) -> Outcome:
    """With the best plan in chunks, and what none is below in chunks either."""
    contest, best = outcome.plain.anew(math.inf), outcome.found.best
    options = contest.candidates.options
    asked, most = options.chunks, most_chunks(options)
    if best is None or most == 1 or best.panels != 1 or outcome.contest is not outcome.plain:
        return outcome  # the bound of plans with what is to be decided holds in chunks already

    chunks, shortest = best_chunks(best.priced, contest.deadline, asked)

    def search(weights: Weights) -> Searched:
        nonlocal contest
        contest = replace(contest.anew(math.inf, weights), limit=shortest)
        contest.run(meshes)
        return Searched(contest.best, contest.bound, 0.0)

    depth = contest.candidates.model.depth
    met, floor = least_step(search, lambda one: one.priced.sums, depth, contest.deadline, options.accumulate, most, _SLIGHT)
    for one in met:
        if one.best is not None and one.best.memory <= contest.allowed:
            cut, found = best_chunks(one.best.priced, contest.deadline, asked)
            best, chunks, shortest = (one.best, cut, found) if found < shortest else (best, chunks, shortest)
    return replace(outcome, found=replace(outcome.found, best=best), floor=min(outcome.floor, floor), chunks=chunks)


def _of_ways(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> Outcome:
    """The best plan without chunks over meshes and ways to recompute."""
    contest, short = ways(contest)
    refused = _refused(short, meshes)
    if refused is not None:
        return refused
    if short is contest:
        return _searched(contest, meshes)
    ample = _searched(contest, meshes, quick=True)
    if not ample.contest.short:
        return ample
    fastest = ample.contest.best  # though it does not fit
    first = [mesh for mesh in meshes if fastest is not None and mesh == fastest.prices.mesh]
    found = squeeze(short, [*first, *(mesh for mesh in meshes if mesh not in first)], ample.found.best, ample.floor)
    if found.best is None:
        found = _with_least(short, meshes, found.floor)
    return Outcome(short, found, found.floor, ample.contest)


def ways(contest: Contest) -> tuple[Contest, Contest]:
    """The contest with what is recomputed in any case, and the one where the planner decides on the rest, if it may."""
    options, model = contest.candidates.options, contest.candidates.model
    asked = options.recompute if options.trains else "none"
    way = recomputed_by(model, "none" if asked == "auto" else asked, checkpoints=asked == "auto")
    if way:
        model = replace(model, recomputed=way)
        contest = contest.of(folded(model))
    open_model = undecided(model) if asked == "auto" else model
    if not open_model.undecided:
        return contest, contest
    return contest, contest.of(
        folded(open_model) if len(model.operators) > _FEW else replace(open_model, stands=apart(model))
    )


def fit_of(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> Fit:
    """Whether some plan fits, without looking for a fast one.

    Raises:
        AutotpError: there is no plan at all.
    """
    floor = floor_of(contest)
    if floor <= contest.allowed:
        floor = contest.shared(meshes)
    if floor > contest.allowed:
        return Fit(False, floor)
    tries = _tries(contest)
    least = contest.least(meshes, contest.allowed, tries)
    if least is None:
        raise contest.indivisible or AutotpError("no plan")
    if least.used <= contest.allowed:
        return Fit(True, least.used)
    every = sum(1 for _ in contest.candidates.over(meshes))
    return Fit(False if tries >= every else None, least.used)


def floor_of(contest: Contest) -> float:
    """Bytes that no plan takes less than, of any family and on any mesh; without an integer program."""
    candidates = contest.candidates
    return least_bytes(candidates.model, candidates.prices((candidates.topology.devices,)))


def _tries(contest: Contest) -> int:
    """How many programs are tried where an answer is due soon."""
    return max(1, _EFFORT // max(1, len(contest.candidates.model.operators)))


def _refused(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> Outcome | None:
    """What takes the least memory, where that is known not to fit before anything is searched; else nothing.

    A bound that costs nothing says whether a closer one is worth while, and that whether to look for the plan.
    """
    floor = floor_of(contest)
    if _TIGHT * contest.allowed < floor <= contest.allowed:
        floor = contest.shared(meshes)
    if floor <= contest.allowed and (floor <= _CLOSE * contest.allowed or contest.some_fits(meshes)):
        return None
    tries = _tries(contest) if floor > contest.allowed else None
    found = _with_least(contest, meshes, 0.0, tries)
    return Outcome(contest, found, 0.0, contest) if found.best is None else None


def _searched(contest: Contest, meshes: Sequence[tuple[int, ...]], quick: bool = False) -> Outcome:
    """The best plan over meshes; if ``quick``, only if it fits whatever memory the program counts."""
    bound, deadline = contest.allowed, contest.deadline

    def search(weights: Weights) -> Searched:
        nonlocal contest
        contest = replace(contest, deadline=deadline.part(_ROUND))
        contest, found = (_ample if quick else fitting)(contest.anew(math.inf if quick else bound, weights), meshes)
        return found

    if not contest.candidates.options.hides:
        contest, found = (_ample if quick else fitting)(contest.anew(math.inf if quick else bound, EVEN), meshes)
        return Outcome(contest, found, found.floor, contest)
    depth, options = contest.candidates.model.depth, contest.candidates.options
    met, floor = least_step(search, lambda one: one.priced.sums, depth, deadline, options.accumulate)
    contest = replace(contest, deadline=deadline)
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
    except Expired:
        least = contest.least(meshes)
        if least is None or least.used > contest.allowed:
            raise
        return contest, Searched(_fastest_within(contest, least), 0.0, least.used)
    if found.best is not None:
        return contest, found
    found = _with_least(contest, meshes, math.inf)
    if found.best is None:
        return contest, found
    free = contest.anew(math.inf)
    free.run(meshes)
    return contest, replace(found, floor=min(free.bound, found.floor))


def _with_least(contest: Contest, meshes: Sequence[tuple[int, ...]], floor: float, tries: int | None = None) -> Searched:
    """The plan with the least memory, or a faster one that is met on the way from it, if it fits."""
    least = contest.least(meshes, tries=tries)
    if contest.candidates.options.family.name == "auto" and (tries is None or tries >= _MANY):
        # Tables of moments are not exact, and may lead past it: what shards all state takes little in any case.
        sharded = contest.within("zero3")
        other = sharded.least(meshes, tries=tries)
        if other is not None and (least is None or other.used < least.used):
            contest, least = sharded, other
    if least is None:
        return Searched(None, floor, math.inf)
    if least.used > contest.allowed:
        smallest = contest.candidates.found(least.candidate, least.assembled, least.found.choice)
        return Searched(None, floor, least.used, smallest)
    best = _fastest_within(contest, least)
    return Searched(best, min(floor, best.solution.seconds), best.memory)


def _fastest_within(contest: Contest, least: Least) -> Found:
    """The best plan met on the way from the one with the least memory, which fits, to faster ones."""
    candidates = contest.candidates
    try:
        assembled = contest.anew(math.inf).assemble(least.candidate)
    except Expired:
        return candidates.found(least.candidate, least.assembled, least.found.choice)
    choice = quicker(
        assembled.problem,
        least.moments,
        least.found,
        lambda choice: evaluate(assembled.problem, choice).seconds,
        lambda choice: candidates.found(least.candidate, assembled, choice).memory <= contest.allowed,
        contest.deadline,
    )
    return candidates.found(least.candidate, assembled, choice)


def _fitting_by_sum(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> tuple[Contest, Searched]:
    """The last of the contests whose programs have about as much memory as is allowed."""
    contest.run(meshes)
    if contest.best is None and not math.isinf(contest.needed) and contest.some_fits(meshes):
        contest = contest.anew(_HOPE * contest.allowed)
        contest.run(meshes)
    floor, used = contest.bound, 0.0
    for left in reversed(range(_TIGHTER)):
        if contest.best is None:
            break
        used = contest.best.memory
        if used <= contest.allowed:
            return contest, Searched(contest.best, floor, used)
        if not left or contest.deadline.over:
            break
        contest = contest.anew(min(contest.memory, contest.best.solution.memory) - (used - contest.allowed))
        contest.run(meshes)
    return contest, Searched(None, floor, used)
