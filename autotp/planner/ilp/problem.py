"""The integer program in the abstract: nodes that choose one strategy each, and tensors that link them.

Given one strategy ``s(o)`` per node, a tensor ``t`` has the layout of row ``have[s(producer)]`` and is required in
those of the set ``L(t)`` of *distinct* columns ``want[s(consumer)]`` over its uses (-1 is ignored). Then

    seconds = sum_o cost_o[s(o)] + sum_t sum_{l in L(t)} cost_t[have, l]                              (1)
    memory  = sum_o memory_o[s(o)] + sum_t sum_{l in L(t)} memory_t[have, l]
              + max_{t, l in L(t)} temporary_t[have, l]                                        (2)

:func:`evaluate` implements (1) and (2) and is the definition that every solution method is tested against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Evaluation", "Node", "Problem", "Tensor", "Use", "classes", "distinct_wants", "evaluate", "validate"]

_FEW = 8  # numbers up to this multiple of their count are not sorted, but marked in an array


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An operator, a parameter or an input: exactly one of its ``S`` strategies is chosen.

    Attributes:
        name: its name in error messages.
        cost: ``[S]`` seconds; ``inf`` forbids a strategy.
        memory: ``[S]`` bytes that are kept on each device.
    """

    name: str
    cost: np.ndarray
    memory: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One consumer of a tensor.

    Attributes:
        node: index of the consuming node.
        want: ``[S]`` column of the tensor's matrices that each strategy of the consumer requires; -1 if it
            requires none.
    """

    node: int
    want: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor: produced once, required in several layouts, resharded once per distinct required layout.

    Attributes:
        name: its name in error messages.
        producer: index of the producing node.
        have: ``[S]`` row of the matrices: the layout in which each strategy of the producer returns the tensor.
        uses: the consumers; one node may appear twice, and may be the producer itself.
        cost: ``[H, W]`` seconds of the reshard from row to column and of the opposite one of the gradient; ``inf`` if
            it is impossible.
        memory: ``[H, W]`` bytes held until the backward pass, counted once per distinct required column.
        temporary: ``[H, W]`` bytes held only while the reshard's result is in use; only the largest one
            counts.
    """

    name: str
    producer: int
    have: np.ndarray
    uses: tuple[Use, ...]
    cost: np.ndarray
    memory: np.ndarray
    temporary: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Nodes, and the tensors between them."""

    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]

    def variables(self, alive: Sequence[np.ndarray]) -> int:
        """The number of strategies in the masks ``alive`` of all nodes, plus that of reshards between their layouts."""
        changes = 0
        for tensor in self.tensors:
            wanted = {column for use in tensor.uses for column in use.want[alive[use.node]].tolist()}
            changes += len(set(tensor.have[alive[tensor.producer]].tolist())) * len(wanted)
        return sum(int(mask.sum()) for mask in alive) + changes


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The cost of a full assignment: seconds (``inf`` if a chosen reshard is impossible) and bytes per device."""

    seconds: float
    memory: float


def distinct_wants(tensor: Tensor, choice: Sequence[int]) -> list[int]:
    """The distinct columns that the consumers of ``tensor`` require under ``choice``, in ascending order."""
    return sorted({column for use in tensor.uses if (column := int(use.want[choice[use.node]])) >= 0})


