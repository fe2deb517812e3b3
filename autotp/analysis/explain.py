"""Why an operator is sharded as it is: the terms of its cost, and the cost of each alternative.

Each alternative has two costs. *In place*: only this operator (and its folded copies) changes, all others keep their
strategies, and the resulting reshards are counted. *Planned*: the alternative is pinned, and all others are planned anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import fx

from autotp.analysis.inspection import Reshard, reshards_of
from autotp.costs.priced import Priced
from autotp.costs.prices import Prices
from autotp.costs.step import Sums
from autotp.costs.what_if import TensorClasses
from autotp.errors import AutotpError
from autotp.planner import plan_captured, prepare
from autotp.plans.constraints import parse
from autotp.plans.families import family
from autotp.plans.options import Options
from autotp.plans.plan import Plan
from autotp.plans.schemes import scheme
from autotp.runtime.rewrite import checked, panelled
from costmodel import compute
from passes.capture import Captured
from passes.graph import note_of
from passes.layouts.layout import describe
from passes.rules.factors import value_of
from passes.rules.shapes import operands_of
from passes.rules.table import flop_of, name_of
from passes.strategies.space import Space, strategies
from passes.strategies.strategy import Strategy

__all__ = ["Alternative", "Explainer", "Explanation", "explain_operator", "priced_plan"]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another strategy of the operator.

    Attributes:
        scheme: its name, if it has one.
        pin: the constraint that selects it.
        layouts: of the operands, then of the results, as text.
        in_place_seconds: of the whole step, if only this operator and its copies change.
        terms: seconds of that step's computation, communication of activations, and communication of parameters, hidden or
            not.
        planned_seconds: of the whole step, planned anew with this strategy pinned; None if not requested, or if there is no
            such plan.
    """

    scheme: str
    pin: str
    layouts: tuple[str, ...]
    in_place_seconds: float
    terms: tuple[float, float, float]
    planned_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One operator of a plan.

    Attributes:
        name, target, module, source: of the captured node; ``source`` is the line in the user's model.
        copies: the number of operators that are decided together with it, itself included.
        factors: of its iteration space: name -> size.
        scheme, layouts: as in the plan.
        pin: the constraint that selects the plan's strategy.
        compute_seconds, inner_seconds, reshard_seconds: of this operator per step: its computation, the collectives inside
            it, and the reshards that are charged to it. Their sum is the plan's ``seconds``.
        expression, values: the compute seconds as a sympy expression, and the values of its symbols.
        reshards: the steps of the reshards that are charged to it.
        bound_ratio: bytes moved over the communication lower bound; None if there is no bound.
        step_seconds, step_terms: of the whole plan, counted as for alternatives (without chunks).
        considered: the number of its strategies on this mesh, within the plan's family.
        alternatives: the best ones, cheapest in place first.
    """

    name: str
    target: str
    module: str
    source: str | None
    copies: int
    factors: Mapping[str, int]
    scheme: str
    layouts: tuple[str, ...]
    pin: str
    compute_seconds: float
    inner_seconds: float
    reshard_seconds: float
    expression: str
    values: Mapping[str, float]
    reshards: tuple[Reshard, ...]
    bound_ratio: float | None
    step_seconds: float
    step_terms: tuple[float, float, float]
    considered: int
    alternatives: tuple[Alternative, ...]

    @property
    def seconds(self) -> float:
        """The operator's seconds per step."""
        return self.compute_seconds + self.inner_seconds + self.reshard_seconds


def priced_plan(captured: Captured, plan: Plan, merged: bool | None = None) -> Priced:
    """Prices the strategies of a plan, without its chunks.

    Args:
        captured: the model that was planned, captured for the same inputs.
        plan: the plan.
        merged: whether the communication of parameters and their gradients is merged into large messages; by default, if
            the plan's schedule overlaps communication.

    Raises:
        PlanMismatchError: the plan is for another model or other inputs.
    """
    operators, chosen, resting = checked(captured, plan)
    model = prepare(captured, parse(plan.constraints), plan.repeated, train=plan.mode == "train", compiled=plan.compile)
    merged = plan.schedule == "overlap" if merged is None else merged
    prices = Prices(
        plan.topology,
        plan.mesh_shape,
        train=plan.mode == "train",
        optimizer=plan.optimizer,
        accumulate=plan.accumulate,
        together=model.parameter_bytes if merged else 0.0,
    )
    panels, found = panelled(plan, operators, chosen, resting)
    once = [name for name, fqn in captured.parameters.items() if fqn in plan.gathered_once]
    return Priced.of(model, prices, chosen, resting, panels, found, once)


def explain_operator(captured: Captured, plan: Plan, name: str, *, count: int = 5, planned: int = 1) -> Explanation:
    """Explains one operator of a plan.

    Args:
        captured: the model that was planned, captured for the same inputs.
        plan: the plan.
        name: of the operator in the plan.
        count: the number of alternatives to list.
        planned: the number of these for which all other operators are planned anew.

    Raises:
        AutotpError: the plan has no such operator; the message lists some that it has.
        PlanMismatchError: the plan is for another model or other inputs.
    """
    return Explainer(captured, plan).explain(name, count, planned)


