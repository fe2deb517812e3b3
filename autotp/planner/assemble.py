"""The integer program of a model on one mesh: a structure, which is masked, priced, and then weighted.

Operators, parameters and the model's outputs are nodes; inputs, buffers and constants are nodes with one choice. Tied
(folded) nodes become one node whose costs are those of all its copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import fx

from autotp.costs.prices import Prices
from autotp.planner.choices import Choice, Edge, Needs, Rest, kept_inside
from autotp.planner.ilp import NEVER, Deadline, Node, Problem, Tensor, Use
from autotp.planner.structure import Structure
from autotp.plans.constraints import Requirement
from costmodel.overlap import Weight, Weights
from passes.layouts.codes import PARTIAL, WHOLE, decode, fitting, local_elements, restoring
from passes.layouts.layout import Layout
from passes.layouts.reshard_matrix import Collective, Tariff
from passes.rules.shapes import results_of
from passes.strategies.strategy import Strategy, whole_layout

__all__ = ["EVEN", "Assembled", "assemble"]

#: Weights of 1: no communication is hidden.
EVEN = Weights()


@dataclass(frozen=True, slots=True)
class Assembled:
    """An integer program, with the meaning of its nodes' choices."""

    problem: Problem
    structure: Structure
    mesh: tuple[int, ...]

    def chosen(self, node: fx.Node, row: int) -> Strategy | Layout:
        """The strategy of an operator, or the layout of a placeholder, that a row stands for."""
        choice = self.structure.nodes[self.structure.index[node]][1]
        if isinstance(choice, Choice):
            return choice.space.strategy(row % len(choice.space.serves))
        return whole_layout(len(self.mesh)) if choice is None else decode(choice.rows[row], self.mesh)

    def strategies(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The strategies and layouts of a choice, as rows without the decision what is rematerialized."""
        rows = zip(self.structure.nodes, choice, strict=True)
        return tuple(row if c is None else row % c.count for (_, c, _), row in rows)

    def joined(self, choice: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
        """The choice with the strategies of ``choice`` that rematerializes what ``other`` does."""
        own, pairs = self.strategies(choice), zip(self.structure.nodes, self.strategies(other), other, strict=True)
        return tuple(mine + row - its for mine, ((_, _, _), its, row) in zip(own, pairs, strict=True))

    def keeping(self, choice: Sequence[int], nodes: Collection[fx.Node]) -> tuple[int, ...]:
        """The same choice, except that the results of ``nodes`` are kept."""
        rows = zip(self.structure.nodes, self.strategies(choice), choice, strict=True)
        return tuple(strategy if node in nodes else row for (node, _, _), strategy, row in rows)

    def rematerialized(self, choice: Sequence[int]) -> set[fx.Node]:
        """Undecided operators that a choice recomputes, and parameters that it gathers again; one node for all copies."""
        found = set()
        for (node, made, _), row in zip(self.structure.nodes, choice, strict=True):
            if made is not None and (made.recomputing if isinstance(made, Choice) else made.regathered)[row]:
                found.add(node)
        return found

    @property
    def frugal(self) -> Assembled:
        """The program in which all parameters that may be gathered again are; that never takes more memory."""
        nodes = []
        for node, (_, rest, _) in zip(self.problem.nodes, self.structure.nodes, strict=True):
            allowed = rest.regathered if isinstance(rest, Rest) and rest.regathered.any() else True
            nodes.append(replace(node, cost=np.where(allowed, node.cost, np.inf)))
        return replace(self, problem=replace(self.problem, nodes=tuple(nodes)))


def assemble(
    structure: Structure,
    prices: Prices,
    panelled: bool = False,
    *,
    weights: Weights = EVEN,
    deadline: Deadline = NEVER,
) -> Assembled:
    """The integer program of a structure on the mesh of ``prices``.

    Args:
        structure: of the model's plans.
        prices: of the mesh.
        panelled: products keep their data operand in its resting layout; the backward pass gathers it again in panels.
        weights: the weights of seconds, by what may hide them.
        deadline: see Raises.

    Raises:
        Expired: the deadline passed before the program was complete.
    """
    key = prices, panelled, structure.chosen.family.scatters
    if key not in structure.last:
        structure.last.clear()  # it is large, and the same mesh is usually requested several times in a row
        structure.last[key] = _Assembly(structure, prices, panelled, deadline)
    return structure.last[key].weighted(weights, deadline)


#: Weights -> the weighted seconds of each choice, infinite where one does not exist.
Weighted = Callable[[Weights], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """The properties of a tensor's reshards that do not depend on weights; see `Tensor`.

    ``regather``: ``[H, W]``, which are repeated for the backward pass; ``barred``: which do not exist, None if all do.
    """

    regather: np.ndarray
    memory: np.ndarray
    temporary: np.ndarray
    barred: np.ndarray | None
    uses: tuple[Use, ...]


class _Assembly:
    """The integer program of a structure on the mesh of ``prices``, before seconds are weighted; see `assemble`.

    Raises:
        Expired: the deadline passed before it was complete.
    """

    def __init__(self, structure: Structure, prices: Prices, panelled: bool, deadline: Deadline) -> None:
        self.structure, self.prices, self.panelled = structure, prices, panelled
        self.mesh = prices.mesh
        self.by_key: dict[object, tuple[Weighted, np.ndarray]] = {}
        self.kept: dict[int, np.ndarray] = {}
        for node, choice, _ in structure.nodes:
            deadline.check()
            if choice is not None and (key := self.key(node, choice)) not in self.by_key:
                work = self.strategies(choice, key[1]) if isinstance(choice, Choice) else self.layouts(choice, key[1])
                self.by_key[key] = work
        self.moves: list[_Moves] = []
        for edge in structure.edges:
            deadline.check()
            self.moves.append(self.moved(edge))

    def key(self, node: fx.Node, choice: Choice | Rest) -> tuple[int, Sequence[Requirement]]:
        """A key; nodes with equal keys have the same strategies at the same prices."""
        return id(choice), self.structure.model.pins.get(node, ())

    def weighted(self, weights: Weights, deadline: Deadline) -> Assembled:
        """The program with weighted seconds.

        Raises:
            Expired: the deadline passed before it was complete.
        """
        known = {key: (seconds(weights), memory) for key, (seconds, memory) in self.by_key.items()}
        nodes = []
        for index, (node, choice, count) in enumerate(self.structure.nodes):
            deadline.check()
            cost, memory = (np.zeros(1), np.zeros(1)) if choice is None else known[self.key(node, choice)]
            nodes.append(Node(node.name, count * cost, count * memory + self.kept.get(index, 0.0)))
        edges, weighing, tensors = self.structure.edges, _Weighing(self, weights), list[Tensor]()
        for edge, moves in zip(edges, self.moves, strict=True):
            deadline.check()
            tensors.append(weighing.tensor(edge, moves))
        tensors += [weighing.needed(edge, edge.needs) for edge in edges if edge.needs is not None]
        tensors += [self.tied(edge, view) for edge in edges if edge.needs is not None for view in edge.needs.views]
        return Assembled(Problem(tuple(nodes), tuple(tensors)), self.structure, self.mesh)

    def strategies(self, choice: Choice, pins: Sequence[Requirement]) -> tuple[Weighted, np.ndarray]:
        """Seconds and saved bytes of an operator's strategies; infinite seconds where one does not exist on this mesh."""
        valid = choice.space.valid(self.mesh)
        for pin in pins:
            valid &= pin.allows(choice.space.serves, choice.space)
        if choice.best and valid.any():
            valid &= choice.score == choice.score[valid].max()
        memory = np.zeros(len(valid))
        if choice.saves and self.prices.train:
            for tensor, rows in zip(results_of(choice.space.operator.node), choice.space.results, strict=True):
                memory += local_elements(tuple(tensor.shape), rows, self.mesh) * tensor.element_size()
        if not choice.run.recomputed and self.prices.train:
            memory += kept_inside(choice, self.mesh)
        exists, costs = choice.twice(valid), []
        for run in filter(None, (choice.run, choice.rerun)):
            compute = self.prices.computing(choice.space, choice.flop, run)
            late, inner_late = self.prices.behind(choice.space.operator.node, run)
            costs.append((compute, late, self.prices.inside(choice.space, run)[1], inner_late))

        def seconds(weights: Weights) -> np.ndarray:
            found = []
            for compute, late, spent, inner_late in costs:
                ahead, behind = (each.of(spent, parameter=False) for each in (weights.forward, weights.backward))
                computing = ((1 - late) * weights.forward.compute + late * weights.backward.compute) * compute
                found.append(computing + (1 - inner_late) * ahead + inner_late * behind)
            return np.where(exists, self.prices.accumulate * np.concatenate(found), np.inf)

        return seconds, choice.twice(memory)

    def layouts(self, rest: Rest, pins: Sequence[Requirement]) -> tuple[Weighted, np.ndarray]:
        """Seconds of the optimizer's step and bytes of the state, by resting layout; infinite seconds if not offered."""
        shape = tuple(rest.value.shape)
        elements = local_elements(shape, rest.rows, self.mesh)
        fits = fitting(shape, rest.rows, self.mesh) & restoring(rest.rows, self.mesh)
        fits &= ~((rest.rows != WHOLE) & (np.array(self.mesh) == 1)).any(axis=-1)
        if not rest.parameter:
            found = np.where(fits, 0.0, np.inf)
            return lambda _: found, elements * rest.value.element_size()
        fits &= rest.regathered | (not self.panelled)
        for pin in pins:
            fits &= pin.allows(rest.rows)
        offered = np.zeros(len(fits), bool)
        offered[np.flatnonzero(fits)[np.unique(rest.groups[fits], return_index=True)[1]]] = True
        if self.structure.chosen.family.rest == "sharded":
            parts = np.where(rest.rows >= 0, np.array(self.mesh), 1).prod(axis=-1)
            offered &= parts == parts[fits].max(initial=0)
        memory = self.prices.states(elements, rest.cast.rests.itemsize)
        seconds = self.prices.updating(self.prices.update_bytes(elements, rest.cast.rests.itemsize))
        return lambda weights: np.where(offered, weights.update * seconds, np.inf), memory

    def moved(self, edge: Edge) -> _Moves:
        """The bytes of a tensor's reshards, which of them exist, and which are repeated for the backward pass."""
        prices, shape, itemsize = self.prices, tuple(edge.value.shape), edge.value.element_size()
        regather = np.zeros((len(edge.rows), len(edge.wants)), bool)
        for_backward = edge.regathered[:, None] & edge.saved
        if self.panelled:
            for_backward |= edge.products
        comes = np.full(regather.shape, edge.cast.there)  # a parameter is also cast, from its local part
        if not edge.cast.there and (edge.parameter or for_backward.any()):
            rows, wants = edge.rows[:, None, :], edge.wants[None, :, :]
            comes = ((rows >= 0) & (rows != wants)).any(axis=-1)
        regather |= comes & for_backward
        if edge.repeats and prices.train:
            regather |= (edge.rows[:, None, :] != edge.wants[None, :, :]).any(axis=-1) & (edge.saved | edge.products)
        wanted = local_elements(shape, edge.wants, self.mesh) * itemsize
        memory = np.zeros(regather.shape)
        if edge.keeps and prices.train:
            saved = edge.saved if self.panelled else edge.saved | edge.products
            memory = memory + np.where(saved, edge.count * wanted, 0.0)
            if self.panelled and edge.products.any():
                kept = edge.count * local_elements(shape, edge.rows, self.mesh) * itemsize
                self.kept[edge.producer] = self.kept.get(edge.producer, 0.0) + kept[edge.have]
        stays = comes & ~edge.regathered[:, None] & edge.saved & (edge.parameter and prices.train)
        memory = memory + np.where(stays, edge.count * wanted, 0.0)
        if edge.parameter and edge.trained and prices.train and prices.accumulate > 1:
            # Unreduced sums are held besides the gradient that they are reduced to.
            waiting = (edge.gradients == PARTIAL).any(axis=-1)
            unreduced = local_elements(shape, edge.gradients, self.mesh) * itemsize
            memory = memory + np.where(waiting, edge.count * unreduced, 0.0)
        temporary = np.where(comes & ~stays, wanted, 0.0) if edge.parameter else np.zeros(regather.shape)
        scattered = None
        if not self.structure.chosen.family.scatters and not edge.parameter:
            scattered = ((edge.rows[:, None, :] == PARTIAL) & (edge.wants[None, :, :] >= 0)).any(axis=-1)
        return _Moves(regather, memory, temporary, scattered, tuple(Use(index, want) for index, want in edge.uses))

    def tied(self, edge: Edge, view: int) -> Tensor:
        """The constraint, by infinite costs, that a view is recomputed if and only if its base is."""
        (_, made, _), (_, shown, _) = self.structure.nodes[view], self.structure.nodes[edge.producer]
        assert isinstance(made, Choice) and isinstance(shown, Choice)
        cost = np.where(np.eye(2, dtype=bool), 0.0, np.inf)
        uses = (Use(view, made.recomputing.astype(np.int64)),)
        return Tensor(
            edge.name, edge.producer, shown.recomputing.astype(np.int64), uses, cost, np.zeros((2, 2)), np.zeros((2, 2))
        )


class _Weighing:
    """The weighted seconds of reshards."""

    def __init__(self, assembly: _Assembly, weights: Weights) -> None:
        self.assembly, self.weights = assembly, weights
        self.prices, self.mesh = assembly.prices, assembly.mesh
        self.tariffs: dict[tuple[bool, Weight, float], Tariff] = {}
        self.known: dict[Hashable, np.ndarray] = {}
        for parameter, weight in itertools.product((False, True), {weights.forward, weights.backward, weights.reductions}):
            mine = [edge for edge in assembly.structure.edges if edge.parameter == parameter]
            sizes = list(dict.fromkeys(_size(edge, d) for edge in mine for d in (edge.cast.used, edge.cast.reduced)))
            found = Tariff.of(sizes, self.mesh, self.pay(parameter, weight)) if sizes else []
            self.tariffs |= {(parameter, weight, size): tariff for size, tariff in zip(sizes, found, strict=True)}

    def tensor(self, edge: Edge, moves: _Moves) -> Tensor:
        """A tensor with the weighted seconds of its reshards."""
        cost = edge.count * self.reshards(edge, moves.regather)
        if moves.barred is not None:
            cost = np.where(moves.barred, np.inf, cost)
        return Tensor(edge.name, edge.producer, edge.have, moves.uses, cost, moves.memory, moves.temporary)

    def needed(self, edge: Edge, needs: Needs) -> Tensor:
        """Reshards of a recomputed tensor to readers that need it for their gradients, or to be recomputed themselves."""
        rows, columns = len(edge.rows), len(edge.wants)
        cost = np.zeros((2 * rows, columns))
        cost[rows:] = edge.count * self.prices.accumulate * self.there(edge, self.weights.backward)
        if self.assembly.panelled:  # products gather their operand again, in panels, anyway
            cost[:, edge.products & ~edge.saved] = 0.0
        uses = tuple(Use(index, want) for index, want in needs.uses)
        return Tensor(edge.name, edge.producer, needs.have, uses, cost, np.zeros(cost.shape), np.zeros(cost.shape))

    def reshards(self, edge: Edge, regather: np.ndarray) -> np.ndarray:
        """Weighted seconds of reshards from every layout to every wanted one, with those of the gradient, ``[H, W]``."""
        shape, cast = tuple(edge.value.shape), edge.cast
        forward, backward, times = self.weights.forward, self.weights.backward, self.prices.accumulate
        found = times * self.there(edge, forward)
        if not self.prices.train:
            return found
        if regather.any():
            repeated = found if forward == backward else times * self.there(edge, backward)
            found = np.where(regather, found + repeated, found)
        if edge.trained:
            back = np.where(edge.rows == PARTIAL, WHOLE, edge.rows)
            if edge.parameter and not cast.changes:  # reduced once, by the last micro-batch
                return found + self.moving(edge, edge.gradients, back, self.weights.reductions, cast.reduced).T
            found = found + times * self.moving(edge, edge.gradients, back, backward, cast.reduced).T
            if cast.back:
                elements = local_elements(shape, edge.gradients, self.mesh)
                found = found + times * backward.compute * self.prices.casting(elements, cast.used, cast.reduced)
        return found

    def there(self, edge: Edge, weight: Weight) -> np.ndarray:
        """Weighted seconds of the same reshards once, without those of the gradient, ``[H, W]``."""
        moved, cast = self.moving(edge, edge.rows, edge.wants, weight, edge.cast.used), edge.cast
        if not cast.there:
            return moved
        elements = local_elements(tuple(edge.value.shape), edge.rows, self.mesh)
        return moved + weight.compute * self.prices.casting(elements, cast.rests, cast.used)[:, None]

    def moving(self, edge: Edge, have: np.ndarray, want: np.ndarray, weight: Weight, dtype: torch.dtype) -> np.ndarray:
        """Weighted seconds of the reshards from every layout in ``have`` to every one in ``want``."""
        shape = tuple(edge.value.shape)
        key = edge.parameter, weight, shape, dtype.itemsize, have.tobytes(), want.tobytes()
        if key not in self.known:  # many tensors of a model are alike
            tariff, pay = self.tariffs[edge.parameter, weight, _size(edge, dtype)], self.pay(edge.parameter, weight)
            pricer = self.assembly.structure.pricer
            self.known[key] = pricer.seconds(shape, dtype.itemsize, have, want, self.mesh, tariff, pay)
        return self.known[key]

    def pay(self, parameter: bool, weight: Weight) -> Collective:
        """The function for the weighted seconds of a pass's collectives that move parameters, or other tensors."""
        prices = self.prices

        def seconds(kind: str, axes: tuple[int, ...], volumes: np.ndarray) -> np.ndarray:
            return weight.of(prices.spent(kind, axes, volumes, parameter), parameter=parameter)

        return seconds


def _size(edge: Edge, dtype: torch.dtype) -> float:
    return float(edge.value.numel() * dtype.itemsize)
