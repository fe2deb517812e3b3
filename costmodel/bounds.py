"""A lower bound on the communication of a distributed matrix product.

Symbols: **a**, **b**, **c** the three dims of the product, largest first; **P** devices. Source: Al Daas, Ballard,
Grigori, Kumar, Rouse, "Tight memory-independent parallel matrix multiplication communication lower bounds", SPAA 2022,
arXiv 2205.13407, theorem 3: at least one device must access this number of elements of the three matrices together. It may
own one P-th of each matrix from the start. The bound assumes that each device starts with one P-th of each operand and ends
with one P-th of the result; a plan that stores copies of a matrix may communicate less.
"""

from __future__ import annotations

import sympy

from .formula import Number, compile_formula

__all__ = ["ACCESSED", "OWNED", "P", "a", "b", "c", "matmul_elements"]

a, b, c, P = sympy.symbols("a b c P", positive=True)

ACCESSED: sympy.Expr = sympy.Piecewise(
    ((a * b + a * c) / P + b * c, a >= P * b),
    (2 * sympy.sqrt(a * b * c**2 / P) + a * b / P, a * b >= P * c**2),
    (3 * (a * b * c / P) ** sympy.Rational(2, 3), True),
)
"""Elements that at least one device must access; in the three cases, one, two or three dims of the device grid exceed 1."""

OWNED: sympy.Expr = (a * b + a * c + b * c) / P
"""Elements that each device owns."""

_received = ACCESSED - OWNED


def matmul_elements(m: Number, k: Number, n: Number, devices: Number) -> Number:
    """The number of elements that at least one device must receive or send in an m x k by k x n product.

    It is the same for each of the two products of the backward pass, which permute m, k and n.

    Args:
        m, k, n: dims of the product, in any order.
        devices: the number of devices that take part.

    Returns:
        elements; 0 on one device.
    """
    smallest, middle, largest = sorted((m, k, n))
    return max(0.0, float(compile_formula((a, b, c, P), _received)(largest, middle, smallest, devices)))
