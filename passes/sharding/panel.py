"""The panelling pass: turns gather-then-multiply into a loop of panels (see ``passes.sharding.panel_loop``).

``loops`` finds, from layouts alone, which products can be panelled and how; the planner prices them and chooses the number
of panels of each. ``panel`` rewrites a sharded graph accordingly. Products that share one gathered operand form one loop,
so that the operand is still gathered only once.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.graph import RECOMPUTE, Cast, cast_of, note_of, place_of
from passes.layouts.layout import Layout, local_shape
from passes.layouts.reshard import Step, steps
from passes.rules.factors import Operator, Value, value_of
from passes.rules.rule import Product
from passes.rules.shapes import operands_of
from passes.rules.table import rule_of
from passes.sharding.panel_loop import Operand, panelled
from passes.strategies.strategy import Strategy, Want, gradient_of, whole_layout
from passes.world import ops

__all__ = ["Loop", "data_position", "loops", "panel"]


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop of panels.

    Attributes:
        members: the products in the loop, which share their data operand.
        factor: the factor of the loop: "k", or a dim of the results ("0", "-1").
        operands: how the loop gets the data operand, then each member's weight.
        absorbed: per operand, whether the loop gathers it; otherwise, it is given in the layout that the product wants.
        cuts: the number of blocks of the loop's dim; each gives an equal part to every panel.
        most: the greatest number of panels; its divisors are possible.
        values: per operand: whole shape, dtypes, the layout that it has, and what the product wants.
    """

    members: tuple[fx.Node, ...]
    factor: str
    operands: tuple[Operand, ...]
    absorbed: tuple[bool, ...]
    cuts: int
    most: int
    values: tuple[tuple[tuple[int, ...], Cast, Layout, Want], ...] = field(repr=False)

    @property
    def data(self) -> fx.Node:
        """The operand that the members share."""
        return self.members[0].args[_product(self.members[0]).data]  # type: ignore[return-value]

    @property
    def transposed(self) -> tuple[bool, ...]:
        """Per member, whether its weight is [n, k]."""
        return tuple(_product(node).transposed for node in self.members)


@dataclass(frozen=True, slots=True)
class _Side:
    """One operand of a product: its tensor, the layouts before and after its reshard, and its local shape after it."""

    node: fx.Node
    have: Layout
    want: Want
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    local: tuple[int, ...]

    @property
    def gathered(self) -> bool:
        return bool(self.forward) and all(s.kind == "all_gather" for s in self.forward)

    def operand(self, dim: int, absorbed: bool, cuts: int, mesh: tuple[int, ...]) -> Operand | None:
        """How the loop over ``dim`` (-1: the operand lacks it) gets this operand; None if it cannot."""
        if not absorbed:
            return Operand(dim, cuts)
        here = [s for s in self.forward if s.dim == dim]
        axes = {s.axes for s in here}
        if any(s.size for s in here) or not _contiguous(here, mesh):
            return None
        back = [s for s in self.backward if s.dim == dim and s.axes in axes and s.kind in ("reduce_scatter", "slice")]
        if {s.axes for s in back} != axes or len(back) != len(here) or not _contiguous(back[::-1], mesh):
            return None
        before = tuple(s for s in self.forward if s not in here)
        after = tuple(s for s in self.backward if s not in back)
        cast = note_of(self.node).cast
        dtypes = None if cast is None else (cast.used, cast.reduced)
        return Operand(dim, cuts, before, tuple(here), tuple(back), after, dtypes)

    def owners(self, dim: int, mesh: tuple[int, ...]) -> int:
        return math.prod(mesh[s.axes[0]] for s in self.forward if s.dim == dim)


def _contiguous(gathers: Sequence[Step], mesh: tuple[int, ...]) -> bool:
    """Whether gathers join contiguous parts: their only blocks are those that the preceding gathers have joined."""
    joined = [math.prod(mesh[s.axes[0]] for s in gathers[:i]) for i in range(len(gathers))]
    return all(s.blocks in (1, ways) for s, ways in zip(gathers, joined, strict=True))


def loops(
    operators: Mapping[fx.Node, Operator],
    strategies: Mapping[str, Strategy],
    resting: Mapping[str, Layout],
    mesh: tuple[int, ...],
) -> list[Loop]:
    """The possible loops, in the graph's order; each over the factor along which the most bytes are gathered by panels.

    Args:
        operators: the analysis of a captured graph.
        strategies: operator name -> strategy.
        resting: placeholder name -> layout at rest (whole if absent).
        mesh: sizes of the mesh axes.
    """
    return list(_Finder(operators, strategies, resting, mesh).run())


