"""Compiling sympy expressions once and evaluating them in bulk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import sympy
from sympy.printing.numpy import NumPyPrinter

__all__ = ["Number", "compile_formula"]

Number = float | np.ndarray
"""One value, or an array with one value per candidate."""


def compile_formula(symbols: Sequence[sympy.Symbol], expression: sympy.Expr) -> Callable[..., Number]:
    """Compiles an expression to a vectorised function that shares common subexpressions; once for equal arguments.

    Args:
        symbols: the function's arguments in order.
        expression: an expression without other free symbols.

    Returns:
        A function of numbers or numpy arrays that broadcast together. It returns a float if all arguments
        are numbers, and a float64 array otherwise, even if the expression is constant.

    Raises:
        ValueError: ``expression`` has a free symbol that is not among ``symbols``.
    """
    return _compiled(tuple(symbols), expression)


@functools.cache
def _compiled(symbols: tuple[sympy.Symbol, ...], expression: sympy.Expr) -> Callable[..., Number]:
    stray = expression.free_symbols - set(symbols)
    if stray:
        raise ValueError(f"formula {expression}: symbols {sorted(map(str, stray))} are not among its arguments")
    # Without qualified names, functions such as numpy.where are printed as in lambdify's namespace.
    printer = _Printer({"fully_qualified_modules": False, "inline": True, "allow_unknown_functions": True})
    compiled = sympy.lambdify(list(symbols), expression, modules="numpy", printer=printer, cse=True)

    def evaluate(*values: Number) -> Number:
        # Converting first avoids Python's unbounded integers, and integer division, in the formula.
        arrays = [np.asarray(value, dtype=np.float64) for value in values]
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        result = np.asarray(compiled(*arrays), dtype=np.float64)
        if not shape:
            return float(result)
        return result if result.shape == shape and result.base is None else np.broadcast_to(result, shape).copy()

    return evaluate


class _Printer(NumPyPrinter):
    """Prints Min and Max as nested numpy.minimum and numpy.maximum, which broadcast; amin of a list does not."""

    def _print_Min(self, expr: sympy.Min) -> str:
        return self._nested("minimum", expr.args)

    def _print_Max(self, expr: sympy.Max) -> str:
        return self._nested("maximum", expr.args)

    def _nested(self, name: str, args: Sequence[sympy.Expr]) -> str:
        text = self._print(args[0])
        for arg in args[1:]:
            text = f"{self._module_format(f'numpy.{name}')}({text}, {self._print(arg)})"
        return text
