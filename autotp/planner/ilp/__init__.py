"""Choose one strategy per operator: the abstract integer program and its solver (no torch).

Input: a `problem`, whose nodes have choices and whose tensors link them, with seconds; output: a `Solution` with its proof,
or bounds. `solve` calls `presolve`, then `eliminate` where that is cheap, else `search`, which bounds by `dual`, improves
by `local`, and settles the rest by `labels` or `mip`, until the `deadline`. `hasty` gives choices without proof, and
`minimax` solves a small model under several limits at once. `copies` of the process bound programs side by side. Where
memory is short, seconds for every byte are part of what strategies cost (*priced*): how many, is found outside
(`autotp.planner.squeeze`).

Every method is here because it wins by a factor of 2 or more on an instance of a real model. The table holds CPU seconds on
one thread of a shared machine; the instances are small models on four devices, the programs as the planner states them.
"All nodes eliminated" is exact elimination of everything that presolve leaves; CP-SAT and SCIP had found no proof when they
were stopped:

| model, mesh | variables | settled by | here | all nodes eliminated | HiGHS | CP-SAT | SCIP |
|---|---|---|---|---|---|---|---|
| Llama, 2x2 | 44,643 | duality | 0.10 | 1.06 | 0.73 | over 3.7 | over 5.3 |
| Llama, 2x2, priced | 44,648 | labels | 0.43 | 1.06 | 2.58 | over 6.0 | over 4.8 |
| U-Net, 2x2 | 38,228 | elimination | 0.04 | 0.04 | 0.99 | - | - |

Elimination of some nodes first makes the programs of ten plans of a GPT-2 3.4 times faster in sum; elimination of all the
rest, where that is cheap, makes programs up to 4.3 times faster (Llama on 8 devices: 0.05 s instead of 0.21). Labels are
tried at once; where their tables grow too large, limits rise from the bound to the best choice known, so that HiGHS gets
what is left. Tables between the same two nodes are joined after an elimination: bounds are closer, and the search of what
is left takes 5.8 s instead of 10.4 for the programs of Llama-3-70B on 64 devices. Dominance among strategies, which was
here, won nothing.
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
