"""The costs of a plan's strategies: those of every operator, of every reshard, and of the step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx
from torch.distributed.tensor import Partial, Replicate

from autotp.costs.floor import kernels
from autotp.costs.model import Model
from autotp.costs.price import Price
from autotp.costs.prices import Prices
from autotp.costs.runs import Runs
from autotp.costs.step import Pass, Sums
from costmodel import overlap
from passes.graph import cast_of
from passes.layouts.layout import Layout, local_shape
from passes.rules.factors import Value, value_of
from passes.rules.table import flop_of
from passes.sharding.panel import Loop
from passes.strategies.strategy import LINEAR_PREFIX, Strategy, Want, whole_layout

__all__ = ["Moved", "OperatorCost", "Priced"]


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor in a layout that some operators require.

    Attributes:
        value: the tensor.
        want: the layout, and that of its gradient.
        users: the operators that require it; none for an output of the graph.
        parameter: whether it is a parameter.
        price: the price of its reshard in a step, and of the opposite one of its gradient.
        reduction: the part of the price that is paid once, however many micro-batches a step has; None if there is none.
    """

    value: Value
    want: Want
    users: list[fx.Node]
    parameter: bool
    price: Price
    reduction: Price | None = None


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """The cost of one operator in a step.

    Attributes:
        own: the price of the operator by itself: its computation, and the collectives inside it.
        charged: the reshards charged to it, each with the number of operators among which its price is divided.
    """

    own: Price
    charged: Sequence[tuple[Moved, int]]

    @property
    def reshards(self) -> float:
        """Seconds of its share of reshards."""
        return sum(moved.price.communication / shared for moved, shared in self.charged)

    @property
    def communication(self) -> float:
        """Seconds of collectives inside it and of its share of reshards."""
        return self.own.communication + self.reshards

    @property
    def seconds(self) -> float:
        """Seconds of computation and communication."""
        return self.own.compute + self.communication

    @property
    def received(self) -> float:
        """Bytes received by the operator and for its share of reshards."""
        return self.own.received + sum(moved.price.received / shared for moved, shared in self.charged)


