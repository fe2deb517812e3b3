"""The sharding rules: how each operator's dims map to the factors of its iteration space.

In comes a node of a captured graph. Out goes its `OpRule`, and for a whole graph an `Operator` per node, with the factors
that it has. `notation` reads the rules' language; `shapes`, `views` and `operators` find forms that depend on arguments;
`table` has a `Rule` per operator with its `lowering`, `kinds` the kernels without one; `factors` analyses a whole graph.
"""

from passes.rules.notation import OpRule, RuleError
from passes.rules.rule import Rule
from passes.rules.table import RULES, rule_of

__all__ = ["RULES", "OpRule", "Rule", "RuleError", "rule_of"]
