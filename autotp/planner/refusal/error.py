"""The error for a job that does not fit: the memory that it needs, by kind, and the changes that would make it fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from autotp.costs.footprint import Footprint
from autotp.errors import Change, MemoryBoundError, gigabytes
from autotp.planner.describe import Found
from autotp.planner.refusal.changes import Job, changes_of

__all__ = ["nothing_fits"]

_SHOWN = 0.01  # share of the memory needed; kinds with less are not listed
_STATE = {"parameter": "parameters and optimizer state"}


def nothing_fits(job: Job, smallest: Found, strategy: str) -> MemoryBoundError:
    """Returns the error that says why no plan fits.

    Args:
        job: the job that does not fit.
        smallest: the plan with the least memory.
        strategy: the family that was searched.
    """
    needed, bound = smallest.memory, job.contest.allowed
    consists = _consists(smallest)
    changes = changes_of(job)
    lines = [
        f"no plan of strategy {strategy!r} fits {gigabytes(bound)} on each device: the smallest found needs "
        f"{gigabytes(needed)}, {gigabytes(needed - bound)} more",
        "of these: " + _shown(consists, needed),
        *_listed(changes),
    ]
    return MemoryBoundError("\n  ".join(lines), needed, bound, consists, changes)


def _consists(found: Found) -> dict[str, float]:
    sizes: dict[str, float] = defaultdict(float)
    for kind, _, size in Footprint(found.priced).explain(found.memory):
        sizes[_STATE.get(kind, kind) if found.prices.train else kind] += size
    return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))


def _shown(consists: Mapping[str, float], needed: float) -> str:
    shown = {kind: size for kind, size in consists.items() if size >= _SHOWN * needed}
    return ", ".join(f"{kind} {gigabytes(size)}" for kind, size in shown.items())


def _listed(changes: Sequence[Change]) -> list[str]:
    """A line for each result, with the changes that had it."""
    heads = {True: "fits with", False: "does not fit with", None: "not tried"}
    lines: dict[str, list[str]] = defaultdict(list)
    for fits, head in heads.items():
        for change in changes:
            if change.fits is fits:
                lines[f"{head} {change.reason}".strip()].append(str(change))
    return [f"{head}: {'; '.join(mine)}" for head, mine in lines.items()]
