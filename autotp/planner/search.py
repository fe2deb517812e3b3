"""The planner: solves the integer programs of all candidate meshes, and describes the best plan."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from autotp.costs.floor import least_host, least_seconds
from autotp.costs.model import Model, trained_values
from autotp.costs.priced import Priced
from autotp.errors import AutotpError, ConstraintError, TimeLimitError
from autotp.planner.candidates import Candidates, candidate_meshes
from autotp.planner.contest import Contest
from autotp.planner.describe import AXIS_NAMES, describe_plan
from autotp.planner.fitting import ways
from autotp.planner.folding import folded
from autotp.planner.ilp import NEVER, NO_LAYOUT, Deadline
from autotp.planner.least_step import best_chunks, chunked, in_parts, sharding_of
from autotp.planner.refusal import Job, Recapture, nothing_fits, part_of
from autotp.planner.ways import best_of_ways
from autotp.plans.constraints import Constraint, minimal, requirements
from autotp.plans.families import Family
from autotp.plans.options import Options, machine_of
from autotp.plans.plan import Plan
from costmodel import Topology, TopologyError
from costmodel.overlap import hosted
from costmodel.text.numbers import figure
from passes.capture import Captured, Precision, capture
from passes.layouts.layout import Layout
from passes.overlap.trace import undrawn
from passes.rules.factors import analyse
from passes.sharding.chunk import Chunked
from passes.sharding.uneven import lone

__all__ = ["AXIS_NAMES", "plan", "plan_captured", "plan_model", "prepare"]

_log = logging.getLogger("autotp.plan")
_ANSWERING = 8.0  # seconds of planning after which, approximately, a job that does not fit is refused
_TRYING = 1.0  # seconds, at least, for trying changes that would make it fit
# Describing the plan takes about so many times as long as the analysis of distinct operators, and of all operators.
_ENDING, _READING = 6.0, 2.0


def plan(
    model: nn.Module,
    topology: Topology | str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    strategy: str | Family = Options.strategy,
    mesh: Sequence[int] | None = Options.mesh,
    mode: str = Options.mode,
    memory: float | None = Options.memory,
    optimizer: str = Options.optimizer,
    accumulate: int = Options.accumulate,
    panels: int | None = Options.panels,
    chunks: Mapping[str, int] | None = Options.chunks,
    schedule: str = Options.schedule,
    compile: bool = Options.compile,
    constraints: Sequence[str] | Mapping[str, str] = Options.constraints,
    precision: Precision = Options.precision,
    time_limit: float = Options.time_limit,
    gap: float = Options.gap,
    recompute: str | Sequence[str] = Options.recompute,
    reshard_after_forward: bool | None = Options.reshard_after_forward,
    outputs: str = Options.outputs,
    observe: Sequence[str] = Options.observe,
) -> Plan:
    """Plans how ``model`` runs on ``topology``. Needs no process group and no device; the model may be on ``meta``.

    Args:
        model: any module that ``torch.export`` takes, unmodified.
        topology: a ``Topology``, or the name or path of one.
        args, kwargs: example inputs of the global batch; left out, a Hugging Face model's ``dummy_inputs`` serve.
        strategy, mesh, mode, memory, optimizer, accumulate, panels, chunks, schedule: see `autotp.plans.options.Options`.
        compile, constraints, precision, time_limit, gap, recompute, reshard_after_forward, outputs, observe: see there.

    Returns:
        The best plan that was found; ``Plan.optimal`` and ``Plan.gap`` say how good it is known to be.

    Raises:
        AutotpError: when an argument is wrong.
        TimeLimitError: when no plan was found within the time limit.
        ConstraintError: when no plan satisfies the constraints; names a minimal infeasible subset.
        CaptureError: when ``torch.export`` refuses the model.
        MemoryBoundError: when no plan fits the memory.
    """
    options = Options(
        strategy,
        mesh=mesh,
        mode=mode,
        memory=memory,
        optimizer=optimizer,
        accumulate=accumulate,
        panels=panels,
        chunks=chunks,
        schedule=schedule,
        compile=compile,
        constraints=constraints,
        precision=precision,
        time_limit=time_limit,
        gap=gap,
        recompute=recompute,
        reshard_after_forward=reshard_after_forward,
        outputs=outputs,
        observe=observe,
    )
    return plan_model(model, topology, args, kwargs, options)


def plan_model(
    model: nn.Module,
    topology: Topology | str | os.PathLike[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Options,
) -> Plan:
    """``plan`` with its options as one object."""
    topology = machine_of(topology)
    options.check(topology)
    started = time.perf_counter()
    captured = capture(model, args, kwargs, options.precision, options.outputs, options.observe)

    def recapture(parts: int, precision: Precision) -> Captured:
        example = part_of(captured, (tuple(args), dict(kwargs or {})), parts)
        return capture(model, *example, precision, options.outputs, options.observe)

    return plan_captured(captured, topology, options, {"capture_seconds": time.perf_counter() - started}, recapture)


def prepare(
    captured: Captured,
    constraints: Sequence[Constraint] = (),
    recomputed: Mapping[str, bool] | None = None,
    resting: Mapping[str, Layout] | None = None,
    *,
    train: bool = True,
    compiled: bool = False,
) -> Model:
    """Analyses and folds a captured model. The result does not depend on the mesh.

    Args:
        captured: the model.
        constraints: that its plans have to satisfy.
        recomputed: names of operators that the backward pass recomputes; see `autotp.costs.model.Model`.
        resting: name of a parameter or buffer -> the layout in which it has to rest.
        train, compiled: see `autotp.costs.model.Model`.

    Raises:
        AutotpError: a constraint names nothing in the model.
    """
    operators = analyse(captured.graph_module.graph, captured.inputs)
    trained = trained_values(captured, operators)
    model = Model(captured, operators, {}, trained, train=train, compiled=compiled)
    by_node = {node: recomputed[node.name] for node in operators if recomputed and node.name in recomputed}
    graph, fqns = captured.graph_module.graph, {**captured.parameters, **captured.buffers}
    rests = {n: resting[fqns[n.name]] for n in graph.nodes if resting and fqns.get(n.name) in resting}
    return _pinned(replace(model, recomputed=by_node, resting=rests), constraints)


def _pinned(model: Model, constraints: Sequence[Constraint]) -> Model:
    """The model with constraints, folded as far as they allow."""
    return folded(replace(model, pins=requirements(constraints, model.captured, model.operators)))


def plan_captured(
    captured: Captured,
    topology: Topology,
    options: Options,
    stats: Mapping[str, Any] | None = None,
    recapture: Recapture | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """``plan`` for a model that was captured already.

    Args:
        captured: the model.
        topology: with as many devices as ``options.mesh``, if that is given.
        options: of the job.
        stats: further entries of ``Plan.planning``.
        recapture: captures the model again, to try changes of a job that does not fit.
        clock: returns seconds; the time limit refers to it.

    Raises:
        AutotpError: as ``plan`` does.
    """
    started = clock()
    options, asked = _answerable(captured, options), options.asked
    deadline = Deadline(started + options.time_limit, clock)
    first, meshes = _begin(captured, topology, options, deadline), _meshes(topology, options)
    model, bound = first.candidates.model, first.allowed
    analysis, folded_operators = clock() - started, sum(model.stands[n] is n for n in model.operators)
    apart = analysis * folded_operators / max(1, len(model.operators))
    ending = min(_ENDING * apart + _READING * analysis, options.time_limit / 2)
    first = replace(first, deadline=replace(deadline, at=deadline.at - ending))
    plain, short = ways(first)
    chosen, hides, chunks = options.family, options.hides, options.chunks
    try:
        outcome = best_of_ways(plain, short, meshes, apart)
    except TimeoutError as error:
        raise TimeLimitError(f"{error} (it is {options.time_limit:g} s)") from error
    contest, found, floor, best = outcome.contest, outcome.found, outcome.floor, outcome.found.best
    if best is None:
        conflict = _conflict(contest, meshes, asked)
        if conflict is not None or found.smallest is None:
            raise conflict or _no_plan(contest)
        until = max(min(started + _ANSWERING, deadline.at), clock() + _TRYING)
        job = Job(first, contest, _begin, _meshes, recapture, (stats or {}).get("capture_seconds", 0.0), until)
        raise nothing_fits(job, found.smallest, chosen.name)
    prices = best.priced
    sums, least = prices.sums, best.solution.seconds
    fields: dict[str, Any] = {}
    if hides:
        _warn_of_lone_parts(prices)
        least = sums.step(hides)
        if chunks is None and not prices.panels:
            chunks = best_chunks(prices, first.deadline)[0] if outcome.chunks is None else outcome.chunks
    if chunks:
        made = in_parts(prices, chunks)
        _tell(chunks, made, hides)
        sums = chunked(prices, made) if hides else sums
        least = sums.step(hides) if hides else least
        chunks = {kind: count for kind, count in chunks.items() if count == 1 or kind in made.counts}
        fields = {"chunked": {kind: len(names) for kind, names in made.cut.items()}, "whole": made.whole}
    every = plain.candidates.model  # what it recomputes, every plan recomputes
    floor = max(floor, least_seconds(every, prices.prices)) if floor < least else floor
    floor, least = hosted(floor, least_host(every, prices.prices)), hosted(least, sums.host)
    gap = max(0.0, 1 - floor / least) if least else 0.0
    plan = describe_plan(
        best,
        sums,
        hides=hides,
        strategy=chosen.name,
        optimal=gap <= 1e-9,
        gap=gap if gap > 1e-9 else 0.0,
        mode=options.mode,
        memory_bound=bound,
        chunks=chunks or {},
        schedule=options.schedule,
        compile=options.compile,
        outputs=options.outputs,
        observe=tuple(options.observe),
        constraints=tuple(one.text for one in asked),
        planning={},
        **fields,
    )
    for name, value in asdict(plan.predicted).items():
        figure(value, f"topology {topology.name!r}: {name}, predicted from its figures,", error=TopologyError)
    planning = dict(stats or {}) | {
        "seconds": clock() - started,
        "analysis_seconds": analysis,
        "assembly_seconds": contest.assembling,
        "solver_seconds": contest.solving,
        "variables": best.solution.variables,
        "method": best.solution.method,
        "meshes": len(meshes),
        "panels": options.panels,
        "recompute": options.recompute,
        "reshard_after_forward": options.reshard_after_forward,
        "operators": len(model.operators),
        "folded_operators": folded_operators,
    }
    _log.info(
        "%s on %s of %s: mesh %s, step %.4g s, %s, in %.2f s",
        chosen.name,
        f"{topology.devices} devices",
        topology.name,
        "x".join(map(str, plan.mesh_shape)),
        plan.predicted.step_seconds,
        "proven optimal" if plan.optimal else f"within {plan.gap:.2%} of the bound",
        planning["seconds"],
    )
    return replace(plan, planning=planning)


def _answerable(captured: Captured, options: Options) -> Options:
    """The options, without overlap if the graph has no schedule, and without panels if there are chunks."""
    unknown = undrawn(captured.graph_module.graph) if options.hides else []
    if unknown:
        _log.warning("planned without overlap: %s draw random numbers in a way that has no schedule", ", ".join(unknown))
        options = replace(options, schedule="none")
    return replace(options, panels=1) if options.chunks else options


def _warn_of_lone_parts(prices: Priced) -> None:
    """Warns of dims with one element on some devices and more on others: graphs that differ for that are not scheduled."""
    captured = prices.model.captured
    names = [captured.parameters.get(name, name) for name in lone(captured.graph_module.graph, sharding_of(prices))]
    if names:
        _log.warning(
            "planned with overlap, but it may run without: devices have parts of one element, and of more, of %s, and "
            "graphs that differ for that run as they are; with sizes that divide by the mesh, all parts are equal",
            ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
        )


def _tell(chunks: Mapping[str, int], made: Chunked, hides: bool) -> None:
    """Warns of requested chunks that have no effect."""
    for kind, count in chunks.items():
        if count > 1 and kind not in made.counts:
            why = "; ".join(f"{name}: {reason}" for name, reason in list(made.whole.items())[:3]) or "nothing communicates"
            _log.warning("chunks: nothing comes in %d chunks of the %s (%s)", count, kind, why)
    if made.counts and not hides:
        _log.warning("chunks %s win nothing with schedule='none', which hides no communication", dict(made.counts))


def _conflict(contest: Contest, meshes: Sequence[tuple[int, ...]], asked: Sequence[Constraint]) -> ConstraintError | None:
    """An error with a minimal infeasible subset of the constraints; None if there is no plan without constraints either."""

    def feasible(some: Sequence[Constraint]) -> bool:
        return contest.of(_pinned(contest.candidates.model, some)).admits(meshes)

    return minimal(asked, feasible) if asked and feasible(()) else None


def _no_plan(contest: Contest) -> AutotpError:
    """The error for a job that has no plan regardless of memory."""
    return contest.indivisible or AutotpError(
        f"strategy {contest.candidates.options.family.name!r} has no plan: {NO_LAYOUT}"
    )


def _begin(captured: Captured, topology: Topology, options: Options, deadline: Deadline = NEVER) -> Contest:
    """The contest of a job."""
    bound = topology.device.memory if options.memory is None else options.memory
    model = prepare(captured, options.asked, resting=options.resting, train=options.trains, compiled=options.compile)
    together = model.parameter_bytes if options.hides or options.family.merges else 0.0
    return Contest(Candidates(model, topology, options, together), bound, deadline)


def _meshes(topology: Topology, options: Options) -> list[tuple[int, ...]]:
    """The meshes of a job."""
    chosen = options.family
    every = candidate_meshes(topology.devices, chosen.axes, chosen.least) if options.mesh is None else [options.mesh]
    return [tuple(mesh) for mesh in every]
