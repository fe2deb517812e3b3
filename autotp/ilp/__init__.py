"""Choose one strategy per operator: the abstract integer program and its solver (no torch)."""

from autotp.ilp.problem import Evaluation, Node, Problem, Tensor, Use, evaluate
from autotp.ilp.solve import Infeasible, Pruned, Solution, least_memory, solve

__all__ = [
    "Evaluation",
    "Infeasible",
    "Node",
    "Problem",
    "Pruned",
    "Solution",
    "Tensor",
    "Use",
    "evaluate",
    "least_memory",
    "solve",
]
