"""Exact search among the strategies that pruning leaves: elimination of nodes by labels, pruned with reduced costs.

A label is a partial assignment, given by its cost in seconds and the strategies of the nodes shared with other tables.
Tables of labels are joined on a node, the node is dropped, and of the labels that agree in all remaining nodes, the
cheapest is kept. This is bucket elimination (Dechter, "Bucket elimination: a unifying framework for reasoning", 1999).

Duality keeps the tables small: after :class:`autotp.planner.ilp.dual.Dual` has converged, every part of the objective has
a reduced cost of at least 0, and the parts sum to the amount by which an assignment exceeds the lower bound. A label
whose parts sum to more than the gap cannot be part of an assignment better than the best known one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from autotp.planner.ilp.deadline import Deadline
from autotp.planner.ilp.dual import Dual
from autotp.planner.ilp.problem import Problem

__all__ = ["settle"]


class _TooMany(Exception):
    """A table has exceeded its size limit, or the deadline has passed."""


@dataclass(slots=True, eq=False)
class _Table:
    """Labels, one per row: strategies of ``nodes``, cost, reduced cost, and the rows of the parent tables joined in it."""

    nodes: tuple[int, ...]
    at: np.ndarray
    seconds: np.ndarray
    reduced: np.ndarray
    parents: list[tuple[_Table, np.ndarray]] = field(default_factory=list)

    def rows(self, index: np.ndarray, parents: list[tuple[_Table, np.ndarray]]) -> _Table:
        return self.relabelled(self.nodes, self.at[index], index, parents)

    def relabelled(
        self,
        nodes: tuple[int, ...],
        at: np.ndarray,
        index: np.ndarray,
        parents: list[tuple[_Table, np.ndarray]],
    ) -> _Table:
        return _Table(nodes, at, self.seconds[index], self.reduced[index], parents)


@dataclass(slots=True)
class _Labels:
    problem: Problem
    gap: float
    limit: int
    deadline: Deadline

    def allowed(self, table: _Table) -> np.ndarray:
        return (table.reduced < self.gap) & np.isfinite(table.seconds)

    def kept(self, table: _Table) -> _Table:
        index = np.flatnonzero(self.allowed(table))
        if len(index) > self.limit or self.deadline.over:
            raise _TooMany
        return table if len(index) == len(table.at) else table.rows(index, [(p, i[index]) for p, i in table.parents])

    def key(self, table: _Table, nodes: tuple[int, ...]) -> np.ndarray:
        key = np.zeros(len(table.at), dtype=np.int64)
        for node in nodes:
            key = key * len(self.problem.nodes[node].cost) + table.at[:, table.nodes.index(node)]
        return key

    def join(self, a: _Table, b: _Table) -> _Table:
        shared = tuple(n for n in a.nodes if n in b.nodes)
        left, right = self.key(a, shared), self.key(b, shared)
        order = np.argsort(right, kind="stable")
        low = np.searchsorted(right[order], left, side="left")
        count = np.searchsorted(right[order], left, side="right") - low
        total = int(count.sum())
        if total > 4 * self.limit:
            raise _TooMany
        one = np.repeat(np.arange(len(left)), count)
        two = order[np.repeat(low - (np.cumsum(count) - count), count) + np.arange(total)]
        rest = [k for k, n in enumerate(b.nodes) if n not in a.nodes]
        table = _Table(
            (*a.nodes, *(b.nodes[k] for k in rest)),
            np.hstack([a.at[one], b.at[two][:, rest]]),
            a.seconds[one] + b.seconds[two],
            a.reduced[one] + b.reduced[two],
            [(a, one), (b, two)],
        )
        return self.kept(table)

    def drop(self, table: _Table, node: int) -> _Table:
        """Drop ``node`` from a table; of the labels that agree in all other nodes, keep the cheapest."""
        rest = tuple(n for n in table.nodes if n != node)
        key = self.key(table, rest)
        order = np.lexsort((table.seconds, key))
        best = np.ones(len(order), dtype=bool)
        best[1:] = key[order][1:] != key[order][:-1]
        index = order[best]
        columns = [k for k, n in enumerate(table.nodes) if n != node]
        return table.relabelled(rest, table.at[index][:, columns], index, [(table, index)])


def _tables(labels: _Labels, dual: Dual) -> list[_Table]:
    problem = labels.problem
    tables = []
    for number, node in enumerate(problem.nodes):
        size = len(node.cost)
        reduced = dual.theta[number] - dual.theta[number].min()
        at = np.arange(size)[:, None]
        tables.append(labels.kept(_Table((number,), at, node.cost, reduced)))
    for number, tensor in enumerate(problem.tensors):
        if not tensor.uses:
            continue
        nodes = [tensor.producer]
        at = np.arange(len(tensor.have))[:, None]
        zero = np.zeros(len(at))
        table = _Table((tensor.producer,), at, zero, zero)
        shares = zero
        wanted: list[np.ndarray] = []
        for use, part in zip(tensor.uses, dual.parts[number], strict=True):
            if use.node not in nodes:
                size = len(use.want)
                one = np.repeat(np.arange(len(table.at)), size)
                two = np.tile(np.arange(size), len(table.at))
                if len(one) > 4 * labels.limit:
                    raise _TooMany
                at = np.hstack([table.at[one], two[:, None]])
                table = table.relabelled((*table.nodes, use.node), at, one, [])
                shares, wanted = shares[one], [want[one] for want in wanted]
                nodes.append(use.node)
            have, strategy = table.at[:, 0], table.at[:, nodes.index(use.node)]
            want, row = use.want[strategy], tensor.have[have]
            counted = want >= 0
            for earlier in wanted:
                counted = counted & (earlier != want)
            column = np.maximum(want, 0)
            share, excess = part.at(have, strategy)
            shares = shares + share
            wanted.append(want)
            table = _Table(
                table.nodes,
                table.at,
                table.seconds + np.where(counted, tensor.cost[row, column], 0.0),
                table.reduced + excess,
            )
            index = np.flatnonzero(labels.allowed(table))
            table, shares = table.rows(index, []), shares[index]
            wanted = [earlier[index] for earlier in wanted]
        # The part of the shared costs that their split among the uses does not cover is reduced cost, too.
        missing = table.seconds - shares
        table.reduced = table.reduced + np.maximum(missing, 0.0)
        tables.append(labels.kept(table))
    return tables


def settle(
    problem: Problem,
    dual: Dual,
    *,
    target: float,
    limit: int,
    deadline: Deadline,
) -> tuple[bool, tuple[int, ...] | None]:
    """Find the cheapest assignment that costs less than ``target``, or prove that there is none.

    Args:
        problem: the problem.
        dual: the converged dual of the same problem.
        target: the cost to beat, in seconds.
        limit: the maximum number of labels in a table.
        deadline: when to give up.

    Returns:
        whether the search was completed (False: a table exceeded the limit, or the deadline passed), and the cheapest
        assignment, or None.
    """
    gap = target - dual.bound()
    labels = _Labels(problem, gap, limit, deadline)
    try:
        tables = _tables(labels, dual)
        left = set(range(len(problem.nodes)))
        while left:
            node = min(left, key=lambda n: (_size(problem, tables, n), n))
            left.discard(node)
            mine = sorted((t for t in tables if node in t.nodes), key=lambda t: len(t.at))
            tables = [t for t in tables if node not in t.nodes]
            joined = mine[0]
            for table in mine[1:]:
                joined = labels.join(joined, table)
            tables.append(labels.drop(joined, node))
        final = tables[0]
        for table in tables[1:]:
            final = labels.drop(labels.join(final, table), -1)
    except _TooMany:
        return False, None
    if not len(final.at):
        return True, None
    best = int(np.argmin(final.seconds))
    choice = [0] * len(problem.nodes)
    _trace(final, best, choice)
    return True, tuple(choice)


def _size(problem: Problem, tables: list[_Table], node: int) -> float:
    scope = {n for table in tables if node in table.nodes for n in table.nodes}
    return math.prod(len(problem.nodes[n].cost) for n in scope)


def _trace(table: _Table, row: int, choice: list[int]) -> None:
    stack = [(table, row)]
    while stack:
        at, number = stack.pop()
        for node, strategy in zip(at.nodes, at.at[number].tolist(), strict=True):
            choice[node] = strategy
        stack.extend((parent, int(index[number])) for parent, index in at.parents)
