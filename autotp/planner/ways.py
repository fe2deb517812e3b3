"""The best plan of all ways to search: the whole space at once, single families, and fixed choices what to recompute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autotp.costs.floor import least_host
from autotp.costs.recompute import recomputed_by, within_kernels
from autotp.errors import BatchError
from autotp.planner.contest import Contest
from autotp.planner.fitting import HURRY, Outcome, best_plan, seconds_of, ways
from autotp.planner.folding import folded
from autotp.planner.ilp import Expired, frozen
from autotp.plans.families import FAMILIES
from costmodel.overlap import hosted

__all__ = ["best_of_ways"]

_HALF = 0.5  # share of the time for plans that recompute only where memory is short
_FAR = 0.99  # share of a step; a bound below it is far off: memory decides more than the search knows of choices
_FAMILIES = 0.5  # largest share of the remaining time for families
_LEAST = 10.0  # seconds for families, at least, unless that is more than their share


@frozen()
def best_of_ways(plain: Contest, short: Contest, meshes: Sequence[tuple[int, ...]], analysis: float) -> Outcome:
    """Returns the best plan over meshes and over decisions what to recompute.

    If memory is short, the planner decides for each operator that ``full`` recomputes. With a fusing compiler, recomputing
    what stays inside its kernels may also save time: results that are not kept are neither written nor read. If the gap
    exceeds the requested one, single families are searched too: the search is better over fewer choices. If nothing fits,
    or only plans far from the bound, all that ``selective`` or ``full`` recompute is recomputed, for a try.

    Args:
        plain, short: the two contests of the job, from ``ways``.
        meshes: to search.
        analysis: seconds that the analysis of the distinct operators took; a measure of the time of other phases.

    Raises:
        Expired: the deadline passed before any plan was found.
    """
    begun = plain.deadline.clock()
    found = _decided(plain, short, meshes, analysis)
    none = found.found.best is None
    if none:
        found = _with_fixed(found, plain, meshes, analysis)
    if found.found.best is None or not _further(found, plain, 1 - plain.candidates.options.gap):
        return found
    found = _of_families(found, plain, meshes, analysis, plain.deadline.clock() - begun)
    return found if none else _with_fixed(found, plain, meshes, analysis)


def _decided(plain: Contest, short: Contest, meshes: Sequence[tuple[int, ...]], analysis: float) -> Outcome:
    """The best plan over decisions what to recompute; with a fusing compiler, also of what stays inside its kernels."""
    options, model = plain.candidates.options, plain.candidates.model
    if not (options.trains and options.recompute == "auto" and options.compile):
        return best_plan(plain, short, meshes, analysis)
    deadline = replace(plain.deadline, shared=True).part(_HALF)
    found = best_plan(replace(plain, deadline=deadline), replace(short, deadline=deadline), meshes, analysis)
    fused = plain.of(folded(within_kernels(model)))
    return _faster(found, partial(best_plan, fused, fused, meshes, analysis))


def _with_fixed(known: Outcome, plain: Contest, meshes: Sequence[tuple[int, ...]], analysis: float) -> Outcome:
    """The known plan or, if there is none, or only one far from the bound, a faster one with fixed recomputation."""
    options, model = plain.candidates.options, plain.candidates.model
    if not (options.trains and options.recompute == "auto"):
        return known
    if known.found.best is None or (known.contest is not known.plain and _further(known, plain, _FAR)):
        for way in ("selective", "full"):
            fixed = plain.of(folded(replace(model, recomputed=recomputed_by(model, way))))
            known = _faster(known, partial(best_plan, fixed, fixed, meshes, analysis))
    return known


def _of_families(
    known: Outcome, contest: Contest, meshes: Sequence[tuple[int, ...]], analysis: float, spent: float
) -> Outcome:
    """The known plan, or a faster one of a family.

    Takes about ``spent`` seconds; far from the bound, up to half of the rest, and with fixed recomputation, too.
    """
    families = [one for name, one in FAMILIES.items() if name != "auto"]
    families.sort(key=lambda family: family.name != "zero3")  # it shards all state, so it is the likeliest to fit
    far, half = _further(known, contest, _FAR), _FAMILIES * contest.deadline.left
    until = contest.deadline.within(half if far else min(max(spent, _LEAST), half))
    for number, family in enumerate(families if contest.candidates.options.family.name == "auto" else ()):
        time = until.left / (len(families) - number if far else 1)
        fewer = replace(contest.within(family.name), deadline=contest.deadline.within(time))
        shown = [mesh for mesh in meshes if family.least <= len(mesh) <= family.axes]
        if shown and time > HURRY * analysis:
            search = _of_family if far else _decided
            found = _faster(known, partial(search, *ways(fewer), shown, analysis))
            known = replace(found, floor=known.floor)
    return known


def _further(known: Outcome, plain: Contest, share: float) -> bool:
    """Whether the bound is below this share of the step of the known plan; both with the host's time."""
    best = known.found.best
    assert best is not None
    return hosted(known.floor, least_host(plain.candidates.model, best.prices)) < share * seconds_of(known)


def _of_family(plain: Contest, short: Contest, meshes: Sequence[tuple[int, ...]], analysis: float) -> Outcome:
    """The best plan of a single family."""
    return _with_fixed(_decided(plain, short, meshes, analysis), plain, meshes, analysis)


def _faster(known: Outcome, search: Callable[[], Outcome]) -> Outcome:
    """The known outcome, or another one if its step is shorter, with the lower bound of both."""
    try:
        other = search()
    except (BatchError, Expired) as error:
        return replace(known, floor=min(known.floor, error.bound if isinstance(error, Expired) else 0.0))
    if other.found.best is None:
        return known if known.found.best is not None else min(known, other, key=lambda one: one.found.used)
    return replace(min(known, other, key=seconds_of), floor=min(known.floor, other.floor))
