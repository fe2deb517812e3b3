"""Compiling sympy expressions once and evaluating them in bulk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import sympy

__all__ = ["Number", "compile_formula"]

Number = float | np.ndarray
"""One value, or one per row of a table of candidates."""


def compile_formula(symbols: Sequence[sympy.Symbol], expression: sympy.Expr) -> Callable[..., Number]:
    """Turns an expression into a vectorised function, common subexpressions shared.

    Args:
        symbols: the function's arguments in order.
        expression: holds no other free symbols.

    Returns:
        A function of numbers or numpy arrays that broadcast together. It gives a float where all arguments
        are numbers and a float64 array otherwise, also where the expression is constant.

    Raises:
        ValueError: ``expression`` has a free symbol that is not among ``symbols``.
    """
    stray = expression.free_symbols - set(symbols)
    if stray:
        raise ValueError(f"formula {expression}: symbols {sorted(map(str, stray))} are not among its arguments")
    compiled = sympy.lambdify(list(symbols), expression, modules="numpy", cse=True)

    def evaluate(*values: Number) -> Number:
        # Converting first keeps Python integers of any size, and integer division, out of the formula.
        arrays = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in values))
        result = np.asarray(compiled(*arrays), dtype=np.float64)
        return float(result) if arrays[0].ndim == 0 else np.broadcast_to(result, arrays[0].shape).copy()

    return evaluate
