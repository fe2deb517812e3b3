"""From the solver's choice to a ``Plan``: every operator with its scheme, its costs and its panels."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import fx

from autotp.costs.footprint import Footprint
from autotp.costs.layers import held_in_layers
from autotp.costs.model import Model
from autotp.costs.panels import choose_panels
from autotp.costs.priced import Priced
from autotp.costs.prices import Prices
from autotp.costs.recompute import decided
from autotp.costs.step import Moment, Sums
from autotp.costs.transit import gathers
from autotp.planner.assemble import Assembled
from autotp.planner.folding import folded
from autotp.planner.ilp import Solution
from autotp.plans.plan import AXIS_NAMES, Plan, PlannedOperator, fingerprint
from autotp.plans.schemes import scheme
from costmodel import bounds
from passes.graph import cast_of, note_of
from passes.layouts.layout import describe
from passes.rules.factors import value_of
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import name_of, rule_of
from passes.sharding.panel import loops
from passes.strategies.strategy import LINEAR_PREFIX, whole_layout

__all__ = ["AXIS_NAMES", "Found", "describe_plan"]


@dataclass(frozen=True, eq=False)
class Found:
    """A solution with its integer program and prices. Its costs are computed once, at the first access.

    Attributes:
        assembled: the integer program.
        solution: a solution of it.
        prices: of the mesh.
        panels: panels of each product: a number, 1 for none; None for the fastest.
        layers: the share of identical layers, from the first on, in which undecided operators, and parameters that may be
            gathered again, follow ``other`` instead of the solution.
        other: what is rematerialized in those layers.
        spared: the part of ``other`` that follows the solution in the last of those layers nevertheless.
    """

    assembled: Assembled
    solution: Solution
    prices: Prices
    panels: int | None = 1
    layers: float = 0.0
    other: Set[fx.Node] = frozenset()
    spared: Set[fx.Node] = frozenset()

    @cached_property
    def rematerialized(self) -> Set[fx.Node]:
        """The undecided operators that are recomputed, and the parameters that are gathered again."""
        model, mine = self.assembled.structure.model, self.assembled.rematerialized(self.solution.choice)
        copies = Counter(model.stands.values())
        met: Counter[fx.Node] = Counter()
        found = set()
        for node in (*model.undecided, *self._parameters):
            stand = model.stands.get(node, node)
            first = met[stand] < round(self.layers * copies[stand]) - (stand in self.spared)
            met[stand] += 1
            if stand in (self.other if first else mine):
                found.add(node)
        return found

    @cached_property
    def model(self) -> Model:
        """The model with the decision what is recomputed."""
        model = self.assembled.structure.model
        if not model.undecided:
            return model
        found = decided(model, [node for node in model.undecided if node in self.rematerialized])
        return folded(found) if self.layers else found

    @cached_property
    def priced(self) -> Priced:
        """The strategies with their prices, and the panels of the products."""
        model, prices = self.model, self.prices
        chosen = functools.cache(self._chosen)
        strategies = {node.name: chosen(self._stand(node)) for node in model.operators}
        given = model.captured.graph_module.graph.find_nodes(op="placeholder")
        resting = {node.name: chosen(self._stand(node)) for node in given if node.name in model.placed}
        possible = [] if self.panels == 1 else loops(model.operators, strategies, resting, prices.mesh)
        panels = choose_panels(possible, model.operators, strategies, prices, self.panels)
        once = [node.name for node in self._parameters if node not in self.rematerialized]
        return Priced.of(model, prices, strategies, resting, panels, possible, once)

    @property
    def _parameters(self) -> list[fx.Node]:
        captured = self.assembled.structure.model.captured
        return [n for n in captured.graph_module.graph.find_nodes(op="placeholder") if n.name in captured.parameters]

    @cached_property
    def held(self) -> Mapping[Moment, float]:
        """Bytes on each device at every moment of a step (see ``autotp.costs.footprint``)."""
        return self._simulated(self.model)

    @cached_property
    def nearly_held(self) -> Mapping[Moment, float]:
        """``held`` without the moments of most identical layers, up to rounding (see ``autotp.costs.layers``)."""
        return held_in_layers(self.model, self._simulated)

    def _simulated(self, model: Model) -> Mapping[Moment, float]:
        footprint = Footprint(replace(self.priced, model=model))
        footprint.run()
        return footprint.held

    @property
    def memory(self) -> float:
        """Bytes on each device at the worst moment of a step."""
        return max(self.held.values(), default=0.0)

    def proven(self, seconds: float, bound: float) -> Found:
        """The same choice, with its step time and a lower bound on that of all choices, in seconds."""
        found = copy.copy(self)  # keeps cached properties
        object.__setattr__(found, "solution", replace(self.solution, seconds=seconds, bound=bound))
        return found

    def _stand(self, node: fx.Node) -> fx.Node:
        """The node that stands for it."""
        return self.assembled.structure.model.stands.get(node, node)

    def _chosen(self, stand: fx.Node) -> Any:
        """The strategy of an operator, or the layout of a parameter, given the node that stands for it."""
        return self.assembled.chosen(stand, self.solution.choice[self.assembled.structure.index[stand]])


def describe_plan(found: Found, sums: Sums, *, hides: bool, **fields: Any) -> Plan:
    """The plan of a solution.

    Args:
        found: the solution.
        sums: the seconds of a step, in chunks if there are any.
        hides: whether communication is hidden behind computing.
        fields: the plan's fields that the solution does not decide.
    """
    priced = found.priced
    model, prices = priced.model, priced.prices
    captured, whole = model.captured, whole_layout(len(prices.mesh))
    copies = Counter(model.stands[node] for node in model.operators)
    given = captured.graph_module.graph.find_nodes(op="placeholder")
    layouts = {model.placed[n.name]: priced.layouts[n, 0] for n in given if n.name in model.placed}
    return Plan(
        mesh_shape=prices.mesh,
        mesh_axes=AXIS_NAMES[: len(prices.mesh)],
        topology=prices.topology,
        operators=tuple(_operator(priced, node, copies[model.stands[node]]) for node in model.operators),
        layouts=layouts | {fqn: whole for fqn in captured.unused},
        gathered_once=_gathered_once(priced),
        batch_axes=_batch_axes(priced),
        predicted=sums.predicted(hides, found.memory),
        model_hash=fingerprint(captured),
        optimizer=prices.optimizer,
        precision=captured.precision,
        accumulate=prices.accumulate,
        **fields,
    )


def _batch_axes(priced: Priced) -> tuple[str, ...]:
    """The mesh axes that split the batch of any operator."""
    axes = {
        axis
        for node, operator in priced.model.operators.items()
        for axis, factor in enumerate(priced.strategies[node.name].assignment)
        if factor is not None and factor in operator.factors and operator.factors[factor].role == "batch"
    }
    return tuple(AXIS_NAMES[axis] for axis in sorted(axes))


def _gathered_once(priced: Priced) -> tuple[str, ...]:
    """The parameters whose gathered or cast copy is kept for the backward pass."""
    model, found = priced.model, []
    for moved in priced.reshards:
        node, have = moved.value[0], priced.layouts[moved.value]
        read = priced.prices.train and any(model.reads_back(user, moved.value) for user in moved.users)
        if node.name in priced.gathered_once and read:
            shape = tuple(node.meta["val"].shape)
            if cast_of(node).there or gathers(shape, have, moved.want.layout, priced.prices.mesh):
                found.append(model.captured.parameters[node.name])
    return tuple(dict.fromkeys(found))


_RECOMPUTED: Mapping[bool | None, Literal["", "local", "all"]] = {None: "", False: "local", True: "all"}


def _operator(priced: Priced, node: fx.Node, count: int) -> PlannedOperator:
    """The plan's entry for an operator."""
    model, names = priced.model, AXIS_NAMES[: len(priced.prices.mesh)]
    operator, strategy, cost = model.operators[node], priced.strategies[node.name], priced.costs[node]
    operands = operands_of(node)
    have = [priced.layouts[value_of(n)] for n in operands]
    shown = [w.layout for w in strategy.wants] + list(strategy.results)
    used = sorted({f for f in strategy.assignment if f is not None and not f.startswith(LINEAR_PREFIX)})
    return PlannedOperator(
        name=node.name,
        target=name_of(node),
        module=note_of(node).module,
        scheme=scheme(operator, strategy, have, [n.name in model.captured.parameters for n in operands]),
        assignment=strategy.assignment,
        strategy={f: tuple(names[a] for a in strategy.axes(f)) for f in used},
        layouts=tuple(describe(layout, names) for layout in shown),
        count=count,
        fold=model.stands[node].name,
        seconds=cost.seconds,
        communication_seconds=cost.communication,
        bytes_moved=cost.received,
        bound_bytes=_bound(priced, node),
        panels=priced.panels.get(node.name, 1),
        replicated=operator.rule is None and bool(operands),
        recomputed=_RECOMPUTED[model.recomputed.get(node)],
    )


def _bound(priced: Priced, node: fx.Node) -> float:
    """Bytes that a matrix product with a weight must move at least, forward and backward."""
    model, prices = priced.model, priced.prices
    table, operator = rule_of(node), model.operators[node]
    operands = operands_of(node)
    weights = [n for n in operands if n.name in model.captured.parameters and n.meta["val"].dim() == 2]
    if table is None or table.flop is None or operator.rule is None or not weights or "conv" in name_of(node):
        return 0.0
    m, k, n = (math.prod(f.size for f in operator.factors.values() if f.kind == kind) for kind in ("m", "k", "n"))
    least = bounds.matmul_elements(m, k, n, math.prod(prices.mesh)) * results_of(node)[0].element_size()
    products = 1
    if prices.train:
        products += sum(value_of(o) in model.trained for o in operands if o.meta["val"].dim() > 1)
    return float(products * least)
