"""Lets operators write their results over operands that have no later readers: gradients are summed in place, and an
all-reduce writes its result over its operand.

Autograd does so too. It saves the memory of a result, and the time to access memory that is not in the caches. Results that
fill only a part of their memory are copied out of it instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from passes.overlap.aliasing import source_of
from passes.overlap.launch import launch, wait
from passes.torch_internals import OpOverload

__all__ = ["inplace"]

_aten = torch.ops.aten
_FORMS: dict[Any, Any] = {
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.mul.Scalar: _aten.mul_.Scalar,
    _aten.div.Tensor: _aten.div_.Tensor,
    _aten.div.Scalar: _aten.div_.Scalar,
    _aten.neg.default: _aten.neg_.default,
}
#: Losses whose kernels return a scalar in memory that is as large as an operand.
_LOOSE = (_aten.mse_loss.default, _aten.smooth_l1_loss.default, _aten.soft_margin_loss.default)


def inplace(graph: fx.Graph) -> None:
    """Changes a scheduled graph, whose order is final, to use in-place operators."""
    for node in [node for node in graph.nodes if node.target in _LOOSE and node.meta["val"].dim() == 0]:
        with graph.inserting_after(node):
            copy = graph.call_function(_aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    nodes = list(graph.nodes)
    number = {node: i for i, node in enumerate(nodes)}
    roots: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    readers: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    for node in nodes:
        source = source_of(node)
        roots[node] = node if source is None else roots[source]
        ends = number[node]
        if node.target is launch:  # its operand is read until the wait
            ends = max((number[user] for user in node.users if user.target is wait), default=len(nodes))
        for source in node.all_input_nodes:
            last[roots[source]] = max(last.get(roots[source], 0), ends)
            readers.setdefault(roots[source], []).append((node, ends))
    into: dict[fx.Node, fx.Node] = {}

    def found(node: fx.Node) -> fx.Node:
        root = roots[node]
        while root in into:
            root = into[root]
        return root

    for node in nodes:
        if node.target is launch and node.args[1] == "all_reduce":
            operand: Any = node.args[2]
            root = roots[operand]
            # It is overwritten from the launch on: all its other readers must have run by then.
            others = [end for reader, end in readers[root] if reader is not node]
            alone = root not in into.values() and all(end < number[node] for end in others)
            if alone and _fresh(root) and _whole(operand, root):
                node.args = (node.args[0], "all_reduce_", *node.args[2:])
        form = _FORMS.get(node.target)
        if form is None or not isinstance(node.args[0], fx.Node):
            continue
        operand = node.args[0]
        root = found(operand)
        if _fresh(root) and last[root] == number[node] and _fits_exactly(node, operand, root, found):
            node.target = form
            into[node] = root  # the result lies in the operand's memory
            last[root] = max(last[root], last.get(node, number[node]))


def _fresh(node: fx.Node) -> bool:
    """Whether a node returns a new tensor, to which nothing outside the graph refers."""
    if node.target is operator.getitem:
        return node.args[0].op == "call_module"  # type: ignore[union-attr]
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def _whole(operand: fx.Node, root: fx.Node) -> bool:
    """Whether a tensor is contiguous and has all elements of the tensor in whose memory it lies."""
    mine, whole = operand.meta.get("val"), root.meta.get("val")
    return isinstance(mine, Tensor) and isinstance(whole, Tensor) and mine.numel() == whole.numel() and mine.is_contiguous()


def _fits_exactly(node: fx.Node, operand: fx.Node, root: fx.Node, found: Callable[[fx.Node], fx.Node]) -> bool:
    """Whether the result fits into the operand's memory exactly, and no other operand lies there."""
    mine, result, whole = operand.meta.get("val"), node.meta.get("val"), root.meta.get("val")
    if not (isinstance(mine, Tensor) and isinstance(result, Tensor) and isinstance(whole, Tensor)):
        return False
    others = [n for n in node.all_input_nodes if n is not operand]
    return (
        mine.shape == result.shape
        and mine.dtype == result.dtype
        and mine.device == result.device
        and mine.numel() == whole.numel()
        and mine.stride() == result.stride()
        and not any(found(other) is root for other in others)
    )
