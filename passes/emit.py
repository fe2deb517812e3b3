"""Adds nodes to a graph of operators, with their fake values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["emit"]


def emit(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A node that calls an operator, where the graph's insertion point is; its ``val`` is found from its operands'.

    Raises:
        ValueError: no operand has a fake tensor.
    """
    node = graph.call_function(target, args)
    value = fx.node.map_aggregate(args, lambda a: a.meta["val"] if isinstance(a, fx.Node) else a)
    with _mode_of(value):
        node.meta["val"] = target(*value)  # type: ignore[misc]
    return node


def _mode_of(values: Any) -> Any:
    for value in torch.utils._pytree.tree_leaves(values):
        if isinstance(value, Tensor) and hasattr(value, "fake_mode"):
            return value.fake_mode
    raise ValueError("no operand has a fake tensor")
