"""Choose one strategy per operator: the abstract integer program and its solver (no torch).

In comes a `Problem`: nodes with choices, and tensors that link them, with seconds and bytes. Out goes a `Solution` with its
proof, or bounds (`Estimate`). `solve` calls `presolve`, `eliminate` where nothing binds the memory, and `search` for the
rest, which bounds by `dual`, cuts into `pieces`, and settles those by `labels` or `mip`; `estimate` gives bounds alone,
`local` good choices, `prices` the price of memory.
"""

from autotp.planner.ilp.estimate import Estimate, estimate, glance
from autotp.planner.ilp.problem import Evaluation, Node, Problem, Tensor, Use, evaluate
from autotp.planner.ilp.solve import (
    NO_LAYOUT,
    Infeasible,
    Pruned,
    Solution,
    cheapest,
    least_memory,
    settle,
    solution_at,
    solve,
)

__all__ = [
    "NO_LAYOUT",
    "Estimate",
    "Evaluation",
    "Infeasible",
    "Node",
    "Problem",
    "Pruned",
    "Solution",
    "Tensor",
    "Use",
    "cheapest",
    "estimate",
    "evaluate",
    "glance",
    "least_memory",
    "settle",
    "solution_at",
    "solve",
]
