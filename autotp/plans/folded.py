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
        """The operator that speaks for the row wherever all agree."""
        return self.operators[0]

    @property
    def seconds(self) -> float:
        """Seconds a step that all of them take together, communication included."""
        return sum(operator.seconds for operator in self.operators)

    @property
    def bytes_moved(self) -> float:
        """Bytes that each device receives for all of them in a step."""
        return sum(operator.bytes_moved for operator in self.operators)

    @property
    def bound_bytes(self) -> float:
        """The communication lower bound of those that are matrix products, in bytes; 0 for others."""
        return sum(operator.bound_bytes for operator in self.operators)


def fold_operators(operators: Iterable[PlannedOperator]) -> list[FoldedOperator]:
    """Gather operators that differ only in the number of their layer, in the order of the first of each.

    Args:
        operators: A plan's operators.

    Returns:
        One row for each different combination of module, target, scheme, strategy and layouts.
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
    """A module's path, or a parameter's, with every layer number written as ``*``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module or "")