def classes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Classes of equal numbers, in ascending order: the class of each number, and the index of each class's first number.

    Args:
        values: integers not below -1.
    """
    most = int(values.max(initial=-1)) + 1
    if most > _FEW * len(values):
        _, first, index = np.unique(values, return_index=True, return_inverse=True)
        return index.reshape(-1), first
    met = np.zeros(most + 1, dtype=bool)
    met[values] = True  # the last entry is for -1
    number = np.cumsum(met) - 1 + met[-1]
    number[-1] = 0
    index = number[values]
    first = np.empty(int(met.sum()), dtype=np.intp)
    first[index[::-1]] = np.arange(len(values) - 1, -1, -1)  # reversed, so that the first index is written last
    return index, first


def evaluate(problem: Problem, choice: Sequence[int]) -> Evaluation:
    """The exact objective (1) and memory (2) of a full assignment.

    Args:
        problem: the problem.
        choice: one strategy index per node.

    Raises:
        ValueError: if ``choice`` does not name one existing strategy per node.
    """
    if len(choice) != len(problem.nodes):
        raise ValueError(f"evaluate: choice has {len(choice)} entries for {len(problem.nodes)} nodes; give one each")
    seconds: list[float] = []
    resting: list[float] = []
    largest = 0.0
    for node, strategy in zip(problem.nodes, choice, strict=True):
        if not 0 <= strategy < len(node.cost):
            raise ValueError(f"evaluate: node {node.name!r} has {len(node.cost)} strategies, choice says {strategy}")
        seconds.append(float(node.cost[strategy]))
        resting.append(float(node.memory[strategy]))
    for tensor in problem.tensors:
        row = int(tensor.have[choice[tensor.producer]])
        for column in distinct_wants(tensor, choice):
            seconds.append(float(tensor.cost[row, column]))
            resting.append(float(tensor.memory[row, column]))
            largest = max(largest, float(tensor.temporary[row, column]))
    total = math.fsum(seconds) if all(map(math.isfinite, seconds)) else math.inf
    return Evaluation(total, math.fsum([*resting, largest]))


def validate(problem: Problem) -> None:
    """Check shapes, index ranges and signs.

    Raises:
        ValueError: naming the node or tensor, the field and what is wrong with it.
    """
    count = len(problem.nodes)
    for node in problem.nodes:
        size = len(node.cost)
        if size == 0:
            raise ValueError(f"node {node.name!r}: no strategies; give at least one (replicated is always valid)")
        if node.memory.shape != (size,):
            raise ValueError(f"node {node.name!r}: memory has shape {node.memory.shape}, cost {node.cost.shape}")
        _check_values(f"node {node.name!r}", "cost", node.cost, inf=True, sign=False)
        _check_values(f"node {node.name!r}", "memory", node.memory, inf=False, sign=True)
    for tensor in problem.tensors:
        where = f"tensor {tensor.name!r}"
        if tensor.cost.ndim != 2:
            raise ValueError(f"{where}: cost has shape {tensor.cost.shape}; give a matrix [have, want]")
        rows, columns = tensor.cost.shape
        if tensor.memory.shape != (rows, columns) or tensor.temporary.shape != (rows, columns):
            raise ValueError(
                f"{where}: memory {tensor.memory.shape} and temporary {tensor.temporary.shape} do not fit "
                f"cost {tensor.cost.shape}; give [H, W]"
            )
        _check_values(where, "cost", tensor.cost, inf=True, sign=True)
        _check_values(where, "memory", np.where(np.isinf(tensor.cost), 0.0, tensor.memory), inf=False, sign=True)
        _check_values(where, "temporary", np.where(np.isinf(tensor.cost), 0.0, tensor.temporary), inf=False, sign=True)
        _check_port(where, "have", tensor.producer, tensor.have, problem, low=0, high=rows, count=count)
        for number, use in enumerate(tensor.uses):
            _check_port(where, f"uses[{number}].want", use.node, use.want, problem, low=-1, high=columns, count=count)


def _check_values(where: str, field: str, values: np.ndarray, *, inf: bool, sign: bool) -> None:
    if np.isnan(values).any() or np.isneginf(values).any():
        raise ValueError(f"{where}: {field} holds NaN or -inf; every value must be a number")
    if not inf and np.isinf(values).any():
        raise ValueError(f"{where}: {field} holds inf; forbid a choice by an infinite cost instead")
    if sign and (values < 0).any():
        raise ValueError(f"{where}: {field} is negative (least {values.min()}); it must be 0 or more")


def _check_port(
    where: str, field: str, node: int, index: np.ndarray, problem: Problem, *, low: int, high: int, count: int
) -> None:
    if not 0 <= node < count:
        raise ValueError(f"{where}: {field} belongs to node {node}, but there are {count} nodes")
    size = len(problem.nodes[node].cost)
    if index.shape != (size,):
        raise ValueError(
            f"{where}: {field} has shape {index.shape}, but node {problem.nodes[node].name!r} has {size} strategies"
        )
    if size and not (low <= int(index.min()) and int(index.max()) < high):
        raise ValueError(f"{where}: {field} ranges over {index.min()}..{index.max()}; allowed are {low}..{high - 1}")
