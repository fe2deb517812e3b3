"""Removes views that change nothing, and takes views of views from the underlying tensor.

Tracing and sharding leave many of them: a reshape to the same shape, a transpose of a transpose. They cost no time on the
device, but each is an operator that Python calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from passes.overlap.primitives import in_one_format, laid_out

__all__ = ["tidy"]

_aten = torch.ops.aten
_RESHAPING = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})
_ARRANGING = frozenset({in_one_format, laid_out})
_MAY_CHANGE_NOTHING = _RESHAPING | _ARRANGING


def tidy(graph: fx.Graph) -> None:
    """Replaces redundant views by equivalent earlier nodes, in place.

    Outputs keep their identity: a view of another output, or of an input, that is an output is not replaced by that tensor.
    Changes of the memory format to that of the operand are replaced by the operand even then.

    Args:
        graph: its nodes are operators, each with a fake tensor in ``meta["val"]``.
    """
    for node in list(graph.nodes):
        if node.target in _RESHAPING:
            _look_through(node)
        same = _same(node)
        if same is not None and (node.target in _ARRANGING or not any(user.op == "output" for user in node.users)):
            node.replace_all_uses_with(same)
    for node in reversed(list(graph.nodes)):
        if not node.users and (node.target in _MAY_CHANGE_NOTHING or node.target is _aten.t.default):
            graph.erase_node(node)


def _look_through(node: fx.Node) -> None:
    """Lets a reshape of a reshape read the latter's operand, if that is contiguous and can thus be viewed in any shape."""
    operand: Any = node.args[0]
    if operand.target in _RESHAPING and operand.args[0].meta["val"].is_contiguous():
        node.replace_input_with(operand, operand.args[0])


def _same(node: fx.Node) -> fx.Node | None:
    """An earlier node with the same elements, shape and strides, in the same memory; None if none is known."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    operand = node.args[0]
    if node.target is _aten.t.default and operand.target is _aten.t.default:
        return operand.args[0]  # type: ignore[return-value]
    if node.target in _MAY_CHANGE_NOTHING:
        old, new = operand.meta["val"], node.meta["val"]
        if not isinstance(old, Tensor) or old.shape != new.shape or old.stride() != new.stride():
            return None
        # In dims of size 1, a kernel may choose other strides than its fake implementation.
        return operand if node.target in _RESHAPING or 1 not in old.shape else None
    return None
