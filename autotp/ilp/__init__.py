"""Choose one strategy per operator: the abstract integer program and its solver (no torch)."""

from autotp.ilp.estimate import Estimate, estimate, glance
from autotp.ilp.problem import Evaluation, Node, Problem, Tensor, Use, evaluate
from autotp.ilp.solve import NO_LAYOUT, Infeasible, Pruned, Solution, cheapest, least_memory, settle, solution_at, solve

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
