"""Choose one strategy per operator: the abstract integer program and its solver (no torch).

Input: a `problem`, whose nodes have choices and whose tensors link them, with seconds and bytes; output: a `Solution` with
its proof, or bounds. `solve` calls `presolve`, then `eliminate` where nothing binds the memory, else `search`, which bounds
by `dual`, improves by `local`, and settles the rest by `labels` or `mip`, until the `deadline`. `estimate` gives only
bounds, `Hasty` choices, `prices` the price of memory, and `minimax` solves a small model under several limits at once.

Every method is here because it wins by a factor of 2 or more on an instance of a real model. The tables hold CPU seconds on
one thread of a shared machine; the instances are small models on four devices, the programs as the planner states them.

Without a bound on memory (*priced*: with seconds for every byte, as `estimate` asks). "All nodes eliminated" is exact
elimination of everything that presolve leaves; CP-SAT and SCIP had found no proof when they were stopped:

| model, mesh | variables | settled by | here | all nodes eliminated | HiGHS | CP-SAT | SCIP |
|---|---|---|---|---|---|---|---|
| Llama, 2x2 | 44,643 | duality | 0.10 | 1.06 | 0.73 | over 3.7 | over 5.3 |
| Llama, 2x2, priced | 44,648 | labels | 0.43 | 1.06 | 2.58 | over 6.0 | over 4.8 |
| U-Net, 2x2 | 38,228 | elimination | 0.04 | 0.04 | 0.99 | - | - |

Elimination of some nodes first makes the programs of ten plans of a GPT-2 3.4 times faster in sum; elimination of all the
rest, where that is cheap, makes programs up to 4.3 times faster (Llama on 8 devices: 0.05 s instead of 0.21).

With 90 or 95 % of the memory that the plan without a bound takes. "Presolved" is the program that presolve alone leaves,
"bounded" the one that duality leaves at the best cost known; "no labels" is the search with HiGHS in their place:

| model, mesh | presolved: variables | HiGHS | bounded: variables | HiGHS | CP-SAT | SCIP | no labels | here |
|---|---|---|---|---|---|---|---|---|
| U-Net, 4 | 38,246 | 18.7 | 27,557 | 13.4 | over 18 | over 19 | 9.8 | 1.9 |
| U-Net, 2x2 | 38,240 | over 5.2 | 25,621 | over 5.7 | over 5.1 | - | 6.5 | 3.2 |
| Llama, 2x2 | 44,659 | 13.1 | 38,451 | over 15 | over 15 | over 15 | 4.8 | 2.2 |
| BERT, 2x2 | 22,700 | 3.1 | 14,508 | 2.4 | over 7.9 | - | 3.2 | 0.4 |
| ResNet, 4 | 9,521 | 1.2 | 5,860 | 0.8 | over 15 | 1.3 | 1.3 | 1.0 |

Labels are tried at once, which settles BERT. For the U-Net on 4 devices their tables grow too large: without rising limits
HiGHS had to take over, and the search took 15.6 s. Dominance among strategies, which was here, won nothing on any of these.
A search that also branched on the largest temporary was up to 1.4 times faster (U-Net, 2x2), and took 53.6 s in sum where
this one takes 28.3 s, over all 36 programs of 60 plans that were not settled by bounds.
"""

from autotp.planner.ilp.deadline import NEVER, Deadline, Expired
from autotp.planner.ilp.estimate import Estimate, Hasty, estimate, glance
from autotp.planner.ilp.minimax import minimax
from autotp.planner.ilp.problem import Evaluation, Node, Problem, Tensor, Use, evaluate
from autotp.planner.ilp.search import CLOSEST
from autotp.planner.ilp.solve import (
    NO_LAYOUT,
    Infeasible,
    Pruned,
    Solution,
    cheapest,
    least,
    least_memory,
    promising,
    settle,
    solution_at,
    solve,
)

__all__ = [
    "CLOSEST",
    "NEVER",
    "NO_LAYOUT",
    "Deadline",
    "Estimate",
    "Evaluation",
    "Expired",
    "Hasty",
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
    "least",
    "least_memory",
    "minimax",
    "promising",
    "settle",
    "solution_at",
    "solve",
]
