"""Closed forms of the communication of known schemes: elements that each device receives, forward and backward.

The planner does not use them, since costs follow from layouts; they are compared with the counted traffic of rewritten
graphs. Symbols, for a product C[m,n] = A[m,k] B[k,n]: **m**, **k**, **n** its dims; **q** the parts of rows and of columns,
**d** depth; for Tensor3D **q** the parts of n and **p** the parts of k. All collectives are rings.

Sources: Tensor3D, arXiv 2305.13525, section 4 (with z = 1, summed over a whole layer); SUMMA2.5-LM / Tesseract, arXiv
2105.14500, and Optimus, arXiv 2104.05343: A and B are communicated in the forward pass, A, B, dA and dB in the backward
pass, and dB is all-reduced over depth; 3D, arXiv 2105.14450: A and B are gathered and C is reduce-scattered; the backward
pass gathers dC, A and B and reduce-scatters dA and dB.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import sympy

__all__ = ["LAYER", "LINEAR", "d", "h", "k", "m", "n", "p", "q"]

m, k, n, h, p, q, d = sympy.symbols("m k n h p q d", positive=True)

_gather = (q - 1) / q

LINEAR: Mapping[str, sympy.Expr] = MappingProxyType(
    {
        "tensor3d": 2 * (p - 1) / p * m * n / q + 2 * (q - 1) / q * m * k / p,
        "tesseract-2.5d": 3 * _gather * (m * k / (d * q) + k * n / q) + 2 * (d - 1) / d * k * n / q**2,
        "3d": _gather * (3 * m * k + 3 * k * n + 2 * m * n) / q**2,
    }
)
"""One linear layer, in the symbols m, k, n and q, and p or d."""


def _layer(linear: sympy.Expr, *, swapped: bool = False) -> sympy.Expr:
    """The linear layers of a transformer layer with m tokens and hidden size h: fused QKV, projection, MLP up and down."""
    total = sympy.Integer(0)
    for inputs, outputs, swap in ((h, 3 * h, False), (h, h, True), (h, 4 * h, False), (4 * h, h, True)):
        one = linear.subs({k: inputs, n: outputs}, simultaneous=True)
        total += one.subs({p: q, q: p}, simultaneous=True) if swapped and swap else one
    return sympy.simplify(total)


LAYER: Mapping[str, sympy.Expr] = MappingProxyType(
    {name: _layer(form, swapped=name == "tensor3d") for name, form in LINEAR.items()}
)
"""The linear layers of one transformer layer, in the symbols m, h and q, and p or d."""
