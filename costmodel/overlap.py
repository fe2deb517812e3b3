"""What a step takes when its communication goes on while something is computed.

Symbols: **C** seconds of computing; **A** seconds of communication that moves activations and their gradients, which
what follows has to wait for; **P** seconds of communication that moves parameters and their gradients, which may come
early or late; **D** operators with a weight, the depth of the model; **c** chunks in which devices work; **s** into how
many parts the waiting for activations falls, of which one is exposed; **k** the share of communicating that takes the
processors' time (`costmodel.Device.contention`).

Either the processors are what limits, and wait for the first parameters and for what no other chunk hides (``DEVICE``), or
the network is, and waits for the first thing to send (``NETWORK``): the pipeline's filling, as in ATP's chunks and
Tensor3D's overdecomposition. Without chunks s is 1: activations are waited for. Chunks of the rows of single products have
a pipeline in every product, s = c; chunks of the whole batch have one for the whole step, s = c D.

    STEP = max(DEVICE, NETWORK) = max over 0 <= mu <= 1 of  mu DEVICE + (1 - mu) NETWORK

so the least of any of these weighted sums over all plans, which the planner's integer program finds, is below the step of
every plan (Lagrange), and the greatest of them is the bound that a plan is proven optimal by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import sympy

from .formula import Number, compile_formula

__all__ = ["DEVICE", "NETWORK", "STEP", "A", "C", "D", "P", "Weights", "c", "k", "parts", "s", "sides", "weights"]

C, A, P, k = sympy.symbols("C A P k", nonnegative=True)
D, c, s = sympy.symbols("D c s", positive=True)

DEVICE: sympy.Expr = C + k * (A + P) + (1 - k) * (A / s + P / D)
"""Seconds of a step that its processors limit."""

NETWORK: sympy.Expr = A + P + C / (D * c)
"""Seconds of a step that the network limits."""

STEP: sympy.Expr = sympy.Max(DEVICE, NETWORK)
"""Seconds of a step."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a second of each kind counts in a weighted sum; all 1: nothing is hidden."""

    compute: float = 1.0
    activations: float = 1.0
    parameters: float = 1.0


def sides(
    compute: Number,
    activations: Number,
    parameters: Number,
    depth: Number,
    chunks: Number,
    way: str,
    contention: Number,
) -> tuple[Number, Number]:
    """(``DEVICE``, ``NETWORK``) with numbers.

    Args:
        compute, activations, parameters: seconds, of all chunks together.
        depth: operators with a weight.
        chunks: how many; 1 for none.
        way: what is cut, ``batch`` or ``rows``.
        contention: the symbol k.

    Returns:
        Seconds; a step takes the greater.
    """
    device, network = _compiled()
    numbers = compute, activations, parameters, depth, chunks, parts(depth, chunks, way), contention
    return device(*numbers), network(*numbers)


def parts(depth: Number, chunks: Number, way: str) -> Number:
    """The symbol s."""
    return chunks * depth if way == "batch" and chunks > 1 else chunks


def weights(share: float, depth: float, contention: float) -> Weights:
    """Those of ``share`` DEVICE + (1 - share) NETWORK, without chunks."""
    rest = 1.0 - share
    return Weights(share + rest / depth, 1.0, share * (contention + (1 - contention) / depth) + rest)


@functools.cache
def _compiled() -> tuple[Callable[..., Number], Callable[..., Number]]:
    symbols = (C, A, P, D, c, s, k)
    return compile_formula(symbols, DEVICE), compile_formula(symbols, NETWORK)
