"""The sharding rules: how each operator's dims map to the factors of its iteration space."""

from passes.rules.notation import OpRule, RuleError
from passes.rules.table import RULES, Rule, rule_of

__all__ = ["RULES", "OpRule", "Rule", "RuleError", "rule_of"]
