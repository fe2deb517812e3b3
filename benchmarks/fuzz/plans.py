"""Plans of cases: the planner's, or plans with random strategies that an optimal plan would not contain.

Random strategies are stored by step of the module, not by node of the graph, so that they remain valid while a case is
shrunk.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn

from autotp.planner import plan_captured
from autotp.plans.options import Options
from autotp.plans.plan import Plan
from autotp.plans.plan_file import decode_layout, encode_layout
from benchmarks.fuzz.case import Case, build, lines_of
from costmodel import Topology
from costmodel.errors import AutotpError
from passes.capture import Captured, capture
from passes.graph import note_of
from passes.layouts.codes import fits, restorable
from passes.layouts.layout import Layout, place
from passes.rules.factors import Operator, analyse
from passes.rules.table import name_of
from passes.sharding.panel import loops
from passes.strategies.space import strategies
from passes.strategies.strategy import LINEAR_PREFIX, Strategy

__all__ = ["Use", "decided", "machine", "planned", "use_of", "uses_of"]

#: (rule, use of one mesh axis): the name of a factor in the rule, "+i" (a linear pseudo-factor), or "replicated".
Use = tuple[str, str]

_FREE = {"bandwidth": "1000000 GB/s", "latency": "0.000001 us"}


def machine(case: Case) -> Topology:
    """The machine that a case is planned for."""
    return Topology.flat(case.options.devices, **(_FREE if case.options.free else {}))


def planned(case: Case, model: nn.Module, args: Sequence[Tensor]) -> tuple[Captured, Plan]:
    """The captured model and the plan of a case, with the random strategies and resting layouts of its options."""
    options = case.options
    topology = machine(case)
    asked = Options(
        options.family,
        mesh=options.mesh,
        mode="inference" if options.inference else "train",
        memory=options.memory,
        panels=options.panels,
        chunks=options.chunks,
        schedule=options.schedule,
        constraints=options.constraints,
        recompute=options.recompute,
        reshard_after_forward=options.reshard_after_forward,
    )
    asked.check(topology)
    captured = capture(model, tuple(args))
    plan = plan_captured(captured, topology, asked)
    try:  # through a file, as other processes receive it
        plan = Plan.from_json(plan.to_json())
    except AutotpError as error:
        raise ValueError(f"a plan that no process takes: {error}") from error
    return captured, _changed(case, captured, plan) if options.served or options.rests else plan


def steps_of(case: Case, captured: Captured) -> Mapping[str, tuple[str, int]]:
    """Operator -> (name of the step that it comes from, its index among the operators of this step)."""
    lines, seen, found = lines_of(case), Counter[str](), {}
    for node in captured.graph_module.graph.nodes:
        if node.op == "call_function":
            line = (note_of(node).source or "").rpartition(":")[2]
            step = lines.get(int(line), "") if line.isdigit() else ""
            found[node.name] = (step, seen[step])
            seen[step] += 1
    return found


def _changed(case: Case, captured: Captured, plan: Plan) -> Plan:
    operators = analyse(captured.graph_module.graph, captured.inputs)
    places = steps_of(case, captured)
    chosen = {}
    for node, operator in operators.items():
        wanted = case.options.served.get(places[node.name])
        now = plan.assignments[node.name]
        chosen[node.name] = now if wanted is None else nearest(operator, plan.mesh_shape, wanted).assignment
    layouts = dict(plan.layouts)
    shapes = {fqn: _shape(captured, name) for name, fqn in captured.parameters.items()}
    for name, encoded in case.options.rests.items():
        layout = decode_layout(encoded)
        if name in layouts and fits(shapes[name], layout, plan.mesh_shape) and restorable(layout, plan.mesh_shape):
            layouts[name] = layout
    plan = dataclasses.replace(
        plan,
        operators=tuple(dataclasses.replace(op, assignment=chosen[op.name], panels=1) for op in plan.operators),
        layouts=layouts,
        gathered_once=tuple(layouts) if case.options.reshard_after_forward is False else (),
    )
    panels = _panels(case, captured, operators, plan)
    return dataclasses.replace(
        plan, operators=tuple(dataclasses.replace(op, panels=panels.get(op.name, 1)) for op in plan.operators)
    )


def _panels(case: Case, captured: Captured, operators: Mapping[fx.Node, Operator], plan: Plan) -> dict[str, int]:
    """The number of panels of every panelled operator: the case's, where it divides the largest possible number."""
    count = case.options.panels or 1
    if count == 1:
        return {}
    chosen = {node.name: nearest(op, plan.mesh_shape, plan.assignments[node.name]) for node, op in operators.items()}
    resting: dict[str, Layout] = {name: plan.resting(fqn) for name, fqn in captured.parameters.items()}
    found = loops(operators, chosen, resting, plan.mesh_shape)
    return {node.name: count for loop in found for node in loop.members if loop.most % count == 0}


