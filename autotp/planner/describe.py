"""From the solver's choice to a ``Plan``: every operator with its scheme, its costs and its panels."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch import fx

from autotp.costs.footprint import Footprint, Moment
from autotp.costs.model import Model
from autotp.costs.panels import choose_panels
from autotp.costs.prices import Prices
from autotp.costs.step import Priced, Sums
from autotp.planner.assemble import Assembled
from autotp.planner.ilp import Solution
from autotp.plans.plan import AXIS_NAMES, Plan, PlannedOperator, Predicted, fingerprint
from autotp.plans.schemes import scheme
from costmodel import bounds
from passes.graph import note_of
from passes.layouts.layout import Layout, describe
from passes.rules.factors import Value, value_of
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import name_of, rule_of
from passes.sharding.panel import Loop, loops
from passes.strategies.strategy import LINEAR_PREFIX, Strategy, whole_layout

__all__ = ["AXIS_NAMES", "Found", "describe_plan", "held_of", "memory_of", "priced"]


@dataclass(frozen=True, slots=True)
class Found:
    """A solution with what it was found for.

    Attributes:
        assembled: the integer program.
        solution: its optimum.
        prices: of the mesh.
        panels: panels of each product: a number, None for the fastest; 1 for none.
    """

    assembled: Assembled
    solution: Solution
    prices: Prices
    panels: int | None = 1


def describe_plan(model: Model, found: Found, *, sums: Sums | None = None, **fields: Any) -> Plan:
    """The plan of a solution.

    Args:
        model: that was planned.
        found: the solution.
        sums: what a step takes where communication is hidden; None: nothing hides it.
        fields: the plan's fields that the solution does not decide.
    """
    return _Description(model, found).plan(sums, **fields)


def priced(model: Model, found: Found) -> tuple[Priced, bool]:
    """A solution's strategies with their prices, and whether some products have panels."""
    description = _Description(model, found)
    panels = description.panels()
    return description.priced(), bool(panels)


def memory_of(model: Model, found: Found) -> float:
    """Bytes on each device at the worst moment of a step (see ``autotp.costs.footprint``)."""
    return max(held_of(model, found).values())


def held_of(model: Model, found: Found) -> dict[Moment, float]:
    """Bytes on each device at every moment of a step (see ``autotp.costs.footprint``)."""
    description = _Description(model, found)
    description.panels()
    footprint = description.footprint()
    footprint.run()
    return footprint.held


