"""How much each of several figures counts, where the greatest of them limits, and what bytes are worth, where there is a
bound: cutting planes by linear programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from ortools.math_opt.python import mathopt

__all__ = ["Multipliers", "Shares", "next_shares"]

_PATIENCE = timedelta(seconds=1)

#: Of each group of figures, their shares.
Shares = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The solution of the linear program of ``next_shares``.

    Attributes:
        shares: of each group's figures.
        prices: of every excess.
        value: the least line there.
        mixture: for each line its part in the mixture of lines that has this value and, on average, no excess.
    """

    shares: Shares
    prices: tuple[float, ...]
    value: float
    mixture: tuple[float, ...]


def next_shares(
    lines: Sequence[Sequence[Sequence[float]]],
    excesses: Sequence[Sequence[float]] = (),
    between: Sequence[tuple[float, float]] = (),
) -> Multipliers:
    """Where the least of the lines, the sums of their figures weighted by shares and of their priced excesses, is greatest.

    Args:
        lines: one for each choice met, of as many groups of figures; a group's shares have the sum 1.
        excesses: of each choice what it takes above each of several bounds, or, negative, below.
        between: least and greatest price of each excess.
    """
    unit = max(figure for line in lines for group in line for figure in group) or 1.0  # a solver takes small numbers for 0
    much = max((abs(excess) for row in excesses for excess in row), default=0.0) or 1.0
    model = mathopt.Model()
    shares = [[model.add_variable(lb=0.0, ub=1.0) for _ in group] for group in lines[0]]
    prices = [model.add_variable(lb=low * much / unit, ub=high * much / unit) for low, high in between]
    for group in shares:
        model.add_linear_constraint(sum(group) == 1.0)
    least = model.add_variable(lb=-float("inf"))
    rows = []
    for number, line in enumerate(lines):
        pairs = [pair for group, figures in zip(shares, line, strict=True) for pair in zip(group, figures, strict=True)]
        terms = [share * (figure / unit) for share, figure in pairs]
        if excesses:
            terms += [price * (excess / much) for price, excess in zip(prices, excesses[number], strict=True)]
        rows.append(model.add_linear_constraint(least <= sum(terms)))
    model.maximize(least)
    # Where prices differ by ten orders, GLOP calls some results imprecise and may not end; HiGHS, a little slower, does.
    found = mathopt.solve(model, mathopt.SolverType.GLOP, params=mathopt.SolveParameters(time_limit=_PATIENCE))
    if not found.has_primal_feasible_solution():
        found = mathopt.solve(model, mathopt.SolverType.HIGHS)
    values = ([max(0.0, found.variable_values(share)) for share in group] for group in shares)
    return Multipliers(
        # A solver may be a little off the sum 1.
        tuple(tuple(value / sum(group) for value in group) for group in values),
        tuple(max(0.0, found.variable_values(price)) * unit / much for price in prices),
        unit * found.objective_value(),
        tuple(abs(found.dual_values(row)) for row in rows),
    )
