"""Exact elimination of nodes by min-plus products, without a memory limit.

Without a memory limit, the objective is a sum of tables, one per node and one per tensor, and a node ``o`` can
be eliminated by minimisation (bucket elimination, Dechter 1999): all tables over ``o`` are replaced by one
table

    f(neighbours of o) = min_s ( cost_o[s] + sum over tables of table(s, neighbours) ),

and are kept to restore the strategy of ``o`` afterwards. For a node with one tensor in and one out, this is the
min-plus matrix product of the two; a leaf becomes a cost of its only neighbour. A table is indexed not by the
strategies of its nodes but by the classes that it distinguishes (rows, columns, pairs of these), so it stays small.

:func:`eliminate_all` eliminates every node if that stays within a budget of work;
:func:`eliminate_some` eliminates the nodes whose elimination leaves a table between at most two nodes, and
returns the rest as a problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotp.planner.ilp.deadline import NEVER, Deadline
from autotp.planner.ilp.problem import Node, Problem, Tensor, Use, classes

__all__ = ["Core", "eliminate_all", "eliminate_some"]

_LARGEST = 3e7  # entries of a table: 240 MB
_GROWTH = 2.0  # maximum size of a new table, relative to those that it replaces
_BLOCK = 1 << 16  # entries that are added at once, so that they stay in the cache


@dataclass(slots=True, eq=False)
class _Factor:
    """A table over nodes: axis k is indexed by ``index[k][strategy of nodes[k]]``. Entries are computed when needed."""

    nodes: tuple[int, ...]
    index: tuple[np.ndarray, ...]
    sizes: tuple[int, ...]
    tensor: Tensor | None = None
    table: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Merge:
    """The elimination of a node, before the entries of the new table are computed.

    Attributes:
        node: the eliminated node.
        factors: the tables over it.
        joint: node of these tables -> the joint class of each of its strategies, and one strategy of each class.
        made: the table that replaces them.
    """

    node: int
    factors: tuple[_Factor, ...]
    joint: dict[int, tuple[np.ndarray, np.ndarray]]
    made: _Factor


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """How to restore an eliminated node, given the choice of its neighbours.

    Attributes:
        node: the node.
        neighbours: its neighbours when it was eliminated.
        index: per neighbour, the class of each of its strategies.
        leaders, costs: the cheapest strategy of each of the node's own classes, and its cost.
        tables: ``[own class, class of each neighbour]``, of size 1 along neighbours that a table does not have.
    """

    node: int
    neighbours: tuple[int, ...]
    index: tuple[np.ndarray, ...]
    leaders: np.ndarray
    costs: np.ndarray
    tables: tuple[np.ndarray, ...]

    def best(self, choice: Sequence[int]) -> int:
        """The node's best strategy, given the strategies of its neighbours."""
        at = [int(index[choice[n]]) for n, index in zip(self.neighbours, self.index, strict=True)]
        total = self.costs
        for table in self.tables:
            place = [i if size > 1 else 0 for i, size in zip(at, table.shape[1:], strict=True)]
            total = total + table.T[tuple(reversed(place))]
        return int(self.leaders[np.argmin(total)])


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """The result of elimination: a problem over the remaining nodes, and how to complete its assignments."""

    problem: Problem
    nodes: tuple[int, ...]
    steps: tuple[_Step, ...]
    total: int

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The best assignment of all nodes, given one of the remaining nodes."""
        full = [0] * self.total
        for node, strategy in zip(self.nodes, choice, strict=True):
            full[node] = int(strategy)
        for step in reversed(self.steps):
            full[step.node] = step.best(full)
        return tuple(full)


def _classes(columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Joint classes of several index arrays: the class of each strategy, and one strategy of each class."""
    joint, first = classes(columns[0])
    for column in columns[1:]:
        other, of_class = classes(column)
        joint, first = classes(joint * len(of_class) + other)
    return joint, first


def _of_tensor(tensor: Tensor) -> _Factor:
    ports: dict[int, list[np.ndarray]] = {tensor.producer: [tensor.have]}
    for use in tensor.uses:
        ports.setdefault(use.node, []).append(use.want)
    joint = {node: _classes(columns) for node, columns in ports.items()}
    return _Factor(
        tuple(ports),
        tuple(c for c, _ in joint.values()),
        tuple(len(f) for _, f in joint.values()),
        tensor,
    )


