"""The planner: for every candidate mesh the integer program's optimum, and of those the best."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from autotp.errors import AutotpError, MemoryBoundError
from autotp.families import Family, family
from autotp.folding import fold
from autotp.ilp import Infeasible, Solution, solve
from autotp.plan import Plan, PlannedOperator, Predicted, fingerprint
from autotp.pricing import Price, Prices, flop_of
from autotp.problem import Assembled, Model, assemble, trained_values
from autotp.schemes import scheme
from costmodel import Topology
from costmodel.memory import OPTIMIZERS
from passes.capture import Captured, capture
from passes.factors import analyse, value_of
from passes.layout import Layout, describe
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import name_of
from passes.strategy import SUM, Strategy, Want, whole_layout

__all__ = ["AXIS_NAMES", "candidate_meshes", "check", "plan", "plan_captured", "prepare"]

#: Names of mesh axes, outermost first.
AXIS_NAMES = ("x", "y", "z", "w")


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
        time_limit: seconds for the solver, over all meshes.

    Raises:
        AutotpError: when an argument is wrong.
        CaptureError: when ``torch.export`` refuses the model.
        MemoryBoundError: when no plan fits the memory.
    """
    topology = Topology.load(topology) if isinstance(topology, str) else topology
    check(mode, optimizer, mesh, topology)
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
        time_limit=time_limit,
        stats={"capture_seconds": capture_seconds},
    )


def check(mode: str, optimizer: str, mesh: Sequence[int] | None, topology: Topology) -> None:
    """Refuses wrong options with an ``AutotpError`` that names the right ones."""
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


def candidate_meshes(devices: int, axes: int) -> Iterator[tuple[int, ...]]:
    """All ordered factorisations of ``devices`` into at most ``axes`` sizes above 1, fewest axes first."""
    if devices == 1:
        yield (1,)
        return
    divisors = [n for n in range(2, devices + 1) if devices % n == 0]
    for count in range(1, axes + 1):
        for sizes in itertools.product(divisors, repeat=count):
            if math.prod(sizes) == devices:
                yield sizes


def plan_captured(
    captured: Captured,
    topology: Topology,
    chosen: Family,
    *,
    mesh: tuple[int, ...] | None = None,
    mode: str = "train",
    memory: float | None = None,
    optimizer: str = "adamw",
    time_limit: float = 120.0,
    stats: Mapping[str, Any] | None = None,
) -> Plan:
    """``plan`` for a model that was captured already."""
    started = time.perf_counter()
    bound = topology.device.memory if memory is None else memory
    model = prepare(captured)
    best: tuple[Solution, Assembled, Prices] | None = None
    lowest, needed = math.inf, math.inf
    meshes = [mesh] if mesh is not None else list(candidate_meshes(topology.devices, chosen.axes))
    proven, solving = True, 0.0
    for sizes in meshes:
        prices = Prices(topology, sizes, train=mode == "train", optimizer=optimizer)
        cutoff = math.inf if best is None else best[0].seconds
        left = max(1.0, time_limit - (time.perf_counter() - started))
        try:
            assembled, solution, spent = _solve(model, sizes, chosen, prices, bound, left, cutoff)
        except Infeasible as error:
            needed = min(needed, error.needed_memory)
            continue
        solving += spent
        if solution is None:
            continue
        proven = proven and solution.optimal
        lowest = min(lowest, solution.bound)
        if best is None or solution.seconds < best[0].seconds:
            best = solution, assembled, prices
    if best is None:
        raise MemoryBoundError(
            f"no plan of strategy {chosen.name!r} fits {bound / 1e9:.3g} GB on each device: the smallest needs "
            f"{needed / 1e9:.3g} GB, {(needed - bound) / 1e9:.3g} GB more; use more devices, a smaller batch, an optimizer "
            "with less state, or strategy 'auto' or 'zero3'",
            needed,
            bound,
        )
    solution, assembled, prices = best
    gap = 0.0 if proven else max(0.0, 1 - lowest / solution.seconds)
    planning = dict(stats or {}) | {
        "seconds": time.perf_counter() - started,
        "solver_seconds": solving,
        "variables": solution.variables,
        "method": solution.method,
        "meshes": len(meshes),
        "operators": len(model.operators),
        "folded_operators": sum(model.stands[n] is n for n in model.operators),
    }
    return _describe(model, assembled, solution, prices, chosen, bound, proven, gap, mode, planning)


def _solve(
    model: Model,
    mesh: tuple[int, ...],
    chosen: Family,
    prices: Prices,
    bound: float,
    time_limit: float,
    cutoff: float,
) -> tuple[Assembled, Solution | None, float]:
    """The optimum on one mesh, with the solver's seconds.

    A family that only all-reduces may have no way to hand a partial sum on; then it may scatter after all.
    """
    assembled = assemble(model, mesh, chosen, prices, bound)
    _check_batch(chosen, model, assembled, mesh)
    begun = time.perf_counter()
    try:
        solution = solve(assembled.problem, time_limit=time_limit, cutoff=cutoff)
    except Infeasible as error:
        if chosen.scatters or math.isfinite(error.needed_memory):
            raise
        return _solve(model, mesh, replace(chosen, scatters=True), prices, bound, time_limit, cutoff)
    return assembled, solution, time.perf_counter() - begun


