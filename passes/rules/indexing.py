"""Rules of operators that read or write at indices. See `passes.rules.shapes` for what builders return.

Indexed dims are whole, since an index may point anywhere. The dims of the indices can be sharded if the operator reads, but
not if it writes.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.rules.notation import Dim, OpRule
from passes.rules.shapes import dims_of, named, op_rule, operands_of, shape_of, shapes_of

__all__ = ["index", "index_put", "index_select", "select_scatter"]


def _indices(node: fx.Node) -> tuple[list[int], list[fx.Node]]:
    """The dims that have an index, and these indices."""
    given = named(node)["indices"]
    return [d for d, i in enumerate(given) if i is not None], [i for i in given if i is not None]


def _masks(indices: list[fx.Node]) -> bool:
    return any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices)


def _aligned(dims: list[Dim], whole: tuple[int, ...], shape: tuple[int, ...]) -> list[Dim]:
    """The dims of a tensor of this shape, which broadcasts to a tensor of the shape ``whole`` with the given dims."""
    shift = len(dims) - len(shape)
    return [dims[shift + i] if n == whole[shift + i] else () for i, n in enumerate(shape)]


def _spread(where: list[int], indices: list[fx.Node]) -> tuple[int, int]:
    """The position of the first of the indices' dims in the result of indexing, and their number."""
    together = where[-1] - where[0] == len(where) - 1
    return (where[0] if together else 0), max(len(shape_of(i)) for i in indices)


def index(node: fx.Node) -> OpRule | None:
    """index.Tensor: indexed dims are whole; the dims of the indices and the other dims can be sharded."""
    where, indices = _indices(node)
    if not indices or _masks(indices):
        return None
    operands, (result,) = shapes_of(node)
    first, count = _spread(where, indices)
    dims, sizes = dims_of(result)
    rest = iter(dims[:first] + dims[first + count :])
    source = [() if d in where else next(rest) for d in range(len(operands[0]))]
    own, whole = dims[first : first + count], result[first : first + count]
    return op_rule([source, *(_aligned(own, whole, s) for s in operands[1:])], [dims], sizes, linear=[(0,)])


def index_put(node: fx.Node) -> OpRule | None:
    """index_put: dims that are not indexed can be sharded; all dims can, if one mask selects elements for one value."""
    where, indices = _indices(node)
    operands, (result,) = shapes_of(node)
    dims, sizes = dims_of(result)
    value = operands[-1]
    if len(operands) != len(indices) + 2 or not indices:
        return None
    if _masks(indices):
        after = where[0] + len(operands[1])
        extra = max(0, len(value) - (len(result) - after))
        if len(indices) > 1 or any(n != 1 for n in value[:extra]):
            return None
        one = [*([()] * extra), *_aligned(dims, result, value[extra:])]
        return op_rule([dims, dims[where[0] : after], one], [dims], sizes)
    first, count = _spread(where, indices)
    dims = [() if d in where else dim for d, dim in enumerate(dims)]
    left = [d for d in range(len(result)) if d not in where]
    spread = [*(dims[d] for d in left[:first]), *([()] * count), *(dims[d] for d in left[first:])]
    sized = (*(result[d] for d in left[:first]), *([1] * count), *(result[d] for d in left[first:]))
    if len(value) > len(spread):
        return None
    return op_rule([dims, *([()] * len(s) for s in operands[1:-1]), _aligned(spread, sized, value)], [dims], sizes)


def index_select(node: fx.Node) -> OpRule | None:
    """index_select: the selected dim is whole in the operand, and has the index's factor in the result."""
    (source, chosen), (result,) = shapes_of(node)
    if not source:
        return None
    where = named(node)["dim"] % len(source)
    dims, sizes = dims_of(result)
    operand = [() if i == where else d for i, d in enumerate(dims)]
    return op_rule([operand, [dims[where]] if chosen else []], [dims], sizes, linear=[(0,)])


def select_scatter(node: fx.Node) -> OpRule:
    """select_scatter: the dim that the written part lacks is whole."""
    shape = shape_of(operands_of(node)[0])
    where = named(node)["dim"] % len(shape)
    dims, sizes = dims_of(shape)
    dims[where] = ()
    part = [d for i, d in enumerate(dims) if i != where]
    return op_rule([dims, part], [dims], sizes, linear=[(0, 1)])
