"""Choose one strategy per operator: the abstract integer program and its solver (no torch)."""

from autotp.ilp.estimate import Estimate, estimate, glance
from autotp.ilp.problem import Evaluation, Node, Problem, Tensor, Use, evaluate
from autotp.ilp.solve import Infeasible, Pruned, Solution, least_memory, settle, solve

__all__ = [
    "Estimate",
    "Evaluation",
    "Infeasible",
    "Node",
    "Problem",
    "Pruned",
    "Solution",
    "Tensor",
    "Use",
    "estimate",
    "evaluate",
    "glance",
    "least_memory",
    "settle",
    "solve",
]
