"""The best plan that fits the memory, including the decision which results are recomputed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from autotp.costs.floor import least_bytes
from autotp.costs.recompute import recomputed_by, undecided
from autotp.errors import BatchError
from autotp.planner.assemble import EVEN
from autotp.planner.candidates import Candidate, in_haste
from autotp.planner.contest import Contest
from autotp.planner.describe import Found
from autotp.planner.folding import apart, folded
from autotp.planner.ilp import NEVER, Deadline, Expired
from autotp.planner.least_step import Searched, best_chunks, first_shares, least_of_meshes, most_chunks
from autotp.planner.squeeze import squeeze
from costmodel import overlap
from costmodel.overlap import Weights

__all__ = ["HURRY", "Outcome", "best_plan", "floor_of", "seconds_of", "tries", "ways"]

HURRY = 100  # multiple of the analysis time; with less time left, a heuristic looks for a plan first
_HASTE = 1 / 3  # share of the time for that heuristic where memory is short
_SEARCH = 0.75  # share of the time for plans without chunks, if chunks may be used
_ALL = 0.9  # the same share, if chunks may not be used
_REFUSING = 0.25  # share of the time for deciding whether any plan fits
_LARGE = 200  # operators and parameters after folding, above which the time may be short
_REST = 0.5  # share of the remaining time for the heuristic after the search expired without a plan
_ROUND = 0.5  # share of the remaining time for each search with new shares of what limits a step
_SLIGHT = 0.01  # relative; the search for a bound on chunked plans ends if it can rise by less
_TIGHT = 0.5  # share of the memory; if the cheap lower bound, which may be loose, is above it, a tighter one is computed
_CLOSE = 0.8  # share of the memory; if the tighter bound is above it, the plan with the least memory is searched first
_LOOKING = 3.0  # seconds after which, for a job that does not fit, no more meshes are tried if a plan is known
_EFFORT = 4_000  # operators, summed over the programs that are tried for the least memory of a job known not to fit
_MANY = 10  # tries from which on another family is tried too
_FEW = 40  # most operators of a model whose identical layers are decided separately


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a search: the last contest, its best plan, and a proven lower bound on the step time, in seconds.

    ``plain``: the last contest without undecided recomputation. ``chunks``: those of the plan; None: not searched.
    """

    contest: Contest
    found: Searched
    floor: float
    plain: Contest
    chunks: Mapping[str, int] | None = None


def best_plan(contest: Contest, short: Contest, meshes: Sequence[tuple[int, ...]], analysis: float) -> Outcome:
    """The best plan of ``contest`` or, if memory is short, of ``short``, which also decides what to recompute."""
    share = _SEARCH if most_chunks(contest.candidates.options) > 1 else _ALL
    hurried, first = contest.deadline.left < HURRY * analysis, None
    large = len({*contest.candidates.model.stands.values()}) > _LARGE
    deadline = replace(contest.deadline, shared=hurried or large)
    if hurried or (large and floor_of(contest) > _TIGHT * contest.allowed):
        first = _in_haste(contest, meshes, deadline.part(_HASTE))
    try:
        part = deadline.part(share)
        outcome = _of_ways(replace(contest, deadline=part), replace(short, deadline=part), meshes, fits=first is not None)
    except Expired as error:
        first = first or _in_haste(contest, meshes, deadline.part(_REST))
        if first is None:
            raise contest.indivisible or error from None
        return _in_chunks(meshes, Outcome(contest, Searched(first, error.bound, first.memory), error.bound, contest))
    plain = replace(outcome.plain, deadline=deadline)
    outcome = replace(outcome, plain=plain, contest=plain if outcome.contest is outcome.plain else outcome.contest)
    best, hides = outcome.found.best, contest.candidates.options.hides
    if first is not None and (best is None or _step(first, hides) < _step(best, hides)):
        outcome = replace(outcome, found=replace(outcome.found, best=first))
    return _in_chunks(meshes, outcome)


def seconds_of(outcome: Outcome) -> float:
    """Seconds of the best plan's step in its chunks; infinite without a plan."""
    best, hides = outcome.found.best, outcome.contest.candidates.options.hides
    if best is None:
        return math.inf
    if not outcome.chunks:
        return best.priced.sums.seconds(hides)
    return best_chunks(best.priced, outcome.contest.deadline, outcome.chunks)[1].seconds(hides)


def _step(found: Found, hides: bool) -> float:
    return found.priced.sums.step(hides)


