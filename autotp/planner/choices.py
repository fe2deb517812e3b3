"""The choices of operators, parameters and inputs, and the tensors between them, as layout codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from autotp.costs.runs import Run
from passes.graph import Cast
from passes.layouts.codes import WHOLE, local_elements
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
        space: the strategies of one of them.
        flop: of the whole operator, forward.
        run: how a step runs it.
        rerun: how a step runs it if the backward pass recomputes it; None unless the planner decides that. If it does, the
            choices are the strategies twice, first those that keep the results.
        saves: whether its results are kept for the backward pass.
        kept: what its gradients are made of.
        best: whether only the strategies with the highest score belong to the family.
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
        """Whether the planner decides if it is recomputed."""
        return self.rerun is not None

    def twice(self, per_strategy: np.ndarray) -> np.ndarray:
        """Expands an array over strategies to one over choices, for what does not depend on whether results are kept."""
        return np.concatenate([per_strategy, per_strategy]) if self.undecided else per_strategy

    @property
    def count(self) -> int:
        """The number of strategies: half the number of choices if undecided."""
        return len(self.space.serves)

    @property
    def recomputing(self) -> np.ndarray:
        """Per choice, whether it runs the operator again for the backward pass."""
        never = np.zeros(len(self.space.serves), bool)
        return np.concatenate([never, ~never]) if self.undecided else never


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """The layouts in which a parameter, input or constant may rest.

    Attributes:
        value: the whole tensor.
        cast: its dtypes.
        rows: the layout codes.
        groups: the group of each layout; of every group, only the first layout that fits a mesh is offered.
        regathered: for a parameter, per layout, whether the gathered copy is gathered again for the backward pass, or kept.
        undecided: whether the planner decides that. If so, the layouts are listed twice, first those with kept copies.
        parameter: whether it has a gradient and optimizer state.
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
        """The number of layouts: half the number of choices if undecided."""
        return len(self.rows) // 2 if self.undecided else len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """What the backward pass reads of a tensor, where the planner decides what is kept.

    Attributes:
        have: per choice of the producer, a row of ``Edge.rows``, or, if it is recomputed, of a copy appended to them.
        uses: (index of the reader, per choice the column of ``Edge.wants`` that its gradient, or its recomputation, reads;
            -1: none).
        views: readers that are views of it, which are recomputed if and only if it is.
    """

    have: np.ndarray
    uses: tuple[tuple[int, np.ndarray], ...]
    views: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Edge:
    """A tensor between its producer and its readers.

    Attributes:
        name: of the node that returns it.
        value: the whole tensor.
        cast: the dtypes in which it is made or rests, is moved, and has its gradient reduced.
        producer: index of the producing node.
        have: per choice of the producer, a row of ``rows``.
        rows: the layout codes that it can have.
        regathered: for a parameter, per row, whether the gathered copy is gathered again for the backward pass.
        uses: (index of the reader, per choice a row of ``wants``).
        wants, gradients: the layouts that readers want, and those in which they return the gradient.
        saved: per row of ``wants``, whether a reader keeps that tensor for its backward pass.
        products: the same for products that read it as their data operand.
        copies: the tensors of the model that it stands for.
        parameter: whether it is a parameter.
        trained: whether it has a gradient.
        keeps: whether it is an activation that is not recomputed, so that what readers save of it is kept.
        repeats: whether what readers save of it is resharded again in the backward pass.
        needs: what the backward pass reads of it, where that depends on what is recomputed.
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
        """The number of such tensors in the model."""
        return len(self.copies)

    @cached_property
    def stays(self) -> np.ndarray:
        """Whether nothing has to be moved or cast, ``[H, W]``."""
        return (self.rows[:, None, :] == self.wants[None, :, :]).all(axis=-1) & (not self.cast.there)

    @cached_property
    def travels(self) -> np.ndarray:
        """Whether bringing it from one layout to another surely communicates, ``[H, W]``."""
        return ((self.rows[:, None] != self.wants) & (self.rows[:, None] != WHOLE)).any(axis=-1)

    @cached_property
    def first(self) -> Mapping[str, np.ndarray]:
        """For each column, the first one with that layout, or gradient, ``[W]``.

        The keys are those of ``Held`` in `autotp.planner.memory.tables`.
        """
        return {"layouts": _first(self.wants), "gradients": _first(self.gradients)}


def _first(rows: np.ndarray) -> np.ndarray:
    """For each row, the index of the first row that equals it."""
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
    """Bytes of ``parts``: (an operand, or -1 for the first result; bytes per element), by strategy, ``[S]``."""
    space, found = choice.space, np.zeros(len(choice.space.serves))
    for position, size in parts:
        node = space.operator.node
        tensor = results_of(node)[0] if position < 0 else operands_of(node)[position].meta["val"]
        rows = space.results[0] if position < 0 else space.wants[position]
        found += size * local_elements(tuple(tensor.shape), rows, mesh)
    return found
