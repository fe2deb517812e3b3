"""What a plan's operators and reshards cost, one by one and by what may hide it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from torch import fx
from torch.distributed.tensor import Partial, Replicate

from autotp.costs.model import Model, depth_of
from autotp.costs.price import Price
from autotp.costs.prices import Prices
from costmodel import overlap
from passes.layouts.layout import Layout
from passes.rules.factors import Value, value_of
from passes.rules.shapes import operands_of
from passes.rules.table import flop_of
from passes.strategies.strategy import LINEAR_PREFIX, Strategy, Want, whole_layout

__all__ = ["Moved", "Pass", "Priced", "Sums"]


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor that some operators want in a layout.

    Attributes:
        value: the tensor.
        want: the layout.
        users: operators that want it so; none for an output of the graph.
        parameter: it is a parameter.
        price: of its reshard and the mirror for its gradient.
    """

    value: Value
    want: Want
    users: list[fx.Node]
    parameter: bool
    price: Price


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass on each device, by what may hide them (see `costmodel.overlap`).

    Attributes:
        compute: of computing.
        activations: of communication that moves activations or their gradients.
        parameters: of communication that moves parameters or their gradients.
        contended_activations, contended_parameters: those of them that take the processors' time.
        levels: of either communication on each level of the network, innermost first.
    """

    compute: float = 0.0
    activations: float = 0.0
    parameters: float = 0.0
    contended_activations: float = 0.0
    contended_parameters: float = 0.0
    levels: tuple[float, ...] = ()

    def plus(self, figures: Sequence[float], *, parameter: bool) -> Pass:
        """With a pass of a `Price` more, which moves a parameter or its gradient, or something else."""
        compute, communication, contended, *levels = figures
        every = tuple(mine + more for mine, more in itertools.zip_longest(self.levels, levels, fillvalue=0.0))
        found = replace(self, compute=self.compute + compute, levels=every)
        if parameter:
            more, taken = self.parameters + communication, self.contended_parameters + contended
            return replace(found, parameters=more, contended_parameters=taken)
        more, taken = self.activations + communication, self.contended_activations + contended
        return replace(found, activations=more, contended_activations=taken)

    def sides(self, depth: int, chunks: int, hidden: float) -> tuple[float, ...]:
        """Seconds of the pass if the processors limit it, and if each level of the network does."""
        seconds = self.compute, self.activations, self.parameters, hidden
        shares = (
            self.contended_activations / self.activations if self.activations else 0.0,
            self.contended_parameters / self.parameters if self.parameters else 0.0,
        )
        return tuple(map(float, overlap.sides(*seconds, depth, chunks, shares, self.levels)))


@dataclass(frozen=True, slots=True)
class Sums:
    """Seconds of a step on each device, by what may hide them (see `costmodel.overlap`).

    Attributes:
        forward, backward: the passes.
        depth: operators with a weight.
        chunks: in how many chunks this is done; 1 for none.
        hidden: seconds of activations' communication that other chunks hide, in both passes.
    """

    forward: Pass
    backward: Pass
    depth: int
    chunks: int = 1
    hidden: float = 0.0

    @property
    def compute(self) -> float:
        """All computing."""
        return self.forward.compute + self.backward.compute

    @property
    def activations(self) -> float:
        """All communication that moves activations and their gradients."""
        return self.forward.activations + self.backward.activations

    @property
    def parameters(self) -> float:
        """All communication that moves parameters and their gradients."""
        return self.forward.parameters + self.backward.parameters

    @property
    def communication(self) -> float:
        """All communication."""
        return self.activations + self.parameters

    @property
    def sides(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Of either pass: seconds if the processors limit it, and if each level of the network does."""
        share = self.hidden / self.activations if self.activations else 0.0
        first, second = (one.sides(self.depth, self.chunks, share * one.activations) for one in self.passes)
        return first, second

    @property
    def passes(self) -> tuple[Pass, Pass]:
        """Both passes."""
        return self.forward, self.backward

    def plus(self, price: Price, *, parameter: bool = False, times: int = 1) -> Sums:
        """With so many times something of this price, which moves a parameter or its gradient, or something else."""
        forward, backward = price.times(times).passes
        return replace(
            self,
            forward=self.forward.plus(forward, parameter=parameter),
            backward=self.backward.plus(backward, parameter=parameter),
        )

    @property
    def step(self) -> float:
        """Seconds of a step, communication hidden behind computing."""
        return sum(map(max, self.sides))