class Explainer:
    """Explains operators of one plan; see `explain_operator`."""

    def __init__(self, captured: Captured, plan: Plan) -> None:
        self.captured, self.plan = captured, plan
        self.priced = priced_plan(captured, plan)
        self.model, self.prices = self.priced.model, self.priced.prices
        self.nodes = {node.name: node for node in self.model.operators}
        self.entries = {op.name: op for op in plan.operators}
        self.classes = TensorClasses(self.priced)
        self.whole = self.step(self.priced.sums)

    def explain(self, name: str, count: int = 5, planned: int = 1) -> Explanation:
        """See `explain_operator`."""
        if name not in self.nodes:
            said = ", ".join(list(self.entries)[:8])
            raise AutotpError(f"the plan has no operator {name!r}; its operators are {said}, … (see `autotp inspect`)")
        node, entry = self.nodes[name], self.entries[name]
        operator, strategy = self.model.operators[node], self.priced.strategies[name]
        cost = self.priced.costs[node]
        work = self.prices.work(Space.alone(operator, strategy), flop_of(node), self.priced.runs.run(node))
        values = {} if work is None else work.values(self.plan.topology.device)
        others = list(self.others(node))
        costed = (self.alternative(node, each) for each in (others if count else ()))
        best = sorted(costed, key=lambda each: each.in_place_seconds)
        alternatives = [self.planned(each, node) if i < planned else each for i, each in enumerate(best[:count])]
        return Explanation(
            name=name,
            target=name_of(node),
            module=note_of(node).module,
            source=note_of(node).source,
            copies=len(self.copies(node)),
            factors={f.name: f.size for f in operator.factors.values()},
            scheme=entry.scheme,
            layouts=entry.layouts,
            pin=self.pin(name, strategy),
            compute_seconds=cost.own.compute,
            inner_seconds=cost.own.communication,
            reshard_seconds=cost.reshards,
            expression=str(self.prices.accumulate * compute.KERNEL) if work is not None else "0",
            values={str(symbol): np.asarray(value).item() for symbol, value in values.items()},
            reshards=reshards_of(self.plan, self.priced, node),
            bound_ratio=entry.bound_ratio,
            step_seconds=self.whole,
            step_terms=_terms(self.priced.sums),
            considered=len(others) + 1,
            alternatives=tuple(alternatives),
        )

    def copies(self, node: fx.Node) -> list[fx.Node]:
        """The operators that are decided together with ``node``, itself included."""
        stand = self.model.stands[node]
        return [other for other in self.model.operators if self.model.stands[other] is stand]

    def step(self, sums: Sums) -> float:
        """Seconds of a step under the plan's schedule."""
        return sums.seconds(hides=self.plan.schedule == "overlap")

    def others(self, node: fx.Node) -> Iterator[Strategy]:
        """The operator's other strategies on this mesh, within the plan's family."""
        operator, mine = self.model.operators[node], self.priced.strategies[node.name]
        ways = family(self.plan.strategy).restrictions(len(self.plan.mesh_shape))

        def allow(axis: int, factor: Any) -> bool:
            return any(way.allows(operator, axis, factor) for way in ways)

        for strategy in strategies(operator, self.plan.mesh_shape, allow):
            if strategy.assignment != mine.assignment:
                yield strategy

    def alternative(self, node: fx.Node, strategy: Strategy) -> Alternative:
        """The alternative of a strategy, with its cost if only this operator and its copies change."""
        operands = operands_of(node)
        have = [self.priced.layouts[value_of(n)] for n in operands]
        parameters = [n.name in self.captured.parameters for n in operands]
        called = scheme(self.model.operators[node], strategy, have, parameters)
        shown = [w.layout for w in strategy.wants] + list(strategy.results)
        layouts = tuple(describe(layout, self.plan.mesh_axes) for layout in shown)
        sums = self.classes.changed(node, strategy)
        return Alternative(called, self.pin(node.name, strategy), layouts, self.step(sums), _terms(sums))

    def pin(self, name: str, strategy: Strategy) -> str:
        """The constraint that selects a strategy."""
        served = zip(self.plan.mesh_axes, strategy.assignment, strict=True)
        return f"{name}=" + " ".join(f"{factor or '-'}@{axis}" for axis, factor in served)

    def planned(self, other: Alternative, node: fx.Node) -> Alternative:
        """The alternative with the seconds of a step that is planned anew around it; unchanged if there is no such plan."""
        terms = other.pin.partition("=")[2]
        pins = [f"{copy.name}={terms}" for copy in self.copies(node)]
        plan = self.plan
        try:
            options = replace(Options.of(plan), chunks={}, constraints=[*plan.constraints, *pins])
            found = plan_captured(self.captured, plan.topology, options)
        except AutotpError:
            return other
        return replace(other, planned_seconds=found.predicted.step_seconds)


def _terms(sums: Sums) -> tuple[float, float, float]:
    return sums.compute, sums.activations, sums.parameters
