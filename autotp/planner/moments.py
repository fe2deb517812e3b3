"""What a moment of a step holds, as an integer program: bytes by strategies and reshards.

`autotp.costs.footprint` walks through a step of one plan. Here all plans are seen at once, at one moment: every operator,
parameter and tensor says what it holds then, under each of its strategies and layouts. That is a table for each node and
each tensor, as the seconds of the integer program are, so that the plan which holds the least at a moment, or on average
over moments, is found as the fastest one is. Where a storage has several names (views), and where layouts are wanted by
several readers at different times, the tables are close and not exact: footprints have the last word.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from autotp.costs.model import shown_by
from autotp.costs.moment import Moment, Turn
from autotp.costs.prices import Prices
from autotp.planner.assemble import Assembled, kept_inside
from autotp.planner.ilp import Node, Problem, Tensor, Use
from autotp.planner.structure import Choice, Edge
from passes.layouts.codes import local_elements
from passes.rules.factors import Value
from passes.rules.table import saved_by
from passes.sharding.panel import data_position

__all__ = ["Moments"]

#: Bytes by node and strategy, and by (tensor, those of its uses that hold it) and (have, want).
Tables = tuple[dict[int, np.ndarray], dict[tuple[int, tuple[int, ...]], np.ndarray]]

_PANELS = 4  # of an operand that is gathered in panels, about one in so many is there at once


@dataclass(frozen=True, slots=True)
class _Reader:
    """One use of a tensor: when, and what of it is kept for the reader's backward pass: nothing, it, or it as it rests.

    ``saves`` is whether it ever is: where the planner decides, that depends on the choice. ``flows``: a gradient
    comes back. ``ends``: it is an output of the model.
    """

    at: int
    saves: bool
    panelled: bool
    view: bool
    flows: bool
    ends: bool


@dataclass(frozen=True, slots=True)
class _Life:
    """When one tensor is made (before all operators: -1), whether its producer keeps it or it is a view; who reads it.

    ``until`` is the last operator of the block in whose backward pass it may be made again. ``alone``: of the names of its
    storage, which are views, it is the one that counts.
    """

    made: int
    until: int
    kept: bool
    view: bool
    alone: bool
    last: int
    returned: bool
    readers: tuple[_Reader, ...]


class Moments:
    """The moments of the steps of all plans on a mesh.

    Args:
        assembled: the integer program of the mesh, whose infinite costs say what exists.
        prices: of the mesh.
        panelled: products keep their data operand as it rests, and gather it again in panels.
    """

    def __init__(self, assembled: Assembled, prices: Prices, panelled: bool) -> None:
        self.assembled, self.prices, self.panelled = assembled, prices, panelled
        self.structure = assembled.structure
        self.model = self.structure.model
        self.order = {node: at for at, node in enumerate(self.model.operators)}
        self.readers = self._readers()
        self.lives = [_counted([self._life(value) for value in edge.copies]) for edge in self.structure.edges]
        numbers = itertools.count(len(self.lives))
        self.needs = [number if edge.needs is None else next(numbers) for number, edge in enumerate(self.structure.edges)]
        self.inside = self._inside()
        self.known: dict[tuple[Moment, bool], Tables] = {}
        self.allowed = [np.where(np.isfinite(t.cost), 0.0, np.inf) for t in assembled.problem.tensors]

    @property
    def usual(self) -> list[Moment]:
        """Where the worst moment mostly is: as the backward pass begins, and as it ends."""
        last = len(self.order) - 1
        return (
            [Moment(last, Turn.BACKWARD), Moment(0, Turn.BACKWARD)] if self.prices.train else [Moment(last, Turn.FORWARD)]
        )

    def program(self, shares: Mapping[Moment, float], surely: bool = False) -> Problem:
        """The integer program whose seconds are the bytes that moments hold, or hold at least, weighted."""
        nodes, tensors = self._weighted(shares, surely)
        problem = self.assembled.problem
        made = tuple(
            Node(n.name, np.where(np.isfinite(n.cost), nodes.get(i, 0.0), np.inf), np.zeros(len(n.cost)))
            for i, n in enumerate(problem.nodes)
        )
        found = []
        for number, tensor in enumerate(problem.tensors):
            every = tuple(range(len(tensor.uses)))
            for uses in {every: None} | {held: None for edge, held in tensors if edge == number}:
                table = tensors.get((number, uses), 0.0) + (self.allowed[number] if uses == every else 0.0)
                if np.any(table):
                    held = tuple(tensor.uses[use] for use in uses)
                    found.append(_tensor(tensor, held, np.broadcast_to(table, tensor.cost.shape)))
        return Problem(made, tuple(found))

    def bytes(self, moment: Moment, choice: Sequence[int], surely: bool = False) -> float:
        """What a choice holds at a moment, or holds at least, as the tables have it."""
        nodes, tensors = self.tables(moment, surely)
        total = sum(float(table[choice[node]]) for node, table in nodes.items())
        for (number, uses), table in tensors.items():
            tensor = self.assembled.problem.tensors[number]
            wants = {int(tensor.uses[use].want[choice[tensor.uses[use].node]]) for use in uses}
            total += float(table[int(tensor.have[choice[tensor.producer]]), sorted(wants - {-1})].sum())
        return total

    def tables(self, moment: Moment, surely: bool = False) -> Tables:
        """Bytes held at a moment, or held at least: for bounds."""
        if (moment, surely) not in self.known:
            self.known[moment, surely] = self._tables(moment, surely)
        return self.known[moment, surely]

    def _weighted(self, shares: Mapping[Moment, float], surely: bool) -> Tables:
        nodes: dict[int, np.ndarray] = {}
        tensors: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        for moment, share in shares.items():
            if share > 0:
                mine, held = self.tables(moment, surely)
                for node, table in mine.items():
                    nodes[node] = nodes.get(node, 0.0) + share * table
                for key, table in held.items():
                    tensors[key] = tensors.get(key, 0.0) + share * table
        return nodes, tensors

    def _tables(self, moment: Moment, surely: bool) -> Tables:
        tables = _Sum(self.structure.edges, self.prices, self.needs)
        for number, (edge, lives) in enumerate(zip(self.structure.edges, self.lives, strict=True)):
            for life, count in lives.items():
                if edge.parameter:
                    tables.parameter(number, edge, life, count, moment, self.panelled, surely)
                elif surely:
                    tables.least(number, edge, life, count, moment)
                else:
                    tables.activation(number, edge, life, count, moment)
        for number, (at, kept) in self.inside:
            if at <= moment.at and self.prices.train:
                tables.nodes[number] = tables.nodes.get(number, 0.0) + kept
        return tables.nodes, tables.tensors

    def _inside(self) -> list[tuple[int, tuple[int, np.ndarray]]]:
        """Of every operator that keeps more than operands and results: its node, when it runs, and bytes by strategy."""
        found = []
        for node, at in self.order.items():
            number = self.structure.index[self.model.stands.get(node, node)]
            choice = self.structure.nodes[number][1]
            assert isinstance(choice, Choice)
            kept = choice.twice(kept_inside(choice, self.prices.mesh)) * ~choice.again
            if kept.any() and node not in self.model.recomputed:
                found.append((number, (at, kept)))
        return found

    def _readers(self) -> dict[Value, list[tuple[fx.Node, int]]]:
        """In the order of the uses of the tensor that stands for it."""
        stands, index = self.model.stands, self.structure.index
        return {
            value: sorted(uses, key=lambda use: (index[stands.get(use[0], use[0])], use[1]))
            for value, uses in self.model.readers.items()
        }

    def _life(self, value: Value) -> _Life:
        producer = value[0]
        readers = tuple(self._reader(value, user, position) for user, position in self.readers[value])
        ends = len(self.order)
        return _Life(
            made=self.order.get(producer, -1),
            until=self.order.get(self.model.undecided.get(producer, producer), -1),
            kept=producer in self.order
            and saved_by(producer) == "result"
            and value in self.model.trained
            and producer not in self.model.recomputed,
            view=shown_by(producer) is not None,
            alone=self._alone(value),
            last=self._last(value),
            returned=any(reader.at == ends for reader in readers),
            readers=readers,
        )

    def _last(self, value: Value) -> int:
        """The last operator to read a tensor, or a view of it."""
        last = self.order.get(value[0], -1)
        for user, position in self.readers.get(value, ()):
            last = max(last, self.order.get(user, -1))
            if position == 0 and shown_by(user) == value:
                last = max(last, self._last((user, 0)))
        return last

    def _alone(self, value: Value) -> bool:
        """Whether, of all names of a storage, this is the one that most readers save, gradients first."""
        root = value
        while (shown := shown_by(root[0])) is not None:
            root = shown
        if root[0].op == "placeholder":
            return False
        best, most, names = root, (-1, -1), [root]
        for name in names:
            readers = self.readers.get(name, ())
            gradients = sum(user in self.order and name in self.model.saved[user] for user, _ in readers)
            saves = gradients, sum(user in self.model.undecided and shown_by(user) != name for user, _ in readers)
            best, most = (name, saves) if saves > most else (best, most)
            names += [(user, 0) for user, position in readers if position == 0 and shown_by(user) == name]
        return value == best

    def _reader(self, value: Value, user: fx.Node, position: int) -> _Reader:
        if user not in self.order:
            return _Reader(len(self.order), False, False, False, True, True)
        saves = value[0] not in self.model.recomputed and (
            value in self.model.saved[user] or user in self.model.undecided and value[0].op != "placeholder"
        )
        data = self.panelled and data_position(user) == position
        view, flows = position == 0 and shown_by(user) == value, user in self.model.differentiated
        return _Reader(self.order[user], saves and self.prices.train, data, view, flows, False)


class _Sum:
    """Tables in the making."""

    def __init__(self, edges: Sequence[Edge], prices: Prices, needs: Sequence[int]) -> None:
        self.prices, self.needs = prices, needs
        self.nodes: dict[int, np.ndarray] = {}
        self.tensors: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        self.sizes = [self._sizes(edge) for edge in edges]

    def _sizes(self, edge: Edge) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Bytes as it is, as it is wanted, of the gradient that a reader returns; and where nothing has to move."""
        shape, cast, mesh = tuple(edge.value.shape), edge.cast, self.prices.mesh
        own = local_elements(shape, edge.rows, mesh) * cast.rests.itemsize
        wanted = local_elements(shape, edge.wants, mesh) * cast.used.itemsize
        back = local_elements(shape, edge.gradients, mesh) * (cast.used.itemsize + cast.back * cast.reduced.itemsize)
        stays = (edge.rows[:, None, :] == edge.wants[None, :, :]).all(axis=-1) & (not cast.there)
        return own, wanted, back, stays

    def own(self, edge: Edge, sizes: np.ndarray, again: bool = True) -> None:
        """Bytes that a tensor takes by how it is made, or rests; and where it is made again, if it is there then."""
        mine = sizes[edge.have]
        if not again and edge.needs is not None:
            mine = np.where(edge.needs.have < len(sizes), mine, 0.0)
        self.nodes[edge.producer] = self.nodes.get(edge.producer, 0.0) + mine

    def held(self, number: int, uses: Sequence[int], table: np.ndarray) -> None:
        """Bytes that a tensor takes by how these uses want it, once for those that want it alike."""
        if uses:
            key = number, tuple(uses)
            self.tensors[key] = self.tensors.get(key, 0.0) + table

    def parameter(
        self, number: int, edge: Edge, life: _Life, count: int, moment: Moment, panelled: bool, surely: bool
    ) -> None:
        """Its state, what it is gathered to, and its gradient from its last reader's turn on."""
        own, wanted, back, stays = self.sizes[number]
        trained = edge.trained and self.prices.train
        state = self.prices.states(own / edge.cast.rests.itemsize, edge.cast.rests.itemsize)
        forward = moment.turn is Turn.FORWARD
        come = trained and not forward and moment.at < max(reader.at for reader in life.readers)
        self.own(edge, count * (state - (own if self.prices.train else 0.0) + (own if come else 0.0)))
        moved = np.where(stays, 0.0, wanted[None, :] / (_PANELS if panelled else 1))
        now = [use for use, reader in enumerate(life.readers) if reader.at == moment.at]
        if forward and not surely:
            begun = any(reader.at <= moment.at for reader in life.readers)
            later = [use for use, reader in enumerate(life.readers) if reader.at >= moment.at]
            self.held(number, later if begun else [], count * moved)
        elif moment.turn is Turn.BACKWARD:
            self.held(number, now, count * (moved + back[None, :] if trained else moved))

    def activation(self, number: int, edge: Edge, life: _Life, count: int, moment: Moment) -> None:
        """The tensor, copies of it, and its gradient."""
        own, wanted, _, stays = self.sizes[number]
        at, readers, forward = moment.at, list(enumerate(life.readers)), moment.turn is Turn.FORWARD
        given = life.made < 0
        if given:
            self.own(edge, count * own)
        elif life.made > at:
            if not forward and life.returned and not life.view:
                self.own(edge, count * own)
            return
        in_use = forward and life.made <= at <= life.last
        there = given or life.returned or in_use
        whole = there or life.kept
        back = not forward and at <= life.until  # made again by now
        if whole and not given and not life.view:
            self.own(edge, count * own, again=there or back)
        moved = np.where(stays, 0.0, wanted[None, :])
        kept = moved if whole else np.broadcast_to(wanted[None, :], stays.shape)
        saved = [use for use, r in readers if r.saves and not r.panelled and r.at <= at]
        rests = [use for use, r in readers if r.saves and r.panelled and r.at <= at]
        if edge.needs is not None:
            kept = np.concatenate([kept, kept if back else np.zeros_like(kept)])
        self.held(self.needs[number], saved, count * kept)
        if rests and not whole:
            resting = np.where(stays, 0.0, own[:, None])
            if edge.needs is not None:
                resting = np.concatenate([resting, resting if back else np.zeros_like(resting)])
            if saved or edge.needs is not None:
                self.held(self.needs[number], rests, count * resting)
            else:  # kept once, however many want it
                self.own(edge, count * own)
        panels = [use for use, r in readers if r.at == at and r.panelled]
        if forward:
            now = [use for use, r in readers if r.at == at and not r.saves and not r.panelled]
            self.held(number, now, count * moved)
            # The result of a view is a storage of its own only where the operand had to move.
            views = [use for use, r in readers if r.view and r.at <= at <= life.last]
            self.held(number, views, count * moved)
        if moment.turn is not Turn.ARRIVAL:
            self.held(number, panels, count * moved / _PANELS)
        if not forward and edge.trained and not given:
            self.gradient(number, edge, life, count, moment)

    def least(self, number: int, edge: Edge, life: _Life, count: int, moment: Moment) -> None:
        """What there is of a tensor in any case, however many names a storage has, and whenever it is made again."""
        own, wanted, back, stays = self.sizes[number]
        if life.made < 0:
            self.own(edge, count * own)
        if not 0 <= life.made <= moment.at:
            return
        kept = np.where(stays, 0.0, wanted[None, :])
        if life.returned and moment.turn is not Turn.FORWARD:
            if not life.view and moment.at >= min((r.at for r in life.readers if r.saves), default=0):
                self.own(edge, count * own)
            if edge.trained and life.made < moment.at:
                self.held(
                    number,
                    [use for use, r in enumerate(life.readers) if r.ends],
                    np.broadcast_to(count * back, stays.shape),
                )
        elif life.alone:
            if life.kept and not life.view:
                self.own(edge, count * own, again=False)
            else:
                kept = np.broadcast_to(wanted[None, :], stays.shape)
        kept = count * kept / _alike(edge.wants)
        if edge.needs is not None:
            kept = np.concatenate([kept, np.zeros_like(kept)])
        self.held(
            self.needs[number],
            [u for u, r in enumerate(life.readers) if r.saves and not r.panelled and r.at <= moment.at],
            kept,
        )
        if moment.turn is Turn.BACKWARD and edge.trained:
            now = [use for use, r in enumerate(life.readers) if r.at == moment.at and r.flows]
            self.held(number, now, np.broadcast_to(count * back / _alike(edge.gradients), stays.shape))
            if life.made == moment.at and not life.view and any(r.flows for r in life.readers):
                self.own(edge, count * own)

    def gradient(self, number: int, edge: Edge, life: _Life, count: int, moment: Moment) -> None:
        """In the layouts in which readers return it, until all of it comes to that of the tensor."""
        own, _, back, stays = self.sizes[number]
        every = np.broadcast_to(back[None, :], stays.shape)
        later = [use for use, r in enumerate(life.readers) if r.at > moment.at]
        if life.made < moment.at:
            self.held(number, later, count * every)
            if moment.turn is Turn.BACKWARD:  # beside what is there, to be added to it
                self.held(number, [use for use, r in enumerate(life.readers) if r.at == moment.at], count * every)
        elif moment.turn is Turn.ARRIVAL:
            self.held(number, later, count * np.where(stays & (back[None, :] == own[:, None]), every, every + own[:, None]))
        elif not life.view:
            self.own(edge, count * own)


def _alike(rows: np.ndarray) -> np.ndarray:
    """How many rows each is equal to."""
    return np.asarray((rows[:, None, :] == rows[None, :, :]).all(axis=-1).sum(axis=1))


def _tensor(tensor: Tensor, uses: tuple[Use, ...], cost: np.ndarray) -> Tensor:
    rows, columns = tensor.cost.shape
    return Tensor(tensor.name, tensor.producer, tensor.have, uses, cost, np.zeros(columns), np.zeros((rows, columns)))


def _counted(lives: Sequence[_Life]) -> dict[_Life, int]:
    found: dict[_Life, int] = defaultdict(int)
    for life in lives:
        found[life] += 1
    return found