class _Description:
    def __init__(self, model: Model, found: Found) -> None:
        self.model, self.found, self.prices = model, found, found.prices
        self.captured, self.mesh = model.captured, found.prices.mesh
        self.graph = self.captured.graph_module.graph
        self.strategies: dict[str, Strategy] = {node.name: self.choice(node) for node in model.operators}
        whole = whole_layout(len(self.mesh))
        self.resting: dict[str, Layout] = {}
        self.layouts: dict[Value, Layout] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                parameter = node.name in self.captured.parameters
                self.layouts[(node, 0)] = self.choice(node) if parameter else whole
                if parameter:
                    self.resting[node.name] = self.layouts[(node, 0)]
        for node in model.operators:
            for i, layout in enumerate(self.strategies[node.name].results):
                self.layouts[(node, i)] = layout

    def choice(self, node: fx.Node) -> Any:
        stand, assembled = self.model.stands.get(node, node), self.found.assembled
        return assembled.chosen(stand, self.found.solution.choice[assembled.structure.index[stand]])

    def plan(self, sums: Sums | None, **fields: Any) -> Plan:
        model, names = self.model, AXIS_NAMES[: len(self.mesh)]
        panels = self.panels()
        own = self.priced().operators()
        moved, unassigned = self.edges()
        copies: dict[fx.Node, int] = defaultdict(int)
        for node in model.operators:
            copies[model.stands[node]] += 1
        planned = []
        for node, operator in model.operators.items():
            strategy = self.strategies[node.name]
            operands = operands_of(node)
            have = [self.layouts[value_of(n)] for n in operands]
            communication = own[node].communication + moved[node][0]
            shown = [w.layout for w in strategy.wants] + list(strategy.results)
            used = sorted({f for f in strategy.assignment if f is not None and not f.startswith(LINEAR_PREFIX)})
            planned.append(
                PlannedOperator(
                    name=node.name,
                    target=name_of(node),
                    module=note_of(node).module,
                    scheme=scheme(operator, strategy, have, [n.name in self.captured.parameters for n in operands]),
                    assignment=strategy.assignment,
                    strategy={f: tuple(names[a] for a in strategy.axes(f)) for f in used},
                    layouts=tuple(describe(layout, names) for layout in shown),
                    count=copies[model.stands[node]],
                    fold=model.stands[node].name,
                    seconds=own[node].compute + communication,
                    communication_seconds=communication,
                    bytes_moved=own[node].received + moved[node][1],
                    bound_bytes=self.bound(node),
                    panels=panels.get(node.name, 1),
                    replicated=operator.rule is None and bool(operands),
                )
            )
        compute = sum(price.compute for price in own.values())
        communication = sum(op.communication_seconds for op in planned) + unassigned
        step = compute + communication
        if sums is not None:
            compute, communication, step = sums.compute, sums.communication, sums.step
        resting = {self.captured.parameters[name]: layout for name, layout in self.resting.items()}
        resting |= {fqn: whole_layout(len(self.mesh)) for fqn in self.captured.unused}
        return Plan(
            mesh_shape=self.mesh,
            mesh_axes=names,
            topology=self.prices.topology,
            operators=tuple(planned),
            layouts=resting,
            predicted=Predicted(step, compute, communication, step - compute, self.memory()),
            model_hash=fingerprint(self.captured),
            optimizer=self.prices.optimizer,
            **fields,
        )

    def panels(self) -> dict[str, int]:
        self.loops: list[Loop] = []
        self.chosen_panels: dict[str, int] = {}
        if self.found.panels == 1:
            return {}
        possible = loops(self.model.operators, self.strategies, self.resting, self.mesh)
        chosen = choose_panels(possible, self.model.operators, self.strategies, self.prices, self.found.panels)
        self.loops = [loop for loop in possible if loop.members[0].name in chosen]
        self.chosen_panels = dict(chosen)
        return chosen

    def edges(self) -> tuple[dict[fx.Node, tuple[float, float]], float]:
        """Seconds and bytes received of each operator's reshards, and the seconds of those that belong to none."""
        found: dict[fx.Node, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        unassigned = 0.0
        for moved, charged in self.priced().charged():
            price = moved.price
            if not charged:
                unassigned += price.communication
            for user in charged:
                seconds, received = found[user]
                found[user] = seconds + price.communication / len(charged), received + price.received / len(charged)
        return found, unassigned

    def priced(self) -> Priced:
        """The chosen strategies with their prices."""
        return Priced(self.model, self.prices, self.strategies, self.layouts, self.again())

    def again(self) -> set[tuple[Value, fx.Node]]:
        """Which products gather their data operand again for the backward pass: (operand, product)."""
        return {(value_of(loop.data), node) for loop in self.loops for node in loop.members if loop.absorbed[0]}

    def memory(self) -> float:
        """See ``memory_of``."""
        return self.footprint().run()

    def footprint(self) -> Footprint:
        """A step, not walked through yet."""
        return Footprint(self.model, self.prices, self.strategies, self.layouts, self.chosen_panels, self.again())

    def bound(self, node: fx.Node) -> float:
        """Bytes that a matrix product with a weight must move at least, forward and backward."""
        table, operator = rule_of(node), self.model.operators[node]
        operands = operands_of(node)
        weights = [n for n in operands if n.name in self.captured.parameters and n.meta["val"].dim() == 2]
        if table is None or table.kind != "product" or operator.rule is None or not weights:
            return 0.0
        m, k, n = (math.prod(f.size for f in operator.factors.values() if f.kind == kind) for kind in ("m", "k", "n"))
        least = bounds.matmul_elements(m, k, n, math.prod(self.mesh)) * results_of(node)[0].element_size()
        products = 1
        if self.prices.train:
            products += sum(value_of(o) in self.model.trained for o in operands if o.meta["val"].dim() > 1)
        return float(products * least)