@dataclass(frozen=True, eq=False)
class Priced:
    """The strategies of all operators, and their costs, each computed when it is first read.

    Attributes:
        model: the model, analysed and folded.
        prices: the prices on the mesh.
        strategies: operator name -> strategy.
        layouts: tensor -> the layout in which it is produced or at rest.
        panels: name of a product that gathers its operands panel by panel -> number of panels.
        regathered: (operand, product) for each product whose data operand the backward pass gathers again.
        gathered_once: names of the parameters whose gathered copies are kept until the backward pass has read them.
    """

    model: Model
    prices: Prices
    strategies: Mapping[str, Strategy]
    layouts: Mapping[Value, Layout]
    panels: Mapping[str, int] = field(default_factory=dict)
    regathered: Set[tuple[Value, fx.Node]] = frozenset()
    gathered_once: Set[str] = frozenset()

    @classmethod
    def of(
        cls,
        model: Model,
        prices: Prices,
        strategies: Mapping[str, Strategy],
        resting: Mapping[str, Layout],
        panels: Mapping[str, int],
        found: Sequence[Loop],
        gathered_once: Collection[str] = (),
    ) -> Priced:
        """From the strategies of operators and the layouts of placeholders at rest.

        Args:
            model, prices, strategies, panels, gathered_once: see the attributes.
            resting: placeholder name -> layout at rest; replicated by default.
            found: all possible loops of panels, including those of products without panels.
        """
        whole = whole_layout(len(prices.mesh))
        given = model.captured.graph_module.graph.find_nodes(op="placeholder")
        layouts: dict[Value, Layout] = {(node, 0): resting.get(node.name, whole) for node in given}
        for node in model.operators:
            layouts |= {(node, i): layout for i, layout in enumerate(strategies[node.name].results)}
        regathered = {
            (value_of(loop.data), node)
            for loop in found
            for node in loop.members
            if node.name in panels and loop.absorbed[0]
        }
        return cls(model, prices, strategies, layouts, panels, regathered, frozenset(gathered_once))

    @cached_property
    def runs(self) -> Runs:
        """How a step runs the operators."""
        return Runs(self.model)

    @cached_property
    def own(self) -> Mapping[fx.Node, Price]:
        """The price of every operator by itself in a step; operators that are folded together share one."""
        found: dict[fx.Node, Price] = {}
        for node in self.model.operators:
            stand = self.model.stands[node]
            if stand not in found:
                found[stand] = self.alone(stand, self.strategies[stand.name])
            found[node] = found[stand]
        return found

    def alone(self, node: fx.Node, strategy: Strategy) -> Price:
        """The price of an operator by itself in a step, with a strategy."""
        price = self.prices.operator(self.model.operators[node], strategy, flop_of(node), self.runs.run(node))
        return price if self.prices.accumulate == 1 else price.times(self.prices.accumulate)

    @cached_property
    def costs(self) -> Mapping[fx.Node, OperatorCost]:
        """The cost of every operator, with its share of the reshards around it.

        A reshard is divided evenly among the operators that require it. One that reduces partial sums is charged to the
        operator that produced these, wherever they are reduced.
        """
        charges: dict[fx.Node, list[tuple[Moved, int]]] = defaultdict(list)
        origins = self._origins()
        for moved in self.reshards:
            value, want = moved.value, moved.want
            summed = (isinstance(h, Partial) for h, w in zip(self.layouts[value], want.layout, strict=True) if h != w)
            charged = [origins[value]] if any(summed) and value in origins else moved.users
            if not charged and value[0] in self.model.operators:
                charged = [value[0]]
            for user in charged:
                charges[user].append((moved, len(charged)))
        return {node: OperatorCost(price, charges[node]) for node, price in self.own.items()}

    @cached_property
    def reshards(self) -> Sequence[Moved]:
        """Every tensor in every layout that is required of it."""
        users: dict[tuple[Value, Want], list[fx.Node]] = defaultdict(list)
        for node, operands in self.model.operands.items():
            for operand, want in zip(operands, self.strategies[node.name].wants, strict=True):
                users[value_of(operand), want].append(node)
        whole = whole_layout(len(self.prices.mesh))
        for leaf in self.model.outputs:
            users[value_of(leaf), Want.of(whole)] += []
        for leaf, cache in self.model.written:
            users[value_of(leaf), Want.of(self.layouts[cache, 0])] += []
        return [self.moved(value, self.layouts[value], want, each) for (value, want), each in users.items()]

    def moved(self, value: Value, have: Layout, want: Want, users: list[fx.Node]) -> Moved:
        """One tensor, produced or at rest in the layout ``have``, in the layout that ``users`` require."""
        parameter = value[0].name in self.model.captured.parameters
        tensor, trained = self.model.named[value].meta["val"], value in self.model.trained
        cast = cast_of(self.model.named[value])
        regather = self.twice(value, users)
        price = self.prices.reshard(tensor, have, want, gradient=trained, regather=regather, parameter=parameter, cast=cast)
        if not (parameter and trained and self.prices.train and self.prices.accumulate > 1) or cast.changes:
            return Moved(value, want, users, parameter, price)
        reduction = self.prices.returning(tuple(tensor.shape), have, want, cast, parameter=True)
        if users and all(user.name in self.panels for user in users):  # a loop of panels reduces in every micro-batch
            return Moved(value, want, users, parameter, price.plus(reduction.times(self.prices.accumulate - 1)))
        return Moved(value, want, users, parameter, price, reduction)

    def twice(self, value: Value, users: Sequence[fx.Node]) -> bool:
        """Whether the reshard of a tensor that ``users`` require is repeated for the backward pass."""
        repeated = self.model.recomputed.get(value[0]) and any(value in self.model.saved[user] for user in users)
        gathered = value[0].name in self.model.captured.parameters and value[0].name not in self.gathered_once
        read = gathered and any(self.model.reads_back(user, value) for user in users)
        return bool(repeated) or read or any((value, user) in self.regathered for user in users)

    def _origins(self) -> dict[Value, fx.Node]:
        """Tensor of partial sums -> the operator that produced them; others may have passed them on since."""
        found: dict[Value, fx.Node] = {}
        for node, operator in self.model.operators.items():
            strategy = self.strategies[node.name]
            passed = [int(a[1:]) for a in strategy.assignment if a is not None and a.startswith(LINEAR_PREFIX)]
            origin = node
            if passed and operator.rule is not None:
                before = [value_of(self.model.operands[node][i]) for i in operator.rule.linear[passed[0]]]
                origin = next((found[value] for value in before if value in found), node)
            for i, layout in enumerate(strategy.results):
                if any(isinstance(p, Partial) for p in layout):
                    found[(node, i)] = origin
        return found

    @cached_property
    def sums(self) -> Sums:
        """The seconds of a step, grouped by what may hide them."""
        return self.in_chunks(1)

    def in_chunks(self, chunks: int, rows: Collection[str] | None = None) -> Sums:
        """``sums`` of a step in chunks.

        Args:
            chunks: the number of chunks.
            rows: names of the products whose rows are divided into chunks; None if the whole batch is.
        """
        accumulate = self.prices.accumulate if self.prices.train else 1
        found, joined = Sums(Pass(), Pass(), self.model.depth, chunks=chunks, accumulate=accumulate), 0.0
        apart: list[list[Price]] = [list(self.own.values()), []]
        real = len(self.prices.devices)
        near: dict[fx.Node, float] = defaultdict(float)
        for node in self.model.operators:
            if any(factor is not None for factor in self.strategies[node.name].assignment[real:]):
                joined += self.own[node].communication
        for moved in self.reshards:
            apart[moved.parameter].append(moved.price)
            if moved.parameter:
                continue
            if any(not isinstance(p, Replicate) for p in (*self.layouts[moved.value][real:], *moved.want.layout[real:])):
                joined += moved.price.communication
            beside = [n for n in (moved.value[0], *moved.users) if rows is not None and n.name in rows]
            for node in beside:
                near[node] += moved.price.communication / len(beside)
        for parameter, prices in enumerate(apart):
            if prices:
                found = found.plus(_total(prices), parameter=bool(parameter))
        if reductions := [moved.reduction for moved in self.reshards if moved.reduction is not None]:
            found = found.reducing(_total(reductions))
        if rows is None:
            hidden = float(overlap.hidden_by_batch(joined, found.depth, chunks))
        else:
            hidden = sum(float(overlap.hidden_by_rows(near[node], self.own[node].compute, chunks)) for node in near)
        return replace(found, hidden=hidden, update=self.prices.updating(self.updated), host=self.host)

    @property
    def host(self) -> float:
        """Seconds in which the host launches a step's kernels."""
        device = self.prices.topology.device
        return device.host and device.host * self.launches

    @cached_property
    def launches(self) -> float:
        """The number of kernels of a step, including those of every chunk and of recomputation.

        Collectives do not count: the time to launch one is in its price (`costmodel.Level.overhead`).
        """
        found, real = 0.0, len(self.prices.devices)
        for node in self.model.operators:
            splits = zip(self.prices.mesh[real:], self.strategies[node.name].assignment[real:], strict=True)
            times = math.prod(count for count, factor in splits if factor is not None)
            found += times * kernels(self.runs, node)
        return self.prices.accumulate * found

    @cached_property
    def updated(self) -> float:
        """Bytes that the optimizer's step reads and writes on one device."""
        found = 0.0
        for node in self.model.captured.graph_module.graph.find_nodes(op="placeholder"):
            if node.name in self.model.captured.parameters:
                part = math.prod(local_shape(tuple(node.meta["val"].shape), self.layouts[node, 0], self.prices.mesh))
                found += self.prices.update_bytes(part, cast_of(node).rests.itemsize)
        return found


def _total(prices: Sequence[Price]) -> Price:
    """The sum of prices."""
    return tuple.__new__(Price, map(sum, zip(*prices, strict=True)))
