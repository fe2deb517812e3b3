"""How much each of several figures counts, where the greatest of them limits: cutting planes by linear programs."""

from __future__ import annotations

from collections.abc import Sequence

from ortools.math_opt.python import mathopt

__all__ = ["Shares", "next_shares"]

#: Of each group of figures, their shares.
Shares = tuple[tuple[float, ...], ...]


def next_shares(lines: Sequence[Sequence[Sequence[float]]]) -> tuple[Shares, float]:
    """(shares, value) where the least of the lines, the sums of their figures weighted by shares, is greatest.

    Args:
        lines: one for each choice met, of as many groups of figures; a group's shares have the sum 1.
    """
    unit = max(figure for line in lines for group in line for figure in group) or 1.0  # a solver takes small numbers for 0
    model = mathopt.Model()
    shares = [[model.add_variable(lb=0.0, ub=1.0) for _ in group] for group in lines[0]]
    for group in shares:
        model.add_linear_constraint(sum(group) == 1.0)
    least = model.add_variable(lb=0.0)
    for line in lines:
        pairs = [pair for group, figures in zip(shares, line, strict=True) for pair in zip(group, figures, strict=True)]
        model.add_linear_constraint(least <= sum(share * (figure / unit) for share, figure in pairs))
    model.maximize(least)
    found = mathopt.solve(model, mathopt.SolverType.GLOP)
    values = ([max(0.0, found.variable_values(share)) for share in group] for group in shares)
    # A solver may be a little off the sum 1.
    return tuple(tuple(value / sum(group) for value in group) for group in values), unit * found.objective_value()
