"""Arguments for every operator of the rule table: name of the rule -> builder.

A builder takes a source of choices (`benchmarks.fuzz.draws.Draw`) and returns ``(args, kwargs)`` for the operator itself,
with an ``Operand`` for every tensor. Tests that run one operator create these tensors; the fuzzer looks for them among
the values of a model. Operators without a builder are element-wise: their arguments follow from torch's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.fuzz.dims import DIMS
from benchmarks.fuzz.draws import Arguments, Builder, Draw, Operand, ids, mask, real, shaped, sizes, some
from benchmarks.fuzz.elementwise import elementwise
from benchmarks.fuzz.images import batch_norm, convolution, group_norm, image, pooled, same, transposed
from benchmarks.fuzz.indices import INDICES
from benchmarks.fuzz.networks import NETWORKS

__all__ = ["BUILDERS", "arguments"]


def arguments(name: str, draw: Draw) -> Arguments:
    """Random ``(args, kwargs)`` for the operator of a rule."""
    if name not in BUILDERS:
        return elementwise(name, draw)
    built = BUILDERS[name](draw)
    return built if isinstance(built, tuple) else (built, {})


def linear(draw: Draw) -> list[Any]:
    *lead, k, n = some(draw, 2, 5)
    return [real(*lead, k), real(n, k), draw.pick([None, real(n)])]


def matmul(draw: Draw) -> list[Any]:
    a, b, r, k, c = sizes(draw, 5)
    left = draw.pick([(a, b, r, k), (b, r, k), (r, k), (1, b, r, k), (a, 1, r, k), (k,)])
    if draw.pick([True, *[False] * 4]):
        return [real(*left), real(k)]
    return [real(*left), real(*draw.pick([(b, k, c), (k, c), (a, b, k, c), (1, k, c)]))]


def addmm(draw: Draw) -> Any:
    r, k, c = sizes(draw, 3)
    factors = draw.pick([{}, {}, {"alpha": 2}, {"beta": 0.5}])
    return [draw.pick([real(c), real(r, c), real(1, c)]), real(r, k), real(k, c)], factors


def baddbmm(draw: Draw) -> list[Any]:
    b, r, k, c = sizes(draw, 4)
    return [real(b, r, c), real(b, r, k), real(b, k, c)]


def einsum(draw: Draw) -> list[Any]:
    a, b, c, d = sizes(draw, 4)
    equation, left, right = draw.pick(
        [
            ("bij,bjk->bik", (d, a, b), (d, b, c)),
            ("bij,kj->kbi", (d, a, b), (c, b)),
            ("ij,ij->i", (a, b), (a, b)),
            ("bhqd,bhkd->bhqk", (a, 2, b, c), (a, 2, d, c)),
            ("i,j->ji", (a,), (b,)),
        ]
    )
    return [equation, [real(*left), real(*right)]]


def attention(draw: Draw) -> Arguments:
    b, s, d, e = draw.size(), draw.pick([1, 4, 6, 8]), draw.pick([2, 4]), draw.pick([3, 4])
    kv, group = draw.pick([(4, 1), (2, 2), (1, 4), (3, 1), (2, 1)])
    t = draw.pick([s, s, 5])
    q, k, v = real(b, kv * group, s, d), real(b, kv, t, d), real(b, kv, t, e)
    how = draw.pick(["plain", "causal", "mask", "bias"])
    shape = draw.pick([(b, 1, s, t), (1, kv * group, s, t), (s, t), (b, kv * group, s, t)])
    given = {"mask": mask(*shape), "bias": real(*shape)}.get(how)
    return [q, k, v, given, 0.0, how == "causal"], {"enable_gqa": group > 1, "scale": draw.pick([None, 0.3])}


def norm(draw: Draw) -> list[Any]:
    *lead, b, h = some(draw, 2, 4)
    shape = draw.pick([[h], [h], [b, h]])
    kind = draw.pick(["both", "both", "weight", "none"])
    weight = real(*shape) if kind != "none" else None
    return [real(*lead, b, h), shape, weight, real(*shape) if kind == "both" else None, 1e-5, False]


def rms_norm(draw: Draw) -> list[Any]:
    x, shape, weight, *_ = norm(draw)
    return [x, shape, weight, draw.pick([None, 1e-6])]


def cross_entropy(draw: Draw) -> list[Any]:
    m, v = draw.pick([3, 4, 6, 8, 9]), draw.pick([5, 7, 8, 12])
    space = draw.pick([(), (), (2,)])
    extra = draw.pick(["plain", "plain", "weight", "smooth"])
    weight = Operand((v,), "unit", constant=True) if extra == "weight" else None
    ignored = draw.pick([-100, 1])
    return [real(m, v, *space), ids(v, m, *space), weight, draw.pick([0, 1, 2]), ignored, 0.1 if extra == "smooth" else 0.0]


def pair_loss(draw: Draw) -> list[Any]:
    shape = some(draw, 1, 3)
    return [real(*shape), real(*shape), draw.pick([0, 1, 1, 2])]


def reduce_dims(draw: Draw) -> list[Any]:
    shape = some(draw, 1, 4)
    dims = draw.pick([[0], [-1], [len(shape) // 2], sorted({0, len(shape) - 1})])
    return [real(*shape), dims, draw.pick([True, False])]


def one_dim(draw: Draw) -> list[Any]:
    shape = some(draw, 1, 3)
    return [real(*shape), draw.pick(range(-1, len(shape))), draw.pick([True, False])]


def reshape(draw: Draw) -> list[Any]:
    a, b, c = sizes(draw, 3)
    pairs = [([a, b, c], [a * b, c]), ([a, b, c], [a, b * c]), ([a, b, c], [a * b * c]), ([a * b, c], [a, b, c])]
    pairs += [([a, b, c], [b, a, c]), ([a, b, c], [a, 1, b * c]), ([a, b * c], [a * b, c]), ([a * b * c], [a, b, c])]
    source, target = draw.pick(pairs)
    return [real(*source), target]


def expand(draw: Draw) -> list[Any]:
    a, b, c = sizes(draw, 3)
    source, target = draw.pick([((a, 1, c), (a, b, c)), ((b, 1), (a, b, c)), ((1, c), (a, b, c)), ((1,), (a, b))])
    return [real(*source), list(target)]


def permute(draw: Draw) -> list[Any]:
    shape = some(draw, 2, 4)
    order = sorted(range(len(shape)), key=lambda _: draw.pick(range(100)))
    return [real(*shape), order]


def unsqueeze(draw: Draw) -> list[Any]:
    shape = some(draw, 1, 3)
    return [real(*shape), draw.pick(range(-1, len(shape) + 1))]


def slice_(draw: Draw) -> list[Any]:
    a, b = sizes(draw, 2)
    start, end, step = draw.pick([(2, 7, 2), (0, 4, 1), (1, 8, 1), (4, 8, 1)])
    return draw.pick([[real(a, 8, b), 1, start, end, step], [real(8, a), 0, start, end, step]])


def split(draw: Draw) -> list[Any]:
    a, b = sizes(draw, 2)
    parts = draw.pick([[b, b, b], [b, b], [1, b + 1], [2, 4]])
    return draw.pick(
        [[real(a, sum(parts)), parts, 1], [real(sum(parts), a), parts, 0], [real(a, sum(parts), 2), parts, -2]]
    )


def cat(draw: Draw) -> list[Any]:
    a, b, c = sizes(draw, 3)
    return draw.pick([[[real(a, b), real(a, c)], 1], [[real(a, b), real(c, b), real(a, b)], 0]])


def stack(draw: Draw) -> list[Any]:
    shape = some(draw, 1, 3)
    return [[real(*shape)] * draw.pick([1, 2, 3]), draw.pick(range(-1, len(shape) + 1))]


def repeat(draw: Draw) -> list[Any]:
    a, b = sizes(draw, 2)
    return [real(a, b), draw.pick([[2, 1, 3], [1, 2], [2, 1], [3, 1, 1]])]


def padded(draw: Draw) -> list[Any]:
    return [real(*some(draw, 2, 3)), draw.pick([[1, 2], [0, 0, 1, 0], [0, 1, 2, 0]]), draw.pick([0.5, 0.0])]


def roll(draw: Draw) -> list[Any]:
    return [real(*sizes(draw, 2)), *draw.pick([([1], [1]), ([1],), ([2, 1], [0, 1]), ([-1], [0])])]


def squares(draw: Draw) -> list[Any]:
    return [real(*some(draw, 0, 2), draw.size(), draw.size()), draw.pick([0, 1, -1])]


def broadcasting(count: int, *extra: Any) -> Builder:
    def build(draw: Draw) -> list[Any]:
        a, b = sizes(draw, 2)
        shapes = [(a, b), *(draw.pick([(a, b), (a, b), (b,), (a, 1)]) for _ in range(count - 1))]
        return [*(real(*shape) for shape in shapes), *extra]

    return build


def fresh(*extra: Any) -> Builder:
    def build(draw: Draw) -> list[Any]:
        return [real(*some(draw, 1, 2)), draw.pick([[3, 4], [draw.size(), draw.size()]]), *extra]

    return build


def noisy(rank: int) -> Builder:
    return lambda draw: [real(*sizes(draw, rank)), 0.5, True]


BUILDERS: Mapping[str, Builder] = {
    **DIMS,
    **INDICES,
    **NETWORKS,
    "aten.linear.default": linear,
    "aten.matmul.default": matmul,
    "aten.mm.default": shaped(lambda r, k, c: [real(r, k), real(k, c)], 3),
    "aten.bmm.default": shaped(lambda b, r, k, c: [real(b, r, k), real(b, k, c)], 4),
    "aten.addmm.default": addmm,
    "aten.baddbmm.default": baddbmm,
    "aten.einsum.default": einsum,
    **{f"aten.conv{n}d.default": convolution(n) for n in (1, 2, 3)},
    **{f"aten.conv{n}d.padding": same(n) for n in (1, 2, 3)},
    "aten.conv_transpose1d.default": transposed(1),
    "aten.conv_transpose2d.input": transposed(2),
    "aten.conv_transpose3d.input": transposed(3),
    "aten.scaled_dot_product_attention.default": attention,
    "aten.layer_norm.default": norm,
    "aten.rms_norm.default": rms_norm,
    "aten.group_norm.default": group_norm,
    "autotp.renewed.default": shaped(lambda r, c: [real(r, c), real(r, c)], 2),
    "autotp.batch_norm_train.default": batch_norm(True),
    "aten.batch_norm.default": batch_norm(False),
    "aten.softmax.int": lambda d: one_dim(d)[:2],
    "aten.log_softmax.int": lambda d: one_dim(d)[:2],
    "aten._softmax.default": lambda d: [*one_dim(d)[:2], False],
    "aten._log_softmax.default": lambda d: [*one_dim(d)[:2], False],
    "aten.cross_entropy_loss.default": cross_entropy,
    **{f"aten.{kind}_loss.default": pair_loss for kind in ("mse", "l1", "smooth_l1")},
    "aten.sum.default": lambda d: [real(*some(d))],
    "aten.mean.default": lambda d: [real(*some(d))],
    **{f"aten.{kind}": reduce_dims for kind in ("sum.dim_IntList", "mean.dim", "amax.default", "amin.default")},
    "aten.reshape.default": reshape,
    "aten.expand.default": expand,
    "aten.permute.default": permute,
    "aten.unsqueeze.default": unsqueeze,
    "aten.squeeze.default": shaped(lambda a, b: [real(a, 1, b)], 2),
    "aten.squeeze.dim": shaped(lambda a, b: [real(a, 1, b), 1], 2),
    "aten.squeeze.dims": shaped(lambda a, b: [real(1, a, 1, b), [0, 2]], 2),
    "aten.slice.Tensor": slice_,
    "aten.select.int": shaped(lambda a, b: [real(a, 8, b), 1, 3], 2),
    "aten.split_with_sizes.default": split,
    "aten.repeat.default": repeat,
    "aten.cat.default": cat,
    "aten.stack.default": stack,
    "aten.constant_pad_nd.default": padded,
    "aten.pad.default": lambda d: [*padded(d)[:2], "constant", 0.5],
    "aten.flip.default": lambda d: [real(*sizes(d, 2)), d.pick([[0], [1], [0, 1]])],
    "aten.roll.default": roll,
    "aten.diff.default": lambda d: [real(d.size(), 6), 1, d.pick([1, 0, -1])],
    "aten.tril.default": squares,
    "aten.triu.default": squares,
    "aten.addcmul.default": lambda d: (broadcasting(3)(d), d.pick([{}, {"value": 0.5}])),
    "aten.lerp.Scalar": broadcasting(2, 0.3),
    "aten.max_pool1d.default": pooled(1, [[2]], [[3], [1], [1]]),
    "aten.max_pool2d.default": pooled(2, [[2, 2]], [[3, 3], [1, 1], [1, 1]]),
    "aten.avg_pool1d.default": pooled(1, [[2]], [[3], [1], [1]]),
    "aten.avg_pool2d.default": pooled(2, [[2, 2]], [[3, 3], [1, 1], [1, 1]]),
    "aten.adaptive_avg_pool1d.default": pooled(1, [[2]], [[8]], [[1]]),
    "aten.adaptive_avg_pool2d.default": pooled(2, [[2, 2]], [[8, 4]], [[1, 1]]),
    "aten.adaptive_max_pool2d.default": pooled(2, [[2, 2]], [[8, 4]]),
    "aten.upsample_nearest2d.vec": image(None, [2.0, 2.0]),
    "aten.upsample_nearest2d.default": image([8, 8]),
    "aten.upsample_bilinear2d.vec": image(None, False, [2.0, 2.0]),
    "aten.upsample_bicubic2d.vec": image(None, False, [2.0, 2.0]),
    "aten.dropout.default": noisy(2),
    "aten.alpha_dropout.default": noisy(2),
    "aten.feature_dropout.default": noisy(3),
    "aten.feature_alpha_dropout.default": noisy(3),
    "aten.new_ones.default": fresh(),
    "aten.new_zeros.default": fresh(),
    "aten.new_full.default": fresh(0.5),
}
