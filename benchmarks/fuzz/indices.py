"""Arguments of operators that read or write at indices or under masks, for `benchmarks.fuzz.operators`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.fuzz.draws import Builder, Draw, Operand, a_dim, ids, mask, places, real, sizes

__all__ = ["INDICES"]


def embedding(draw: Draw) -> list[Any]:
    v, h = draw.pick([5, 6, 8, 12]), draw.size()
    shape = draw.pick([(draw.size(), 3), (draw.size(),), (draw.size(), draw.size())])
    return [real(v, h), ids(v, *shape), draw.pick([-1, 1]), False]


def index(draw: Draw) -> list[Any]:
    """Arguments of ``index``, with indices of adjacent or separate dims."""
    a, b, c, n = sizes(draw, 4)
    forms = [[ids(a, 4, 1), ids(5, 1, 6)], [ids(a, 4)], [ids(a, 4, 6)], [ids(a, n), ids(5, n)], [None, None, ids(c, n)]]
    forms += [[None, ids(5, n, 3)], [ids(a, n), None, ids(c, 3, 1)], [None, ids(5, n), ids(c, 3, n)], [ids(a, 1), None]]
    return [real(a, 5, c), draw.pick(forms)]


def index_put(draw: Draw) -> list[Any]:
    """Arguments of ``index_put``: unique indices, a mask, or repeated indices whose values are accumulated."""
    a, b, c = sizes(draw, 3)
    forms = [
        ((a, b, 5), [None, None, places(5, 2)], [(a, b, 2), (b, 1), ()]),
        ((a, b, 5), [None, None, places(5, 3)], [(a, 1, 3), (3,), (1,)]),
        ((5, b, c), [places(5, 2)], [(2, b, c), (c,), (2, 1, c)]),
        ((5, b, c), [places(5, 2), None, ids(c, 2)], [(2, b), (b,), (2, 1)]),
        ((a, 5, c), [ids(a, 3, 1), places(5, 1, 4, axis=1)], None),
        ((a, b, c), [mask(a, b, c)], [(), (1,)]),
        ((a, b, c), [mask(a, b)], [(c,), (), (1, c)]),
        ((a, b, c), [None, mask(b)], [(c,), ()]),
    ]
    shape, where, values = draw.pick(forms)
    if values is None:  # accumulate=True, so an index may occur twice
        return [real(*shape), where, real(*draw.pick([(3, 4, shape[2]), (shape[2],)])), True]
    return [real(*shape), where, real(*draw.pick(values))]


def along(give: Callable[[Draw, int, int], tuple[int, Operand, list[Any]]], *more: Any) -> Builder:
    """A builder for operators that select, fill or write whole slices at the indices of a dim, given by ``give``."""

    def build(draw: Draw) -> Any:
        shape, size = sizes(draw, draw.pick([3, 2, 1])), draw.pick([5, 8])
        dim = a_dim(draw, len(shape))
        shape[dim] = size
        n, chosen, options = give(draw, size, len(shape))
        part = list(shape)
        part[dim] = n
        given = [real(*part) if o is Operand else o for o in (*options, *more)]
        return [real(*shape), dim, chosen, *given]

    return build


def _any(draw: Draw, size: int, _: int) -> tuple[int, Operand, list[Any]]:
    n = draw.pick([1, 3, 4, 6])
    return n, draw.pick([ids(size, n), ids(size, n), ids(size)]), []


def _once(draw: Draw, size: int, _: int) -> tuple[int, Operand, list[Any]]:
    n = draw.pick([1, 3, 4])
    return n, places(size, n), []


def _added(draw: Draw, size: int, _: int) -> tuple[int, Operand, list[Any]]:
    n = draw.pick([1, 3, 4, 6])
    return n, ids(size, n), [Operand]


def index_add(draw: Draw) -> Any:
    return along(_added)(draw), draw.pick([{}, {"alpha": 2}])


def spread(*more: Any, source: bool = True, once: bool = False, kind: str = "real") -> Builder:
    """A builder for gathers and scatters; in the other dims, the index is as large as the operand or smaller."""

    def build(draw: Draw) -> list[Any]:
        shape, size = sizes(draw, draw.pick([3, 2, 2, 1])), draw.pick([5, 6])
        dim = a_dim(draw, len(shape))
        at = dim % len(shape)
        fewer = draw.pick([False, False, True])
        part = [max(1, n - 1) if fewer else n for n in shape]
        shape[at], part[at] = size, draw.pick([1, 3, 5])
        index = places(size, *part, axis=at) if once else ids(size, *part)
        return [Operand(tuple(shape), kind), dim, index, *([Operand(tuple(part), kind)] if source else []), *more]

    return build


def scatter_reduce(draw: Draw) -> Any:
    how = draw.pick(["sum", "mean", "amax", "amin", "prod"])
    built = spread(how, kind="unit" if how == "prod" else "real")(draw)
    return built, draw.pick([{}, {"include_self": False}])


def take_along_dim(draw: Draw) -> list[Any]:
    """Arguments with a dim; or without one for a vector, because torch then flattens its operand, which needs a view."""
    a, b, c = sizes(draw, 3)
    shape = (a, b, c)
    dim = a_dim(draw, 3)
    index = [draw.pick([1, n]) for n in shape]
    index[dim] = draw.pick([1, 3])
    return draw.pick([[real(*shape), ids(shape[dim], *index), dim]] * 3 + [[real(a), ids(a, draw.pick([3, 5]))]])


def slice_scatter(draw: Draw) -> list[Any]:
    a, b = sizes(draw, 2)
    start, end, step, n = draw.pick([(2, 8, 2, 3), (0, 3, 1, 3), (-3, None, 1, 3), (None, -2, 1, 6), (1, 100, 3, 3)])
    forms = [((a, 8, b), (a, n, b), 1), ((8, a), (n, a), 0), ((a, b, 8), (a, b, n), -1), ((8,), (n,), 0)]
    whole, part, dim = draw.pick(forms)
    return [real(*whole), real(*part), dim, start, end, step]


def select_scatter(draw: Draw) -> list[Any]:
    a, b = sizes(draw, 2)
    whole, part, dim = draw.pick([((a, 4, b), (a, b), 1), ((a, b, 4), (a, b), -1), ((4, a), (a,), 0), ((4,), (), 0)])
    return [real(*whole), real(*part), dim, draw.pick([0, 3, -2])]


def masked(*value: Any) -> Builder:
    def build(draw: Draw) -> list[Any]:
        a, b = sizes(draw, 2)
        return [real(a, b), mask(*draw.pick([(a, b), (b,), (a, 1)])), *value]

    return build


def where(first: bool, second: bool) -> Builder:
    """A builder for ``where``; ``first`` and ``second``: whether this value is a tensor rather than a number."""

    def build(draw: Draw) -> list[Any]:
        a, b = sizes(draw, 2)
        shapes = [(a, b), (b,), (1, b), ()]
        given = [real(*draw.pick(shapes)) if tensor else draw.pick([0.5, 0.25, 2.0]) for tensor in (first, second)]
        return [mask(*draw.pick([(a, b), (a, b), (b,), (a, 1)])), *given]

    return build


def repeat_interleave(draw: Draw) -> Any:
    shape = sizes(draw, draw.pick([3, 2, 1]))
    dim, copies = a_dim(draw, len(shape)), draw.pick([2, 3, 1])
    named = [real(*shape), copies, dim], draw.pick([{}, {"output_size": copies * shape[dim]}])
    return draw.pick([named, named, ([real(*shape), copies], {})])


def repeat_unlike(draw: Draw) -> Any:
    """Arguments with different counts: a permutation of 0, 1, …, so that their sum is known."""
    shape, size = sizes(draw, draw.pick([3, 2, 1])), draw.pick([2, 3, 4])
    dim = a_dim(draw, len(shape))
    shape[dim] = size
    return [real(*shape), places(size, size), dim], {"output_size": size * (size - 1) // 2}


INDICES: Mapping[str, Builder] = {
    "aten.embedding.default": embedding,
    "aten.index.Tensor": index,
    "aten.index_put.default": index_put,
    "aten.index_select.default": along(_any),
    "aten.index_fill.int_Scalar": along(_once, 0.5),
    "aten.index_fill.int_Tensor": along(_once, real()),
    "aten.index_copy.default": along(_once, Operand),
    "aten.index_add.default": index_add,
    "aten.gather.default": spread(source=False),
    "aten.scatter.value": spread(0.5, source=False),
    "aten.scatter.src": spread(once=True),
    "aten.scatter_add.default": spread(),
    "aten.scatter_reduce.two": scatter_reduce,
    "aten.take_along_dim.default": take_along_dim,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select_scatter.default": select_scatter,
    "aten.masked_fill.Scalar": masked(0.25),
    "aten.masked_fill.Tensor": masked(real()),
    "aten.where.self": where(True, True),
    "aten.where.ScalarOther": where(True, False),
    "aten.where.ScalarSelf": where(False, True),
    "aten.where.Scalar": where(False, False),
    "aten.fill.Tensor": lambda draw: [real(*sizes(draw, 2)), real()],
    "aten.repeat_interleave.self_int": repeat_interleave,
    "aten.repeat_interleave.self_Tensor": repeat_unlike,
    "aten.bucketize.Tensor": lambda draw: (
        [real(*sizes(draw, draw.pick([1, 2]))), Operand((draw.pick([1, 3, 6]),), "sorted", constant=True)],
        draw.pick([{}, {"right": True}]),
    ),
}
