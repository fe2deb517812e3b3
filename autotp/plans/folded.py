"""Operators of a plan that differ only in the number of their layer, folded into one row."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from autotp.plans.plan import PlannedOperator

__all__ = ["FoldedOperator", "fold_operators", "unnumbered"]


@dataclass(frozen=True, slots=True)
class FoldedOperator:
    """One row of the table: operators that are identical except for the number of their layer.

    Attributes:
        module: The operators' module with every layer number written as ``*``.
        operators: The operators, at least one.
    """

    module: str
    operators: tuple[PlannedOperator, ...]

    @property
    def first(self) -> PlannedOperator:
        """The first operator, whose values are shown where those of all operators are equal."""
        return self.operators[0]

    @property
    def seconds(self) -> float:
        """Seconds per step of all operators together, including communication."""
        return sum(operator.seconds for operator in self.operators)

    @property
    def bytes_moved(self) -> float:
        """Bytes that each device receives per step for all operators together."""
        return sum(operator.bytes_moved for operator in self.operators)

    @property
    def bound_bytes(self) -> float:
        """The sum of the operators' communication lower bounds, in bytes; that of an operator without a bound is 0."""
        return sum(operator.bound_bytes for operator in self.operators)


def fold_operators(operators: Iterable[PlannedOperator]) -> list[FoldedOperator]:
    """Folds operators that differ only in the number of their layer into rows, in the order of each row's first operator.

    Args:
        operators: A plan's operators.

    Returns:
        One row for each different combination of module, target, scheme, strategy, layouts and panels.
    """
    rows: dict[Hashable, list[PlannedOperator]] = {}
    for operator in operators:
        strategy = tuple((factor, tuple(axes)) for factor, axes in operator.strategy.items())
        key = (
            unnumbered(operator.module),
            operator.target,
            operator.scheme,
            strategy,
            tuple(operator.layouts),
            operator.panels,
            operator.replicated,
        )
        rows.setdefault(key, []).append(operator)
    return [FoldedOperator(unnumbered(row[0].module), tuple(row)) for row in rows.values()]


def unnumbered(module: str) -> str:
    """The path of a module or parameter, with every layer number written as ``*``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module or "")
