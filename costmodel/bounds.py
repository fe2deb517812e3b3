"""How little communication a distributed matrix product needs at least.

Symbols: **a**, **b**, **c** the three dims of the product, largest first; **P** processors. Source: Al Daas, Ballard,
Grigori, Kumar, Rouse, "Tight memory-independent parallel matrix multiplication communication lower bounds", SPAA 2022,
arXiv 2205.13407, theorem 3: some processor must access so many elements of the three matrices together, of which it may
own a P-th share from the start. Each processor starts with one P-th of each operand and ends with one P-th of the result;
a plan that keeps copies of a matrix at rest may stay below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import sympy

from .formula import Number, compile_formula

__all__ = ["ACCESSED", "OWNED", "P", "a", "b", "c", "matmul_elements"]

a, b, c, P = sympy.symbols("a b c P", positive=True)

ACCESSED: sympy.Expr = sympy.Piecewise(
    ((a * b + a * c) / P + b * c, a >= P * b),
    (2 * sympy.sqrt(a * b * c**2 / P) + a * b / P, a * b >= P * c**2),
    (3 * (a * b * c / P) ** sympy.Rational(2, 3), True),
)
"""Elements that some processor must access: one, two or three dims of the processor grid are above 1."""

OWNED: sympy.Expr = (a * b + a * c + b * c) / P
"""Elements that each processor owns."""


def matmul_elements(m: Number, k: Number, n: Number, devices: Number) -> Number:
    """The least number of elements that some device must receive or send in an m x k by k x n product.

    The same for each of the two products of the backward pass, which permute m, k and n.

    Args:
        m, k, n: dims of the product, in any order.
        devices: processors that take part.

    Returns:
        elements; 0 on one device.
    """
    smallest, middle, largest = sorted((m, k, n))
    return max(0.0, float(_compiled()(largest, middle, smallest, devices)))


@functools.cache
def _compiled() -> Callable[..., Number]:
    return compile_formula((a, b, c, P), ACCESSED - OWNED)
