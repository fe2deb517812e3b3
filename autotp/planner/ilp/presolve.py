"""Make a problem smaller without losing its optimum.

* :func:`consistent` removes strategies that no neighbour can ever be joined to by a finite reshard.
* :func:`undominated` removes strategy ``s`` of a node when another one ``r`` of that node has
  ``cost[r] - cost[s] + sum over ports of sup(reshard with r - reshard with s) <= 0``,
  the same for resting bytes, and no
  larger temporary; the supremum runs over everything the neighbours may still choose.
* :func:`compact` cuts the arrays down to what is left, merges equal rows and columns, and drops tensors that
cost nothing.

One strategy is removed at a time, by one that is still there, so ties need no special care.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from autotp.planner.ilp.problem import Node, Problem, Tensor, Use

__all__ = ["Reduced", "compact", "consistent", "undominated"]

Alive = list[np.ndarray]  # per node a boolean mask over its strategies


@dataclass(frozen=True, slots=True)
class Reduced:
    """A smaller problem and, per node, the original index of each strategy that is left."""

    problem: Problem
    kept: tuple[np.ndarray, ...]

    def restore(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """A choice of the smaller problem in terms of the original."""
        return tuple(int(kept[strategy]) for kept, strategy in zip(self.kept, choice, strict=True))


def consistent(problem: Problem, alive: Alive) -> bool:
    """Clear, in place, strategies that cannot be part of any finite assignment; False when a node has none
    left.
    """
    for node, mask in zip(problem.nodes, alive, strict=True):
        mask &= np.isfinite(node.cost)
    changed = True
    while changed:
        before = sum(int(mask.sum()) for mask in alive)
        for tensor in problem.tensors:
            finite = np.isfinite(tensor.cost)
            if finite.all():
                continue
            have = alive[tensor.producer]
            for use in tensor.uses:
                want = alive[use.node]
                if use.node == tensor.producer:
                    want &= (use.want < 0) | finite[tensor.have, np.maximum(use.want, 0)]
                if not (use.want[want] < 0).any():
                    columns = np.unique(use.want[want])
                    have &= finite[:, columns].any(axis=1)[tensor.have]
                rows = np.unique(tensor.have[have])
                want &= (use.want < 0) | finite[rows].any(axis=0)[np.maximum(use.want, 0)]
        after = sum(int(mask.sum()) for mask in alive)
        changed = after < before
    return all(mask.any() for mask in alive)


def _have_change(tensor: Tensor, rows: np.ndarray, wants: list[np.ndarray], bounded: bool) -> np.ndarray:
    """``[r, s]``: most that moving the producer from row ``rows[s]`` to ``rows[r]`` can add, in seconds."""
    columns = np.unique(np.concatenate(wants)) if wants else np.zeros(0, dtype=int)
    may_none = all((want < 0).any() for want in wants)
    columns = columns[columns >= 0]
    result = np.zeros((len(rows), len(rows)))
    if not len(columns):
        return result
    cost = tensor.cost[np.ix_(rows, columns)]
    temporary = tensor.temporary[np.ix_(rows, columns)]
    for s in range(len(rows)):
        seen = np.isfinite(cost[s])
        if not seen.any():
            continue
        change = cost[:, seen] - cost[s, seen]
        single = change.max(axis=1)
        count = min(len(wants), change.shape[1])
        many = np.sort(np.maximum(change, 0.0), axis=1)[:, -count:].sum(axis=1)
        result[:, s] = np.where(single > 0, many, 0.0 if may_none else single)
        if bounded:
            result[(temporary[:, seen] > temporary[s, seen]).any(axis=1), s] = math.inf
        result[s, s] = 0.0
    return result


def _want_change(
    tensor: Tensor, rows: np.ndarray, columns: np.ndarray, others: np.ndarray, bounded: bool
) -> tuple[np.ndarray, np.ndarray]:
    """``[r, s]`` twice: most that wanting ``columns[r]`` instead of ``columns[s]`` can add, in seconds and
    in bytes.
    """
    none = columns < 0
    at = np.maximum(columns, 0)
    cost = np.where(none, 0.0, tensor.cost[np.ix_(rows, at)])
    temporary = np.where(none, 0.0, tensor.temporary[np.ix_(rows, at)])
    resting = np.where(none, 0.0, tensor.memory[at])
    # A column that another use may want too stays paid for when this use leaves it.
    refunded = ~np.isin(columns, others)
    size = len(columns)
    seconds = np.zeros((size, size))
    memory = resting[:, None] - np.where(refunded, resting, 0.0)[None, :]
    for s in range(size):
        seen = np.isfinite(cost[:, s])
        if not seen.any():
            continue
        back = cost[seen, s] if refunded[s] else np.zeros(int(seen.sum()))
        seconds[:, s] = (cost[seen] - back[:, None]).max(axis=0)
        if bounded:
            seconds[(temporary[seen] > temporary[seen, s][:, None]).any(axis=0), s] = math.inf
        seconds[s, s] = memory[s, s] = 0.0
    return seconds, memory


def _ports(problem: Problem) -> list[dict[int, list[int]]]:
    """Per node: tensor -> its ports there, -1 for the producer's and i for use i."""
    ports: list[dict[int, list[int]]] = [defaultdict(list) for _ in problem.nodes]
    for number, tensor in enumerate(problem.tensors):
        if tensor.uses:
            ports[tensor.producer][number].append(-1)
            for i, use in enumerate(tensor.uses):
                ports[use.node][number].append(i)
    return ports


