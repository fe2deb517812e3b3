"""The part that enumeration does not settle, as a mixed-integer program for an OR-Tools solver.

With ``x[o,s]`` binary, ``X_i[t,l] = sum of x[o_i,s] over s wanting column l`` (use i of t, node ``o_i``) and
``P[t,h] = sum of x[producer(t),s] over s having row h``:

    minimise  sum_{o,s} cost_o[s] x[o,s] + sum_{t,h,l} cost_t[h,l] y[t,h,l]                  (1) nodes, cells
    s.t.      sum_s x[o,s] = 1                                            for every o              (2) nodes
              w[t,l] >= X_i[t,l]                                          for every use i          (3) shared
              sum_h y[t,h,l] = w[t,l],   y[t,h,l] <= P[t,h]               for every t, h, l        (4) cells
              sum_l y[t,h,l] = P[t,h] (<= if a use may want none), sum_h y[t,h,l] = X[t,l]  one use (5) paired
              z[v] >= sum_{h: temporary_t[h,l] >= v} y[t,h,l]             for every t, l, v      (6) temporary
              sum memory_o[s] x[o,s] + sum memory_t[h,l] y[t,h,l] + T <= bound                     (7) build
                  with  T = sum_k (v_k - v_{k-1}) z[v_k],  z[v_k] <= z[v_{k-1}]                    (8) largest

(4) is the facility-location form of the reshard: the product ``P w`` relaxed as tightly as two-index
constraints allow; (5) is the transportation polytope, the convex hull for two nodes. ``y`` of an impossible
reshard does not exist, and cells of one column of a shared tensor with the same cost and bytes are one
variable, which loses nothing in (4). The largest temporary, a maximum, has no good linear relaxation; one binary variable
for each of its few values, (8), gives the solver something to branch on.
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

_LONGEST = 1e6  # seconds, which a solver takes for its limit instead of infinity
_SCALE = 1e4  # what the reference cost becomes: a reduced-cost tolerance of 1e-7 is then 1e-11 of the optimum


@dataclass(frozen=True, slots=True)
class MipResult:
    """Outcome of one run: the choice (None if none was found), the proven lower bound in seconds, and
    whether it is over.
    """

    choice: tuple[int, ...] | None
    bound: float
    finished: bool


class _Rows:
    """Variables and constraints in the flat arrays that the solver's model format wants."""

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
    """A built program: its rows, the ``x`` variables of each node, and what one unit of its objective is
    in seconds.
    """

    rows: _Rows
    x: tuple[tuple[int, ...], ...]
    unit: float

    @property
    def size(self) -> int:
        """Number of variables."""
        return len(self.rows.cost)


