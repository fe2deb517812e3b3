"""The time of a loop that fetches one panel while it works on the previous one.

Symbols: **g** seconds to fetch one panel; **w** seconds of work on one panel; **N** panels. Source: the two-stage pipeline;
the first fetch and the last work are exposed, and between them the slower stage determines the time. With N = 1 nothing
overlaps.
"""

from __future__ import annotations

import sympy

from .formula import Number, compile_formula

__all__ = ["PIPELINE", "N", "g", "seconds", "w"]

g, w = sympy.symbols("g w", nonnegative=True)
N = sympy.Symbol("N", positive=True)

PIPELINE: sympy.Expr = g + (N - 1) * sympy.Max(g, w) + w
"""Seconds of the loop in the symbols g, w, N."""


def seconds(fetch: Number, work: Number, panels: Number) -> Number:
    """Seconds of a loop over ``panels`` panels, with ``fetch`` and ``work`` seconds for each."""
    return compile_formula((g, w, N), PIPELINE)(fetch, work, panels)
