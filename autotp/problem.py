"""From analysed operators to the integer program: nodes with priced strategies, tensors with priced reshards.

Operators, parameters and the model's outputs are nodes; inputs, buffers and constants are nodes with one choice. Tied
(folded) nodes become one node whose costs are those of all its copies.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate

from autotp.families import Restriction, restricted
from autotp.folding import signature
from autotp.ilp import Node, Problem, Tensor, Use
from autotp.pricing import Prices, flop_of
from passes.capture import Captured
from passes.factors import Operator, Value, value_of
from passes.layout import Layout, blocks_of, fits, is_shard, place
from passes.panel import data_position
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import rule_of
from passes.strategy import Strategy, Want, whole_layout

__all__ = ["Assembled", "Model", "assemble", "trained_values"]


@dataclass(frozen=True, slots=True)
class Model:
    """A captured model, analysed and folded: what planning needs on every mesh.

    Attributes:
        captured: the captured graph.
        operators: its analysis.
        stands: operator or parameter node -> the node that stands for it.
        trained: tensors through which gradients flow.
    """

    captured: Captured
    operators: Mapping[fx.Node, Operator]
    stands: Mapping[fx.Node, fx.Node]
    trained: frozenset[Value]


@dataclass(frozen=True, slots=True)
class Assembled:
    """A problem with the meaning of its nodes' choices.

    Attributes:
        problem: the integer program.
        index: representative node -> index of the problem's node.
        choices: per problem node, its strategies, or its resting layouts for a placeholder.
    """

    problem: Problem
    index: Mapping[fx.Node, int]
    choices: Sequence[Sequence[Strategy] | Sequence[Layout]]


def assemble(
    model: Model, mesh: tuple[int, ...], chosen: Restriction, prices: Prices, memory_bound: float, panelled: bool = False
) -> Assembled:
    """The integer program of a model on a mesh, within a family.

    ``panelled``: products keep their data operand as it rests and gather it again, in panels, for the backward pass.
    """
    return _Assembly(model, mesh, chosen, prices, panelled).run(memory_bound)


class _Assembly:
    def __init__(self, model: Model, mesh: tuple[int, ...], chosen: Restriction, prices: Prices, panelled: bool) -> None:
        self.panelled = panelled
        self.kept: dict[int, np.ndarray] = {}
        self.model, self.mesh, self.chosen, self.prices = model, mesh, chosen, prices
        self.whole = whole_layout(len(mesh))
        self.captured = model.captured
        self.copies: dict[fx.Node, int] = defaultdict(int)
        for node in model.stands.values():
            self.copies[node] += 1
        self.index: dict[fx.Node, int] = {}
        self.alike: dict[object, tuple[list[Strategy], np.ndarray, np.ndarray]] = {}
        self.choices: list[Sequence] = []
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []

    def stand(self, node: fx.Node) -> fx.Node:
        return self.model.stands.get(node, node)

    def run(self, memory_bound: float) -> Assembled:
        graph = self.captured.graph_module.graph
        for node in self.model.operators:
            if self.stand(node) is node:
                self._add_operator(node)
        wanted = self._wanted_parameters()
        for node in graph.nodes:
            if node.op == "placeholder" and self.stand(node) is node:
                self._add_placeholder(node, wanted.get(node, ()))
        output = graph.output_node()
        self._add(output, [None], [0.0], [0.0])
        self._add_tensors(output)
        for index, memory in self.kept.items():
            self.nodes[index] = replace(self.nodes[index], memory=self.nodes[index].memory + memory)
        return Assembled(Problem(tuple(self.nodes), tuple(self.tensors), memory_bound), self.index, self.choices)

    def _add(self, node: fx.Node, choices: Sequence, cost: Any, memory: Any) -> None:
        self.index[node] = len(self.nodes)
        self.choices.append(choices)
        self.nodes.append(Node(node.name, np.asarray(cost, float), np.asarray(memory, float)))

    def _add_operator(self, node: fx.Node) -> None:
        operator, count = self.model.operators[node], self.copies[node]
        weight = any(value_of(n)[0].name in self.captured.parameters for n in operands_of(node))
        gradient = any((node, i) in self.model.trained for i in range(len(results_of(node))))
        key = signature(operator, frozenset(self.captured.parameters)), weight, gradient
        if key not in self.alike:
            self.alike[key] = self._priced(operator, weight, gradient)
        found, cost, memory = self.alike[key]
        self._add(node, found, count * cost, count * memory)

    def _priced(self, operator: Operator, weight: bool, gradient: bool) -> tuple[list[Strategy], np.ndarray, np.ndarray]:
        """Strategies of an operator with the seconds and the saved bytes of each."""
        node = operator.node
        found = restricted(self.chosen, operator, self.mesh, weight)
        flop, table = flop_of(node), rule_of(node)
        saved = table is not None and table.saves == "result" and self.prices.train and gradient
        cost, memory = [], []
        for strategy in found:
            cost.append(self.prices.operator(operator, strategy, flop, gradient=gradient).seconds)
            kept = zip(results_of(node), strategy.results, strict=True) if saved else ()
            memory.append(sum(self.prices.bytes(t, layout) for t, layout in kept))
        return found, np.asarray(cost), np.asarray(memory, float)

    def _wanted_parameters(self) -> dict[fx.Node, list[Layout]]:
        """Parameter -> the layouts that any strategy of a reader wants."""
        found: dict[fx.Node, dict[Layout, None]] = defaultdict(dict)
        for node in self.model.operators:
            if self.stand(node) is not node:
                continue
            for position, operand in enumerate(operands_of(node)):
                if operand.name in self.captured.parameters:
                    for strategy in self.choices[self.index[node]]:
                        found[self.stand(operand)].setdefault(strategy.wants[position].layout)
        return {node: list(layouts) for node, layouts in found.items()}

    def _add_placeholder(self, node: fx.Node, wanted: Sequence[Layout]) -> None:
        value = node.meta["val"]
        if node.name not in self.captured.parameters:
            self._add(node, [self.whole], [0.0], [float(value.numel() * value.element_size())])
            return
        found = self._resting_layouts(tuple(value.shape), wanted)
        count = max(1, self.copies[node])
        self._add(node, found, [0.0] * len(found), [count * self.prices.state(value, layout) for layout in found])

    def _resting_layouts(self, shape: tuple[int, ...], wanted: Sequence[Layout]) -> list[Layout]:
        """Where a parameter may rest: as readers want it, or sharded further; as far as it can be if the family says so."""
        rests = self.chosen.family.rest
        if rests == "whole":
            return [self.whole]
        layouts: dict[Layout, None] = {self.whole: None} if rests == "free" else {}
        for layout in [self.whole, *wanted]:
            settled = tuple(Replicate() if isinstance(p, Partial) else p for p in layout)
            left = [a for a, p in enumerate(settled) if isinstance(p, Replicate) and self.mesh[a] > 1]
            left = [a for a in left if self.chosen.rests(a) != "whole"]
            for count in [len(left)] if rests == "sharded" else range(len(left) + 1):
                for axes in itertools.combinations(left, count):
                    layouts.setdefault(self._further(shape, settled, axes))
        if rests == "sharded":
            most = max(_ways(layout, self.mesh) for layout in layouts)
            layouts = {layout: None for layout in layouts if _ways(layout, self.mesh) == most}
        return list(layouts)

    def _further(self, shape: tuple[int, ...], layout: Layout, axes: Sequence[int]) -> Layout:
        """Shards on further ``axes``, each on the first dim that can take it, untouched dims first."""
        dims = sorted(range(len(shape)), key=lambda d: (any(is_shard(p) and p.dim == d for p in layout), d))  # type: ignore[attr-defined]
        for axis in axes:
            for dim in dims:
                candidate = (*layout[:axis], place(dim, self._joint(layout, axis, dim)), *layout[axis + 1 :])
                if fits(shape, candidate, self.mesh):
                    layout = candidate
                    break
        return layout

    def _joint(self, layout: Layout, axis: int, dim: int) -> int:
        """In how many blocks ``axis`` may split a dim further without moving what other axes hold of it."""
        others = [(a, blocks_of(p)) for a, p in enumerate(layout) if is_shard(p) and p.dim == dim]  # type: ignore[attr-defined]
        if all(a < axis and blocks == 1 for a, blocks in others):
            return 1
        return max(blocks * math.prod(self.mesh[a] for a, b in others if b == blocks) for _, blocks in others)

    def _add_tensors(self, output: fx.Node) -> None:
        grouped: dict[tuple, int] = defaultdict(int)
        example: dict[tuple, fx.Node] = {}
        readers: dict[Value, list[tuple[fx.Node, int]]] = defaultdict(list)
        named: dict[Value, fx.Node] = {}
        for node in self.model.operators:
            for position, operand in enumerate(operands_of(node)):
                readers[value_of(operand)].append((self.stand(node), position))
                named[value_of(operand)] = operand
        for leaf in output.args[0]:  # type: ignore[union-attr]
            if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor):
                readers[value_of(leaf)].append((output, 0))
                named[value_of(leaf)] = leaf
        for (producer, result), uses in readers.items():
            key = (self.stand(producer), result, tuple(sorted(uses, key=lambda u: (self.index[u[0]], u[1]))))
            grouped[key] += 1
            example.setdefault(key, named[(producer, result)])
        for (producer, result, uses), count in grouped.items():
            self.tensors.append(self._tensor(example[(producer, result, uses)], producer, result, uses, count))

    def _tensor(self, node: fx.Node, producer: fx.Node, result: int, uses: Sequence, count: int) -> Tensor:
        value, prices = node.meta["val"], self.prices
        parameter = producer.name in self.captured.parameters
        trained = (producer, result) in self.model.trained
        floating = trained and prices.train
        choices = self.choices[self.index[producer]]
        placed = [c if producer.op == "placeholder" else c.results[result] for c in choices]
        rows: dict[Layout, int] = {}
        have = np.array([rows.setdefault(layout, len(rows)) for layout in placed])
        columns: dict[Want, int] = {}
        users, saving, products = [], set(), set()
        for user, position in uses:
            whole = Want(self.whole, self.whole)
            wants = [whole] if user.op == "output" else [s.wants[position] for s in self.choices[self.index[user]]]
            if not floating:
                wants = [Want(w.layout, self.whole) for w in wants]
            chosen = np.array([columns.setdefault(w, len(columns)) for w in wants])
            users.append(Use(self.index[user], chosen))
            if self.panelled and not parameter and user.op == "call_function" and data_position(user) == position:
                products |= set(chosen.tolist())
                continue
            table = rule_of(user) if user.op == "call_function" else None
            if table is not None and table.saves == "operands" and prices.train:
                saving |= set(chosen.tolist())
        regather = np.zeros((len(rows), len(columns)), bool)
        temporary = np.zeros(regather.shape)
        memory = np.zeros(len(columns))
        keeps = producer.op != "placeholder" and value.dtype.is_floating_point
        if products and prices.train and keeps:
            kept = np.array([prices.bytes(value, layout) for layout in rows])
            self.kept[self.index[producer]] = self.kept.get(self.index[producer], 0.0) + count * kept[have]
        for want, c in columns.items():
            if c in products:
                regather[:, c] = [_gathered(layout, want.layout) for layout in rows]
            if not parameter and c in saving and keeps:
                memory[c] = count * prices.bytes(value, want.layout)
            if parameter:
                for layout, r in rows.items():
                    regather[r, c] = _gathered(layout, want.layout)
                    temporary[r, c] = prices.bytes(value, want.layout) if regather[r, c] else 0.0
        cost = count * prices.reshards(value, list(rows), list(columns), gradient=floating, regather=regather)
        if not self.chosen.family.scatters and not parameter:
            scattered = np.array([[_scattered(layout, w.layout) for w in columns] for layout in rows])
            cost = np.where(scattered, np.inf, cost)
        return Tensor(node.name, self.index[producer], have, tuple(users), cost, memory, temporary)


def _ways(layout: Layout, mesh: tuple[int, ...]) -> int:
    return math.prod(n for n, p in zip(mesh, layout, strict=True) if is_shard(p))


def _scattered(have: Layout, want: Layout) -> bool:
    return any(isinstance(h, Partial) and is_shard(w) for h, w in zip(have, want, strict=True))


def _gathered(have: Layout, want: Layout) -> bool:
    return any(is_shard(h) and h != w for h, w in zip(have, want, strict=True))


def trained_values(captured: Captured, operators: Mapping[fx.Node, Operator]) -> frozenset[Value]:
    """The tensors through which gradients flow to a parameter."""
    trained: set[Value] = set()
    for node in captured.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in captured.parameters:
            trained.add((node, 0))
    for node in operators:
        if "detach" in str(node.target) or not any(value_of(n) in trained for n in operands_of(node)):
            continue
        trained |= {(node, i) for i, t in enumerate(results_of(node)) if t.dtype.is_floating_point}
    return frozenset(trained)
