"""Arguments of operators that work along dims, of losses, and of complex numbers, for `benchmarks.fuzz.operators`.

Operators that depend on the order of elements get operands without ties: kernels break ties depending on the strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.fuzz.draws import (
    Arguments,
    Builder,
    Draw,
    Operand,
    a_dim,
    complex_,
    constant,
    ids,
    mask,
    ranked,
    real,
    shaped,
    sizes,
    some,
    some_dims,
    unit,
)

__all__ = ["COMPLEX_TOO", "DIMS"]

Make = Callable[..., Operand]

#: Operators of real operands that also take complex ones, and are differentiable there.
_BOTH = """
add.Tensor sub.Tensor mul.Tensor div.Tensor mul.Scalar neg mm bmm matmul linear outer einsum sum sum.dim_IntList mean
mean.dim cumsum reshape expand permute unsqueeze squeeze squeeze.dim squeeze.dims slice.Tensor select.int split_with_sizes
repeat cat stack flip roll tril triu where.self index_select index.Tensor gather index_put abs sgn exp clone alias
masked_fill.Scalar addcmul diff unfold constant_pad_nd linalg_vector_norm
"""
COMPLEX_TOO = frozenset(f"aten.{name if '.' in name else f'{name}.default'}" for name in _BOTH.split())


def reduced(make: Make, *more: Any) -> Builder:
    """A builder for reductions along one dim, with and without ``keepdim``."""

    def build(draw: Draw) -> list[Any]:
        shape = some(draw, 1, 4)
        return [make(*shape), *more, a_dim(draw, len(shape)), draw.pick([True, False])]

    return build


def reduced_dims(make: Make, *before: list[Any], least: int = 1) -> Builder:
    """A builder for reductions along one or more dims, each of size ``least`` or more."""

    def build(draw: Draw) -> list[Any]:
        shape = some(draw, 1, 4)
        dims = some_dims(draw, len(shape))
        for dim in dims:
            shape[dim] = max(least, shape[dim])
        return [make(*shape), *map(draw.pick, before), dims, draw.pick([True, False])]

    return build


def deviation(draw: Draw) -> list[Any]:
    x, dims, keep = reduced_dims(ranked, least=2)(draw)
    return [x, dims, draw.pick([True, False]), keep]


def corrected(draw: Draw) -> Arguments:
    x, dims, keep = reduced_dims(ranked, least=3)(draw)
    return [x, dims], {"correction": draw.pick([0, 1, 2, None]), "keepdim": keep}


def along(make: Make, *more: list[Any]) -> Builder:
    """A builder for operators along one dim; each of ``more`` lists the choices for a further argument."""

    def build(draw: Draw) -> list[Any]:
        shape = some(draw, 1, 3)
        return [make(*shape), a_dim(draw, len(shape)), *map(draw.pick, more)]

    return build


def kth(draw: Draw) -> list[Any]:
    x, dim = along(ranked)(draw)
    return [x, draw.pick(range(1, max(1, x.shape[dim]) + 1)), dim, draw.pick([True, False])]


def top(draw: Draw) -> list[Any]:
    x, k, dim, largest = kth(draw)
    return [x, k, dim, largest]


def stable(draw: Draw) -> Arguments:
    """Arguments of a stable sort, for which operands with ties are allowed, too."""
    x, dim = along(draw.pick([ranked, ranked, lambda *shape: ids(5, *shape)]))(draw)
    return [x], {"stable": True, "dim": dim, "descending": draw.pick([True, False])}


def transformed(make: Make) -> Builder:
    def build(draw: Draw) -> list[Any]:
        shape = [draw.pick([4, 2, 3, 6]) for _ in range(draw.pick([3, 2, 1]))]
        return [make(*shape), draw.pick([None, None, 5, 2]), a_dim(draw, len(shape)), draw.pick(_NORMS)]

    return build


def transformed_dims(make: Make) -> Builder:
    def build(draw: Draw) -> list[Any]:
        shape = [draw.pick([4, 2, 3, 6]) for _ in range(draw.pick([2, 3, 4]))]
        dims = draw.pick([[-2, -1], [0], [-1], [0, -1], [1, 0]])
        return [make(*shape), draw.pick([None, None, [4] * len(dims)]), dims, draw.pick(_NORMS)]

    return build


_NORMS = [None, None, "ortho", "forward"]


def shifted(draw: Draw) -> list[Any]:
    shape = some(draw, 1, 3)
    return [draw.pick([real, complex_])(*shape), draw.pick([some_dims(draw, len(shape)), None])]


def halved(draw: Draw) -> list[Any]:
    shape = some(draw, 1, 3)
    dim = a_dim(draw, len(shape))
    shape[dim] *= 2
    return [real(*shape), dim]


def windows(draw: Draw) -> list[Any]:
    a, b = sizes(draw, 2)
    return draw.pick([[real(a, 8, b), 1, 3, 2], [real(a, b, 8), -1, 2, 1], [real(8, a), 0, 4, 4], [real(8), 0, 2, 3]])


def shuffled(channels: int, space: int) -> Builder:
    def build(draw: Draw) -> list[Any]:
        *lead, c, h, w = sizes(draw, draw.pick([3, 4]))
        return [real(*lead, channels * c, space * h, space * w), 2]

    return build


def loss(first: Make, second: Make, weights: int = 0) -> Builder:
    """A builder for losses of two tensors of the same shape, with ``weights`` optional tensors that broadcast to it."""

    def build(draw: Draw) -> list[Any]:
        a, b = sizes(draw, 2)
        shapes = [(a, b), (b,), (a, 1), (1,)]
        given = [draw.pick([None, constant(*draw.pick(shapes))]) for _ in range(weights)]
        return [first(a, b), second(a, b), *given, draw.pick([1, 0, 2])]

    return build


def divergence(draw: Draw) -> Arguments:
    log = draw.pick([True, False])
    return loss(real, real if log else unit)(draw), {"log_target": log}


def huber(draw: Draw) -> list[Any]:
    return [*loss(real, real)(draw), draw.pick([1.0, 0.5])]


def likelihood(draw: Draw) -> list[Any]:
    m, v = draw.pick([3, 4, 6, 8]), draw.pick([5, 7, 8])
    lead, space = draw.pick([((m,), ()), ((m,), ()), ((m,), (2,)), ((m,), (2, 3)), ((), ())])
    weight = draw.pick([None, constant(v)])
    return [real(*lead, v, *space), ids(v, *lead, *space), weight, draw.pick([1, 0, 2]), draw.pick([-100, 1])]


def weight_norm(draw: Draw) -> list[Any]:
    shape = tuple(n or 2 for n in some(draw, 2, 3))  # no size 0: torch's kernel divides by it, which kills the process
    dim = draw.pick([0, 0, len(shape) - 1, 1])
    return [unit(*shape), real(*(n if i == dim else 1 for i, n in enumerate(shape))), dim]


def compared(draw: Draw) -> list[Any]:
    a, b, c = sizes(draw, 3)
    shapes = draw.pick([((a, b, c), (a, b, c)), ((a, b, c), (b, c)), ((c,), (c,)), ((a, 1, c), (1, b, c))])
    return [real(*shapes[0]), unit(*shapes[1])]


def similar(draw: Draw) -> list[Any]:
    x, y = compared(draw)
    return [x, y, a_dim(draw, max(len(x.shape), len(y.shape))), 1e-8]


def distant(draw: Draw) -> list[Any]:
    return [*compared(draw), draw.pick([2.0, 1.0, 3.0]), 1e-6, draw.pick([True, False])]


def crossed(draw: Draw) -> Arguments:
    a, b = sizes(draw, 2)
    forms = [([real(a, 3, b), real(a, 3, b)], {"dim": 1}), ([real(a, b, 3), real(1, b, 3)], {})]
    return draw.pick([*forms, ([real(3, a), real(3, 1)], {"dim": -2})])


def linalg_norm(draw: Draw) -> list[Any]:
    x, dim, keep = reduced(unit)(draw)
    return draw.pick([[x, None, [dim], keep], [x, 2, [dim], keep], [x, 1, [dim], keep], [x, None, None, False]])


def two(first: Make, second: Make) -> Builder:
    """A builder for binary operators; the operands broadcast with each other."""

    def build(draw: Draw) -> list[Any]:
        a, b = sizes(draw, 2)
        shapes = [(a, b), (a, b), (b,), (a, 1)]
        return draw.pick([[first(a, b), second(*draw.pick(shapes))], [first(*draw.pick(shapes)), second(a, b)]])

    return build


def plain(make: Make) -> Builder:
    return lambda draw: [make(*some(draw, 1, 3))]


def _either(*shape: int) -> Operand:
    """An operand for transforms that take both dtypes: complex if its sizes add up to an odd number, otherwise real."""
    return complex_(*shape) if sum(shape) % 2 else real(*shape)


DIMS: Mapping[str, Builder] = {
    **{f"aten.{name}.dim": reduced(ranked) for name in ("max", "min", "median")},
    "aten.kthvalue.default": kth,
    **{f"aten.{name}.default": reduced(ranked) for name in ("argmax", "argmin")},
    "aten.prod.dim_int": reduced(unit),
    **{f"aten.{name}.dim": reduced(mask) for name in ("any", "all")},
    **{f"aten.{name}.dims": reduced_dims(mask) for name in ("any", "all")},
    **{f"aten.{name}.dim": deviation for name in ("var", "std")},
    **{f"aten.{name}.correction": corrected for name in ("var", "std", "var_mean", "std_mean")},
    "aten.logsumexp.default": reduced_dims(real),
    "aten.linalg_vector_norm.default": reduced_dims(ranked, [2, 1, 3.0, float("inf"), float("-inf")]),
    "aten.norm.ScalarOpt_dim": reduced_dims(unit, [2, 1, 3.0, None]),
    "aten.linalg_norm.default": linalg_norm,
    "aten.topk.default": top,
    "aten.sort.default": along(ranked, [True, False]),
    "aten.argsort.default": along(ranked, [True, False]),
    "aten.sort.stable": stable,
    "aten.argsort.stable": stable,
    "aten.cumsum.default": along(real),
    "aten.logcumsumexp.default": along(real),
    "aten.cumprod.default": along(unit),
    **{f"aten.{name}.default": along(ranked) for name in ("cummax", "cummin")},
    **{f"aten.fft_{name}.default": transformed(_either) for name in ("fft", "ifft")},
    **{f"aten.fft_{name}.default": transformed(complex_) for name in ("irfft", "hfft")},
    **{f"aten.fft_{name}.default": transformed(real) for name in ("rfft", "ihfft")},
    **{f"aten.fft_{name}.default": transformed_dims(_either) for name in ("fft2", "ifft2", "fftn", "ifftn")},
    **{f"aten.fft_{name}.default": transformed_dims(complex_) for name in ("irfft2", "irfftn")},
    **{f"aten.fft_{name}.default": transformed_dims(real) for name in ("rfft2", "rfftn")},
    **{f"aten.fft_{name}.default": shifted for name in ("fftshift", "ifftshift")},
    "aten.glu.default": halved,
    "aten.unfold.default": windows,
    "aten.pixel_shuffle.default": shuffled(4, 1),
    "aten.pixel_unshuffle.default": shuffled(1, 2),
    "aten.huber_loss.default": huber,
    "aten.kl_div.default": divergence,
    "aten.binary_cross_entropy.default": loss(unit, unit, 1),
    "aten.binary_cross_entropy_with_logits.default": loss(real, unit, 2),
    "aten.nll_loss_nd.default": likelihood,
    "aten._weight_norm.default": weight_norm,
    "aten.outer.default": shaped(lambda a, b: [real(a), real(b)], 2),
    "aten.cosine_similarity.default": similar,
    "aten.pairwise_distance.default": distant,
    "aten.linalg_cross.default": crossed,
    "aten.complex.default": two(real, real),
    "aten.polar.default": two(unit, real),
    **{f"aten.{name}.default": plain(complex_) for name in ("real", "imag", "view_as_real", "resolve_conj", "resolve_neg")},
    "aten.angle.default": lambda draw: plain(draw.pick([complex_, unit]))(draw),
}
