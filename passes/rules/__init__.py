"""The sharding rules: how each operator's dims map to the factors of its iteration space.

Input: a node of a captured graph. Output: its `OpRule`, and for a whole graph an `Operator` per node, with its factors.
`table` has a `Rule` (`rule`) per operator, with its `lowering`; `notation` parses the rules. `shapes`, `views`, `indexing`,
`recurrent` and `operators` build rules that depend on arguments; `elementwise` has the rules of element-wise operators, for
every overload. `kept` says which tensors the backward pass reads of an operator, `kinds` which kind of kernel an operator
without a rule is, and `factors` analyses a whole graph.
"""

from passes.rules.notation import OpRule, RuleError
from passes.rules.rule import Rule
from passes.rules.table import RULES, rule_of

__all__ = ["RULES", "OpRule", "Rule", "RuleError", "rule_of"]
