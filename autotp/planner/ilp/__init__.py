"""Choose one strategy per operator: the abstract integer program and its solver (no torch).

Input: a `problem`, whose nodes have strategies and are linked by tensors, both with costs in seconds; output: a `Solution`
with a proven bound, or bounds alone. `solve` calls `presolve`, then `eliminate` if that is cheap, and otherwise `search`,
which bounds by `dual`, improves by `local`, and settles the rest by `labels` or `mip`, until the `deadline`. `hasty` finds
assignments without a proof, and `minimax` solves small programs with several objectives and limits at once. `copies` of
the process compute bounds of several programs in parallel. If memory is short, the costs of strategies include a price per
byte, in seconds (*priced*), which is determined outside (`autotp.planner.squeeze`).

Every method is here because it is faster by a factor of 2 or more on an instance of a real model. The table lists CPU
seconds on one thread of a shared machine; the instances are small models on four devices, with the planner's programs. "All
nodes eliminated" is exact elimination of all nodes that presolve leaves; CP-SAT and SCIP had not proven an optimum when
they were stopped:

| model, mesh | variables | settled by | here | all nodes eliminated | HiGHS | CP-SAT | SCIP |
|---|---|---|---|---|---|---|---|
| Llama, 2x2 | 44,643 | duality | 0.10 | 1.06 | 0.73 | over 3.7 | over 5.3 |
| Llama, 2x2, priced | 44,648 | labels | 0.43 | 1.06 | 2.58 | over 6.0 | over 4.8 |
| U-Net, 2x2 | 38,228 | elimination | 0.04 | 0.04 | 0.99 | - | - |

Elimination of some nodes first makes the programs of ten plans of a GPT-2 3.4 times faster in total; elimination of all
remaining nodes, if that is cheap, makes programs up to 4.3 times faster (Llama on 8 devices: 0.05 s instead of 0.21).
Labels are tried first; if their tables grow too large, the search is repeated with limits that rise from the lower bound to
the best known cost, and HiGHS solves the rest. Tables between the same two nodes are joined after an elimination: bounds
are tighter, and the search of the remaining program takes 5.8 s instead of 10.4 for the programs of Llama-3-70B on 64
devices. Dominance among strategies, which was implemented here, gained nothing.
"""

from autotp.planner.ilp.copies import frozen, side_by_side
from autotp.planner.ilp.deadline import NEVER, Deadline, Expired
from autotp.planner.ilp.hasty import Hasty
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
    promising,
    solution_at,
    solve,
)

__all__ = [
    "CLOSEST",
    "NEVER",
    "NO_LAYOUT",
    "Deadline",
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
    "evaluate",
    "frozen",
    "least",
    "minimax",
    "promising",
    "side_by_side",
    "solution_at",
    "solve",
]
