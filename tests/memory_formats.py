"""Tensors of equal values in different memory formats, and an operator with such operands and gradients."""

from __future__ import annotations

import operator
import random

import torch
from torch import Tensor, fx

from passes.graph import annotate, differentiable, note_of

__all__ = ["FORMATS", "laid", "scatter_formats"]

#: ``open`` gives dims of size 1 arbitrary strides, as views may leave them; ``expanded`` has a dim of stride 0.
FORMATS = ("contiguous", "reversed", "channels last", "every second", "open", "open, channels last", "expanded")


def laid(tensor: Tensor, form: str, rng: random.Random) -> Tensor:
    """A tensor of the same values in another memory format; ``expanded`` needs values that are equal along dim 0."""
    rank = tensor.dim()
    if form == "reversed":
        return _in_order(tensor, list(reversed(range(rank))))
    if form in ("channels last", "open, channels last") and rank > 2:
        tensor = _in_order(tensor, [0, *range(2, rank), 1])
    elif form == "every second" and rank:
        wider = tensor.new_empty([2 * n + 1 for n in tensor.shape])
        return wider[tuple(slice(1, None, 2) for _ in range(rank))].copy_(tensor)
    elif form == "expanded" and rank and len(tensor):
        return tensor[:1].clone(memory_format=torch.contiguous_format).expand(tensor.shape)
    else:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    if form.startswith("open") and tensor.numel():
        strides = [
            rng.choice([1, 7, 1024, tensor.numel()]) if n == 1 else stride
            for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())
    return tensor


def _in_order(tensor: Tensor, order: list[int]) -> Tensor:
    back = [order.index(d) for d in range(len(order))]
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


class _Laid(torch.autograd.Function):
    """Returns a tensor in one format, and its gradient in another."""

    @staticmethod
    def forward(ctx, x, form, gradient, seed):
        ctx.gradient, ctx.seed = gradient, seed
        return laid(x, form, random.Random(seed))

    @staticmethod
    def backward(ctx, gradient):
        return laid(gradient, ctx.gradient, random.Random(ctx.seed + 1)), None, None, None


def scatter_formats(graph: fx.Graph, target: fx.Node, operands: dict[str, str], gradient: str, seed: int) -> None:
    """Gives an operator of a sharded graph operands in given formats, and gradients of its results in another.

    Args:
        graph: a sharded graph.
        target: the captured operator.
        operands: name of a placeholder -> format.
        gradient: format.
        seed: for arbitrary strides.
    """
    for number, node in enumerate(list(graph.nodes)):
        form = operands.get(node.name if node.op == "placeholder" else note_of(node).tensor)
        result = note_of(node).operator == target.name
        if form is None and not result:
            continue
        items = [user for user in node.users if result and user.target is operator.getitem]
        for place in items or [node]:
            with graph.inserting_after(place):
                back = gradient if result or gradient != "expanded" else "contiguous"
                copy = graph.call_function(_relaid, (place, form or "contiguous", back, seed + number))
            copy.meta = dict(place.meta)
            if note_of(place).moves:
                annotate(copy, have=None, layouts=())
            place.replace_all_uses_with(copy)
            copy.update_arg(0, place)


def _relaid(value, form, gradient, seed):
    if not isinstance(value, Tensor):
        return value
    if not differentiable(value):
        return laid(value, form, random.Random(seed))
    return _Laid.apply(value, form, gradient, seed)