class _Finder:
    def __init__(
        self,
        operators: Mapping[fx.Node, Operator],
        strategies: Mapping[str, Strategy],
        resting: Mapping[str, Layout],
        mesh: tuple[int, ...],
    ) -> None:
        self.operators, self.strategies, self.resting, self.mesh = operators, strategies, resting, mesh
        self.readers: dict[tuple[Value, Want], list[fx.Node]] = defaultdict(list)
        for node in operators:
            for operand, want in zip(operands_of(node), strategies[node.name].wants, strict=True):
                self.readers[value_of(operand), want].append(node)

    def run(self) -> Iterator[Loop]:
        groups: dict[tuple[Value, Want], list[fx.Node]] = defaultdict(list)
        for node in self.operators:
            if _is_product(node):
                side = self.side(node, _product(node).data)
                groups[value_of(side.node), side.want].append(node)
        for key, members in groups.items():
            weights = [self.side(node, _product(node).weight) for node in members]
            data = self.side(members[0], _product(members[0]).data)
            alone = len(members) == 1
            together = self.readers[key] == members and (alone or all(w.node.op == "placeholder" for w in weights))
            if data.gathered and together:
                found = self.loop(members, data, weights, True)
                if found is not None:
                    yield found
                continue
            for node, weight in zip(members, weights, strict=True):
                found = self.loop([node], data, [weight], False)
                if found is not None:
                    yield found

    def side(self, node: fx.Node, position: int) -> _Side:
        operand = node.args[position]
        assert isinstance(operand, fx.Node)
        want = self.strategies[node.name].wants[operands_of(node).index(operand)]
        producer, result = value_of(operand)
        if producer.op == "placeholder":
            have = self.resting.get(producer.name, whole_layout(len(self.mesh)))
        else:
            have = self.strategies[producer.name].results[result]
        shape = tuple(operand.meta["val"].shape)
        forward = steps(shape, have, want.layout, self.mesh)
        backward = steps(shape, want.gradient, gradient_of(have), self.mesh)
        return _Side(operand, have, want, forward, backward, local_shape(shape, want.layout, self.mesh))

    def loop(self, members: Sequence[fx.Node], data: _Side, weights: Sequence[_Side], whole: bool) -> Loop | None:
        absorbed = [whole and data.gathered]
        for node, weight in zip(members, weights, strict=True):
            absorbed.append(weight.gathered and self.readers[value_of(weight.node), weight.want] == [node])
        sides = [data, *weights]
        best, most_gathered = None, 0.0
        rows = len(data.local) - 1
        for factor in ("k", *(str(d) for d in range(rows)), *(["-1"] if len(members) == 1 else [])):
            dims = [rows if factor == "k" else int(factor) if factor != "-1" else -1]
            for node in members:
                transposed = _product(node).transposed
                dims.append(int(transposed) if factor == "k" else int(not transposed) if factor == "-1" else -1)
            found = self._over(factor, members, sides, absorbed, dims)
            if found is not None and found[1] > most_gathered:
                best, most_gathered = found
        return best

    def _over(
        self, factor: str, members: Sequence[fx.Node], sides: Sequence[_Side], absorbed: Sequence[bool], dims: Sequence[int]
    ) -> tuple[Loop, float] | None:
        owners = [s.owners(d, self.mesh) if a and d >= 0 else 1 for s, a, d in zip(sides, absorbed, dims, strict=True)]
        cuts = math.lcm(*owners)
        sizes = {side.local[d] for side, d in zip(sides, dims, strict=True) if d >= 0}
        if cuts == 1 or len(sizes) != 1 or next(iter(sizes)) % cuts:
            return None
        operands, gathered = [], 0.0
        for side, mine, dim, ways in zip(sides, absorbed, dims, owners, strict=True):
            operand = side.operand(dim, mine, cuts // ways, self.mesh)
            if operand is None:
                return None
            operands.append(operand)
            gathered += math.prod(side.local) * side.node.meta["val"].element_size() if operand.loop else 0.0
        values = tuple((tuple(s.node.meta["val"].shape), cast_of(s.node), s.have, s.want) for s in sides)
        most = next(iter(sizes)) // cuts
        return Loop(tuple(members), factor, tuple(operands), tuple(absorbed), cuts, most, values), gathered


def data_position(node: fx.Node) -> int | None:
    """The position of the data argument of a product that can be panelled; None for any other operator."""
    return _product(node).data if node.op == "call_function" and _is_product(node) else None


def _product(node: fx.Node) -> Product:
    rule = rule_of(node)
    assert rule is not None and rule.product is not None
    return rule.product


def _is_product(node: fx.Node) -> bool:
    rule = rule_of(node)
    if rule is None or rule.product is None:
        return False
    data, weight = rule.product.data, rule.product.weight
    if any(k in node.kwargs and node.kwargs[k] != 1 for k in ("alpha", "beta")):
        return False
    values = [node.args[i].meta["val"] for i in (data, weight)]  # type: ignore[union-attr]
    if values[1].dim() != 2 or values[0].dim() < 2 or not values[0].dtype.is_floating_point:
        return False
    operands = operands_of(node)
    return node.args[data] is not node.args[weight] and len(set(operands)) == len(operands)


def panel(module: fx.GraphModule, found: Sequence[Loop], panels: Mapping[str, int]) -> fx.GraphModule:
    """Panels some of the products of a sharded graph.

    Args:
        module: a sharded graph.
        found: the loops of its plan.
        panels: operator name -> number of panels; members of one loop have one number.

    Returns:
        The same module if nothing is panelled, else a new one.

    Raises:
        ValueError: if the number of panels is not possible for its loop.
    """
    chosen = [loop for loop in found if panels.get(loop.members[0].name, 1) > 1]
    if not chosen:
        return module
    graph = fx.Graph()
    renamed: dict[fx.Node, fx.Node] = {}
    *_, last = module.graph.nodes
    graph.output(graph.graph_copy(module.graph, renamed)).meta = dict(last.meta)
    by_operator = {note_of(node).operator: node for node in graph.nodes if note_of(node).operator}
    world = next(node for node in graph.nodes if node.op == "get_attr")
    for loop in chosen:
        count = panels[loop.members[0].name]
        if loop.most % count:
            raise ValueError(f"{loop.members[0].name}: {count} panels do not divide its loop's {loop.most}")
        _replace(graph, world, loop, [by_operator[node.name] for node in loop.members], count)
    graph.lint()
    return fx.GraphModule(module, graph, class_name=type(module).__name__)


def _replace(graph: fx.Graph, world: fx.Node, loop: Loop, nodes: Sequence[fx.Node], count: int) -> None:
    positions = [_product(member) for member in loop.members]
    wanted = [nodes[0].args[positions[0].data], *(n.args[p.weight] for n, p in zip(nodes, positions, strict=True))]
    sources: list[Any] = []
    for edge, mine in zip(wanted, loop.absorbed, strict=True):
        assert isinstance(edge, fx.Node)
        assert not mine or edge.target in (ops.reshard, ops.gather)
        sources.append(edge.args[1] if mine else edge)
        if not mine and len(nodes) > 1 and edge.target in (ops.reshard, ops.gather):
            nodes[0].prepend(edge)  # the reshard of a parameter, which can precede the loop
    operands = tuple(operand.plain for operand in loop.operands)
    args = (world, sources[0], sources[1:], operands, loop.factor, count, loop.cuts, loop.transposed)
    with graph.inserting_before(nodes[0]):
        products = graph.call_function(panelled, args, {"at": place_of(loop.members[0])})
        items = [graph.call_function(operator.getitem, (products, i)) for i in range(len(nodes))]
    for node, item in zip(nodes, items, strict=True):
        if node.meta.get(RECOMPUTE):  # the loop runs again for all members, but only these are not kept
            products.meta[RECOMPUTE] = item.meta[RECOMPUTE] = True
    for node, item, where in zip(nodes, items, positions, strict=True):
        result = item
        bias = node.args[where.bias] if where.bias is not None and where.bias < len(node.args) else None
        if bias is not None:
            with graph.inserting_before(node):
                result = graph.call_function(torch.ops.aten.add.Tensor, (item, bias))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    for edge, mine in zip(wanted, loop.absorbed, strict=True):
        if mine and isinstance(edge, fx.Node) and not edge.users:
            graph.erase_node(edge)
