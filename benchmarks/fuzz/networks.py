"""Arguments of recurrent networks and cells, embedding bags, distances and sampling, for `benchmarks.fuzz.operators`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.fuzz.draws import Builder, Draw, Operand, ids, real, sizes

__all__ = ["NETWORKS"]


def _weights(draw: Draw, gates: int, i: int, h: int) -> list[Operand]:
    biased = draw.pick([True, False])
    return [real(gates * h, i), real(gates * h, h), *([real(gates * h)] * 2 if biased else [])]


def network(gates: int, states: int) -> Builder:
    """A builder for recurrent networks: one or two layers, one or both directions, batch first or not."""

    def build(draw: Draw) -> list[Any]:
        t, b, i, h = draw.pick([2, 1, 3]), draw.size(), draw.pick([2, 3]), draw.pick([2, 3])
        layers, both, first = draw.pick([1, 2]), draw.pick([False, True]), draw.pick([True, False])
        ways = 2 if both else 1
        inside = _weights(draw, gates, i, h)
        more = [real(gates * h, ways * h if k == 0 else h) if k < 2 else real(gates * h) for k in range(len(inside))]
        weights = inside * ways + (more * ways if layers > 1 else [])
        state = [real(layers * ways, b, h)] * states
        x = real(b, t, i) if first else real(t, b, i)
        return [x, state if states > 1 else state[0], weights, len(inside) > 2, layers, 0.0, True, both, first]

    return build


def cell(gates: int, states: int) -> Builder:
    def build(draw: Draw) -> list[Any]:
        b, i, h = draw.size(), draw.pick([2, 3]), draw.pick([2, 3])
        state = [real(b, h)] * states
        return [real(b, i), state if states > 1 else state[0], *_weights(draw, gates, i, h)]

    return build


def bags(draw: Draw) -> list[Any]:
    """Arguments for bags of equal size: a sum with or without weights, a mean, or a maximum."""
    v, h, b, n = draw.pick([8, 5, 6]), *sizes(draw, 2), draw.pick([3, 1, 2])
    mode = draw.pick([0, 1, 2])
    return [real(v, h), ids(v, b, n), draw.pick([None, real(b, n)]) if mode == 0 else None, mode]


def ragged_bags(draw: Draw) -> list[Any]:
    """Arguments for bags given by offsets; all offsets are 0, so the last bag has all words."""
    v, h, n = draw.pick([8, 5, 6]), draw.size(), draw.pick([3, 4])
    mode = draw.pick([0, 1, 2])
    factors = draw.pick([None, real(n)]) if mode == 0 else None
    return [real(v, h), ids(v, n), ids(1, draw.pick([1, 2])), False, mode, False, factors, False, draw.pick([None, 1])]


def distances(draw: Draw) -> list[Any]:
    """Arguments for distances, none of which is 0, where the derivative does not exist."""
    a, r, c, k = sizes(draw, 4)
    shapes = draw.pick([((a, r, k), (a, c, k)), ((r, k), (c, k)), ((a, r, k), (c, k)), ((1, r, k), (a, c, k))])
    return [real(*shapes[0]), Operand(shapes[1], "above"), draw.pick([2.0, 1.0, 3.0])]


def sampled(draw: Draw) -> list[Any]:
    """Arguments for sampling an image at a grid of positions."""
    n, c, h, w = sizes(draw, 4)
    return [real(n, c, 4, 5), real(n, h, w, 2), draw.pick([0, 2]), draw.pick([0, 1, 2]), draw.pick([False, True])]


_KINDS = {"lstm": (4, 2), "gru": (3, 1), "rnn_tanh": (1, 1), "rnn_relu": (1, 1)}

NETWORKS: Mapping[str, Builder] = {
    **{f"aten.{name}.input": network(*of) for name, of in _KINDS.items()},
    **{f"aten.{name}_cell.default": cell(*of) for name, of in _KINDS.items()},
    "autotp.embedding_bag.default": bags,
    "aten.embedding_bag.padding_idx": ragged_bags,
    "aten.cdist.default": distances,
    "aten.grid_sampler.default": sampled,
}