def undominated(problem: Problem, alive: Alive, *, bounded: bool) -> int:
    """Clear, in place, dominated strategies of every node, one node after the other; returns how many were
    cleared.
    """
    removed = 0
    for index, ports in enumerate(_ports(problem)):
        mask = alive[index]
        strategies = np.flatnonzero(mask)
        if len(strategies) < 2:
            continue
        node = problem.nodes[index]
        cost, rest = node.cost[strategies], node.memory[strategies]
        seconds = cost[:, None] - cost[None, :]
        memory = rest[:, None] - rest[None, :]
        for number, sides in ports.items():
            tensor = problem.tensors[number]
            if len(sides) > 1:
                # Changing two ports of one tensor at once is not the sum of changing each: ask for equality.
                for side in sides:
                    index_of = (tensor.have if side < 0 else tensor.uses[side].want)[strategies]
                    seconds = np.where(index_of[:, None] == index_of[None, :], seconds, math.inf)
                continue
            if sides[0] < 0:
                rows, place = np.unique(tensor.have[strategies], return_inverse=True)
                wants = [np.unique(use.want[alive[use.node]]) for use in tensor.uses]
                seconds = seconds + _have_change(tensor, rows, wants, bounded)[np.ix_(place, place)]
            else:
                use = tensor.uses[sides[0]]
                rows = np.unique(tensor.have[alive[tensor.producer]])
                columns, place = np.unique(use.want[strategies], return_inverse=True)
                others = [np.unique(u.want[alive[u.node]]) for i, u in enumerate(tensor.uses) if i != sides[0]]
                joined = np.concatenate(others) if others else np.zeros(0, dtype=int)
                more, bytes_ = _want_change(tensor, rows, columns, joined, bounded)
                seconds = seconds + more[np.ix_(place, place)]
                memory = memory + bytes_[np.ix_(place, place)]
        better = seconds <= 0
        if bounded:
            better &= memory <= 0
        np.fill_diagonal(better, False)
        left = np.ones(len(strategies), dtype=bool)
        for s in np.flatnonzero(better.any(axis=0)):
            if (better[:, s] & left).any():
                left[s] = False
        removed += int((~left).sum())
        mask[strategies[~left]] = False
    return removed


def _relabel(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Representatives of the distinct rows of a matrix, and for each row which of them it equals."""
    rows = np.ascontiguousarray(values)
    whole = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    _, first, same = np.unique(whole, return_index=True, return_inverse=True)
    return first, same.reshape(-1)


def compact(problem: Problem, alive: Alive, *, bounded: bool) -> Reduced:
    """The problem restricted to ``alive``; without a bound all bytes are left out of it."""
    kept = tuple(np.flatnonzero(mask) for mask in alive)
    nodes = tuple(
        Node(node.name, node.cost[k], node.memory[k] if bounded else np.zeros(len(k)))
        for node, k in zip(problem.nodes, kept, strict=True)
    )
    tensors = []
    for tensor in problem.tensors:
        wants = [use.want[kept[use.node]] for use in tensor.uses]
        columns = np.unique(np.concatenate(wants)) if wants else np.zeros(0, dtype=int)
        columns = columns[columns >= 0]
        if not len(columns):
            continue
        rows, have = np.unique(tensor.have[kept[tensor.producer]], return_inverse=True)
        cost = tensor.cost[np.ix_(rows, columns)]
        temporary = np.where(np.isfinite(cost), tensor.temporary[np.ix_(rows, columns)], 0.0)
        memory = tensor.memory[columns]
        if not bounded:
            temporary, memory = np.zeros_like(temporary), np.zeros_like(memory)
        if not (cost.any() or temporary.any() or memory.any()):
            continue
        new_column = np.full(tensor.cost.shape[1], -1)
        new_column[columns] = np.arange(len(columns))
        first, same = _relabel(np.hstack([cost, temporary]))
        cost, temporary, have = cost[first], temporary[first], same[have]
        if len(wants) == 1:
            # Equal columns of a shared tensor stay apart: two uses wanting both would pay for both.
            first, same = _relabel(np.hstack([cost.T, temporary.T, memory[:, None]]))
            cost, temporary, memory = cost[:, first], temporary[:, first], memory[first]
            new_column[columns] = same
        uses = tuple(
            Use(use.node, np.where(want < 0, -1, new_column[np.maximum(want, 0)]))
            for use, want in zip(tensor.uses, wants, strict=True)
        )
        tensors.append(Tensor(tensor.name, tensor.producer, have, uses, cost, memory, temporary))
    return Reduced(Problem(nodes, tuple(tensors), problem.memory_bound if bounded else math.inf), kept)
