"""The part of a problem that the other methods leave, as a mixed-integer program for an OR-Tools solver.

With ``x[o,s]`` binary, ``X_i[t,l] = sum of x[o_i,s] over s wanting column l`` (use i of t, node ``o_i``) and
``P[t,h] = sum of x[producer(t),s] over s having row h``:

    minimise  sum_{o,s} cost_o[s] x[o,s] + sum_{t,h,l} cost_t[h,l] y[t,h,l]                  (1) nodes, cells
    s.t.      sum_s x[o,s] = 1                                            for every o              (2) nodes
              w[t,l] >= X_i[t,l]                                          for every use i          (3) shared
              sum_h y[t,h,l] = w[t,l],   y[t,h,l] <= P[t,h]               for every t, h, l        (4) cells
              sum_l y[t,h,l] = P[t,h] (<= if a use may want none), sum_h y[t,h,l] = X[t,l]  one use (5) paired

(4) is the facility-location form of the reshard: the product ``P w`` relaxed as tightly as two-index
constraints allow; (5) is the transportation polytope, the convex hull for two nodes. ``y`` of an impossible
reshard does not exist, and cells of one column of a shared tensor with the same cost are one variable, which does not
weaken (4).
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autotp.planner.ilp.deadline import NEVER, Deadline
from autotp.planner.ilp.problem import Problem, Tensor

__all__ = ["MipResult", "build", "run", "time_limit_of"]

_LONGEST = 1e6  # seconds; the longest time limit, as solvers do not accept infinity
_SCALE = 1e4  # the reference cost after scaling: a reduced-cost tolerance of 1e-7 is then 1e-11 of the optimum


@dataclass(frozen=True, slots=True)
class MipResult:
    """The result of one run: the assignment (None if none was found), the proven lower bound in seconds, and
    whether the solver finished.
    """

    choice: tuple[int, ...] | None
    bound: float
    finished: bool


class _Rows:
    """Variables and constraints as the flat arrays of the solver's model format."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.integer: list[bool] = []
        self.upper: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []

    def variable(self, cost: float, *, integer: bool = False, upper: float = 1.0) -> int:
        self.cost.append(cost)
        self.integer.append(integer)
        self.upper.append(upper)
        return len(self.cost) - 1

    def constraint(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        row = len(self.low)
        self.low.append(low)
        self.high.append(high)
        merged: dict[int, float] = {}
        for column, value in terms:
            merged[column] = merged.get(column, 0.0) + value
        for column in sorted(merged):
            if merged[column] != 0.0:
                self.row.append(row)
                self.column.append(column)
                self.value.append(merged[column])

    def proto(self) -> model_pb2.ModelProto:
        model = model_pb2.ModelProto()
        model.variables.ids.extend(range(len(self.cost)))
        model.variables.lower_bounds.extend([0.0] * len(self.cost))
        model.variables.upper_bounds.extend(self.upper)
        model.variables.integers.extend(self.integer)
        used = [k for k, cost in enumerate(self.cost) if cost != 0.0]
        model.objective.linear_coefficients.ids.extend(used)
        model.objective.linear_coefficients.values.extend([self.cost[k] for k in used])
        model.linear_constraints.ids.extend(range(len(self.low)))
        model.linear_constraints.lower_bounds.extend(self.low)
        model.linear_constraints.upper_bounds.extend(self.high)
        model.linear_constraint_matrix.row_ids.extend(self.row)
        model.linear_constraint_matrix.column_ids.extend(self.column)
        model.linear_constraint_matrix.coefficients.extend(self.value)
        return model


@dataclass(frozen=True, slots=True)
class Model:
    """A built program: its rows, the ``x`` variables of each node, and the unit of its objective in seconds."""

    rows: _Rows
    x: tuple[tuple[int, ...], ...]
    unit: float

    @property
    def size(self) -> int:
        """Number of variables."""
        return len(self.rows.cost)


class _Builder:
    def __init__(self, problem: Problem, unit: float) -> None:
        self.problem = problem
        self.unit = unit
        self.rows = _Rows()
        self.x: list[tuple[int, ...]] = []

    def nodes(self) -> None:
        for node in self.problem.nodes:
            xs = []
            for cost in node.cost.tolist():
                possible = math.isfinite(cost)
                xs.append(self.rows.variable(cost / self.unit if possible else 0.0, integer=True, upper=float(possible)))
            self.rows.constraint([(x, 1.0) for x in xs], 1.0, 1.0)
            self.x.append(tuple(xs))

    def indicator(self, node: int, index: np.ndarray) -> dict[int, int]:
        """Value of ``index`` -> a variable that is 1 if the node's strategy has the value (``x`` itself if only one does).
        Negative values have none.
        """
        groups: dict[int, list[int]] = {}
        for x, value in zip(self.x[node], index.tolist(), strict=True):
            if value >= 0:
                groups.setdefault(value, []).append(x)
        found = {}
        for value, xs in groups.items():
            if len(xs) == 1:
                found[value] = xs[0]
            else:
                found[value] = self.rows.variable(0.0)
                self.rows.constraint([(found[value], -1.0), *((x, 1.0) for x in xs)], 0.0, 0.0)
        return found

    def tensor(self, tensor: Tensor) -> None:
        if not tensor.uses:
            return
        have = self.indicator(tensor.producer, tensor.have)
        if len(tensor.uses) == 1:
            self.paired(tensor, have)
        else:
            self.shared(tensor, have)

    def paired(self, tensor: Tensor, have: dict[int, int]) -> None:
        use = tensor.uses[0]
        wanted = self.indicator(use.node, use.want)
        by_row: dict[int, list[int]] = {row: [] for row in have}
        for column, w in wanted.items():
            ys = []
            for row in have:
                cost = float(tensor.cost[row, column])
                if math.isfinite(cost):
                    y = self.rows.variable(cost / self.unit)
                    ys.append(y)
                    by_row[row].append(y)
            self.rows.constraint([(w, -1.0), *((y, 1.0) for y in ys)], 0.0, 0.0)
        least = -math.inf if (use.want < 0).any() else 0.0
        for row, ys in by_row.items():
            self.rows.constraint([(have[row], -1.0), *((y, 1.0) for y in ys)], least, 0.0)

    def shared(self, tensor: Tensor, have: dict[int, int]) -> None:
        wanted: dict[int, list[int]] = {}
        for use in tensor.uses:
            for column, x in self.indicator(use.node, use.want).items():
                wanted.setdefault(column, []).append(x)
        for column, xs in wanted.items():
            w = xs[0]
            if len(xs) > 1:
                w = self.rows.variable(0.0)
                for x in xs:
                    self.rows.constraint([(w, 1.0), (x, -1.0)], 0.0, math.inf)
            self.cells(tensor, column, w, have)

    def cells(self, tensor: Tensor, column: int, w: int, have: dict[int, int]) -> None:
        groups: dict[float, list[int]] = {}
        for row, p in have.items():
            cost = float(tensor.cost[row, column])
            if math.isfinite(cost):
                groups.setdefault(cost, []).append(p)
        ys = []
        for cost, ps in groups.items():
            y = self.rows.variable(cost / self.unit)
            self.rows.constraint([(y, 1.0), *((p, -1.0) for p in ps)], -math.inf, 0.0)
            ys.append(y)
        self.rows.constraint([(w, -1.0), *((y, 1.0) for y in ys)], 0.0, 0.0)


def build(
    problem: Problem,
    reference: float,
    *,
    excluded: Sequence[Sequence[int]] = (),
    deadline: Deadline = NEVER,
) -> Model:
    """State ``problem`` as a mixed-integer program, constraints (1)-(5) of the module.

    Args:
        problem: the problem.
        reference: an estimate of the optimum in seconds, for scaling.
        excluded: assignments to exclude.
        deadline: see Raises.

    Raises:
        Expired: the deadline passed before the program was complete.
    """
    unit = reference / _SCALE if reference > 0 and math.isfinite(reference) else 1.0
    builder = _Builder(problem, unit)
    builder.nodes()
    for tensor in problem.tensors:
        deadline.check()
        builder.tensor(tensor)
    for choice in excluded:
        xs = [(x[s], 1.0) for x, s in zip(builder.x, choice, strict=True)]
        builder.rows.constraint(xs, -math.inf, len(xs) - 1.0)
    return Model(builder.rows, tuple(builder.x), builder.unit)


def time_limit_of(deadline: Deadline) -> datetime.timedelta:
    """The time left until a deadline, as the time limit of a solver."""
    return datetime.timedelta(seconds=min(max(deadline.left, 0.01), _LONGEST))


def run(model: Model, *, deadline: Deadline) -> MipResult:
    """Solve a built program.

    Args:
        model: from :func:`build`.
        deadline: when to return the best assignment so far.

    Returns:
        the best assignment found; ``finished`` without one means that none exists (the bound is then ``inf``).

    Raises:
        Expired: the deadline has already passed.
    """
    proto = mathopt.Model.from_model_proto(model.rows.proto())
    deadline.check()
    params = mathopt.SolveParameters(
        time_limit=time_limit_of(deadline),
        relative_gap_tolerance=0.0,
        absolute_gap_tolerance=0.0,
        presolve=mathopt.Emphasis.OFF,  # the program is presolved; the solver's own presolve took as long as the search
    )
    result = mathopt.solve(proto, mathopt.SolverType.HIGHS, params=params)
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return MipResult(None, math.inf, True)
    bound = result.termination.objective_bounds.dual_bound * model.unit
    if not result.has_primal_feasible_solution():
        return MipResult(None, bound, False)
    values = result.variable_values()
    by_id = np.zeros(model.size)
    for variable, value in values.items():
        by_id[variable.id] = value
    choice = tuple(int(np.argmax(by_id[list(xs)])) for xs in model.x)
    return MipResult(choice, bound, reason == mathopt.TerminationReason.OPTIMAL)
