"""The best plan whose step fits the memory, whatever it recomputes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from autotp.costs.floor import least_bytes
from autotp.costs.recompute import recomputed_by, undecided, within_kernels
from autotp.errors import BatchError
from autotp.planner.assemble import EVEN
from autotp.planner.candidates import Candidate, in_haste
from autotp.planner.contest import Contest
from autotp.planner.describe import Found
from autotp.planner.folding import apart, folded
from autotp.planner.ilp import NEVER, Deadline, Expired, frozen
from autotp.planner.least_step import Searched, best_chunks, first_shares, least_step, most_chunks
from autotp.planner.squeeze import squeeze
from autotp.plans.families import FAMILIES
from costmodel import overlap
from costmodel.overlap import Weights

__all__ = ["Outcome", "best_of_ways", "floor_of", "tries", "ways"]

_HALF = 0.5  # of the time: for plans that recompute only where memory is short
_HURRY = 100  # times as long as the analysis: who has less time gets an answer in haste first
_HASTE = 1 / 3  # of the time: for an answer in haste where memory is short
_SEARCH = 0.75  # of the time: for plans without chunks, if there may be such in chunks
_ALL = 0.9  # of the time, otherwise
_REFUSING = 0.25  # of the time: for whether anything fits
_LARGE = 200  # operators and parameters that nothing else stands for: then the time may be short
_REST = 0.5  # of the time that is left: for an answer in haste after a search in vain
_ROUND = 0.5  # of the time that is left: for plans by other shares of what limits a step, each time
_SLIGHT = 0.01  # relative; where a bound for steps in chunks can rise by less, it does not matter
_TIGHT = 0.5  # of the memory: where a bound that is easily too low takes more, a closer one is looked at
_CLOSE = 0.8  # of the memory: where the closer bound takes more, the plan with the least memory is looked for first
_LOOKING = 3.0  # seconds: then what a job takes that does not fit is looked for on no more meshes, if it is known on one
_FAR = 0.95  # of a step: where the bound is less, memory decides more than is known of choices
_FAMILIES = 0.5  # of the time that is left, at most: for families
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


@frozen()
def best_of_ways(plain: Contest, short: Contest, meshes: Sequence[tuple[int, ...]], analysis: float) -> Outcome:
    """The best plan over meshes and ways to recompute.

    Recomputing is tried where memory is short: of what ``full`` recomputes, whatever is fastest; if nothing fits, or only
    what is far from the bound, all that ``selective`` or ``full`` recompute. Where a compiler fuses, recomputing what
    stays inside its kernels may also save time: what is not kept is neither written nor read. Where the bound stays
    further away than is asked for, families are searched, too: fewer choices are searched better.

    Args:
        plain, short: of the job, as of ``ways``.
        meshes: to look at.
        analysis: seconds that the analysis took of operators that differ, which say how long other things take.

    Raises:
        Expired: when the time passed before any plan was found.
    """
    begun = plain.deadline.clock()
    found = _of_recomputing(plain, short, meshes, analysis)
    if found.found.best is None or found.floor >= (1 - plain.candidates.options.gap) * _seconds(found):
        return found
    return _of_families(found, plain, meshes, analysis, plain.deadline.clock() - begun)


def _of_recomputing(plain: Contest, short: Contest, meshes: Sequence[tuple[int, ...]], analysis: float) -> Outcome:
    """``best_of_ways`` of all that the family contains, at once."""
    options, model = plain.candidates.options, plain.candidates.model
    if not options.trains or options.recompute != "auto":
        return _best(plain, short, meshes, analysis)
    deadline = replace(plain.deadline, shared=True).part(_HALF) if options.compile else plain.deadline
    found = _best(replace(plain, deadline=deadline), replace(short, deadline=deadline), meshes, analysis)
    if options.compile:
        fused = plain.of(folded(within_kernels(model)))
        found = _faster(found, fused, fused, meshes, analysis)
    short_of_memory = found.contest is not found.plain
    if found.found.best is None or (short_of_memory and found.floor < _FAR * _seconds(found)):
        for way in ("selective", "full"):
            fixed = plain.of(folded(replace(model, recomputed=recomputed_by(model, way))))
            found = _faster(found, fixed, fixed, meshes, analysis)
    return found


def _of_families(
    known: Outcome, contest: Contest, meshes: Sequence[tuple[int, ...]], analysis: float, spent: float
) -> Outcome:
    """What is known, or what a family has that is faster, in as much time as was ``spent``, or half of it all if far."""
    families = [one for name, one in FAMILIES.items() if name != "auto"]
    far, half = known.floor < _FAR * _seconds(known), _FAMILIES * contest.deadline.left
    until = contest.deadline.within(half if far else min(spent, half))
    for number, family in enumerate(families if contest.candidates.options.family.name == "auto" else ()):
        time = until.left / (len(families) - number if far else 1)
        fewer = replace(contest.within(family.name), deadline=contest.deadline.within(time))
        shown = [mesh for mesh in meshes if family.least <= len(mesh) <= family.axes]
        if shown and time > _HURRY * analysis:
            known = replace(_faster(known, *ways(fewer), shown, analysis), floor=known.floor)
    return known


def _faster(known: Outcome, plain: Contest, short: Contest, meshes: Sequence[tuple[int, ...]], analysis: float) -> Outcome:
    """What is known, or what other contests find, if that is faster."""
    try:
        other = _best(plain, short, meshes, analysis)
    except (BatchError, Expired) as error:
        return replace(known, floor=min(known.floor, error.bound if isinstance(error, Expired) else 0.0))
    if other.found.best is None:
        return known if known.found.best is not None else min(known, other, key=lambda one: one.found.used)
    return replace(min(known, other, key=_seconds), floor=min(known.floor, other.floor))


def _best(contest: Contest, short: Contest, meshes: Sequence[tuple[int, ...]], analysis: float) -> Outcome:
    """The best plan over meshes of a contest, and of one that decides on what is recomputed, where memory is short."""
    share = _SEARCH if most_chunks(contest.candidates.options) > 1 else _ALL
    hurried, first = contest.deadline.left < _HURRY * analysis, None
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


def _seconds(outcome: Outcome) -> float:
    """Of the best plan's step, in its chunks."""
    best, hides = outcome.found.best, outcome.contest.candidates.options.hides
    if best is None:
        return math.inf
    if not outcome.chunks:
        return best.priced.sums.seconds(hides)
    return best_chunks(best.priced, outcome.contest.deadline, outcome.chunks)[1].seconds(hides)


