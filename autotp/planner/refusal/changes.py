"""Tries single changes of a job that does not fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autotp.errors import AutotpError, Change
from autotp.planner.contest import Contest
from autotp.planner.fitting import floor_of, tries, ways
from autotp.planner.ilp import Deadline, Expired
from autotp.plans.options import Options
from costmodel import Topology
from costmodel.memory import OPTIMIZERS
from passes.capture import Captured, Precision, policy_of
from passes.torch_internals import tree_map

__all__ = ["Job", "Recapture", "changes_of", "part_of"]

#: Captures the model again, given the number of parts of the batch, of which it uses one, and a precision.
Recapture = Callable[[int, Precision], Captured]

_Posed = tuple[Contest, Sequence[tuple[int, ...]]]

_TIMES = (2, 4)
_LATE = "for lack of time"
_ABSENT = "as that takes the model, of which only the graph is known"
_CLOSE = "to the end"


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a job fits, None if unknown; and the memory of a plan, or a lower bound on that of all plans, in bytes."""

    fits: bool | None
    bytes: float


@dataclass(frozen=True, slots=True)
class Job:
    """A job that does not fit.

    Attributes:
        contest: of the job as it was requested.
        last: the contest that found no plan, in which all that may be recomputed is undecided.
        begin, meshes: functions of a captured model, a machine and options that return the contest and its meshes.
        recapture: captures the model again; None if the model is not available.
        capturing: seconds that the capture took.
        until: seconds on the performance counter, after which nothing else is tried.
    """

    contest: Contest
    last: Contest
    begin: Callable[[Captured, Topology, Options], Contest]
    meshes: Callable[[Topology, Options], Sequence[tuple[int, ...]]]
    recapture: Recapture | None
    capturing: float
    until: float


@dataclass(frozen=True, slots=True)
class _Trial:
    """A change, whether the model has to be captured for it, and a function that returns its contest and meshes."""

    name: str
    captures: bool
    pose: Callable[[], _Posed]


def changes_of(job: Job) -> list[Change]:
    """The result of every change; changes for which there is no time are reported as not tried."""
    found, longest = [], 0.0
    for trial in sorted(_trials(job), key=lambda trial: trial.captures):
        begun = time.perf_counter()
        late = begun + longest + trial.captures * job.capturing > job.until
        if trial.captures and (late or job.recapture is None):
            found.append(Change(trial.name, None, reason=_LATE if job.recapture is not None else _ABSENT))
            continue
        try:
            contest, meshes = trial.pose()
            if late and (floor := floor_of(contest)) <= contest.allowed:
                found.append(Change(trial.name, None, reason=_LATE))
                continue
            fit = Fit(False, floor) if late else fit_of(contest, meshes, Deadline(job.until))
        except AutotpError:  # no such machine or batch: the change is impossible
            continue
        except Expired:
            found.append(Change(trial.name, None, reason=_LATE))
            continue
        longest = max(longest, time.perf_counter() - begun - trial.captures * job.capturing)
        if fit.fits is None:
            found.append(Change(trial.name, None, reason=_CLOSE))
        else:
            found.append(Change(trial.name, fit.fits, fit.bytes))
    return found


def fit_of(contest: Contest, meshes: Sequence[tuple[int, ...]], until: Deadline) -> Fit:
    """Whether some plan fits. Does not search for a fast one, nor for one on more meshes after ``until``.

    Raises:
        AutotpError: there is no plan at all.
    """
    floor = floor_of(contest)
    if floor <= contest.allowed:
        floor = contest.shared(meshes)
    if floor > contest.allowed:
        return Fit(False, floor)
    few = tries(contest)
    least = contest.least(meshes, contest.allowed, few, until)
    if least is None:
        raise contest.indivisible or AutotpError("no plan")
    if least.used <= contest.allowed:
        return Fit(True, least.used)
    every = sum(1 for _ in contest.candidates.over(meshes))
    return Fit(False if few >= every and not until.over else None, least.used)


def _trials(job: Job) -> Iterator[_Trial]:
    """The changes to try: those that cost the least, then those that leave the choices as they are, then the rest."""
    candidates = job.contest.candidates
    options, captured, topology = candidates.options, candidates.model.captured, candidates.topology

    def same_choices(machine: Topology, asked: Options) -> _Posed:
        """The last contest with another machine or other options, but with the same choices."""
        other = replace(job.last.candidates, topology=machine, options=asked, meshes={})
        return job.last.posing(other), job.meshes(machine, asked)

    def larger(count: int) -> _Posed:
        return same_choices(topology.resized(count), options)

    def anew(asked: Options, parts: int = 1) -> _Posed:
        same = parts == 1 and asked.precision == options.precision
        model = captured if same or job.recapture is None else job.recapture(parts, asked.precision)
        return ways(job.begin(model, topology, asked))[1], job.meshes(topology, asked)

    if options.trains and options.recompute != "auto":
        yield _Trial("recompute='auto'", False, partial(anew, replace(options, recompute="auto")))
    if options.reshard_after_forward is False:
        yield _Trial("reshard_after_forward=True", False, partial(anew, replace(options, reshard_after_forward=True)))
    if options.mesh is None:
        for times in _TIMES:
            count = times * topology.devices
            yield _Trial(f"{count} devices", False, partial(larger, count))
    if not options.trains:
        return
    lighter = [name for name, count in OPTIMIZERS.items() if count < OPTIMIZERS[options.optimizer]]
    for name in sorted(lighter, key=lambda name: -OPTIMIZERS[name]):
        yield _Trial(f"optimizer={name!r}", False, partial(same_choices, topology, replace(options, optimizer=name)))
    values = captured.placeholders
    if policy_of(options.precision) is None and any(values[n].dtype == torch.float32 for n in captured.parameters):
        yield _Trial("precision='bf16-mixed'", True, partial(anew, replace(options, precision="bf16-mixed")))
    for times in _TIMES:
        yield _Trial(f"1/{times} of the batch", True, partial(anew, options, times))
        several = replace(options, accumulate=times * options.accumulate)
        yield _Trial(f"the batch in parts, accumulate={several.accumulate}", True, partial(anew, several, times))


def part_of(captured: Captured, call: tuple[tuple[Any, ...], dict[str, Any]], parts: int) -> tuple[Any, Any]:
    """The first of ``parts`` equal parts of a call's batch, which is dim 0 of its first tensor.

    Raises:
        AutotpError: the batch is not divisible by ``parts``.
    """
    shapes = [tuple(captured.placeholders[name].shape) for name in captured.inputs]
    batch = next((shape[0] for shape in shapes if shape), 1)
    if batch % parts:
        raise AutotpError(f"a batch of {batch} cannot be split into {parts} equal parts")

    def part(leaf: Any) -> Any:
        batched = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == batch
        return leaf[: batch // parts] if batched else leaf

    found: tuple[Any, Any] = call if parts == 1 else tree_map(part, call)
    return found
