"""The planner: for every candidate mesh the integer program's optimum, and of those the best."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from autotp.describe import AXIS_NAMES, Found, describe_plan, memory_of
from autotp.errors import AutotpError, BatchError, MemoryBoundError
from autotp.families import Family, Restriction, family
from autotp.folding import fold
from autotp.ilp import Infeasible, Problem, Pruned, Solution, least_memory, solve
from autotp.plan import Plan
from autotp.pricing import Prices
from autotp.problem import Assembled, assemble, trained_values
from autotp.structure import Choice, Model, Structure, structure
from costmodel import Topology
from costmodel.memory import OPTIMIZERS
from passes.capture import Captured, capture
from passes.factors import analyse

__all__ = ["AXIS_NAMES", "candidate_meshes", "check", "plan", "plan_captured", "prepare"]


def plan(
    model: nn.Module,
    topology: Topology | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    strategy: str = "auto",
    mesh: Sequence[int] | None = None,
    mode: str = "train",
    memory: float | None = None,
    optimizer: str = "adamw",
    panels: int | None = None,
    time_limit: float = 120.0,
) -> Plan:
    """Plans how ``model`` runs on ``topology``. Needs no process group and no device; the model may be on ``meta``.

    Args:
        model: any module that ``torch.export`` takes, unmodified.
        topology: a ``Topology``, or the name or path of one.
        args, kwargs: example inputs of the global batch; left out, a Hugging Face model's ``dummy_inputs`` serve.
        strategy: ``auto`` or a family that restricts the search (see ``autotp.FAMILIES``).
        mesh: sizes of the mesh axes, outermost first; left out, the planner chooses them.
        mode: ``train`` or ``inference``.
        memory: bytes each device may use; by default the device's memory.
        optimizer: which state to count: a key of ``costmodel.memory.OPTIMIZERS``.
        panels: in how many panels every product whose operands are gathered gets them, where that number divides; 1 for
            none. Left out, operands are gathered whole unless the memory bound asks for panels.
        time_limit: seconds for the solver, over all meshes.

    Raises:
        AutotpError: when an argument is wrong.
        CaptureError: when ``torch.export`` refuses the model.
        MemoryBoundError: when no plan fits the memory.
    """
    topology = Topology.load(topology) if isinstance(topology, str) else topology
    check(mode, optimizer, mesh, topology, panels)
    chosen = family(strategy)
    started = time.perf_counter()
    captured = capture(model, tuple(args), kwargs)
    capture_seconds = time.perf_counter() - started
    return plan_captured(
        captured,
        topology,
        chosen,
        mesh=None if mesh is None else tuple(mesh),
        mode=mode,
        memory=memory,
        optimizer=optimizer,
        panels=panels,
        time_limit=time_limit,
        stats={"capture_seconds": capture_seconds},
    )


def check(mode: str, optimizer: str, mesh: Sequence[int] | None, topology: Topology, panels: int | None = None) -> None:
    """Refuses wrong options with an ``AutotpError`` that names the right ones."""
    if panels is not None and (not isinstance(panels, int) or panels < 1):
        raise AutotpError(f"panels {panels!r}: give a positive number, or leave it out")
    if mode not in ("train", "inference"):
        raise AutotpError(f"mode {mode!r} is unknown; choose 'train' or 'inference'")
    if optimizer not in OPTIMIZERS:
        raise AutotpError(f"optimizer {optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    if mesh is not None:
        if not 1 <= len(mesh) <= len(AXIS_NAMES) or any(not isinstance(n, int) or n < 1 for n in mesh):
            raise AutotpError(f"mesh {tuple(mesh)}: give 1 to {len(AXIS_NAMES)} positive sizes")
        if math.prod(mesh) != topology.devices:
            raise AutotpError(
                f"mesh {tuple(mesh)} has {math.prod(mesh)} devices, topology {topology.name!r} has {topology.devices}; "
                f"choose a mesh whose sizes multiply to {topology.devices}, or resize the topology"
            )


def prepare(captured: Captured) -> Model:
    """Analyses and folds a captured model; the same on every mesh."""
    operators = analyse(captured.graph_module.graph, captured.inputs)
    stands = fold(operators, frozenset(captured.parameters))
    return Model(captured, operators, stands, trained_values(captured, operators))


def candidate_meshes(devices: int, axes: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """All ordered factorisations of ``devices`` into ``least`` to ``axes`` sizes above 1, fewest axes first.

    Where ``devices`` has fewer prime factors than ``least``, as many axes as it has.
    """
    if devices == 1:
        yield (1,)
        return
    divisors = [n for n in range(2, devices + 1) if devices % n == 0]
    by_count = [
        [sizes for sizes in itertools.product(divisors, repeat=count) if math.prod(sizes) == devices]
        for count in range(1, axes + 1)
    ]
    most = sum(1 for found in by_count if found)
    for found in by_count[min(least, most) - 1 :]:
        yield from found


def plan_captured(
    captured: Captured,
    topology: Topology,
    chosen: Family,
    *,
    mesh: tuple[int, ...] | None = None,
    mode: str = "train",
    memory: float | None = None,
    optimizer: str = "adamw",
    panels: int | None = None,
    time_limit: float = 120.0,
    stats: Mapping[str, Any] | None = None,
) -> Plan:
    """``plan`` for a model that was captured already."""
    started = time.perf_counter()
    bound = topology.device.memory if memory is None else memory
    model = prepare(captured)
    best: Found | None = None
    lowest, needed = math.inf, math.inf
    indivisible: BatchError | None = None
    meshes = [mesh] if mesh is not None else list(candidate_meshes(topology.devices, chosen.axes, chosen.least))
    proven, solving = True, 0.0
    structures: dict[tuple[Restriction, int], Structure] = {}
    price = 0.0
    for sizes in meshes:
        prices = Prices(topology, sizes, train=mode == "train", optimizer=optimizer)
        for restriction in chosen.restrictions(len(sizes)):
            key = restriction, len(sizes)
            if key not in structures:
                structures[key] = structure(model, *key)
            for count in [1, None] if panels is None else [panels]:  # panels cost time: only where memory is short
                cutoff = math.inf if best is None else best.solution.seconds
                left = max(1.0, time_limit - (time.perf_counter() - started))
                try:
                    assembled, solution, spent = _solve(structures[key], prices, bound, left, cutoff, count, price)
                except BatchError as error:
                    indivisible = error
                    break
                except Infeasible as error:
                    needed = min(needed, error.needed_memory)
                    continue
                solving += spent
                proven = proven and (isinstance(solution, Pruned) or solution.optimal)
                if isinstance(solution, Solution):
                    lowest, price = min(lowest, solution.bound), solution.price or price
                    found = Found(assembled, solution, prices, count)
                    used = memory_of(model, found)
                    if used > bound:
                        needed, proven = min(needed, used), False
                    elif best is None or solution.seconds < best.solution.seconds:
                        best = found
                if not solution.bound_binds:
                    break
    if best is None and indivisible is not None and math.isinf(needed):
        raise indivisible
    if best is None:
        least = _least_memory(structures, chosen, meshes, topology, panels, mode, optimizer)
        needed = least if least > bound else needed
        raise MemoryBoundError(
            f"no plan of strategy {chosen.name!r} fits {bound / 1e9:.3g} GB on each device: the smallest needs "
            f"{needed / 1e9:.3g} GB, {(needed - bound) / 1e9:.3g} GB more; use more devices, a smaller batch, an optimizer "
            "with less state, or strategy 'auto' or 'zero3'",
            needed,
            bound,
        )
    planning = dict(stats or {}) | {
        "seconds": time.perf_counter() - started,
        "solver_seconds": solving,
        "variables": best.solution.variables,
        "method": best.solution.method,
        "meshes": len(meshes),
        "operators": len(model.operators),
        "folded_operators": sum(model.stands[n] is n for n in model.operators),
    }
    return describe_plan(
        model,
        best,
        strategy=chosen.name,
        optimal=proven,
        gap=0.0 if proven else max(0.0, 1 - lowest / best.solution.seconds),
        mode=mode,
        memory_bound=bound,
        planning=planning,
    )


def _solve(
    built: Structure, prices: Prices, bound: float, time_limit: float, cutoff: float, panels: int | None, price: float
) -> tuple[Assembled, Solution | Pruned, float]:
    """The optimum on one mesh, with the solver's seconds.

    A family that only all-reduces may have no way to hand a partial sum on; then it may scatter after all.
    """
    assembled = assemble(built, prices, bound, panels != 1)
    _check_batch(built, assembled)
    begun = time.perf_counter()
    try:
        solution = solve(assembled.problem, time_limit=time_limit, cutoff=cutoff, price=price, need=False, trusted=True)
    except Infeasible as error:
        chosen = built.chosen
        if chosen.family.scatters or math.isfinite(error.needed_memory):
            raise
        loosened = replace(chosen, family=replace(chosen.family, scatters=True))
        return _solve(replace(built, chosen=loosened), prices, bound, time_limit, cutoff, panels, price)
    return assembled, solution, time.perf_counter() - begun


def _least_memory(
    structures: Mapping[tuple[Restriction, int], Structure],
    chosen: Family,
    meshes: Sequence[tuple[int, ...]],
    topology: Topology,
    panels: int | None,
    mode: str,
    optimizer: str,
) -> float:
    """The fewest bytes on each device of any plan: by a lower bound for each mesh, then the most promising ones exactly."""
    variants = [1, None] if panels is None else [panels]

    def problem(mesh: tuple[int, ...], restriction: Restriction, count: int | None) -> Problem:
        prices = Prices(topology, mesh, train=mode == "train", optimizer=optimizer)
        return assemble(structures[restriction, len(mesh)], prices, math.inf, count != 1).problem

    tried = [
        (least_memory(problem(mesh, restriction, count), sweeps=5), mesh, number, count or 0)
        for mesh in meshes
        for number, restriction in enumerate(chosen.restrictions(len(mesh)))
        if (restriction, len(mesh)) in structures
        for count in variants
    ]
    least = math.inf
    for floor, mesh, number, count in sorted(tried):
        if floor >= least:
            break
        with suppress(Infeasible):
            restriction = chosen.restrictions(len(mesh))[number]
            least = min(least, least_memory(problem(mesh, restriction, count or None)))
    return least


def _check_batch(built: Structure, assembled: Assembled) -> None:
    """A family whose axes split the batch needs a batch that they divide."""
    chosen, mesh, model = built.chosen, assembled.mesh, built.model
    if chosen.roles is None:
        return
    axes = [a for a, role in enumerate(chosen.roles) if role == "b" and mesh[a] > 1]
    for (_, choice, _), node in zip(built.nodes, assembled.problem.nodes, strict=True):
        if isinstance(choice, Choice):
            batch = frozenset(f.name for f in choice.space.operator.factors.values() if f.role == "batch")
            if (choice.space.axes_of(batch)[:, axes].all(axis=-1) & np.isfinite(node.cost)).any():
                return
    ways = math.prod(mesh[a] for a in axes)
    shapes = {
        n.name: tuple(n.meta["val"].shape)
        for n in model.captured.graph_module.graph.nodes
        if n.op == "placeholder" and n.name in model.captured.inputs
    }
    if any(shape and shape[0] % ways for shape in shapes.values()):
        raise BatchError(
            f"strategy {chosen.family.name!r} splits the batch {ways} ways on mesh {mesh}, but dim 0 of the example inputs "
            f"{shapes} is not divisible by {ways}; choose a batch that is a multiple of {ways}, or another mesh or strategy"
        )
