"""What chunks hide: the time of work and of the communication that belongs to it, done in chunks.

Symbols: **C** seconds of computing it whole; **M** seconds of its communication whole, without latency; **c** chunks;
**a** seconds of latency of one collective; **r** rows of the work; **h** the size at which one dim alone halves the rate of
a matrix product (see `costmodel.compute`).

With c chunks, chunk i communicates while chunk i + 1 is computed (ATP's chunks, Tensor3D's overdecomposition): the longer
of the two is what it takes, and of the other one chunk sticks out, the pipeline's filling. A chunk's product is smaller and
so slower, and every chunk pays its latency.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import sympy

from .formula import Number, compile_formula

__all__ = ["COMMUNICATING", "COMPUTING", "PIPELINE", "C", "M", "a", "best_chunks", "c", "h", "r", "seconds"]

C, M, a, h = sympy.symbols("C M a h", nonnegative=True)
c, r = sympy.symbols("c r", positive=True)

COMPUTING: sympy.Expr = C * (1 + h * c / r) / (1 + h / r)
"""Seconds of computing in c chunks of r / c rows."""

COMMUNICATING: sympy.Expr = M + c * a
"""Seconds of communicating in c chunks."""

PIPELINE: sympy.Expr = sympy.Max(COMPUTING, COMMUNICATING) + sympy.Min(COMPUTING, COMMUNICATING) / c
"""Seconds of both."""


def seconds(
    compute: Number, moving: Number, latency: Number, chunks: Number, *, rows: Number = 1.0, half: float = 0.0
) -> Number:
    """``PIPELINE`` with numbers.

    Args:
        compute: seconds of computing it whole.
        moving: seconds of its communication whole, without latency.
        latency: seconds of one collective of no bytes.
        chunks: how many.
        rows: of the work.
        half: see `costmodel.Device.half_size`.
    """
    return _compiled()(compute, moving, latency, chunks, rows, half)


def best_chunks(
    compute: Number, moving: Number, latency: Number, choices: tuple[int, ...], *, rows: Number = 1.0, half: float = 0.0
) -> tuple[int, float]:
    """The number of chunks that takes the least time, and that time in seconds; the fewest of those that are equal."""
    times = {n: float(seconds(compute, moving, latency, n, rows=rows, half=half)) for n in choices}
    best = min(choices, key=lambda n: (times[n], n))
    return best, times[best]


@functools.cache
def _compiled() -> Callable[..., Number]:
    return compile_formula((C, M, a, c, r, h), PIPELINE)
