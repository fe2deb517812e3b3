"""Replaces sums of matrix products by one product of joined operands: ``P1 Q1 + P2 Q2 = [P1 P2] [Q1; Q2]``.

Such sums come from chunks: the gradient of a weight is the sum of the gradients of all chunks. Each summand is as large as
the weight, is written and then read for the addition, and is a product over few rows; the joined product is over the rows
of the whole batch. Unlike the gradient of an activation, that of a weight has no consumers that wait for it, so computing
it late costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.graph import emit

__all__ = ["join_products"]

_aten = torch.ops.aten
#: Elements read or written per element of a summand: the product writes it, the sum reads it and writes the result.
_TOUCHED = 3
#: Elements read or written per element of an operand that is joined.
_JOINED = 2


@dataclass(frozen=True, slots=True)
class _Product:
    """A summand: a matrix product, or the transpose of one."""

    node: fx.Node
    turned: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        left, right = (n.meta["val"].shape for n in self.node.args)  # type: ignore[union-attr]
        return int(left[0]), int(left[1]), int(right[1])


def join_products(graph: fx.Graph) -> None:
    """Joins sums of products, in place, where this reads and writes less memory than the additions do."""
    for node in reversed(list(graph.nodes)):
        if not _is_sum(node) or any(_is_sum(user) and len(node.users) == 1 for user in node.users):
            continue
        products = _summands(node, first=True)
        if products is not None and len(products) > 1 and _worth(products):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_joined(graph, products))
    graph.eliminate_dead_code()


def _is_sum(node: fx.Node) -> bool:
    return node.target is _aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args)


def _summands(node: fx.Node, *, first: bool = False) -> list[_Product] | None:
    """The products that a tree of sums adds up; None if it has other summands, or if an inner node has other users."""
    if not first and len(node.users) != 1:
        return None
    if _is_sum(node):
        found = [_summands(operand) for operand in node.args]  # type: ignore[arg-type]
        return None if any(part is None for part in found) else [p for part in found for p in part]  # type: ignore[union-attr]
    turned, inner = False, node
    while inner.target is _aten.t.default:
        turned, inner = not turned, inner.args[0]  # type: ignore[assignment]
        if len(inner.users) != 1:
            return None
    return [_Product(inner, turned)] if inner.target is _aten.mm.default else None


def _worth(products: Sequence[_Product]) -> bool:
    rows, _, columns = products[0].sizes
    if any(p.sizes[::2] != (rows, columns) or p.turned != products[0].turned for p in products):
        return False
    joined = sum(p.sizes[1] for p in products) * (rows + columns)
    return _JOINED * joined < _TOUCHED * rows * columns * (len(products) - 1)


def _joined(graph: fx.Graph, products: Sequence[_Product]) -> fx.Node:
    left = _side_by_side(graph, [p.node.args[0] for p in products], 1)
    right = _side_by_side(graph, [p.node.args[1] for p in products], 0)
    made = emit(graph, _aten.mm.default, left, right)
    return emit(graph, _aten.t.default, made) if products[0].turned else made


def _side_by_side(graph: fx.Graph, operands: Sequence[Any], dim: int) -> fx.Node:
    """Concatenates operands along a dim; if all are transposed views, their bases are concatenated, then transposed."""
    if all(operand.target is _aten.t.default for operand in operands):
        under = emit(graph, _aten.cat.default, [operand.args[0] for operand in operands], 1 - dim)
        return emit(graph, _aten.t.default, under)
    return emit(graph, _aten.cat.default, list(operands), dim)
