"""Arguments of operators that work along dims, read or write at indices, or have complex numbers: see `test_rules.py`."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

__all__ = ["CASES"]

SIZES = [1, 2, 3, 4, 5, 6, 8]


def floats(*shape):
    return torch.rand(*shape, dtype=torch.float64) * 0.8 + 0.1


def complex_floats(*shape):
    return torch.complex(floats(*shape), floats(*shape))


def sizes(draw, count):
    return [draw(st.sampled_from(SIZES)) for _ in range(count)]


def some_dim(draw):
    return draw(st.sampled_from([1, 0, -1]))


def ranked(draw):
    """Numbers that are all different, in halves too, so that there is one order of them."""
    shape = sizes(draw, 3)
    return (torch.randperm(shape[0] * shape[1] * shape[2]).reshape(shape) / 512.0).double()


def reduced(*more):
    """Along one dim, which stays or not."""
    return lambda draw: [ranked(draw), *more, some_dim(draw), draw(st.booleans())]


def reduced_dims(*more):
    def build(draw):
        return [ranked(draw) + 0.1, *more, draw(st.sampled_from([[1], [0, -1], [-1], [0]])), draw(st.booleans())]

    return build


def corrected(draw):
    x, dims, keep = reduced_dims()(draw)
    return [x, dims], {"correction": draw(st.sampled_from([0, 1])), "keepdim": keep}


def ordered(*more):
    return lambda draw: [ranked(draw), *more, some_dim(draw)]


def top(draw):
    x, dim = ordered()(draw)
    return [x, draw(st.integers(1, x.shape[dim])), dim, draw(st.booleans())]


def stable(draw):
    x, dim = ordered()(draw)
    return [x], {"stable": True, "dim": dim, "descending": draw(st.booleans())}


def accumulated(draw):
    x, dim = ordered()(draw)
    return [x + 0.5, dim]


def transformed(*, real=False, dims=False):
    def build(draw):
        shape = [draw(st.sampled_from([4, 2, 3, 6])) for _ in range(3)]
        x = floats(*shape) if real else complex_floats(*shape)
        if dims:
            return [x, None, draw(st.sampled_from([[1, 2], [0], [-1]]))]
        return [x, draw(st.sampled_from([None, 5])), some_dim(draw)]

    return build


def shifted(draw):
    return [ranked(draw), draw(st.sampled_from([[1], [0, -1], [2]]))]


def places(size, *shape):
    return torch.randint(0, size, shape)


def indexed(draw):
    """Indices of some dims, next to each other or not."""
    a, b, c, n = sizes(draw, 4)
    x, m = floats(a, b, c), sizes(draw, 1)[0]
    kinds = {
        "last": [None, None, places(c, n)],
        "middle": [None, places(b, m, n)],
        "apart": [places(a, n), None, places(c, m, 1)],
        "together": [None, places(b, n), places(c, m, n)],
        "first": [places(a, m, n)],
    }
    return [x, kinds[draw(st.sampled_from(list(kinds)))]]


def put(draw):
    """Values at indices that each occur once, or under a mask."""
    a, b, c = (draw(st.sampled_from([4, 2, 3, 5])) for _ in range(3))
    x = floats(a, b, c)
    kind = draw(st.sampled_from(["last", "first", "apart", "mask", "mask, rows", "inner mask", "added"]))
    if kind == "last":
        return [
            x,
            [None, None, torch.randperm(c)[:2]],
            draw(st.sampled_from([floats(a, b, 2), floats(b, 1), floats(1)[0]])),
        ]
    if kind == "first":
        return [x, [torch.randperm(a)[:2]], draw(st.sampled_from([floats(2, b, c), floats(c), floats(2, 1, c)]))]
    if kind == "apart":
        return [x, [torch.randperm(a)[:2], None, places(c, 2)], draw(st.sampled_from([floats(2, b), floats(b)]))]
    if kind == "mask":
        return [x, [floats(a, b, c) > 0.5], draw(st.sampled_from([floats(1)[0], floats(1)]))]
    if kind == "mask, rows":
        return [x, [floats(a, b) > 0.5], draw(st.sampled_from([floats(c), floats(1)[0], floats(1, c)]))]
    if kind == "inner mask":
        return [x, [None, floats(b) > 0.5], floats(c)]
    return [x, [None, places(b, 3)], floats(a, 3, c), True]


def scattered(*, source=True, once=False, more=()):
    """At an index that is as large as what is written to, or smaller, in the other dim."""

    def build(draw):
        a, b = sizes(draw, 2)
        rows, width = draw(st.sampled_from([a, max(1, a - 1)])), draw(st.sampled_from([3, 5]))
        index = torch.rand(rows, 5).argsort(1)[:, :width] if once else places(5, rows, width)
        values = floats(rows, width) if source else 0.5
        if draw(st.booleans()):
            return [floats(a, 5), -1, index, values, *more]
        values = values.t().contiguous() if source else values
        return [floats(5, a), 0, index.t().contiguous(), values, *more]

    return build


def scatter_reduce(draw):
    built = scattered()(draw)
    return [*built, draw(st.sampled_from(["sum", "mean", "amax", "prod"]))]


def rows(*, source=True, more=()):
    """Whole rows along a dim, each once."""

    def build(draw):
        a, b = sizes(draw, 2)
        index = torch.randperm(5)[:3]
        if draw(st.booleans()):
            return [floats(a, 5, b), 1, index, *([floats(a, 3, b)] if source else more)]
        return [floats(a, b, 5), -1, index, *([floats(a, b, 3)] if source else more)]

    return build


def part(draw):
    a, b = sizes(draw, 2)
    if draw(st.booleans()):
        return [floats(a, 8, b), floats(a, 3, b), 1, 2, 8, 2]
    return [floats(6, a, b), floats(4, a, b), *draw(st.sampled_from([[0, 2], [-3, 0, -2], [0, 1, 5]]))]


def row(draw):
    a, b = sizes(draw, 2)
    if draw(st.booleans()):
        return [floats(a, 4, b), floats(a, b), 1, 3]
    return [floats(a, b, 4), floats(a, b), -1, -2]


def repeated(draw):
    x, dim = ordered()(draw)
    copies, kind = draw(st.sampled_from([2, 3, 1])), draw(st.sampled_from(["dim", "flat", "row", "sized"]))
    if kind == "flat":
        return [x, copies]
    if kind == "row":
        return [x.flatten(), copies]
    return [x, copies, dim], ({"output_size": copies * x.shape[dim]} if kind == "sized" else {})


def repeated_unlike(draw):
    x, dim = ordered()(draw)
    counts = places(3, x.shape[dim])
    return [x, counts, dim], {"output_size": int(counts.sum())}


def halved(draw):
    shape = sizes(draw, 3)
    dim = some_dim(draw)
    shape[dim] *= 2
    return [floats(*shape), dim]


def windows(draw):
    a, b = sizes(draw, 2)
    return draw(st.sampled_from([[floats(a, 8, b), 1, 3, 2], [floats(a, b, 8), -1, 2, 1]]))


def shuffled(draw):
    a, c, h, w = sizes(draw, 4)
    return [floats(*[a][: draw(st.sampled_from([1, 0]))], 4 * c, h, w), 2]


def unshuffled(draw):
    a, c, h, w = sizes(draw, 4)
    return [floats(*[a][: draw(st.sampled_from([1, 0]))], c, 2 * h, 2 * w), 2]


def loss(*, weights=0):
    def build(draw):
        a, b = sizes(draw, 2)
        shapes = draw(st.sampled_from([[(a, b), (b,)], [(b,), (a, 1)], [(1,), (b,)]]))
        given = [floats(*shape) if draw(st.booleans()) else None for shape in shapes[:weights]]
        return [floats(a, b), floats(a, b), *given, draw(st.sampled_from([1, 0, 2]))]

    return build


def divergence(draw):
    return loss()(draw), {"log_target": draw(st.booleans())}


def likelihood(draw):
    m, v = draw(st.sampled_from([4, 3, 6, 8])), draw(st.sampled_from([5, 7]))
    spatial = draw(st.sampled_from([[], [2]]))
    target = places(v, m, *spatial)
    target[0] = -100
    weight = floats(v) if draw(st.booleans()) else None
    return [floats(m, v, *spatial), target, weight, draw(st.sampled_from([1, 0, 2])), -100]


def weight_norm(draw):
    a, b = sizes(draw, 2)
    if draw(st.booleans()):
        return [floats(a, b, 3), floats(1, b, 1), 1]
    return draw(st.sampled_from([[floats(a, b, 3), floats(a, 1, 1), 0], [floats(b, a), floats(1, a), 1]]))


def masked(*others):
    return lambda draw: [floats(*sizes(draw, 2)) > 0.5, *others]


def masked_from(position):
    def build(draw):
        a, b = sizes(draw, 2)
        args = [floats(a, b) > 0.5, draw(st.sampled_from([floats(a, b), floats(b)]))]
        return [*args, 0.25] if position == 1 else [args[0], 0.25, args[1]]

    return build


def compared(draw):
    a, b, c = sizes(draw, 3)
    return draw(
        st.sampled_from([[floats(a, b, c), floats(a, b, c)], [floats(a, b, c), floats(b, c)], [floats(c), floats(c)]])
    )


def crossed(draw):
    a, b = sizes(draw, 2)
    if draw(st.booleans()):
        return [floats(a, 3, b), floats(a, 3, b)], {"dim": 1}
    return [floats(a, b, 3), floats(1, b, 3)]


COMPLEX = ("real", "imag", "view_as_real", "resolve_conj", "resolve_neg")
FORWARD, REAL = transformed(), transformed(real=True)

CASES = {
    **{f"aten.{name}.dim": reduced() for name in ("max", "min", "median")},
    "aten.kthvalue.default": reduced(1),
    "aten.argmin.default": reduced(),
    "aten.prod.dim_int": lambda draw: (lambda x, *rest: [x + 0.5, *rest])(*reduced()(draw)),
    "aten.any.dims": lambda draw: (lambda x, *rest: [x > 0.5, *rest])(*reduced_dims()(draw)),
    "aten.all.dims": lambda draw: (lambda x, *rest: [x > 0.5, *rest])(*reduced_dims()(draw)),
    **{
        f"aten.{name}.dim": lambda draw: (lambda x, d, k: [x, d, d == [0], k])(*reduced_dims()(draw))
        for name in ("var", "std")
    },
    **{f"aten.{name}.correction": corrected for name in ("var", "std", "var_mean", "std_mean")},
    "aten.logsumexp.default": reduced_dims(),
    "aten.linalg_vector_norm.default": lambda draw: reduced_dims(draw(st.sampled_from([2, 1, 3.0, float("inf")])))(draw),
    "aten.norm.ScalarOpt_dim": lambda draw: reduced_dims(draw(st.sampled_from([2, 1, 3.0])))(draw),
    "aten.linalg_norm.default": lambda draw: (lambda x, d, k: [x + 0.1, None, d, k])(*reduced()(draw)),
    "aten.outer.default": lambda draw: [floats(n) for n in sizes(draw, 2)],
    "aten.cosine_similarity.default": lambda draw: (lambda x, y: [x, y, draw(st.sampled_from([-1, 0]))])(*compared(draw)),
    "aten.pairwise_distance.default": lambda draw: [*compared(draw), 2.0, 1e-6, draw(st.booleans())],
    "aten.linalg_cross.default": crossed,
    "aten.bucketize.Tensor": lambda draw: [floats(*sizes(draw, 2)), torch.tensor([0.2, 0.5, 0.7], dtype=torch.float64)],
    "aten.topk.default": top,
    "aten.sort.default": ordered(),
    "aten.argsort.default": ordered(),
    "aten.sort.stable": stable,
    "aten.argsort.stable": stable,
    **{f"aten.{name}.default": accumulated for name in ("cumprod", "logcumsumexp", "cummax", "cummin")},
    **{f"aten.fft_{name}.default": FORWARD for name in ("fft", "ifft", "irfft", "hfft")},
    **{f"aten.fft_{name}.default": REAL for name in ("rfft", "ihfft")},
    **{
        f"aten.fft_{name}.default": transformed(dims=True)
        for name in ("fft2", "ifft2", "irfft2", "fftn", "ifftn", "irfftn")
    },
    **{f"aten.fft_{name}.default": transformed(real=True, dims=True) for name in ("rfft2", "rfftn")},
    **{f"aten.fft_{name}.default": shifted for name in ("fftshift", "ifftshift")},
    "aten.index.Tensor": indexed,
    "aten.index_put.default": put,
    "aten.index_select.default": rows(source=False),
    "aten.index_fill.int_Scalar": rows(source=False, more=(0.5,)),
    "aten.index_fill.int_Tensor": lambda draw: [*rows(source=False)(draw), floats(1)[0]],
    "aten.index_copy.default": rows(),
    "aten.index_add.default": rows(),
    "aten.scatter.value": scattered(source=False),
    "aten.scatter.src": scattered(once=True),
    "aten.scatter_add.default": scattered(),
    "aten.scatter_reduce.two": scatter_reduce,
    "aten.take_along_dim.default": lambda draw: (lambda x, d: [x, places(x.shape[d], 1, x.shape[1], 1), d])(
        *ordered()(draw)
    ),
    "aten.slice_scatter.default": part,
    "aten.select_scatter.default": row,
    "aten.repeat_interleave.self_int": repeated,
    "aten.repeat_interleave.self_Tensor": repeated_unlike,
    "aten.glu.default": halved,
    "aten.unfold.default": windows,
    "aten.pixel_shuffle.default": shuffled,
    "aten.pixel_unshuffle.default": unshuffled,
    "aten.huber_loss.default": loss(),
    "aten.kl_div.default": divergence,
    "aten.binary_cross_entropy.default": loss(weights=1),
    "aten.binary_cross_entropy_with_logits.default": loss(weights=2),
    "aten.nll_loss_nd.default": likelihood,
    "aten._weight_norm.default": weight_norm,
    "aten.where.Scalar": masked(0.5, 0.25),
    "aten.where.ScalarOther": masked_from(1),
    "aten.where.ScalarSelf": masked_from(2),
    "aten.fill.Tensor": lambda draw: [ranked(draw), floats(1)[0]],
    "aten.complex.default": lambda draw: (lambda a, b: [floats(a, b), floats(b)])(*sizes(draw, 2)),
    "aten.polar.default": lambda draw: (lambda a, b: [floats(a, b), floats(b)])(*sizes(draw, 2)),
    **{f"aten.{name}.default": lambda draw: [complex_floats(*sizes(draw, 2))] for name in COMPLEX},
}