class _Builder:
    def __init__(self, problem: Problem, unit: float, largest_cost: float) -> None:
        self.problem = problem
        self.unit = unit
        self.rows = _Rows()
        self.x: list[tuple[int, ...]] = []
        self.bounded = math.isfinite(problem.memory_bound)
        # A bound of 0 bytes still needs a scale in which bytes are compared.
        self.byte = 1e3 / problem.memory_bound if self.bounded and problem.memory_bound > 0 else 1.0
        self.memory: list[tuple[int, float]] = []
        self.largest_cost = largest_cost / unit
        self.above = self.largest()

    def largest(self) -> dict[float, int]:
        """A variable per value that the largest temporary may have, 1 when it is at least that."""
        if not (self.bounded or self.largest_cost):
            return {}
        found: dict[float, int] = {}
        before, variable = 0.0, -1
        temporaries = [t.temporary[np.isfinite(t.cost)] for t in self.problem.tensors if t.uses]
        for value in np.unique(np.concatenate([np.zeros(0), *temporaries])).tolist():
            if value <= 0:
                continue
            found[value] = self.rows.variable((value - before) * self.largest_cost, integer=True)
            self.remember(found[value], value - before)
            if before:
                self.rows.constraint([(variable, 1.0), (found[value], -1.0)], 0.0, math.inf)
            before, variable = value, found[value]
        return found

    def nodes(self) -> None:
        for node in self.problem.nodes:
            xs = []
            for cost, memory in zip(node.cost.tolist(), node.memory.tolist(), strict=True):
                possible = math.isfinite(cost)
                x = self.rows.variable(cost / self.unit if possible else 0.0, integer=True, upper=float(possible))
                self.remember(x, memory)
                xs.append(x)
            self.rows.constraint([(x, 1.0) for x in xs], 1.0, 1.0)
            self.x.append(tuple(xs))

    def remember(self, variable: int, memory: float) -> None:
        if self.bounded and memory > 0:
            self.memory.append((variable, memory * self.byte))

    def indicator(self, node: int, index: np.ndarray) -> dict[int, int]:
        """A variable per value of ``index`` that is 1 when the node's strategy has it (``x`` itself where
        it is one).
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

    def temporary(self, terms: list[tuple[int, float]]) -> None:
        for value in sorted({value for _, value in terms if value in self.above}):
            reached = [(y, 1.0) for y, other in terms if other >= value]
            self.rows.constraint([(self.above[value], -1.0), *reached], -math.inf, 0.0)

    def held(self, tensor: Tensor, column: int, w: int) -> np.ndarray:
        """Counts the bytes that a column holds whatever the row; what rows hold beside that, ``[H]``."""
        memory = np.where(np.isfinite(tensor.cost[:, column]), tensor.memory[:, column], np.inf)
        least = float(memory.min(initial=np.inf))
        if not self.bounded or not math.isfinite(least):
            return np.zeros(len(memory))
        self.remember(w, least)
        return np.where(np.isfinite(memory), memory - least, 0.0)

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
        temporary = []
        for column, w in wanted.items():
            apart = self.held(tensor, column, w)
            ys = []
            for row in have:
                cost = float(tensor.cost[row, column])
                if math.isfinite(cost):
                    y = self.rows.variable(cost / self.unit)
                    ys.append(y)
                    by_row[row].append(y)
                    temporary.append((y, float(tensor.temporary[row, column])))
                    self.remember(y, float(apart[row]))
            self.rows.constraint([(w, -1.0), *((y, 1.0) for y in ys)], 0.0, 0.0)
        least = -math.inf if (use.want < 0).any() else 0.0
        for row, ys in by_row.items():
            self.rows.constraint([(have[row], -1.0), *((y, 1.0) for y in ys)], least, 0.0)
        self.temporary(temporary)

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
        groups: dict[tuple[float, float, float], list[int]] = {}
        apart = self.held(tensor, column, w)
        for row, p in have.items():
            cost = float(tensor.cost[row, column])
            if math.isfinite(cost):
                bytes_ = float(tensor.temporary[row, column]) if self.bounded or self.largest_cost else 0.0
                groups.setdefault((cost, bytes_, float(apart[row])), []).append(p)
        ys = []
        for (cost, _, held), ps in groups.items():
            y = self.rows.variable(cost / self.unit)
            self.remember(y, held)
            self.rows.constraint([(y, 1.0), *((p, -1.0) for p in ps)], -math.inf, 0.0)
            ys.append(y)
        self.rows.constraint([(w, -1.0), *((y, 1.0) for y in ys)], 0.0, 0.0)
        self.temporary([(y, bytes_) for y, (_, bytes_, _) in zip(ys, groups, strict=True)])


def build(
    problem: Problem,
    reference: float,
    *,
    largest_cost: float = 0.0,
    excluded: Sequence[Sequence[int]] = (),
    deadline: Deadline = NEVER,
) -> Model:
    """State ``problem`` as a mixed-integer program, constraints (1)-(7) of the module.

    Args:
        problem: the problem; the memory bound is left out when it is ``inf``.
        reference: seconds of about the size of the optimum, for scaling.
        largest_cost: what each byte of the largest temporary adds to the objective.
        excluded: choices that are not allowed.
        deadline: see Raises.

    Raises:
        Expired: the deadline passed before it was stated.
    """
    unit = reference / _SCALE if reference > 0 and math.isfinite(reference) else 1.0
    builder = _Builder(problem, unit, largest_cost)
    builder.nodes()
    for tensor in problem.tensors:
        deadline.check()
        builder.tensor(tensor)
    if builder.bounded:
        builder.rows.constraint(builder.memory, -math.inf, problem.memory_bound * builder.byte)
    for choice in excluded:
        xs = [(x[s], 1.0) for x, s in zip(builder.x, choice, strict=True)]
        builder.rows.constraint(xs, -math.inf, len(xs) - 1.0)
    return Model(builder.rows, tuple(builder.x), builder.unit)


def time_limit_of(deadline: Deadline) -> datetime.timedelta:
    """What is left until a deadline, for a solver."""
    return datetime.timedelta(seconds=min(max(deadline.left, 0.01), _LONGEST))


def run(model: Model, *, deadline: Deadline) -> MipResult:
    """Solve a built program.

    Args:
        model: from :func:`build`.
        deadline: when the best choice so far is returned.

    Returns:
        the best choice found; ``finished`` with no choice means that none exists (the bound is then ``inf``).

    Raises:
        Expired: the deadline has passed already.
    """
    proto = mathopt.Model.from_model_proto(model.rows.proto())
    deadline.check()
    params = mathopt.SolveParameters(
        time_limit=time_limit_of(deadline),
        relative_gap_tolerance=0.0,
        absolute_gap_tolerance=0.0,
        presolve=mathopt.Emphasis.OFF,  # what is handed over is presolved; the solver's own took as long as the search
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
