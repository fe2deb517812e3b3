"""Local search: each node in turn takes its best strategy, given the strategies of all other nodes."""

from __future__ import annotations

import numpy as np

from autotp.planner.ilp.deadline import NEVER, Deadline
from autotp.planner.ilp.problem import Problem, distinct_wants

__all__ = ["improve"]

_SWEEPS = 10


class _Neighbourhood:
    """The costs of a node's strategies, with those of its tensors, while all other nodes keep their strategies."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.incident: list[list[int]] = [[] for _ in problem.nodes]
        self.simple: list[bool] = [True] * len(problem.nodes)
        for number, tensor in enumerate(problem.tensors):
            touched = [tensor.producer, *(use.node for use in tensor.uses)]
            for node in set(touched):
                self.incident[node].append(number)
                if touched.count(node) > 1:
                    self.simple[node] = False

    def seconds(self, node: int, choice: list[int]) -> np.ndarray:
        total = self.problem.nodes[node].cost.copy()
        if not self.simple[node]:
            saved = choice[node]
            for strategy in np.flatnonzero(np.isfinite(total)):
                choice[node] = int(strategy)
                total[strategy] += sum(self.tensor_seconds(number, choice) for number in self.incident[node])
            choice[node] = saved
            return total
        for number in self.incident[node]:
            tensor = self.problem.tensors[number]
            if tensor.producer == node:
                columns = distinct_wants(tensor, choice)
                total += tensor.cost[:, columns].sum(axis=1)[tensor.have]
                continue
            use = next(use for use in tensor.uses if use.node == node)
            row = tensor.cost[int(tensor.have[choice[tensor.producer]])].copy()
            paid = {int(u.want[choice[u.node]]) for u in tensor.uses if u is not use} - {-1}
            extra = float(row[list(paid)].sum()) if paid else 0.0
            row[list(paid)] = 0.0
            total += extra + np.where(use.want < 0, 0.0, row[np.maximum(use.want, 0)])
        return total

    def tensor_seconds(self, number: int, choice: list[int]) -> float:
        tensor = self.problem.tensors[number]
        row = int(tensor.have[choice[tensor.producer]])
        return float(sum(tensor.cost[row, column] for column in distinct_wants(tensor, choice)))


def improve(problem: Problem, start: tuple[int, ...], deadline: Deadline = NEVER) -> tuple[int, ...]:
    """Improve an assignment by local search. The result costs at most as much as ``start``.

    Args:
        problem: the problem.
        start: the initial assignment.
        deadline: when to return the best assignment so far.
    """
    around = _Neighbourhood(problem)
    choice = list(start)
    for _ in range(_SWEEPS):
        moved = False
        for node in range(len(choice)):
            if deadline.over:
                return tuple(choice)
            seconds = around.seconds(node, choice)
            best = int(np.argmin(seconds))
            if seconds[best] < seconds[choice[node]]:
                choice[node], moved = best, True
        if not moved:
            break
    return tuple(choice)
