"""The factors of a whole graph: which dims of which tensors are the same factor.

Rules bind factors node by node; this module relates them across nodes. A *cut* divides a dim into a major and a minor part
because some other operator distinguishes them: a reshape that merges batch and sequence, a split of a fused query-key-value
projection, the groups of a group norm. Cuts are propagated through every operator that has the dim, so that ``(batch
sequence)`` can be sharded by sequence in a linear layer, and no reshard is needed at the reshape.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from passes.graph import differentiable
from passes.rules.notation import Dim, OpRule
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import bind, rule_of

__all__ = ["Factor", "Operator", "Value", "analyse", "operators_of", "value_of"]

Value = tuple[fx.Node, int]


def value_of(node: fx.Node) -> Value:
    """The tensor that a node stands for, as (producer, number of the result): for a ``getitem``, a result of its operand.

    Results are numbered as in `passes.rules.shapes.results_of`, which skips items that are not tensors.
    """
    if node.target is not operator.getitem:
        return node, 0
    made, number = node.args[0], node.args[1]
    before = made.meta["val"][:number]  # type: ignore[union-attr, misc]
    return made, sum(isinstance(value, Tensor) for value in before)  # type: ignore[return-value]


def operators_of(graph: fx.Graph) -> list[fx.Node]:
    """The operators of a captured graph, in order, without ``getitem``, which only names results."""
    return [n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


@dataclass(frozen=True, slots=True)
class Factor:
    """A factor of one operator, after cuts.

    Attributes:
        name: unique in the operator (``n``, or ``n.1`` for the second part of a factor that was cut).
        base: the name of the rule's factor that was cut.
        size: its whole size.
        part: which part of ``base`` it is, and ``parts`` how many there are.
        sole: whether it is alone in every dim that has it, so that uneven shards are possible.
        kind: for contractions, "m" (rows), "n" (columns) or "k" (reduced); "" for the batch of a batched product, and else.
        role: "batch", "token", "feature" or "" across the graph.
        offered: whether strategies may shard it.
    """

    name: str
    base: str
    size: int
    part: int
    parts: int
    sole: bool
    kind: str
    role: str
    offered: bool


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """A node with its rule, after cuts into the graph's common factors.

    Attributes:
        node: the captured node.
        rule: its rule after cuts; None if it has no rule.
        factors: name -> factor.
        sums: whether partial sums can reach it, so that strategies that pass them through are useful.
    """

    node: fx.Node
    rule: OpRule | None
    factors: Mapping[str, Factor]
    sums: bool = True


def _add(cuts: list[int], cut: int, size: int) -> bool:
    if cut <= 1 or cut >= size or size % cut or cut in cuts:
        return False
    if any(cut % c and c % cut for c in cuts):
        return False
    cuts.append(cut)
    cuts.sort()
    return True


class _Analysis:
    def __init__(self, graph: fx.Graph, inputs: Iterable[str]) -> None:
        self.nodes = operators_of(graph)
        self.rules = {node: bind(node) for node in self.nodes}
        self.cuts: dict[tuple[Value, int], list[int]] = {}
        self.factor_cuts: dict[tuple[fx.Node, str], list[int]] = {}
        self.parent: dict[object, object] = {}
        self.seen: dict[fx.Node, list[tuple[Value, tuple[Dim, ...], tuple[int, ...]]]] = {}
        self.inputs = [n for n in graph.nodes if n.op == "placeholder" and n.name in set(inputs)]

    def tensors(self, node: fx.Node) -> Sequence[tuple[Value, tuple[Dim, ...], tuple[int, ...]]]:
        if node not in self.seen:
            self.seen[node] = list(self._tensors(node))
        return self.seen[node]

    def _tensors(self, node: fx.Node) -> Iterator[tuple[Value, tuple[Dim, ...], tuple[int, ...]]]:
        rule = self.rules[node]
        if rule is None:
            return
        for operand, dims in zip(operands_of(node), rule.operands, strict=True):
            yield value_of(operand), dims, tuple(operand.meta["val"].shape)
        for index, (result, dims) in enumerate(zip(results_of(node), rule.results, strict=True)):
            yield (node, index), dims, tuple(result.shape)

    def spread_cuts(self) -> None:
        users, waiting, forward = defaultdict[Value, list[fx.Node]](list), set(self.nodes), True
        for node in self.nodes:
            for value, _, _ in self.tensors(node):
                users[value].append(node)
        while waiting:
            for node in self.nodes if forward else reversed(self.nodes):
                if node in waiting:
                    waiting.discard(node)
                    for value in self._spread(node):
                        waiting.update(users[value])
            forward = not forward

    def _spread(self, node: fx.Node) -> list[Value]:
        """Propagates cuts between a node's factors and its tensors; returns the tensors whose nodes need another visit."""
        rule, found = self.rules[node], list[Value]()
        if rule is None:
            return found
        for value, dims, shape in self.tensors(node):
            for d, dim in enumerate(dims):
                known, low, changed = self.cuts.setdefault((value, d), []), 1, False
                for factor in dim:
                    size = rule.sizes[factor]
                    mine = self.factor_cuts.setdefault((node, factor), [])
                    for cut in known:
                        if low < cut < low * size and cut % low == 0:
                            changed |= _add(mine, cut // low, size)
                    for cut in mine:
                        changed |= _add(known, cut * low, shape[d])
                    low *= size
                    changed |= _add(known, low, shape[d])
                if changed:
                    found.append(value)
        return found

    def parts(self, node: fx.Node, factor: str) -> list[tuple[str, int]]:
        """The parts of a factor after cuts: (name, size), the major one first."""
        rule = self.rules[node]
        assert rule is not None
        bounds = [1, *self.factor_cuts.get((node, factor), []), rule.sizes[factor]]
        if len(bounds) == 2:
            return [(factor, rule.sizes[factor])]
        return [(f"{factor}.{i}", y // x) for i, (x, y) in enumerate(zip(bounds, bounds[1:], strict=False))]

    def find(self, key: object) -> object:
        root = key
        while self.parent.get(root, root) != root:
            root = self.parent[root]
        while self.parent.get(key, key) != root:
            self.parent[key], key = root, self.parent.get(key, key)
        return root

    def join(self, a: object, b: object) -> None:
        self.parent[self.find(a)] = self.find(b)

    def relate(self) -> None:
        for node in self.nodes:
            for value, dims, _shape in self.tensors(node):
                for d, dim in enumerate(dims):
                    low = 1
                    for factor in dim:
                        for name, size in self.parts(node, factor):
                            self.join((node, name), (value, d, low, low * size))
                            low *= size


def analyse(graph: fx.Graph, inputs: Iterable[str] = ()) -> dict[fx.Node, Operator]:
    """Analyses the operators of ``graph``: their rules after cuts, and the roles of their factors.

    Args:
        graph: a captured graph.
        inputs: names of the placeholders of the user's inputs; their dim 0 is the batch.
    """
    analysis = _Analysis(graph, inputs)
    analysis.spread_cuts()
    analysis.relate()
    batch, anchored, tokens = set(), set(), set()
    for placeholder in analysis.inputs:
        shape = placeholder.meta["val"].shape
        if len(shape) and shape[0] > 1:
            bounds = [1, *analysis.cuts.get(((placeholder, 0), 0), []), shape[0]]
            batch.add(analysis.find(((placeholder, 0), 0, 1, bounds[1])))
    for node in analysis.nodes:
        rule, table = analysis.rules[node], rule_of(node)
        if rule is None or table is None:
            continue
        contraction = table.flop is not None and table.lower is None
        for factor in rule.sizes:
            parts = analysis.parts(node, factor)
            for name, _size in parts:
                key = analysis.find((node, name))
                if contraction and _kind(node, rule, factor) == "m":
                    tokens.add(key)
                if factor not in rule.whole and (len(parts) == 1 if contraction else table.lower is not None):
                    anchored.add(key)
    anchored |= batch
    result = {}
    learned, partial = _learned(graph), set()
    for node in analysis.nodes:
        rule = analysis.rules[node]
        if rule is not None:
            reached = any(value_of(n) in partial for n in operands_of(node))
            if rule.reduced or (reached and rule.linear):
                partial |= {(node, i) for i in range(len(results_of(node)))}
        result[node] = (
            _operator(analysis, node, rule, batch, tokens, anchored, node in learned, reached)
            if rule
            else Operator(node, None, {}, False)
        )
    return result


def _learned(graph: fx.Graph) -> set[fx.Node]:
    """Floating-point placeholders and all operators that depend on one: not those of masks, ids and positions alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        floating = any(differentiable(t) for t in results_of(node))
        if node.op == "placeholder":
            if floating:
                found.add(node)
        elif node.op == "call_function" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _kind(node: fx.Node, rule: OpRule, factor: str) -> str:
    if factor in rule.reduced:
        return "k"
    table = rule_of(node)
    position = table.product.data if table is not None and table.product is not None else 0
    rows = {f for dim in rule.operands[position] for f in dim}
    columns = {f for dims in rule.operands[position + 1 :][:1] for dim in dims for f in dim}
    if factor in rows and factor in columns:
        return ""
    return "m" if factor in rows else "n"


def _operator(
    analysis: _Analysis,
    node: fx.Node,
    rule: OpRule,
    batch: set,
    tokens: set,
    anchored: set,
    trained: bool,
    sums: bool,
) -> Operator:
    table = rule_of(node)
    assert table is not None
    factors: dict[str, Factor] = {}
    names: dict[str, tuple[str, ...]] = {}
    everywhere = [dim for dims in (*rule.operands, *rule.results) for dim in dims]
    for base in rule.sizes:
        parts = analysis.parts(node, base)
        names[base] = tuple(name for name, _ in parts)
        sole = len(parts) == 1 and all(len(dim) == 1 for dim in everywhere if base in dim)
        for index, (name, size) in enumerate(parts):
            key = analysis.find((node, name))
            role = "batch" if key in batch else "token" if key in tokens else "feature"
            loose = index == 0 or base not in table.contiguous
            offered = base not in rule.whole and loose and (len(parts) == 1 or key in anchored)
            offered = offered and (trained or role == "batch")  # masks and positions are cheap: keep their space small
            kind = _kind(node, rule, base) if table.flop and table.lower is None else ""
            factors[name] = Factor(name, base, size, index, len(parts), sole, kind, role, offered)

    def refine(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(tuple(part for base in dim for part in names[base]) for dim in dims)

    cut = OpRule(
        operands=tuple(refine(dims) for dims in rule.operands),
        results=tuple(refine(dims) for dims in rule.results),
        sizes={name: factor.size for name, factor in factors.items()},
        whole=frozenset(part for base in rule.whole for part in names[base]),
        inner=frozenset(part for base in rule.inner for part in names[base]),
        additive=rule.additive,
        linear=rule.linear,
    )
    assert math.prod(cut.sizes.values()) == math.prod(rule.sizes.values())
    return Operator(node, cut, factors, sums)
