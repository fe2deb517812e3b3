"""What is known of one operator: its `Rule`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.rules.notation import OpRule

__all__ = ["Product", "Rule"]


@dataclass(frozen=True, slots=True)
class Product:
    """Where a product of matrices has its operands among its arguments.

    Attributes:
        data, weight: positions of the two factors.
        bias: position of what is added, or None.
        transposed: whether the weight is [n, k].
    """

    data: int = 0
    weight: int = 1
    bias: int | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One operator's rule and what prices and rewrites need to know about it. Whether it draws random numbers is a tag of
    torch's own; see `passes.rules.table.draws`.

    Attributes:
        form: an expression of the notation, or a builder that makes one (or an ``OpRule``) from a node.
        kind: which of ``costmodel.KINDS`` its speed is.
        inner: whole factors that ``lower`` can shard.
        additive, linear: see ``OpRule``.
        lower: builds the operator's sharded form when a factor in ``inner`` or a reduced factor is sharded.
        shape: position of an argument that is the result's shape, to be made local.
        divide: argument position -> factor whose shards divide it (``num_groups``, equal split sizes).
        flop: FLOP of the whole forward operator.
        backward: the work of the backward operator, in units of the forward one's.
        product: its operands, where it multiplies matrices.
        statistics: how many numbers per row a lowering reduces over the axes of its inner factors, forward and backward.
        contiguous: factors whose lowering counts positions, so that a device must hold neighbouring ones.
        saves: what the backward pass keeps: "operands"; "others", each operand for the others' gradients; "result"; "all"
            of these; "copy", something as large as the first operand; "mask", a byte for each element of the result; "".
        extra: how many tensors of the first operand's size a lowering over inner axes keeps, but one; None: no lowering is
            over inner axes.
        rereads: whether one of these is the operand itself, where the lowering computes in its dtype.
        besides: what the backward pass keeps moreover: (operand, or -1 for the first result; bytes for each element).
        hands_on: the gradients of its operands, where they have its result's shape, are its result's.
        view: moves no data.
        copies: whether it moves data nevertheless where strides leave it no other way.
        detaches: gives its operand's values, and no gradient back.
        channels_last: a memory format in which it reads its first operand fastest.
        misreads: whether the node's kernel may take an operand, or its gradient, for one of another memory format where
            dims of size 1 leave that open: it is then given those in one that is beyond doubt.
        bounded: operand of indices -> the factor that they are indices into (a vocabulary), checked by the operator itself
            unless that factor is sharded.
    """

    form: str | Callable[[fx.Node], OpRule | str | None]
    kind: str = "pointwise"
    inner: tuple[str, ...] = ()
    additive: tuple[int, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    lower: Callable[..., Any] | None = None
    shape: int | None = None
    divide: Mapping[int, str] | None = None
    flop: Callable[[fx.Node], float] | None = None
    backward: float = 2.0
    product: Product | None = None
    statistics: tuple[int, int] = (2, 2)
    contiguous: tuple[str, ...] = ()
    saves: str = "operands"
    extra: int | None = None
    rereads: bool = False
    besides: Callable[[fx.Node], Sequence[tuple[int, float]]] | None = None
    hands_on: bool = False
    view: bool = False
    copies: bool = False
    detaches: bool = False
    channels_last: torch.memory_format | None = None
    misreads: Callable[[fx.Node], bool] | None = None
    bounded: Mapping[int, str] | None = None
