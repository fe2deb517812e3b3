"""Operators of the library ``autotp`` that stand, in a traced graph, for what a sharded graph calls on its world.

They infer shapes, for tracing, and compute nothing: before a graph runs, `passes.overlap.launch` replaces them by calls of
a `passes.world.world.World`. They do not distinguish the devices of a mesh, so devices whose parts have equal shapes have
the same graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from passes.layouts import layout
from passes.layouts.layout import take_block

__all__ = ["COLLECTIVE_OF", "axes_of"]

_LIBRARY = torch.library.Library("autotp", "DEF")


def _define(schema: str, shape: Any) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, shape, "Meta")
    # Autograd reaches them only inside autograd functions, or where there is no gradient to pass on.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return getattr(torch.ops.autotp, name).default


def _as(x: Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "device": x.device}


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _resized(x: Tensor, dim: int, length: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


def _own(x: Tensor, dim: int, blocks: int, axis: int, ways: int, traced: int) -> Tensor:
    return torch.empty_like(take_block(x, dim, blocks, ways, traced), memory_format=torch.contiguous_format)


all_reduce = _define("all_reduce(Tensor x, int[] axes, str op) -> Tensor", _like)
all_gather = _define(
    "all_gather(Tensor x, int axis, int ways) -> Tensor", lambda x, axis, ways: x.new_empty((ways, *x.shape))
)
reduce_scatter = _define("reduce_scatter(Tensor x, int axis) -> Tensor", lambda x, axis: x.new_empty(x.shape[1:]))
all_to_all = _define("all_to_all(Tensor x, int axis) -> Tensor", _like)
#: This device's block of a dim, as a copy; ``traced`` is the coordinate along the axis for which shapes were traced.
own = _define("own(Tensor x, int dim, int blocks, int axis, int ways, int traced) -> Tensor", _own)
#: The tensor on devices whose coordinates on the axes are all 0, zeros on others.
mask = _define("mask(Tensor x, int[] axes) -> Tensor", _like)
pad = _define("pad(Tensor x, int dim, int length) -> Tensor", _resized)
crop = _define("crop(Tensor x, int dim, int length) -> Tensor", _resized)
#: The tensor in a memory format; the tensor itself if it already is in that format.
laid_out = _define(
    "laid_out(Tensor x, MemoryFormat order) -> Tensor", lambda x, order: torch.empty_like(x, memory_format=order)
)
#: The tensor in an unambiguous memory format; the tensor itself if it already is in it.
in_one_format = _define(
    "in_one_format(Tensor x) -> Tensor", lambda x: torch.empty_strided(x.shape, layout.in_one_format(x).stride(), **_as(x))
)
#: Returns the tensor if ``outside`` is 0; raises an IndexError otherwise.
within = _define("within(Tensor ids, Tensor outside, str message) -> Tensor", lambda ids, *_: torch.empty_like(ids))
#: The tensor itself, with one of ``panels`` panels replaced, which has ``cuts`` equal parts along a dim. Nothing else may
#: read the operand.
put = _define("put(Tensor x, Tensor panel, int dim, int cuts, int panels, int number) -> Tensor", _like)
#: Where this device's part of a dim begins, as a tensor without dims.
offset = _define(
    "offset(int size, int[] axes, Tensor like) -> Tensor",
    lambda size, axes, like: torch.empty((), dtype=torch.int64, device=like.device),
)
#: Random numbers from a tensor's method, such as ``bernoulli_``; equal on devices with equal coordinates on the axes.
draw = _define(
    "draw(Tensor seed, int[] salt, int[] axes, Tensor like, str method, float[] by) -> Tensor",
    lambda seed, salt, axes, like, method, by: _like(like),
)

#: Operators that stand for collectives -> the names of the collectives.
COLLECTIVE_OF: Mapping[Any, str] = {
    all_reduce: "all_reduce",
    all_gather: "all_gather",
    reduce_scatter: "reduce_scatter",
    all_to_all: "all_to_all",
}


def axes_of(target: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """The mesh axes of a collective's group."""
    return tuple(args[1]) if target is all_reduce else (args[1],)
