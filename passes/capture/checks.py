"""Leaves out what the model and ``torch.export`` assert of values, and what nothing but these assertions reads."""

from __future__ import annotations

from torch import SymBool, SymFloat, SymInt, fx

from passes.capture.builder import operator_name

__all__ = ["drop_checks"]

_CHECKS = ("aten::_assert", "aten::sym_constrain", "aten::_functional_assert", "aten::_functional_sym")
_NUMBERS = (bool, int, float, SymBool, SymInt, SymFloat)


def drop_checks(module: fx.GraphModule) -> None:
    """Leaves them out in place, in all regions, and numbers taken from tensors (``.item()``) that are for them alone."""
    for graph in [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]:
        for node in reversed(graph.nodes):
            number = node.op == "call_function" and isinstance(node.meta.get("val"), _NUMBERS)
            if not node.users and (number or operator_name(node.target).startswith(_CHECKS)):
                graph.erase_node(node)
