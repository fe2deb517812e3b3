"""The `Rule` of an operator: how it can be sharded, and the properties that costs and passes need."""

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
    """The positions of the operands of a matrix product among its arguments.

    Attributes:
        data, weight: positions of the two operands that are multiplied.
        bias: position of the operand that is added, or None.
        transposed: whether the weight is [n, k].
    """

    data: int = 0
    weight: int = 1
    bias: int | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of an operator, and the properties that the cost model and the passes use. Whether it draws random numbers
    is a tag of torch's own; see `passes.rules.table.draws`.

    Attributes:
        form: an expression of the notation, or a function that makes one (or an ``OpRule``) from a node.
        kind: which of ``costmodel.KINDS`` determines its speed.
        inner: whole factors that ``lower`` can shard.
        additive, linear: see ``OpRule``.
        lower: emits the operator's sharded form if an inner, a reduced or a ``contiguous`` factor is sharded.
        shape: position of an argument that is the result's shape, and is replaced by its local shape.
        divide: argument position -> factor by whose number of shards it is divided (``num_groups``, equal split sizes).
        flop: FLOP of the whole forward operator.
        backward: the work of the backward operator, as a multiple of that of the forward operator.
        product: the positions of its operands, if it is a matrix product.
        statistics: how many numbers per row a lowering reduces over the axes of its inner factors, forward and backward.
        contiguous: factors whose lowering counts positions, so that each device must hold a contiguous range of them.
        saves: the saved tensors: "operands"; "others" (each operand, if the gradients of others need it); "result"; "all"
            (operands and results); "copy" (as large as the first operand); "mask" (a byte per element of the result); "".
        extra: how many tensors of the first operand's size a lowering over inner axes saves, minus one; None: there is no
            such lowering.
        rereads: whether one of these is the operand itself, if the lowering computes in the operand's dtype.
        besides: further saved tensors: (operand, or -1 for the first result; bytes per element of it).
        hands_on: whether the gradient of an operand that has the shape of the result is the gradient of the result.
        view: whether it is a view, which moves no data.
        copies: whether it moves data nevertheless if the strides require it.
        detaches: whether it returns its operand's values, and passes no gradient back.
        channels_last: the memory format in which it reads its first operand fastest.
        misreads: whether the node's kernel may mistake the memory format of an operand, or of a gradient, that dims of
            size 1 make ambiguous: these are then converted to an unambiguous format.
        bounded: position of an operand of indices -> the factor that they index (a vocabulary). The operator itself checks
            them unless that factor is sharded.
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
