"""Minimise a sum of maxima of objectives under bounds on others: one mixed-integer program, for an OR-Tools solver.

A *form* is the objective of a problem: the cost of an assignment. With ``x[o,s]`` binary, ``w[t,l]`` and ``y[t,h,l]`` as
in :mod:`autotp.planner.ilp.mip`, shared by all forms for tensors with the same producer, uses and layouts,

    minimise  sum_g theta[g]
    s.t.      sum_s x[o,s] = 1                                                   for every node o              (1)
              w[t,l] >= sum_{s: use i wants l} x[o_i,s]                          for every use i of t, l       (2)
              sum_h y[t,h,l] = w[t,l],   y[t,h,l] <= sum_{s: o has h} x[o,s]     for every t, h, l             (3)
              theta[g] >= sum cost_f x + sum cost_f y                            for every form f of group g   (4)
              sum cost_m x + sum cost_m y <= bound_m                             for every form m that is bounded (5)
              sum_o x[o, choice_o] <= nodes - 1                                  for every excluded choice     (6)

The time of a step is a sum over passes, each as long as its longest side (4); memory is bounded at every moment (5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.math_opt.python import mathopt

from autotp.planner.ilp.deadline import Deadline
from autotp.planner.ilp.mip import time_limit_of
from autotp.planner.ilp.problem import Problem, Tensor

__all__ = ["minimax"]

_LARGE = 1e3  # the largest node cost of the first form, after scaling


def minimax(
    groups: Sequence[Sequence[Problem]],
    bounded: Sequence[tuple[Problem, float]],
    alive: Sequence[np.ndarray],
    excluded: Sequence[Sequence[int]] = (),
    *,
    deadline: Deadline,
) -> tuple[float, tuple[int, ...] | None]:
    """Minimise the sum over groups of the largest form. Returns a lower bound, and the best assignment found, or None.

    Args:
        groups: the forms of each group; all forms have the same nodes.
        bounded: forms, each with an upper bound.
        alive: per node, a mask of the strategies to consider.
        excluded: assignments to exclude.
        deadline: when to return the best assignment so far; the time to state the program, which is small, is not counted.
    """
    left, program = time_limit_of(deadline), _Program(alive)
    scale = max(float(np.max(node.cost[mask], initial=0.0)) for node, mask in zip(groups[0][0].nodes, alive, strict=True))
    scale = _LARGE / scale if scale else 1.0
    thetas = []
    for forms in groups:
        theta = program.model.add_variable(lb=0.0)
        thetas.append(theta)
        for form in forms:
            program.model.add_linear_constraint(program.sum(form, scale) <= theta)
    for form, room in bounded:
        program.model.add_linear_constraint(program.sum(form, 1 / max(room, 1.0)) <= room / max(room, 1.0))
    for choice in excluded:
        taken = [program.x[node].get(row) for node, row in enumerate(choice)]
        if all(variable is not None for variable in taken):
            program.model.add_linear_constraint(mathopt.fast_sum(taken) <= len(taken) - 1)
    program.model.minimize(mathopt.fast_sum(thetas))
    parameters = mathopt.SolveParameters(time_limit=left, relative_gap_tolerance=0.0)
    result = mathopt.solve(program.model, mathopt.SolverType.GSCIP, params=parameters)
    if result.termination.reason is mathopt.TerminationReason.INFEASIBLE:
        return math.inf, None
    bound = max(0.0, result.dual_bound()) / scale
    if not result.has_primal_feasible_solution():
        return bound, None
    values = result.variable_values()
    return bound, tuple(max(x, key=lambda row: values[x[row]]) for x in program.x)


@dataclass(slots=True)
class _Program:
    """The variables, and the constraints (1) to (3), added when a form needs them."""

    alive: Sequence[np.ndarray]
    model: mathopt.Model = field(default_factory=mathopt.Model)
    x: list[dict[int, mathopt.Variable]] = field(default_factory=list)
    cells: dict[object, dict[tuple[int, int], mathopt.Variable]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for mask in self.alive:
            rows = {int(row): self.model.add_binary_variable() for row in np.flatnonzero(mask)}
            self.model.add_linear_constraint(mathopt.fast_sum(rows.values()) == 1)
            self.x.append(rows)

    def sum(self, form: Problem, scale: float) -> mathopt.LinearExpression:
        """The linear expression of a form, times ``scale``."""
        terms = [
            scale * float(node.cost[row]) * variable
            for node, rows in zip(form.nodes, self.x, strict=True)
            for row, variable in rows.items()
            if node.cost[row]
        ]
        for tensor in form.tensors:
            if not np.any(tensor.cost):
                continue
            for (have, want), variable in self.of(tensor).items():
                if tensor.cost[have, want]:
                    terms.append(scale * float(tensor.cost[have, want]) * variable)
        return mathopt.fast_sum(terms)

    def of(self, tensor: Tensor) -> dict[tuple[int, int], mathopt.Variable]:
        """The variables ``y`` of a tensor by (row, column), for all reshards that are possible."""
        finite = np.isfinite(tensor.cost)
        key = (
            tensor.producer,
            tensor.have.tobytes(),
            finite.tobytes(),
            tuple((use.node, use.want.tobytes()) for use in tensor.uses),
        )
        if key not in self.cells:
            self.cells[key] = self.made(tensor, finite)
        return self.cells[key]

    def made(self, tensor: Tensor, finite: np.ndarray) -> dict[tuple[int, int], mathopt.Variable]:
        having = self.by(tensor.producer, tensor.have)
        wanting = [self.by(use.node, use.want) for use in tensor.uses]
        found: dict[tuple[int, int], mathopt.Variable] = {}
        for want in sorted({column for by in wanting for column in by if column >= 0}):
            cells = {have: self.model.add_variable(lb=0.0, ub=1.0) for have in having if finite[have, want]}
            for have, cell in cells.items():
                self.model.add_linear_constraint(cell <= having[have])
            for by in wanting:
                if want in by:
                    self.model.add_linear_constraint(mathopt.fast_sum(cells.values()) >= by[want])
            found |= {(have, want): cell for have, cell in cells.items()}
        return found

    def by(self, node: int, index: np.ndarray) -> dict[int, mathopt.LinearExpression]:
        """Index -> the sum of the node's variables ``x`` whose strategies have it."""
        grouped: dict[int, list[mathopt.Variable]] = {}
        for row, variable in self.x[node].items():
            grouped.setdefault(int(index[row]), []).append(variable)
        return {key: mathopt.fast_sum(variables) for key, variables in grouped.items()}