def _in_haste(contest: Contest, meshes: Sequence[tuple[int, ...]], deadline: Deadline) -> Found | None:
    """A feasible plan found quickly by a heuristic; None if it finds none. Tries the first mesh even after the deadline.

    Meshes with the fewest axes take the least time and come first. If memory is short, others follow until the deadline.
    """
    options, model = contest.candidates.options, contest.candidates.model
    tried, best, price = [contest], None, 0.0
    shares = first_shares(options.accumulate)
    weights = overlap.weights(shares, model.depth, options.accumulate) if options.hides else EVEN
    if options.trains and options.recompute == "auto":  # recomputing what is cheap may suffice to fit
        recomputed = {**recomputed_by(model, "selective"), **model.recomputed}
        tried.append(contest.of(folded(replace(model, recomputed=recomputed))))
    pairs = sorted(contest.candidates.restrictions(meshes), key=lambda pair: max(pair[0]))
    pairs.sort(key=lambda pair: len(pair[0]) > min(map(len, meshes)))
    for number, (mesh, restriction) in enumerate([*pairs, *pairs[:1]]):
        for one in tried:
            candidate = Candidate(mesh, restriction, one.candidates.panels[0])
            free = replace(one.anew(weights), deadline=NEVER if best is None else deadline)
            fits = contest.allowed
            try:
                _, found = free.ask(
                    candidate, partial(in_haste, one.candidates, candidate, fits, deadline, price, number > 0)
                )
                if found is not None and (best is None or _step(found, options.hides) < _step(best, options.hides)):
                    best = found
                if found is not None and not found.solution.price and one is contest:
                    return best
            except BatchError as error:
                contest.indivisible = error
            except Expired:
                break
        price = price if best is None else best.solution.price
        if deadline.over:
            break
    return best


def _in_chunks(meshes: Sequence[tuple[int, ...]], outcome: Outcome) -> Outcome:
    """Adds the chunk counts of the best plan, and a lower bound that also holds for chunked plans."""
    contest, best = outcome.plain.anew(), outcome.found.best
    options = contest.candidates.options
    asked, most = options.chunks, most_chunks(options)
    if best is None or most == 1 or best.panels != 1 or outcome.contest is not outcome.plain:
        return outcome  # with undecided recomputation, the bound holds for chunked plans already
    chunks, shortest = best_chunks(best.priced, contest.deadline, asked)

    def search(some: Sequence[tuple[int, ...]], limit: float, weights: Weights) -> Searched:
        nonlocal contest
        contest = replace(contest.anew(weights), limit=min(limit, shortest.step(hides=True)))
        contest.run(some)
        return Searched(contest.best, contest.bound, 0.0)

    depth, rest = contest.candidates.model.depth, (options.accumulate, most, _SLIGHT, options.gap)
    met, floor = least_of_meshes(search, lambda one: one.priced.sums, meshes, depth, contest.deadline, *rest)
    for one in met:
        if one.best is not None and one.best.memory <= contest.allowed:
            cut, found = best_chunks(one.best.priced, contest.deadline, asked)
            if found.seconds(hides=True) < shortest.seconds(hides=True):
                best, chunks, shortest = one.best, cut, found
    whole = max(outcome.floor, (1 - overlap.MARGIN) * floor)  # bounds unchunked plans: their sides lack `CHUNKED`
    return replace(outcome, found=replace(outcome.found, best=best), floor=min(whole, floor), chunks=chunks)


def _of_ways(contest: Contest, short: Contest, meshes: Sequence[tuple[int, ...]], fits: bool) -> Outcome:
    """The best plan without chunks, of ``short`` if memory is short; ``fits``: some plan is known to fit."""
    refused = None if fits else _refused(short, meshes)
    if refused is not None:
        return refused
    try:
        ample = _searched(contest, meshes)
    except Expired as error:  # the search that decides what to recompute may still find one
        ample = Outcome(replace(contest, short=True), Searched(None, error.bound, math.inf), error.bound, contest)
    if not ample.contest.short:
        return ample
    fastest = ample.contest.best  # although it does not fit; its mesh is searched first
    order = sorted(meshes, key=lambda mesh: fastest is None or mesh != fastest.prices.mesh)
    found = squeeze(short, order, ample.found.best, ample.floor, partial(_with_least, short, order))
    if found.best is None:
        try:
            found = _with_least(short, order, contest.deadline, found.floor)
        except Expired:
            if found.smallest is None:
                raise
    return Outcome(short, found, found.floor, ample.contest)