def nearest(operator: Operator, mesh: tuple[int, ...], wanted: Sequence[str | None]) -> Strategy:
    """The strategy that agrees with an assignment on the most axes."""

    def allow(axis: int, factor: object) -> bool:
        name = wanted[axis] or ""
        return name == factor.name if factor is not None else name.startswith(LINEAR_PREFIX)  # type: ignore[attr-defined]

    found = list(strategies(operator, mesh, allow))
    return max(found, key=lambda s: sum(a == b and a is not None for a, b in zip(s.assignment, wanted, strict=True)))


def decided(case: Case, rng: random.Random) -> Case:
    """The case with random strategies and resting layouts in its options; unchanged if it cannot be captured."""
    model, args = build(case)
    try:
        captured = capture(model, args)
    except Exception:  # noqa: BLE001 - it recurs, and is counted, when the case runs
        return case
    operators, mesh = analyse(captured.graph_module.graph, captured.inputs), case.options.mesh
    places = steps_of(case, captured)
    served = {}
    for node, operator in operators.items():
        names = [f.name for f in operator.factors.values() if f.offered]
        if operator.rule is not None and operator.rule.linear and operator.sums:
            names += [LINEAR_PREFIX + str(i) for i in range(len(operator.rule.linear))]
        wanted = [rng.choice(names) if names and rng.random() < 0.85 else None for _ in mesh]
        served[places[node.name]] = nearest(operator, mesh, wanted).assignment
    rests = {fqn: tuple(encode_layout(_rest(_shape(captured, n), mesh, rng))) for n, fqn in captured.parameters.items()}
    return case.where(served=served, rests=rests, constraints=(), family="auto")


def _shape(captured: Captured, name: str) -> tuple[int, ...]:
    node = next(n for n in captured.graph_module.graph.nodes if n.name == name)
    return tuple(node.meta["val"].shape)


def _rest(shape: tuple[int, ...], mesh: tuple[int, ...], rng: random.Random) -> Layout:
    layout = list(decode_layout(["R"] * len(mesh)))
    for axis in range(len(mesh)):
        tried = (*layout[:axis], place(rng.randrange(max(1, len(shape)))), *layout[axis + 1 :])
        if rng.random() < 0.6 and fits(shape, tried, mesh) and restorable(tried, mesh):
            layout = list(tried)
    return tuple(layout)


def use_of(operator: Operator, name: str | None) -> Use:
    """The use of an axis for ``name``: the factor's name in the rule, marked if it is a minor part of a cut factor."""
    rule = name_of(operator.node)
    if name is None:
        return rule, "replicated"
    if name.startswith(LINEAR_PREFIX):
        return rule, name
    factor = operator.factors[name]
    base = factor.base.partition("_")[0]
    return rule, base if factor.part == 0 else f"{base} (minor)"


@dataclass(frozen=True, slots=True)
class Uses:
    """The uses of a mesh axis that the strategies of a case's operators offered, and those that its plan took."""

    offered: frozenset[Use]
    taken: frozenset[Use]


def uses_of(captured: Captured, plan: Plan) -> Uses:
    """The uses of mesh axes that were offered to a plan, and those that it took."""
    offered: set[Use] = set()
    taken: set[Use] = set()
    for node, operator in analyse(captured.graph_module.graph, captured.inputs).items():
        if operator.rule is None:
            continue
        names = [f.name for f in operator.factors.values() if f.offered]
        if operator.rule.linear and operator.sums:
            names += [LINEAR_PREFIX + str(i) for i in range(len(operator.rule.linear))]
        offered.add(use_of(operator, None))
        offered |= {use_of(operator, name) for name in names if _alone(operator, name, plan.mesh_shape)}
        taken |= {use_of(operator, name) for name in plan.assignments[node.name]}
    return Uses(frozenset(offered | taken), frozenset(taken))


def _alone(operator: Operator, name: str, mesh: tuple[int, ...]) -> bool:
    """Whether some mesh axis can be mapped to a factor while all other axes are unused."""
    return any(_serves(operator, name, mesh, axis) for axis in range(len(mesh)))


def _serves(operator: Operator, name: str, mesh: tuple[int, ...], axis: int) -> bool:
    wanted: list[str | None] = [None] * len(mesh)
    wanted[axis] = name
    return nearest(operator, mesh, wanted).assignment[axis] == name
