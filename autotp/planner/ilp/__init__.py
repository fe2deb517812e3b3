"""Choose one strategy per operator: the abstract integer program and its solver (no torch).

In comes a `Problem`: nodes with choices, and tensors that link them, with seconds and bytes. Out goes a `Solution` with its
proof, or bounds (`Estimate`). `solve` calls `presolve`, `eliminate` where nothing binds the memory, and `search` for the
rest, which bounds by `dual`, and settles what is left by `labels` or `mip`; `estimate` gives bounds alone, `local` good
choices, `prices` the price of memory.

Every method is here because it beats OR-Tools by a factor of 2 or more on an instance of a real model. CPU seconds on one
thread; CP-SAT and SCIP got the same programs as HiGHS, through MathOpt. Without a bound on memory (the program as it is,
20,000 to 45,000 variables; "duality" is `dual` on the core that elimination of nodes leaves):

| model, mesh | settled by | here | elimination of all nodes | HiGHS |
|---|---|---|---|---|
| Llama, 2x2 | duality | 0.08 | 1.1 | 1.5 |
| Llama, 2x2, bytes priced | duality and labels | 0.47 | 0.68 | 3.4 |
| U-Net, 2x2 | elimination | 0.03 | 0.03 | 1.5 |
| U-Net, 2x2, bytes priced | elimination | 0.03 | 0.03 | over 7 (20 s of wall-clock time) |
| BERT, 2x2 | duality | 0.03 | 1.0 | 1.0 |
| Llama of 32 layers, 4x8 | duality | 0.11 | 0.51 | 1.3 |

With 90 % of the memory that the plan without a bound takes (for the last model 80 GB), after duality and pruning at the
best cost known; "here" includes them (0.2 to 0.5 s), the solvers' columns do not:

| model, mesh | variables left | settled by | here | HiGHS | CP-SAT | SCIP |
|---|---|---|---|---|---|---|
| U-Net, 2x2 | 24,548 | labels | 2.3 | 8.8 | over 12, not proven | - |
| U-Net, 2x2, optimum known | 2,672 | labels | 2.0 | 1.4 | over 9.9, not proven | 4.4 |
| ResNet, 2x2 | 2,682 | labels | 0.9 | 3.2 | - | - |
| Llama, 2x2 | 22,636 | labels | 2.1 | 4.3 | - | - |
| GPT-2, 2x2, optimum known | 6,383 | labels | 1.5 | 0.3 | 2.3 | 0.4 |
| Llama of 32 layers, 4x8 | 1,228 | labels | 0.9 | 0.3 | 0.2 | 1.4 |

HiGHS's own presolve, off here, made it 1.1 to 2 times slower on most of these. A branching on the largest temporary, which
was here, won nothing where labels suffice; HiGHS branches on it where they do not.
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