def ways(contest: Contest) -> tuple[Contest, Contest]:
    """Two contests: with the recomputation that is requested, and with the rest undecided, if the planner may decide."""
    options, model = contest.candidates.options, contest.candidates.model
    asked = options.recompute if options.trains else "none"
    way = recomputed_by(model, "none" if asked == "auto" else asked, checkpoints=asked == "auto")
    if way:
        model = replace(model, recomputed=way)
        contest = contest.of(folded(model))
    open_model = undecided(model) if asked == "auto" else model
    if not open_model.undecided:
        return contest, contest
    return contest, contest.of(folded(open_model) if len(model.operators) > _FEW else apart(open_model))


def floor_of(contest: Contest) -> float:
    """A lower bound on the memory of plans of any family on any mesh, in bytes; needs no integer program."""
    candidates = contest.candidates
    return least_bytes(candidates.model, candidates.prices((candidates.topology.devices,)))


def tries(contest: Contest) -> int:
    """The number of integer programs to try where an answer is due soon."""
    return max(1, _EFFORT // max(1, len(contest.candidates.model.operators)))


def _refused(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> Outcome | None:
    """The plan with the least memory, if it is known before the search that it does not fit; else None.

    A cheap lower bound decides whether to compute a tighter one, and that one whether to search for the plan.
    """
    floor = floor_of(contest)
    looking = replace(contest, deadline=contest.deadline.part(_REFUSING))
    with suppress(Expired):
        if _TIGHT * contest.allowed < floor <= contest.allowed:
            floor = looking.shared(meshes)
        if floor <= contest.allowed and (floor <= _CLOSE * contest.allowed or looking.some_fits(meshes)):
            return None
    if floor <= contest.allowed and looking.deadline.over:
        return None
    few = tries(contest) if floor > contest.allowed else None
    found = _with_least(contest, meshes, contest.deadline, tries=few)
    return Outcome(contest, found, 0.0, contest) if found.best is None else None


def _searched(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> Outcome:
    """The best plan over meshes, without chunks; none if it does not fit (``contest.short``)."""
    deadline = contest.deadline
    # Without chunks, `squeeze` uses the bound found here, so no candidate may be left open with a bound of 0.
    room = contest.allowed if most_chunks(contest.candidates.options) > 1 else math.inf

    def search(some: Sequence[tuple[int, ...]], limit: float, weights: Weights) -> Searched:
        nonlocal contest
        one = replace(contest, deadline=deadline.part(_ROUND), limit=limit).anew(weights)
        one.run(some, room if some is meshes else math.inf)
        fits = one.best is not None and one.best.memory <= one.allowed
        if some is meshes:
            contest = one
            contest.short = not fits or (one.short and bool(one.open))  # a best plan that fits is enough
            fits = not contest.short
        return Searched(one.best if fits else None, one.bound, 0.0)

    if not contest.candidates.options.hides:
        found = search(meshes, math.inf, EVEN)
        return Outcome(contest, found, found.floor, contest)
    depth, options = contest.candidates.model.depth, contest.candidates.options
    rest = (options.accumulate, 1, 1e-6, options.gap)
    met, floor = least_of_meshes(search, lambda one: one.priced.sums, meshes, depth, deadline, *rest)
    contest = replace(contest, deadline=deadline)
    return Outcome(contest, met[0], floor, contest)


def _with_least(
    contest: Contest, meshes: Sequence[tuple[int, ...]], deadline: Deadline, floor: float = 0.0, tries: int | None = None
) -> Searched:
    """A fast plan that fits, or else the plan with the least memory; ``tries``: most programs to try if no plan can fit."""
    asked, contest = contest, replace(contest, deadline=deadline)
    until = NEVER if tries is None else deadline.within(_LOOKING)
    least = contest.least(meshes, contest.allowed, tries, until)
    asked.indivisible = contest.indivisible
    fits = least is not None and least.used <= contest.allowed
    if not fits and contest.candidates.options.family.name == "auto" and (tries is None or tries >= _MANY):
        # Tables of moments are not exact, and may miss the least. Plans that shard all state take little in any case.
        sharded = contest.within("zero3")
        other = least
        with suppress(Expired):
            other = sharded.least(meshes, contest.allowed, tries, until)
        if other is not None and (least is None or other.used < least.used):
            contest, least = sharded, other
    if least is None:
        return Searched(None, floor, math.inf)
    best = contest.candidates.found(least.candidate, least.assembled, least.found.choice)
    if least.used > contest.allowed:
        return Searched(None, floor, least.used, best)
    with suppress(Expired):
        assembled = contest.anew().assemble(least.candidate)
        best = least.quickest(assembled, contest.candidates, contest.allowed, contest.deadline)
    return Searched(best, min(floor, best.solution.seconds), best.memory)
