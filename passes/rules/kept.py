"""The tensors that are saved for an operator's backward pass, by torch's gradient formulas or those of its lowering."""

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
    """The tensors that are saved for an operator's backward pass.

    Attributes:
        operands: positions of the operands that are saved.
        results: whether the results are saved.
        besides: other tensors: (position of an operand, or -1 for the first result; bytes per element of it).
    """

    operands: tuple[int, ...] = ()
    results: bool = False
    besides: tuple[tuple[int, float], ...] = ()


NOTHING = Kept()


def kept(node: fx.Node, trained: Sequence[bool]) -> Kept:
    """The tensors that the gradients of an operator's operands are computed from.

    Args:
        node: an operator of a captured graph.
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
    """`kept` for an operator whose inner factors are sharded, so that a lowering replaces it."""
    rule, first = rule_of(node), operands_of(node)[0].meta["val"]
    if rule is None or rule.extra is None:
        return NOTHING
    besides = kept_besides(node) * first.element_size()
    if rule.rereads and torch.promote_types(first.dtype, torch.float32) == first.dtype:
        return Kept((0,), besides=((0, besides),))
    return Kept(besides=((0, besides + first.element_size()),))


def in_turn(node: fx.Node) -> tuple[int, ...]:
    """The positions of an operator's operands in the order in which their gradients are computed; empty: all at once.

    If each operand has its own formula, autograd sorts them by the names of the arguments: ``mat2`` and ``other`` come
    before ``self``; but ``mat1`` and ``mat2`` before the ``self`` to which their product is added.
    """
    rule, positions = rule_of(node), range(len(operands_of(node)))
    if rule is None or rule.saves != "others" or rule.kind == "convolution":
        return ()
    added = tuple(i for i in positions if i in rule.additive)
    return (*(i for i in positions if i not in added), *added) if added else tuple(reversed(positions))


def working(node: fx.Node) -> tuple[tuple[int, float], ...]:
    """Temporary memory of an operator's backward pass, as `Kept.besides`: gradients between its formulas."""
    rule = rule_of(node)
    if rule is None:
        return ()
    if rule.saves == "copy":
        return ((0, float(operands_of(node)[0].meta["val"].element_size())),)
    return ()


def _in_the_open(node: fx.Node, rule: Rule) -> bool:
    """Whether an attention is computed by torch's formula (with dropout): it saves `besides` instead of its operands."""
    return rule.kind == "attention" and bool(argument(node, 4, "dropout_p", 0.0))