def _check_batch(chosen: Family, model: Model, assembled: Assembled, mesh: tuple[int, ...]) -> None:
    """A family whose axes split the batch needs a batch that they divide."""
    if chosen.model_axes is None:
        return
    axes = [a for a in range(len(mesh)) if a not in chosen.model_axes(len(mesh)) and mesh[a] > 1]
    for node, operator in model.operators.items():
        if model.stands[node] is node:
            for strategy in assembled.choices[assembled.index[node]]:
                served = [strategy.assignment[a] or "" for a in axes]  # type: ignore[union-attr]
                if all(f in operator.factors and operator.factors[f].role == "batch" for f in served):
                    return
    ways = math.prod(mesh[a] for a in axes)
    shapes = {
        n.name: tuple(n.meta["val"].shape)
        for n in model.captured.graph_module.graph.nodes
        if n.op == "placeholder" and n.name in model.captured.inputs
    }
    if any(shape and shape[0] % ways for shape in shapes.values()):
        raise AutotpError(
            f"strategy {chosen.name!r} splits the batch {ways} ways on mesh {mesh}, but dim 0 of the example inputs "
            f"{shapes} is not divisible by {ways}; choose a batch that is a multiple of {ways}, or another mesh or strategy"
        )


def _describe(
    model: Model,
    assembled: Assembled,
    solution: Solution,
    prices: Prices,
    chosen: Family,
    bound: float,
    proven: bool,
    gap: float,
    mode: str,
    planning: Mapping[str, Any],
) -> Plan:
    captured, mesh = model.captured, prices.mesh
    names = AXIS_NAMES[: len(mesh)]
    whole = whole_layout(len(mesh))
    graph = captured.graph_module.graph

    def choice(node: fx.Node) -> Any:
        index = assembled.index[model.stands.get(node, node)]
        return assembled.choices[index][solution.choice[index]]

    layouts: dict[Any, Layout] = {}
    resting: dict[str, Layout] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            layouts[(node, 0)] = choice(node) if node.name in captured.parameters else whole
            if node.name in captured.parameters:
                resting[captured.parameters[node.name]] = layouts[(node, 0)]
    copies: dict[fx.Node, int] = {}
    for node in model.operators:
        copies[model.stands[node]] = copies.get(model.stands[node], 0) + 1
    seen: set = set()
    planned = []
    compute = communication = 0.0
    for node, operator in model.operators.items():
        strategy: Strategy = choice(node)
        gradient = any((node, i) in model.trained for i in range(len(results_of(node))))
        own = prices.operator(operator, strategy, flop_of(node), gradient=gradient)
        moved, received = own[1], own[2]
        weights = []
        for operand, want in zip(operands_of(node), strategy.wants, strict=True):
            price = _edge(model, prices, layouts, seen, operand, want)
            moved, received = moved + price[1], received + price[2]
            if operand.name in captured.parameters:
                weights.append(layouts[(operand, 0)])
        for i, layout in enumerate(strategy.results):
            layouts[(node, i)] = layout
        compute, communication = compute + own[0], communication + moved
        shown = [w.layout for w in strategy.wants] + list(strategy.results)
        used = sorted({f for f in strategy.assignment if f is not None and not f.startswith(SUM)})
        planned.append(
            PlannedOperator(
                name=node.name,
                target=name_of(node),
                module=str(node.meta.get("module", "")),
                scheme=scheme(operator, strategy, weights),
                assignment=strategy.assignment,
                strategy={f: tuple(names[a] for a in strategy.axes(f)) for f in used},
                layouts=tuple(describe(layout, names) for layout in shown),
                count=copies[model.stands[node]],
                fold=model.stands[node].name,
                seconds=own[0] + moved,
                communication_seconds=moved,
                bytes_moved=received,
                replicated=operator.rule is None and bool(operands_of(node)),
            )
        )
    for leaf in graph.output_node().args[0]:  # type: ignore[union-attr]
        if isinstance(leaf, fx.Node) and value_of(leaf) in layouts:
            communication += _edge(model, prices, layouts, seen, leaf, Want(whole, whole))[1]
    for fqn in captured.unused:
        resting[fqn] = whole
    step = compute + communication
    return Plan(
        strategy=chosen.name,
        mesh_shape=mesh,
        mesh_axes=names,
        topology=prices.topology,
        operators=tuple(planned),
        layouts=resting,
        optimal=proven,
        gap=gap,
        predicted=Predicted(step, compute, communication, communication, solution.memory),
        model_hash=fingerprint(captured),
        mode=mode,
        optimizer=prices.optimizer,
        memory_bound=bound,
        planning=planning,
    )


def _edge(model: Model, prices: Prices, layouts: Mapping, seen: set, operand: fx.Node, want: Want) -> Price:
    value = value_of(operand)
    key = value, want
    if key in seen:
        return Price(0.0, 0.0, 0.0)
    seen.add(key)
    parameter = value[0].name in model.captured.parameters
    return prices.reshard(operand.meta["val"], layouts[value], want, gradient=value in model.trained, regather=parameter)
