"""The part of the integer program that depends on the number of mesh axes, but not on their sizes.

It has operators with all their strategies, parameters and caches with all their resting layouts, and tensors with the
layouts that they can have and those that readers want, all as layout codes. For a mesh, choices that do not exist on it are
masked, and prices are filled in.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from autotp.costs.model import Model
from autotp.costs.runs import Runs
from autotp.planner.choices import Choice, Edge, Needs, Rest
from autotp.planner.ilp import NEVER, Deadline
from autotp.plans.families import Restriction
from passes.graph import cast_of, differentiable
from passes.layouts.codes import DIM, INNER, PARTIAL, WHOLE, codes
from passes.layouts.reshard_matrix import ReshardPricer
from passes.rules.factors import Value, value_of
from passes.rules.shapes import operands_of
from passes.rules.table import flop_of, rule_of
from passes.sharding.panel import data_position
from passes.strategies.space import space

__all__ = ["Structure", "structure"]


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """See the module's docstring. ``nodes`` are (graph node, its choices, number of copies).

    ``lives``: the lifetimes of tensors, cached by `autotp.planner.memory.moments` for all meshes; ``last``: the program of
    the last mesh before seconds are weighted, cached by `autotp.planner.assemble`.
    """

    model: Model
    chosen: Restriction
    axes: int
    nodes: Sequence[tuple[fx.Node, Choice | Rest | None, int]]
    edges: Sequence[Edge]
    index: Mapping[fx.Node, int]
    pricer: ReshardPricer
    lives: dict[Any, Any] = field(default_factory=dict)
    last: dict[Any, Any] = field(default_factory=dict)


def structure(
    model: Model, chosen: Restriction, axes: int, pricer: ReshardPricer | None = None, deadline: Deadline = NEVER
) -> Structure:
    """The structure of a model's plans on meshes with ``axes`` axes, restricted to a family.

    Structures with the same number of axes may share a pricer.

    Raises:
        Expired: the deadline passed before it was complete.
    """
    return _Builder(model, chosen, axes, pricer or ReshardPricer(), deadline).run()


class _Registry:
    """Numbers distinct rows of codes."""

    def __init__(self, axes: int) -> None:
        self.known: dict[bytes, int] = {}
        self.rows: list[np.ndarray] = []
        self.axes = axes

    def add(self, rows: np.ndarray) -> np.ndarray:
        """Adds rows, and returns the number of each."""
        rows = np.ascontiguousarray(rows)
        distinct, inverse = np.unique(
            rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel(), return_inverse=True
        )
        numbers = np.empty(len(distinct), np.int64)
        for i, row in enumerate(distinct):
            key = row.tobytes()
            if key not in self.known:
                self.known[key] = len(self.rows)
                self.rows.append(np.frombuffer(key, np.int64))
            numbers[i] = self.known[key]
        return numbers[inverse]

    @property
    def array(self) -> np.ndarray:
        return np.array(self.rows, np.int64).reshape(len(self.rows), -1)


class _Builder:
    def __init__(self, model: Model, chosen: Restriction, axes: int, pricer: ReshardPricer, deadline: Deadline) -> None:
        self.deadline = deadline
        self.model, self.chosen, self.axes, self.pricer = model, chosen, axes, pricer
        self.captured, self.runs = model.captured, Runs(model)
        self.whole = np.full((1, axes), WHOLE, np.int64)
        self.copies: dict[fx.Node, int] = defaultdict(int)
        for node in model.stands.values():
            self.copies[node] += 1
        self.index: dict[fx.Node, int] = {}
        self.nodes: list[tuple[fx.Node, Choice | Rest | None, int]] = []
        self.by_key: dict[object, Choice] = {}

    def stand(self, node: fx.Node) -> fx.Node:
        return self.model.stands.get(node, node)

    def run(self) -> Structure:
        graph = self.captured.graph_module.graph
        for node in self.model.operators:
            if self.stand(node) is node:
                self.add(node, self.choice(node), self.copies[node])
        wanted = self.wanted()
        for node in graph.nodes:
            if node.op == "placeholder" and self.stand(node) is node:
                self.add(node, self.rest(node, wanted.get(node, [])), max(1, self.copies[node]))
        self.add(graph.output_node(), None, 1)
        return Structure(self.model, self.chosen, self.axes, self.nodes, self.edges(), self.index, self.pricer)

    def add(self, node: fx.Node, choice: Choice | Rest | None, count: int) -> None:
        self.index[node] = len(self.nodes)
        self.nodes.append((node, choice, count))

    def choice(self, node: fx.Node) -> Choice:
        self.deadline.check()
        operator = self.model.operators[node]
        weight = any(value_of(n)[0].name in self.captured.parameters for n in operands_of(node))
        runs = self.runs.run(node), self.runs.rerun(node)
        key = self.model.kinds[node], weight, runs, self.model.kept(node)
        if key not in self.by_key:
            table, chosen = rule_of(node), self.chosen
            found = space(operator, self.axes, lambda axis, factor: chosen.allows(operator, axis, factor))
            kept = self.model.kept(node)
            saves = kept.results and not runs[0].recomputed
            best = chosen.prefers(table is not None and table.flop is not None and weight)
            score = np.array(
                [chosen.score(operator, found.assignment(s)) for s in range(len(found.serves))] if best else []
            )
            self.by_key[key] = Choice(found, flop_of(node), *runs, saves, kept, best, score)
        return self.by_key[key]

    def wanted(self) -> dict[fx.Node, list[np.ndarray]]:
        """Parameter or cache -> the layouts that the strategies of its readers want."""
        found: dict[fx.Node, list[np.ndarray]] = defaultdict(list)
        for node in self.model.operators:
            choice = self.nodes[self.index[self.stand(node)]][1]
            assert isinstance(choice, Choice)
            if self.stand(node) is node:
                for position, operand in enumerate(operands_of(node)):
                    if operand.name in self.model.placed:
                        found[self.stand(operand)].append(choice.space.wants[position])
        return found

    def rest(self, node: fx.Node, wanted: Sequence[np.ndarray]) -> Rest:
        value, parameter = node.meta["val"], node.name in self.captured.parameters
        rests = self.chosen.family.rest
        layouts = self.whole
        if node in self.model.resting:
            layouts = codes([self.model.resting[node]])
            if parameter:
                return self.offered(node, layouts, np.zeros(1, np.int64))
        elif node.name in self.model.placed and not (parameter and rests == "whole"):
            layouts = np.unique(np.concatenate([self.whole, *(np.where(w == PARTIAL, WHOLE, w) for w in wanted)]), axis=0)
        if not parameter or rests == "whole":
            numbers = np.arange(len(layouts))
            return Rest(value, cast_of(node), layouts, numbers, np.full(len(layouts), parameter), False, parameter)
        options: dict[tuple[int, ...], int] = {}
        groups = 0
        for row in layouts[::-1]:
            left = [a for a in range(self.axes) if row[a] == WHOLE and self.chosen.rests(a) != "whole"]
            for count in range(len(left), -1, -1) if rests == "sharded" else range(len(left) + 1):
                for axes in itertools.combinations(left, count):
                    for option in self.further(tuple(int(c) for c in row), axes, value.dim()):
                        options.setdefault(option, groups)
                    groups += 1
        return self.offered(node, np.array([*options], np.int64), np.array([*options.values()], np.int64))

    def offered(self, node: fx.Node, rows: np.ndarray, groups: np.ndarray) -> Rest:
        """The layouts in which a parameter may rest, gathered once or twice; one of each group of layouts is enough."""
        gathers = self.chosen.family.gathers if self.read_back(node) else "twice"
        offered = [number for number, name in enumerate(("once", "twice")) if gathers in (name, "free")]
        numbers = np.concatenate([groups + (groups.max() + 1) * number for number in offered])
        twice = np.repeat(np.array(offered, bool), len(rows))
        return Rest(
            node.meta["val"], cast_of(node), np.tile(rows, (len(offered), 1)), numbers, twice, gathers == "free", True
        )

    def read_back(self, node: fx.Node) -> bool:
        """Whether a backward pass may read a parameter."""
        users = {user for user, _ in self.model.readers.get((node, 0), ())}
        return any(user in self.model.undecided or self.model.reads_back(user, (node, 0)) for user in users)

    def further(self, row: tuple[int, ...], axes: Sequence[int], dims: int) -> list[tuple[int, ...]]:
        """The layouts that shard ``row`` over further axes, all on one dim; dims that are not sharded yet come first."""
        if not axes:
            return [row]
        order = sorted(range(dims), key=lambda d: (any(c >= 0 and c // DIM == d for c in row), d))
        found = []
        for dim in order:
            others = [(a, c % DIM) for a, c in enumerate(row) if c >= 0 and c // DIM == dim]
            outermost = all(a < min(axes) and blocks == 1 for a, blocks in others)
            code = dim * DIM + (1 if outermost else INNER)
            found.append(tuple(code if a in axes else c for a, c in enumerate(row)))
        return found

    def edges(self) -> list[Edge]:
        grouped: dict[tuple, list[Value]] = defaultdict(list)
        example: dict[tuple, fx.Node] = {}
        for (producer, result), readers in self.model.readers.items():
            uses = [(self.stand(node), position) for node, position in readers]
            key = (self.stand(producer), result, tuple(sorted(uses, key=lambda u: (self.index[u[0]], u[1]))))
            grouped[key].append((producer, result))
            example.setdefault(key, self.model.named[producer, result])
        return [self.edge(example[key], key, tuple(copies)) for key, copies in grouped.items()]

    def edge(self, node: fx.Node, key: tuple, copies: tuple[Value, ...]) -> Edge:
        self.deadline.check()
        producer, result, uses = key
        parameter = producer.name in self.captured.parameters
        trained = (producer, result) in self.model.trained
        made = self.nodes[self.index[producer]][1]
        rows, wants = _Registry(self.axes), _Registry(self.axes)
        have = rows.add(made.twice(made.space.results[result]) if isinstance(made, Choice) else made.rows)  # type: ignore[union-attr]
        layouts_of, regathered = rows.array, np.full(len(rows.rows), parameter)
        if isinstance(made, Rest) and not made.regathered.all() and parameter:
            have = have + np.where(made.regathered, len(regathered), 0)
            layouts_of = np.concatenate([layouts_of, layouts_of])
            regathered = np.concatenate([~regathered, regathered])
        found: list[tuple[int, np.ndarray]] = []
        saved: list[np.ndarray] = []
        products: list[np.ndarray] = []
        for user, position in uses:
            choice = self.nodes[self.index[user]][1]
            if isinstance(choice, Choice):
                layouts, gradients = map(choice.twice, (choice.space.wants[position], choice.space.gradients[position]))
            else:  # the graph's output, or a cache
                layouts = gradients = self.whole if choice is None else choice.rows
            gradients = gradients if trained else np.full_like(gradients, WHOLE)
            column = wants.add(np.concatenate([layouts, gradients], axis=1))
            found.append((self.index[user], column))
            saves = isinstance(choice, Choice) and position in self.model.kept(user).operands
            if saves or user in self.model.recomputed:
                product = not parameter and data_position(user) == position
                (products if product else saved).append(column)
        mask = [np.zeros(len(wants.rows), bool), np.zeros(len(wants.rows), bool)]
        for chosen, columns in zip(mask, (saved, products), strict=True):
            for column in columns:
                chosen[column] = True
        value = node.meta["val"]
        real = not parameter and producer.op != "placeholder" and differentiable(value)
        return Edge(
            name=node.name,
            value=value,
            cast=cast_of(node),
            producer=self.index[producer],
            have=have,
            rows=layouts_of,
            regathered=regathered,
            uses=tuple(found),
            wants=np.ascontiguousarray(wants.array[:, : self.axes]),
            gradients=np.ascontiguousarray(wants.array[:, self.axes :]),
            saved=mask[0],
            products=mask[1],
            copies=copies,
            parameter=parameter,
            trained=trained,
            keeps=real and producer not in self.model.recomputed,
            repeats=real and self.model.recomputed.get(producer, False),
            needs=self.needs(
                made, have, [(user, position, want) for (user, position), (_, want) in zip(uses, found, strict=True)]
            ),
        )

    def needs(
        self, made: Choice | Rest | None, have: np.ndarray, uses: Sequence[tuple[fx.Node, int, np.ndarray]]
    ) -> Needs | None:
        """The `Needs` of a tensor, by its producer's choices and layouts; None if neither it nor a reader is undecided."""
        if not isinstance(made, Choice) or not (made.undecided or any(u in self.model.undecided for u, *_ in uses)):
            return None
        read = []
        for user, position, want in uses:
            choice = self.nodes[self.index[user]][1]
            if isinstance(choice, Choice):
                needed = self.model.reads_operand_back(user, position, choice.run.recomputed)
                recomputing = choice.recomputing & self.model.reads_operand_back(user, position, recomputed=True)
                want = np.where(recomputing | needed, want, -1)
            else:
                want = np.full_like(want, -1)
            read.append((self.index[user], want))
        views = {
            self.index[u]
            for u, position, _ in uses
            if position == 0 and u in self.model.undecided and u in self.model.shown
        }
        return Needs(have + np.where(made.recomputing, have.max() + 1, 0), tuple(read), tuple(views))
