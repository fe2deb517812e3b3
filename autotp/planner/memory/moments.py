"""The memory at a moment of a step as an integer program: bytes by strategy and reshard.

`autotp.costs.footprint` simulates a step of one plan. This module covers all plans at once, at one moment: a table for
every operator, parameter and tensor has the bytes that it holds then, for each of its strategies and layouts. These tables
have the form of the integer program's tables of seconds, so the plan that holds the least at a moment, or on average over
moments, is found in the same way as the fastest plan. Where a storage has several names (views), and where several readers
want layouts at different times, the tables are close but not exact: footprints decide.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from autotp.costs.prices import Prices
from autotp.costs.step import Moment, Turn
from autotp.planner.assemble import Assembled
from autotp.planner.choices import Choice, kept_inside, parts_of
from autotp.planner.ilp import Deadline, Node, Problem, Tensor, Use, cheapest, least
from autotp.planner.memory.lives import Lives
from autotp.planner.memory.tables import Held, Ledger, Sizes, Tables
from autotp.planner.structure import Structure
from passes.rules.kept import working

__all__ = ["Moments"]

_SECONDS = 10.0  # time limit for a lower bound on the bytes at a moment; most take hundredths of a second


class Moments:
    """The bytes that all plans on a mesh hold at the moments of a step.

    Args:
        assembled: the integer program of the mesh; its infinite costs mark choices that do not exist.
        prices: of the mesh.
        panelled: products keep their data operand in its resting layout, and gather it again in panels.
        deadline: after which methods raise `autotp.planner.ilp.Expired`.
        shared: every device has just its share of every tensor, whatever its layout. No mesh has such plans, but their
            bytes are a lower bound for all meshes.
    """

    def __init__(
        self, assembled: Assembled, prices: Prices, panelled: bool, deadline: Deadline, shared: bool = False
    ) -> None:
        deadline.check()
        self.assembled, self.prices, self.panelled, self.deadline = assembled, prices, panelled, deadline
        self.structure = assembled.structure
        self.model = self.structure.model
        key = panelled, prices.train
        if key not in self.structure.lives:
            self.structure.lives[key] = Lives(self.structure, *key)
        self.lives: Lives = self.structure.lives[key]
        self.order = self.lives.order
        numbers = itertools.count(len(self.structure.edges))
        self.needs = [number if edge.needs is None else next(numbers) for number, edge in enumerate(self.structure.edges)]
        self.tensors = list(assembled.problem.tensors)
        self.again = self._recomputed_uses()
        self.shared = shared
        of = Sizes.shared if shared else Sizes.of
        self.sizes = [of(edge, prices.mesh) for edge in self.structure.edges]
        self.first = dict(enumerate(edge.first for edge in self.structure.edges))
        self.first |= {number: edge.first for number, edge in zip(self.needs, self.structure.edges, strict=True)}
        self.first |= {again: self.first[number] for number, again in self.again.items()}
        self.inside = self._inside()
        self.known: dict[tuple[Moment, bool], Tables] = {}
        self.allowed = [np.where(np.isfinite(t.cost), 0.0, np.inf) for t in assembled.problem.tensors]

    @property
    def usual(self) -> list[Moment]:
        """The moments at which memory usually peaks: begin and end of the backward pass, or the end of inference."""
        last = len(self.order) - 1
        return (
            [Moment(last, Turn.BACKWARD), Moment(0, Turn.BACKWARD)] if self.prices.train else [Moment(last, Turn.FORWARD)]
        )

    def program(
        self, shares: Mapping[Moment, float], surely: bool = False, besides: Problem | None = None, price: float = 1.0
    ) -> Problem:
        """The integer program whose cost is a weighted sum of the bytes at moments.

        Args:
            shares: the weight of each moment.
            surely: count lower bounds on the bytes instead of estimates.
            besides: a program whose cost is added, times ``price``. The bounds of joint tables are closer.
        """
        self.deadline.check()
        nodes, tensors = self._weighted(shares, surely)
        held: dict[int, dict[tuple[tuple[int, ...], str], np.ndarray]] = defaultdict(dict)
        for (number, uses, once), table in tensors.items():
            held[number][uses, once] = table
        problem = self.assembled.problem
        counted = [np.zeros(()) if besides is None else price * node.cost for node in (besides or problem).nodes]
        made = tuple(
            Node(n.name, np.where(np.isfinite(n.cost), more + nodes.get(i, 0.0), np.inf), np.zeros(len(n.cost)))
            for i, (n, more) in enumerate(zip(problem.nodes, counted, strict=True))
        )
        found = []
        for number, tensor in enumerate(self.tensors):
            cost, every = tensor.cost, tensor.uses
            if number < len(problem.tensors):
                cost, every = self.allowed[number], problem.tensors[number].uses
                if besides is not None:
                    cost = besides.tensors[number].cost if price == 1.0 else price * besides.tensors[number].cost
            alone: dict[int, np.ndarray] = {}
            for (uses, once), table in held.get(number, {}).items():
                if len(uses) > 1:
                    found.append(_tensor(tensor, [self._use(number, use, once) for use in uses], table))
                    continue
                columns = self._columns(number, once)
                mine = table if columns is None else table[:, columns]
                alone[uses[0]] = alone[uses[0]] + mine if uses[0] in alone else mine
            if len(every) == 1 and 0 in alone:
                cost = cost + alone.pop(0)
            found += [_tensor(tensor, [tensor.uses[use]], table) for use, table in alone.items()]
            found.append(_tensor(tensor, every, cost))
        return Problem(made, tuple(one for one in found if one.cost.any()))

    def _columns(self, number: int, once: str) -> np.ndarray | None:
        """For each column of a tensor, the first one that shares its storage; None if columns share none."""
        return self.first[number].get(once) if number in self.first else None

    def _use(self, number: int, use: int, once: str) -> Use:
        """A use of a tensor in which columns that share a storage are the same."""
        found, first = self.tensors[number].uses[use], self._columns(number, once)
        return found if first is None else Use(found.node, np.where(found.want < 0, -1, first[found.want]))

    def bytes(self, moment: Moment, choice: Sequence[int], surely: bool = False) -> float:
        """Bytes of a choice at a moment according to the tables, or a lower bound on them."""
        nodes, tensors = self.tables(moment, surely)
        total = sum(float(table[choice[node]]) for node, table in nodes.items())
        for (number, uses, once), table in tensors.items():
            tensor, mine = self.tensors[number], [self._use(number, use, once) for use in uses]
            wants = {int(use.want[choice[use.node]]) for use in mine}
            total += float(table[int(tensor.have[choice[tensor.producer]]), sorted(wants - {-1})].sum())
        return total * (1 + self.prices.spare)

    def least(self, moment: Moment) -> float:
        """A lower bound on the bytes of all choices at a moment."""
        program = self.program({moment: 1.0}, surely=True)
        return max(0.0, least(program, cutoff=math.inf, deadline=self.deadline.within(_SECONDS))[0])

    def cheapest(self, moment: Moment) -> tuple[tuple[int, ...], float]:
        """The choice that holds the least at a moment according to the tables, and its bytes."""
        choice = cheapest(self.program({moment: 1.0}), self.deadline)
        return choice, self.bytes(moment, choice)

    def tables(self, moment: Moment, surely: bool = False) -> Tables:
        """The tables of bytes at a moment, or, for bounds, of lower bounds on them."""
        if (moment, surely) not in self.known:
            self.known[moment, surely] = self._tables(moment, surely)
        return self.known[moment, surely]

    def _weighted(self, shares: Mapping[Moment, float], surely: bool) -> Tables:
        nodes: dict[int, np.ndarray] = {}
        tensors: dict[Held, np.ndarray] = {}
        for moment, share in shares.items():
            if share > 0:
                mine, held = self.tables(moment, surely)
                share *= 1 + self.prices.spare
                for node, table in mine.items():
                    nodes[node] = nodes.get(node, 0.0) + share * table
                for key, table in held.items():
                    tensors[key] = tensors.get(key, 0.0) + share * table
        return nodes, tensors

    def _tables(self, moment: Moment, surely: bool) -> Tables:
        tables = Ledger(self.sizes, self.prices, self.needs, self.again)
        self.deadline.check()
        for number, (edge, lives) in enumerate(zip(self.structure.edges, self.lives.around(moment.at), strict=True)):
            for life, count in lives.items():
                if edge.parameter:
                    tables.parameter(number, edge, life, count, moment, self.panelled, surely)
                elif surely:
                    tables.least(number, edge, life, count, moment)
                else:
                    tables.activation(number, edge, life, count, moment)
        for number, at, kept, besides in self.inside:
            if at <= moment.at and self.prices.train:
                now = besides if moment == (at, Turn.BACKWARD) else 0.0
                tables.nodes[number] = tables.nodes.get(number, 0.0) + kept + now
        return tables.nodes, tables.tensors

    def _recomputed_uses(self) -> dict[int, int]:
        """Adds uses by recomputed readers: to needed tensors (`Needs`), and of parameters, as further tensors, returned."""
        found = {}
        for number, edge in enumerate(self.structure.edges):
            tensor = self.tensors[self.needs[number]]
            uses = [_if_recomputed(use, self.structure) for use in tensor.uses]
            if edge.needs is not None:
                self.tensors[self.needs[number]] = replace(tensor, uses=(*tensor.uses, *uses))
            elif edge.parameter and edge.trained and any((use.want >= 0).any() for use in uses):
                found[number] = len(self.tensors)
                self.tensors.append(_tensor(tensor, uses, np.zeros(tensor.cost.shape)))
        return found

    def _inside(self) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
        """For operators that keep more than operands and results: node, position, bytes kept, and bytes while it is needed.

        The latter are those to work with, and those that are recomputed then.
        """
        found, known = [], dict[int, np.ndarray]()
        for node, at in self.order.items():
            number = self.structure.index[self.model.stands.get(node, node)]
            choice = self.structure.nodes[number][1]
            assert isinstance(choice, Choice)
            if number not in known:
                kept = choice.twice(kept_inside(choice, self.prices.mesh))
                if self.shared:
                    kept = np.full_like(kept, kept.max() / math.prod(self.prices.mesh))
                known[number] = kept
            if known[number].any():
                kept = known[number] * (~choice.recomputing & (node not in self.model.recomputed))
                besides = choice.twice(parts_of(choice, working(node), self.prices.mesh))
                found.append((number, at, kept, besides + known[number] - kept))
        return found


def _if_recomputed(use: Use, structure: Structure) -> Use:
    """The use of a tensor by a reader in those of its choices that recompute the reader."""
    choice = structure.nodes[use.node][1]
    return Use(use.node, np.where(choice.recomputing if isinstance(choice, Choice) else False, use.want, -1))


def _tensor(tensor: Tensor, uses: Sequence[Use], cost: np.ndarray) -> Tensor:
    nothing = np.zeros(tensor.cost.shape)
    return Tensor(tensor.name, tensor.producer, tensor.have, tuple(uses), cost, nothing, nothing)