def _step(found: Found, hides: bool) -> float:
    return found.priced.sums.step(hides)


def _in_haste(contest: Contest, meshes: Sequence[tuple[int, ...]], deadline: Deadline) -> Found | None:
    """A plan that fits, whatever the time; None where haste finds none.

    The mesh with the fewest axes takes the least time. Where memory is short, others are tried until the deadline.
    """
    options, model = contest.candidates.options, contest.candidates.model
    tried, best, price = [contest], None, 0.0
    shares = first_shares(options.accumulate)
    weights = overlap.weights(shares, model.depth, options.accumulate) if options.hides else EVEN
    if options.trains and options.recompute == "auto":  # what is cheap to recompute may be what is too much
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
    """With the best plan in chunks, and what none is below in chunks either."""
    contest, best = outcome.plain.anew(), outcome.found.best
    options = contest.candidates.options
    asked, most = options.chunks, most_chunks(options)
    if best is None or most == 1 or best.panels != 1 or outcome.contest is not outcome.plain:
        return outcome  # the bound of plans with what is to be decided holds in chunks already
    chunks, shortest = best_chunks(best.priced, contest.deadline, asked)

    def search(weights: Weights) -> Searched:
        nonlocal contest
        contest = replace(contest.anew(weights), limit=shortest.step(hides=True))
        contest.run(meshes)
        return Searched(contest.best, contest.bound, 0.0)

    depth = contest.candidates.model.depth
    met, floor = least_step(search, lambda one: one.priced.sums, depth, contest.deadline, options.accumulate, most, _SLIGHT)
    for one in met:
        if one.best is not None and one.best.memory <= contest.allowed:
            cut, found = best_chunks(one.best.priced, contest.deadline, asked)
            if found.seconds(hides=True) < shortest.seconds(hides=True):
                best, chunks, shortest = one.best, cut, found
    whole = max(outcome.floor, (1 - overlap.MARGIN) * floor)  # without chunks, no side is shorter than that
    return replace(outcome, found=replace(outcome.found, best=best), floor=min(whole, floor), chunks=chunks)