@dataclass(frozen=True, slots=True)
class Priced:
    """Strategies of all operators, priced.

    Attributes:
        model: analysed and folded.
        prices: of the mesh.
        strategies: operator name -> strategy.
        layouts: in which every tensor is made or rests.
        again: (operand, product) where the backward pass gathers the product's data operand again.
    """

    model: Model
    prices: Prices
    strategies: Mapping[str, Strategy]
    layouts: Mapping[Value, Layout]
    again: Set[tuple[Value, fx.Node]] = field(default_factory=frozenset)

    def operators(self) -> dict[fx.Node, Price]:
        """What every operator costs by itself; folded ones have one price."""
        found: dict[fx.Node, Price] = {}
        for node in self.model.operators:
            stand = self.model.stands[node]
            if stand not in found:
                operator, gradient = self.model.operators[stand], self.model.differentiated(stand)
                found[stand] = self.prices.operator(
                    operator, self.strategies[stand.name], flop_of(stand), gradient=gradient
                )
            found[node] = found[stand]
        return found

    def reshards(self) -> Iterator[Moved]:
        """Every tensor in every layout that it is wanted in."""
        for value in self.model.readers:
            for want, users in self.wanted(value, lambda node: self.strategies[node.name]).items():
                yield self.moved(value, self.layouts[value], want, users)

    def wanted(self, value: Value, strategy_of: Callable[[fx.Node], Strategy]) -> dict[Want, list[fx.Node]]:
        """How a tensor is wanted, and by which operators; outputs are whole."""
        found: dict[Want, list[fx.Node]] = defaultdict(list)
        whole = whole_layout(len(self.prices.mesh))
        for node, position in self.model.readers[value]:
            if node.op == "output":
                found[Want(whole, whole)] += []
            else:
                found[strategy_of(node).wants[position]].append(node)
        return found

    def moved(self, value: Value, have: Layout, want: Want, users: list[fx.Node]) -> Moved:
        """One tensor, made or resting in the layout ``have``, on its way to those who want it so."""
        parameter = value[0].name in self.model.captured.parameters
        price = self.prices.reshard(
            self.model.named[value].meta["val"],
            have,
            want,
            gradient=value in self.model.trained,
            regather=parameter or any((value, user) in self.again for user in users),
            parameter=parameter,
        )
        return Moved(value, want, users, parameter, price)

    def charged(self) -> Iterator[tuple[Moved, list[fx.Node]]]:
        """Every reshard with the operators that are charged for it, in even shares.

        Those that want it so; or, where it sums up parts, the operator that made them, wherever that happens.
        """
        origins = self.origins()
        for moved in self.reshards():
            value, want = moved.value, moved.want
            summed = (isinstance(h, Partial) for h, w in zip(self.layouts[value], want.layout, strict=True) if h != w)
            charged = [origins[value]] if any(summed) and value in origins else moved.users
            if not charged and value[0] in self.model.operators:
                charged = [value[0]]
            yield moved, charged

    def charges(self) -> dict[fx.Node, list[tuple[Moved, int]]]:
        """Operator -> what it is charged for, each with the number of operators that share it."""
        found: dict[fx.Node, list[tuple[Moved, int]]] = defaultdict(list)
        for moved, users in self.charged():
            for user in users:
                found[user].append((moved, len(users)))
        return found

    def origins(self) -> dict[Value, fx.Node]:
        """A tensor of partial sums -> the operator that made them, which may have passed them on since."""
        found: dict[Value, fx.Node] = {}
        for node, operator in self.model.operators.items():
            strategy = self.strategies[node.name]
            passed = [int(a[1:]) for a in strategy.assignment if a is not None and a.startswith(LINEAR_PREFIX)]
            origin = node
            if passed and operator.rule is not None:
                before = [value_of(operands_of(node)[i]) for i in operator.rule.linear[passed[0]]]
                origin = next((found[value] for value in before if value in found), node)
            for i, layout in enumerate(strategy.results):
                if any(isinstance(p, Partial) for p in layout):
                    found[(node, i)] = origin
        return found

    def sums(self, chunks: int = 1, rows: Collection[str] | None = None) -> Sums:
        """Seconds of a step by what may hide them.

        Args:
            chunks: in which devices work.
            rows: names of the products whose rows the chunks are; None: they are the whole batch's.
        """
        found, in_chunks = Sums(Pass(), Pass(), depth_of(self.model), chunks=chunks), 0.0
        own, real = self.operators(), len(self.prices.devices)
        near: dict[fx.Node, float] = defaultdict(float)
        for node in self.model.operators:
            found = found.plus(own[node])
            if any(factor is not None for factor in self.strategies[node.name].assignment[real:]):
                in_chunks += own[node].communication
        for moved in self.reshards():
            found = found.plus(moved.price, parameter=moved.parameter)
            if moved.parameter:
                continue
            if any(not isinstance(p, Replicate) for p in (*self.layouts[moved.value][real:], *moved.want.layout[real:])):
                in_chunks += moved.price.communication
            beside = [n for n in (moved.value[0], *moved.users) if rows is not None and n.name in rows]
            for node in beside:
                near[node] += moved.price.communication / len(beside)
        if rows is None:
            hidden = float(overlap.hidden_by_batch(in_chunks, found.depth, chunks))
        else:
            hidden = sum(float(overlap.hidden_by_rows(near[node], own[node].compute, chunks)) for node in near)
        return replace(found, hidden=hidden)
