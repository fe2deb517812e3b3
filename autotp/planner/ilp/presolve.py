"""Make a problem smaller without losing its optimum.

* :func:`consistent` removes strategies that need an impossible reshard with every strategy of some neighbour.
* :func:`compact` restricts arrays to the strategies left, merges equal rows and columns, and drops tensors without cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotp.planner.ilp.problem import Node, Problem, Tensor, Use, classes

__all__ = ["Reduced", "compact", "consistent"]

Alive = list[np.ndarray]  # per node a boolean mask over its strategies


@dataclass(frozen=True, slots=True)
class Reduced:
    """A smaller problem and, per node, the original index of each of its strategies."""

    problem: Problem
    kept: tuple[np.ndarray, ...]

    def restore(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """The assignment of the original problem for one of the smaller problem."""
        return tuple(int(kept[strategy]) for kept, strategy in zip(self.kept, choice, strict=True))


def consistent(problem: Problem, alive: Alive) -> bool:
    """Clear, in ``alive``, strategies that are part of no assignment of finite cost. False if a node has none left."""
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
                    columns = _met(use.want[want], finite.shape[1])
                    have &= finite[:, columns].any(axis=1)[tensor.have]
                rows = _met(tensor.have[have], len(finite))
                want &= (use.want < 0) | finite[rows].any(axis=0)[np.maximum(use.want, 0)]
        after = sum(int(mask.sum()) for mask in alive)
        changed = after < before
    return all(mask.any() for mask in alive)


def _met(numbers: np.ndarray, most: int) -> np.ndarray:
    """``[most]``: whether each number from 0 to ``most - 1`` is among ``numbers``, which may also hold -1."""
    met = np.zeros(most + 1, dtype=bool)
    met[numbers] = True
    return met[:-1]


def _relabel(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Representatives of the distinct rows of a matrix, and for each row which of them it equals."""
    rows = np.ascontiguousarray(values)
    whole = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    _, first, same = np.unique(whole, return_index=True, return_inverse=True)
    return first, same.reshape(-1)


def compact(problem: Problem, alive: Alive, *, sized: bool = False) -> Reduced:
    """The problem restricted to the strategies in ``alive``; its memory is 0 unless ``sized``."""
    kept = tuple(np.flatnonzero(mask) for mask in alive)
    nodes = tuple(
        Node(node.name, node.cost[k], node.memory[k] if sized else np.zeros(len(k)))
        for node, k in zip(problem.nodes, kept, strict=True)
    )
    tensors = []
    for tensor in problem.tensors:
        wants = [use.want[kept[use.node]] for use in tensor.uses]
        columns = np.flatnonzero(_met(np.concatenate(wants), tensor.cost.shape[1])) if wants else np.zeros(0, dtype=int)
        if not len(columns):
            continue
        had = tensor.have[kept[tensor.producer]]
        have, first = classes(had)
        cells = np.ix_(had[first], columns)
        cost = tensor.cost[cells]
        bytes_of = (tensor.temporary, tensor.memory) if sized else ()
        tables = [cost, *(np.where(np.isfinite(cost), table[cells], 0.0) for table in bytes_of)]
        if not any(table.any() for table in tables):
            continue
        new_column = np.full(tensor.cost.shape[1], -1)
        new_column[columns] = np.arange(len(columns))
        first, same = _relabel(np.hstack(tables))
        tables, have = [table[first] for table in tables], same[have]
        if len(wants) == 1:
            # Equal columns of a shared tensor stay apart: two uses wanting both would pay for both.
            first, same = _relabel(np.hstack([table.T for table in tables]))
            tables = [table[:, first] for table in tables]
            new_column[columns] = same
        cost, *sizes = tables
        temporary, memory = sizes or (np.zeros_like(cost), np.zeros_like(cost))
        uses = tuple(
            Use(use.node, np.where(want < 0, -1, new_column[np.maximum(want, 0)]))
            for use, want in zip(tensor.uses, wants, strict=True)
        )
        tensors.append(Tensor(tensor.name, tensor.producer, have, uses, cost, memory, temporary))
    return Reduced(Problem(nodes, tuple(tensors)), kept)
