"""What the backward pass reads of an operator: by torch's formulas of gradients, or by those of a lowering in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from passes.graph import differentiable
from passes.rules.rule import Rule
from passes.rules.shapes import argument, operands_of
from passes.rules.table import kept_besides, rule_of

__all__ = ["NOTHING", "Kept", "in_turn", "kept", "kept_lowered", "working"]


class Kept(NamedTuple):
    """What is kept of an operator.

    Attributes:
        operands: positions of the operands that are read.
        results: whether the results are.
        besides: tensors of their own: (an operand, or -1 for the first result; bytes for each of its elements).
    """

    operands: tuple[int, ...] = ()
    results: bool = False
    besides: tuple[tuple[int, float], ...] = ()


NOTHING = Kept()


def kept(node: fx.Node, trained: Sequence[bool]) -> Kept:
    """What the gradients of an operator's operands are made of.

    Args:
        node: captured.
        trained: whether each of its operands has a gradient.
    """
    rule = rule_of(node)
    if rule is None or not any(trained):
        return NOTHING
    operands = operands_of(node)
    read = [i for i, n in enumerate(operands) if differentiable(n.meta["val"]) and i not in rule.additive]
    besides = [] if rule.besides is None else list(rule.besides(node))
    if rule.saves == "all" and _in_the_open(node, rule):
        return Kept(besides=tuple(besides))
    if rule.saves == "others":
        read = [i for i in read if any(trained[:i]) or any(trained[i + 1 :])]
    elif rule.saves not in ("operands", "all"):
        read = []
    if rule.saves == "copy":
        besides.append((0, float(operands[0].meta["val"].element_size())))
    if rule.saves == "mask":
        besides.append((-1, 1.0))
    return Kept(tuple(read), rule.saves in ("result", "all"), tuple(besides))


def kept_lowered(node: fx.Node) -> Kept:
    """What `kept` gives where inner factors are sharded, so that a lowering takes the operator's place."""
    rule, first = rule_of(node), operands_of(node)[0].meta["val"]
    if rule is None or rule.extra is None:
        return NOTHING
    besides = kept_besides(node) * first.element_size()
    if rule.rereads and torch.promote_types(first.dtype, torch.float32) == first.dtype:
        return Kept((0,), besides=((0, besides),))
    return Kept(besides=((0, besides + first.element_size()),))


def in_turn(node: fx.Node) -> tuple[int, ...]:
    """The positions of an operator's operands, in the order in which their gradients are made; none: all at once.

    Where each has a formula of its own, autograd goes by the names of its operators' arguments: ``mat2`` and ``other`` come
    before ``self``; but ``mat1`` and ``mat2`` before the ``self`` that their product is added to.
    """
    rule, positions = rule_of(node), range(len(operands_of(node)))
    if rule is None or rule.saves != "others" or rule.kind == "convolution":
        return ()
    added = tuple(i for i in positions if i in rule.additive)
    return (*(i for i in positions if i not in added), *added) if added else tuple(reversed(positions))


def working(node: fx.Node) -> tuple[tuple[int, float], ...]:
    """What an operator's backward pass holds for a moment, as `Kept.besides`: gradients between those of its formulas."""
    rule = rule_of(node)
    if rule is None:
        return ()
    if rule.saves == "copy":
        return ((0, float(operands_of(node)[0].meta["val"].element_size())),)
    return ()


def _in_the_open(node: fx.Node, rule: Rule) -> bool:
    """Whether an attention is computed by torch's formula, which keeps what `besides` says instead of what it is given."""
    return rule.kind == "attention" and bool(argument(node, 4, "dropout_p", 0.0))
