"""The multipliers of a Lagrangian relaxation, by cutting planes: shares of figures of which the greatest counts, and prices
of what exceeds a bound. They are the solution of a linear program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from ortools.math_opt.python import mathopt

__all__ = ["Multipliers", "Shares", "next_shares"]

_PATIENCE = timedelta(seconds=1)

#: The shares of the figures of each group.
Shares = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The solution of the linear program of ``next_shares``.

    Attributes:
        shares: of the figures of each group.
        prices: of every excess.
        value: the smallest line at these shares and prices.
        mixture: the weight of each line in the mixture of lines that has this value and, on average, no excess.
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
    """The shares and prices at which the smallest line is greatest: the sum of weighted figures and of priced excesses.

    Args:
        lines: one for each choice met, all with the same groups of figures; the shares of a group have the sum 1.
        excesses: how far each choice is above each of several bounds; negative if it is below.
        between: the least and the greatest price of each excess.
    """
    unit = max(figure for line in lines for group in line for figure in group) or 1.0  # solvers treat small numbers as 0
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
    # If prices differ by ten orders, GLOP calls some results imprecise and may not end; HiGHS ends, but is a little slower.
    found = mathopt.solve(model, mathopt.SolverType.GLOP, params=mathopt.SolveParameters(time_limit=_PATIENCE))
    if not found.has_primal_feasible_solution():
        found = mathopt.solve(model, mathopt.SolverType.HIGHS)
    values = ([max(0.0, found.variable_values(share)) for share in group] for group in shares)
    return Multipliers(
        # With a solver's tolerances, the sum may differ slightly from 1.
        tuple(tuple(value / sum(group) for value in group) for group in values),
        tuple(max(0.0, found.variable_values(price)) * unit / much for price in prices),
        unit * found.objective_value(),
        tuple(abs(found.dual_values(row)) for row in rows),
    )
