"""Arguments of convolutions, pooling, batch norm and group norm, for `benchmarks.fuzz.operators`."""

from __future__ import annotations

from typing import Any

from benchmarks.fuzz.draws import Builder, Draw, Operand, real, shaped, sizes

__all__ = ["batch_norm", "convolution", "group_norm", "image", "pooled", "same", "transposed"]


def convolution(rank: int) -> Builder:
    def build(draw: Draw) -> list[Any]:
        groups = draw.pick([1, 1, 2, 4])
        i, o = groups * draw.pick([1, 2, 4]), groups * draw.pick([1, 2, 3])
        lead = draw.pick([[draw.size()], [draw.size()], []])
        step, padding, kernel = draw.pick([1, 1, 2]), draw.pick([0, 1]), draw.pick([1, 3])
        x, w = real(*lead, i, *[5] * rank), real(o, i // groups, *[kernel] * rank)
        return [x, w, draw.pick([None, real(o)]), [step] * rank, [padding] * rank, [1] * rank, groups]

    return build


def same(rank: int) -> Builder:
    def build(draw: Draw) -> list[Any]:
        x, w, bias, _, _, dilation, groups = convolution(rank)(draw)
        return [x, w, bias, [1] * rank, draw.pick(["same", "valid"]), dilation, groups]

    return build


def transposed(rank: int) -> Builder:
    def build(draw: Draw) -> list[Any]:
        groups = draw.pick([1, 1, 2, 4])
        i, o = draw.pick([1, 2, 3]), draw.pick([1, 2, 4])
        lead = draw.pick([[draw.size()], []])
        x, w = real(*lead, groups * i, *[4] * rank), real(groups * i, o, *[3] * rank)
        stride, dilation = draw.pick([1, 2]), draw.pick([1, 2])
        outer = draw.pick([0, stride - 1])
        bias = draw.pick([None, real(groups * o)])
        return [x, w, bias, [stride] * rank, [1] * rank, [outer] * rank, groups, [dilation] * rank]

    return build


def group_norm(draw: Draw) -> list[Any]:
    n, g, c = draw.size(), draw.pick([1, 2, 4]), draw.pick([1, 2, 4, 3])
    channels = draw.pick([None, real(g * c)])
    return [real(n, g * c, *draw.pick([(3,), (), (2, 3)])), g, channels, channels, 1e-5, False]


def batch_norm(training: bool) -> Builder:
    """A builder for ``aten.batch_norm``, which capture replaces by another operator in training."""

    def build(draw: Draw) -> list[Any]:
        n, c = sizes(draw, 2)
        running = Operand((c,), "unit", constant=True)
        kept = draw.pick([True, not training])
        weight, bias = draw.pick([(real(c), real(c)), (real(c), real(c)), (None, None)])
        space = draw.pick([(3,), (2, 2), (), (draw.size(), draw.size()), (draw.size(), 1), (1, draw.size())])
        statistics = [running, running] if kept else [None, None]
        return [real(n, c, *space), weight, bias, *statistics, training, draw.pick([0.1, 0.3]), 1e-5, False]

    return build


def pooled(spatial: int, *choices: list[Any]) -> Builder:
    """A builder for pooling and resizing, batched or not; ``choices`` are the possible further arguments."""

    def build(draw: Draw) -> list[Any]:
        lead = sizes(draw, draw.pick([1, 2, 2]))
        return [real(*lead, *[8] * spatial), *draw.pick(choices)]

    return build


def image(*extra: Any) -> Builder:
    return shaped(lambda n, c: [real(n, c, 4, 4), *extra], 2)