def _of_ways(contest: Contest, short: Contest, meshes: Sequence[tuple[int, ...]], fits: bool) -> Outcome:
    """The best plan without chunks over meshes and ways to recompute; whether some plan is known to fit."""
    refused = None if fits else _refused(short, meshes)
    if refused is not None:
        return refused
    try:
        ample = _searched(contest, meshes)
    except Expired as error:  # what is recomputed is looked at all the same
        ample = Outcome(replace(contest, short=True), Searched(None, error.bound, math.inf), error.bound, contest)
    if not ample.contest.short:
        return ample
    fastest = ample.contest.best  # though it does not fit
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


def floor_of(contest: Contest) -> float:
    """Bytes that no plan takes less than, of any family and on any mesh; without an integer program."""
    candidates = contest.candidates
    return least_bytes(candidates.model, candidates.prices((candidates.topology.devices,)))


def tries(contest: Contest) -> int:
    """How many programs are tried where an answer is due soon."""
    return max(1, _EFFORT // max(1, len(contest.candidates.model.operators)))


def _refused(contest: Contest, meshes: Sequence[tuple[int, ...]]) -> Outcome | None:
    """What takes the least memory, where that is known not to fit before anything is searched; else nothing.

    A bound that costs nothing says whether a closer one is worth while, and that whether to look for the plan.
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
    """The best plan over meshes, if it fits."""
    deadline = contest.deadline
    # Without chunks, what is open would be bounded by what no plan is below, whatever it takes.
    room = contest.allowed if most_chunks(contest.candidates.options) > 1 else math.inf

    def search(weights: Weights) -> Searched:
        nonlocal contest
        contest = replace(contest, deadline=deadline.part(_ROUND)).anew(weights)
        contest.run(meshes, room)
        best = contest.best
        fits = best is not None and best.memory <= contest.allowed
        contest.short = not fits or (contest.short and bool(contest.open))  # a best plan that fits needs nothing else
        return Searched(None if contest.short else best, contest.bound, 0.0)

    if not contest.candidates.options.hides:
        found = search(EVEN)
        return Outcome(contest, found, found.floor, contest)
    depth, options = contest.candidates.model.depth, contest.candidates.options
    met, floor = least_step(search, lambda one: one.priced.sums, depth, deadline, options.accumulate)
    contest = replace(contest, deadline=deadline)
    return Outcome(contest, met[0], floor, contest)


def _with_least(
    contest: Contest, meshes: Sequence[tuple[int, ...]], deadline: Deadline, floor: float = 0.0, tries: int | None = None
) -> Searched:
    """A plan that fits and is fast, or what takes the least memory, with few ``tries`` where nothing is known to fit."""
    asked, contest = contest, replace(contest, deadline=deadline)
    until = NEVER if tries is None else deadline.within(_LOOKING)
    least = contest.least(meshes, contest.allowed, tries, until)
    asked.indivisible = contest.indivisible
    fits = least is not None and least.used <= contest.allowed
    if not fits and contest.candidates.options.family.name == "auto" and (tries is None or tries >= _MANY):
        # Tables of moments are not exact, and may lead past it: what shards all state takes little in any case.
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
