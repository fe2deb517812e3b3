"""Compiling sympy expressions once and evaluating them in bulk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import sympy
from sympy.printing.numpy import NumPyPrinter

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
    # The module's names, such as numpy.where, are then spelt as lambdify's namespace has them.
    printer = _Printer({"fully_qualified_modules": False, "inline": True, "allow_unknown_functions": True})
    compiled = sympy.lambdify(list(symbols), expression, modules="numpy", printer=printer, cse=True)

    def evaluate(*values: Number) -> Number:
        # Converting first keeps Python integers of any size, and integer division, out of the formula.
        arrays = [np.asarray(value, dtype=np.float64) for value in values]
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        result = np.asarray(compiled(*arrays), dtype=np.float64)
        if not shape:
            return float(result)
        return result if result.shape == shape and result.base is None else np.broadcast_to(result, shape).copy()

    return evaluate


class _Printer(NumPyPrinter):
    """Least and greatest of arguments that broadcast, which numpy's amin of a list does not."""

    def _print_Min(self, expr: sympy.Min) -> str:
        return self._nested("minimum", expr.args)

    def _print_Max(self, expr: sympy.Max) -> str:
        return self._nested("maximum", expr.args)

    def _nested(self, name: str, args: Sequence[sympy.Expr]) -> str:
        text = self._print(args[0])
        for arg in args[1:]:
            text = f"{self._module_format(f'numpy.{name}')}({text}, {self._print(arg)})"
        return text
