"""What may be chosen for operators, parameters and inputs, and the tensors between them, as codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from autotp.costs.runs import Run
from passes.graph import Cast
from passes.layouts.codes import local_elements
from passes.rules.factors import Value
from passes.rules.kept import Kept
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import kept_besides
from passes.strategies.space import Space

__all__ = ["Choice", "Edge", "Needs", "Rest", "kept_inside", "parts_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The strategies of identical operators.

    Attributes:
        space: of one of them.
        flop: of the whole operator, forward.
        run: how a step runs it.
        rerun: how, if the backward pass recomputes it, where that is to be chosen: the strategies stand there twice, first
            those that keep its results.
        saves: its results are kept for the backward pass.
        kept: what else its gradients are made of.
        best: only the strategies of the highest score are the family's.
        score: per strategy.
    """

    space: Space
    flop: float
    run: Run
    rerun: Run | None
    saves: bool
    kept: Kept
    best: bool
    score: np.ndarray

    @property
    def undecided(self) -> bool:
        """Whether the planner chooses if it is recomputed."""
        return self.rerun is not None

    def twice(self, per_strategy: np.ndarray) -> np.ndarray:
        """What does not depend on whether results are kept, for all that may be chosen."""
        return np.concatenate([per_strategy, per_strategy]) if self.undecided else per_strategy

    @property
    def count(self) -> int:
        """How many strategies there are, whatever is kept."""
        return len(self.space.serves)

    @property
    def recomputing(self) -> np.ndarray:
        """Of all that may be chosen: whether it runs the operator again for the backward pass."""
        never = np.zeros(len(self.space.serves), bool)
        return np.concatenate([never, ~never]) if self.undecided else never


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """Where a parameter, input or constant may rest.

    Attributes:
        value: the whole tensor.
        cast: its dtypes.
        rows: coded layouts.
        groups: of the layouts of one group, only the first that fits a mesh is offered.
        regathered: of a parameter: whether what is gathered from there is gathered again for the backward pass, or kept.
        undecided: whether it is to be chosen: the layouts stand there twice, first for those that are kept.
        parameter: it has a gradient and optimizer state.
    """

    value: torch.Tensor
    cast: Cast
    rows: np.ndarray
    groups: np.ndarray
    regathered: np.ndarray
    undecided: bool
    parameter: bool

    @property
    def count(self) -> int:
        """How many layouts there are, whatever is kept."""
        return len(self.rows) // 2 if self.undecided else len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """What the backward pass needs of a tensor, where the planner decides what is kept.

    Attributes:
        have: per choice of the producer, a row of ``Edge.rows``, or, if it is recomputed, of the same rows behind them.
        uses: of every reader, per choice, the column of ``Edge.wants`` that its gradient, or recomputing it, reads; -1:
            none.
        views: readers that are views of it, and are recomputed if and only if it is.
    """

    have: np.ndarray
    uses: tuple[tuple[int, np.ndarray], ...]
    views: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Edge:
    """A tensor between its producer and its readers.

    Attributes:
        name: of the node that gives it.
        value: the whole tensor.
        cast: the dtypes in which it is made or rests, moves, and has its gradient reduced.
        producer: index of the producing node.
        have: per strategy of the producer, a row of ``rows``.
        rows: the coded layouts that it can have.
        regathered: of those of a parameter: whether what is gathered from there is gathered again for the backward pass.
        uses: (index of the reader, per strategy a row of ``wants``).
        wants, gradients: the layouts that readers want, and in which they return the gradient.
        saved: wanted tensors that a reader keeps for its backward pass.
        products: wanted tensors that products read as data.
        copies: the tensors of the model that it stands for.
        parameter: it is a parameter.
        trained: a gradient comes back.
        keeps: what readers save of it is an activation's, which is kept.
        repeats: what readers save of it is brought to them once more in the backward pass.
        needs: what readers save of it, where that depends on what is recomputed.
    """

    name: str
    value: torch.Tensor
    cast: Cast
    producer: int
    have: np.ndarray
    rows: np.ndarray
    regathered: np.ndarray
    uses: tuple[tuple[int, np.ndarray], ...]
    wants: np.ndarray
    gradients: np.ndarray
    saved: np.ndarray
    products: np.ndarray
    copies: tuple[Value, ...]
    parameter: bool
    trained: bool
    keeps: bool
    repeats: bool
    needs: Needs | None

    @property
    def count(self) -> int:
        """How many such tensors the model has."""
        return len(self.copies)

    @cached_property
    def stays(self) -> np.ndarray:
        """Where nothing has to move, ``[H, W]``."""
        return (self.rows[:, None, :] == self.wants[None, :, :]).all(axis=-1) & (not self.cast.there)

    @cached_property
    def first(self) -> Mapping[str, np.ndarray]:
        """Of equal columns, the first one, by what a tensor is there once for (`autotp.planner.tables.Held`), ``[W]``."""
        return {"layouts": _first(self.wants), "gradients": _first(self.gradients)}


def _first(rows: np.ndarray) -> np.ndarray:
    """The first of the rows that each is equal to."""
    _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return np.asarray(first[inverse.reshape(-1)])


def kept_inside(choice: Choice, mesh: tuple[int, ...]) -> np.ndarray:
    """Bytes that an operator's strategies keep for the backward pass besides operands and results, ``[S]``."""
    space, operator = choice.space, choice.space.operator
    operands, found = operands_of(operator.node), parts_of(choice, choice.kept.besides, mesh)
    besides = kept_besides(operator.node)
    if operator.rule is None or not besides or not choice.run.gradient:
        return found
    inside = space.axes_of(operator.rule.inner).any(axis=-1)
    first = operands[0].meta["val"]
    size = local_elements(tuple(first.shape), space.wants[0], mesh) * first.element_size()
    return np.where(inside, besides * size, found)


def parts_of(choice: Choice, parts: Sequence[tuple[int, float]], mesh: tuple[int, ...]) -> np.ndarray:
    """Bytes of so many for each element of operands, or (-1) of the first result, of an operator's strategies, ``[S]``."""
    space, found = choice.space, np.zeros(len(choice.space.serves))
    for position, size in parts:
        node = space.operator.node
        tensor = results_of(node)[0] if position < 0 else operands_of(node)[position].meta["val"]
        rows = space.results[0] if position < 0 else space.wants[position]
        found += size * local_elements(tuple(tensor.shape), rows, mesh)
    return found