def _table(factor: _Factor) -> np.ndarray:
    if factor.table is not None:
        return factor.table
    tensor = factor.tensor
    assert tensor is not None
    first = [classes(index)[1] for index in factor.index]
    axis = {node: k for k, node in enumerate(factor.nodes)}

    def spread(node: int, values: np.ndarray) -> np.ndarray:
        shape = [1] * len(factor.nodes)
        shape[axis[node]] = -1
        return values[first[axis[node]]].reshape(shape)

    have = spread(tensor.producer, tensor.have)
    total: np.ndarray = np.zeros(factor.sizes)
    wants: list[np.ndarray] = []
    for use in tensor.uses:
        want = spread(use.node, use.want)
        counted = want >= 0
        for earlier in wants:
            counted = counted & (want != earlier)
        total = total + np.where(counted, tensor.cost[have, np.maximum(want, 0)], 0.0)
        wants.append(want)
    return total


def _least(costs: np.ndarray, tables: Sequence[np.ndarray], sizes: tuple[int, ...]) -> np.ndarray:
    """The minimum of the sum of costs and tables, over their first axis."""
    least = np.full(sizes, math.inf)
    block = max(1, _BLOCK // max(1, math.prod(sizes)))
    for start in range(0, len(costs), block):
        total = costs[start : start + block].reshape(-1, *(1 for _ in sizes))
        for table in tables:
            total = total + table[start : start + block]
        np.minimum(least, total.min(axis=0), out=least)
    return least


class _Pool:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.unary = [node.cost.copy() for node in problem.nodes]
        self.factors: dict[int, _Factor] = {}
        self.of_node: list[dict[int, None]] = [{} for _ in problem.nodes]
        self.next = 0
        self.steps: list[_Step] = []
        self.left = set(range(len(problem.nodes)))
        for tensor in problem.tensors:
            if tensor.uses:
                self.add(_of_tensor(tensor))

    def add(self, factor: _Factor) -> None:
        if len(factor.nodes) == 1:
            self.count(factor)
            return
        self.factors[self.next] = factor
        for node in factor.nodes:
            self.of_node[node][self.next] = None
        self.next += 1

    def count(self, factor: _Factor) -> None:
        """Add a table over a single node to the costs of its strategies."""
        self.unary[factor.nodes[0]] = self.unary[factor.nodes[0]] + _table(factor)[factor.index[0]]

    def estimate(self, node: int) -> tuple[dict[int, int], int]:
        """Axis sizes of the table that eliminating ``node`` would leave, and the entries visited to compute it."""
        sizes: dict[int, int] = {}
        for number in self.of_node[node]:
            factor = self.factors[number]
            for n, size in zip(factor.nodes, factor.sizes, strict=True):
                sizes[n] = min(sizes.get(n, 1) * size, len(self.unary[n]))
        work = math.prod(sizes.values())
        sizes.pop(node, None)
        return sizes, work

    def merge(self, node: int) -> _Merge:
        """Eliminate a node symbolically: replace its tables by one whose shape is known, but not its entries."""
        factors = tuple(self.factors.pop(number) for number in self.of_node[node])
        columns: dict[int, list[np.ndarray]] = {node: [np.arange(len(self.unary[node]))]} if not factors else {}
        for factor in factors:
            for n, index in zip(factor.nodes, factor.index, strict=True):
                columns.setdefault(n, []).append(index)
        joint = {n: _classes(c) for n, c in columns.items()}
        for factor_node in columns:
            self.of_node[factor_node] = {k: None for k in self.of_node[factor_node] if k in self.factors}
        self.left.discard(node)
        rest = {n: each for n, each in joint.items() if n != node}
        sizes = tuple(len(first) for _, first in rest.values())
        made = _Factor(tuple(rest), tuple(classes for classes, _ in rest.values()), sizes)
        if len(rest) > 1:
            self.add(made)
        return _Merge(node, factors, joint, made)

    def eliminate(self, merge: _Merge) -> None:
        """Compute the entries of the new table; those of the tables that it replaces must be known."""
        node, joint, made = merge.node, merge.joint, merge.made
        own, own_first = joint[node]
        order = np.argsort(self.unary[node], kind="stable")[::-1]
        leader = np.empty(len(own_first), dtype=int)
        leader[own[order]] = order  # the cheapest strategy of each class is written last
        neighbours, sizes = made.nodes, made.sizes
        aligned = []
        for factor in merge.factors:
            table = _table(factor)
            picks = []
            for n, index in zip(factor.nodes, factor.index, strict=True):
                picks.append(index[leader if n == node else joint[n][1]])
            table = table[np.ix_(*picks)]
            at = [factor.nodes.index(n) for n in (node, *neighbours) if n in factor.nodes]
            shape = [len(own_first), *(len(joint[n][1]) if n in factor.nodes else 1 for n in neighbours)]
            aligned.append(np.transpose(table, at).reshape(shape))
        costs = self.unary[node][leader]
        made.table = _least(costs, aligned, sizes)
        self.steps.append(_Step(node, neighbours, made.index, leader, costs, tuple(aligned)))
        # Without neighbours, the table is a constant, which is not needed.
        if len(neighbours) == 1:
            self.count(made)


def _merges(pool: _Pool, budget: float, deadline: Deadline) -> list[_Merge] | None:
    """Eliminations of all nodes, that of least work next; None if work or tables are too large or the deadline passes."""
    cached = {node: pool.estimate(node)[1] for node in pool.left}
    spent, merges = 0, []  # work may be too large for a float
    while pool.left:
        node = min(pool.left, key=lambda n: (cached[n], n))
        spent += cached[node]
        touched = pool.estimate(node)[0]
        tables = [math.prod(pool.factors[k].sizes) for k in pool.of_node[node]]
        if spent > budget or max([math.prod(touched.values()), *tables]) > _LARGEST or deadline.over:
            return None
        merges.append(pool.merge(node))
        for n in touched:
            cached[n] = pool.estimate(n)[1]
    return merges


def eliminate_all(problem: Problem, *, budget: float, deadline: Deadline = NEVER) -> tuple[int, ...] | None:
    """The optimal assignment, ignoring memory. None if elimination would visit more than ``budget`` entries in all or make
    too large a table, or if the deadline passes.
    """
    pool = _Pool(problem)
    merges = _merges(pool, budget, deadline)
    if merges is None:
        return None
    for merge in merges:
        if deadline.over:
            return None
        pool.eliminate(merge)
    return Core(Problem((), ()), (), tuple(pool.steps), len(problem.nodes)).restore(())


def eliminate_some(problem: Problem, *, work: float = 4e6, deadline: Deadline = NEVER) -> Core:
    """Eliminate nodes with at most two neighbours as long as the new tables are small.

    Args:
        problem: the problem; its memory is ignored.
        work: the maximum number of entries that one elimination may visit.
        deadline: when to stop; the remaining nodes are kept.
    """
    pool = _Pool(problem)
    queue = sorted(pool.left)
    while queue and not deadline.over:
        node = queue.pop(0)
        if node not in pool.left:
            continue
        sizes, cost = pool.estimate(node)
        before = sum(math.prod(pool.factors[k].sizes) for k in pool.of_node[node])
        if not sizes or len(sizes) > 2 or cost > work or math.prod(sizes.values()) > max(_GROWTH * before, 64.0):
            continue
        pool.eliminate(pool.merge(node))
        queue.extend(n for n in sizes if n not in queue)
    return _core(pool)


def _joined(pool: _Pool) -> None:
    """Join tables between the same two nodes into one, whose bound is tighter than the sum of their bounds."""
    between: dict[frozenset[int], dict[int, _Factor]] = {}
    for number, factor in pool.factors.items():
        if len(factor.nodes) == 2:
            between.setdefault(frozenset(factor.nodes), {})[number] = factor
    for numbered in (some for some in between.values() if len(some) > 1):
        nodes, factors = next(iter(numbered.values())).nodes, list(numbered.values())
        index, first = zip(*(_classes([f.index[f.nodes.index(n)] for f in factors]) for n in nodes), strict=True)
        made = _Factor(nodes, index, tuple(map(len, first)))
        if math.prod(made.sizes) > max(_GROWTH * sum(math.prod(f.sizes) for f in factors), 64.0):
            continue
        made.table = np.zeros(made.sizes)
        for factor in factors:
            mine = _table(factor) if factor.nodes == nodes else _table(factor).T
            made.table += mine[np.ix_(*(factor.index[factor.nodes.index(n)][k] for n, k in zip(nodes, first, strict=True)))]
        pool.factors = {number: factor for number, factor in pool.factors.items() if number not in numbered}
        pool.add(made)


def _core(pool: _Pool) -> Core:
    _joined(pool)
    left = tuple(sorted(pool.left))
    number = {node: k for k, node in enumerate(left)}
    unary = dict(enumerate(pool.unary))
    tensors = []
    for factor in pool.factors.values():
        if factor.tensor is not None:
            t = factor.tensor
            uses = tuple(Use(number[use.node], use.want) for use in t.uses)
            tensors.append(Tensor(t.name, number[t.producer], t.have, uses, t.cost, t.memory, t.temporary))
            continue
        a, b = factor.nodes
        table = _table(factor)
        least = table.min(axis=1)
        unary[a] = unary[a] + least[factor.index[0]]
        table = table - np.where(np.isfinite(least), least, 0.0)[:, None]
        name = f"{pool.problem.nodes[a].name}~{pool.problem.nodes[b].name}"
        use = Use(number[b], factor.index[1])
        zero = np.zeros_like(table)
        tensors.append(Tensor(name, number[a], factor.index[0], (use,), table, zero, zero))
    nodes = tuple(Node(pool.problem.nodes[n].name, unary[n], np.zeros(len(unary[n]))) for n in left)
    return Core(Problem(nodes, tuple(tensors)), left, tuple(pool.steps), len(pool.unary))
