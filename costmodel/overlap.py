"""What a step takes when its communication goes on while something is computed.

A step is two passes, one after the other: nothing of the backward pass, in which gradients travel, begins before the
forward pass has ended. Symbols, each of one pass: **C** seconds of computing; **A** seconds of communication that moves
activations or their gradients, which what follows has to wait for; **P** seconds of communication that moves parameters or
their gradients, which may come early or late within the pass; **D** operators with a weight, the depth of the model; **c**
chunks in which devices work; **H** seconds of A that other chunks hide; **k** and **j** the shares of A and of P that take
the processors' time (`costmodel.Level.contention`, each second by the level that it is spent on).

Either the processors are what limits, and wait for the first parameters and for what nothing hides (``DEVICE``), or the
network is, and waits for the first thing to send (``NETWORK``): the pipeline's filling. Without chunks all activations are
waited for, H = 0. With chunks of the whole batch (Tensor3D's overdecomposition) one chunk communicates while another
computes, all the time but for the filling of one pipeline (``BATCH``). Chunks of the rows of single products (ATP) have a
pipeline in every product, which hides no more than the product takes: of its **a** seconds of communication and **w**
seconds of work the shorter, but for one chunk (``ROWS``).

    PASS = max(DEVICE, NETWORK) = max over 0 <= mu <= 1 of  mu DEVICE + (1 - mu) NETWORK

and a step takes as long as both passes. So the least of any such weighted sum over all plans, which the planner's integer
program finds for a mu of each pass, is below the step of every plan (Lagrange), and the greatest of them is the bound that
a plan is proven optimal by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import sympy

from .formula import Number, compile_formula

__all__ = [
    "BATCH",
    "DEVICE",
    "LATENCY_SHARE",
    "MERGED",
    "MESSAGES",
    "NETWORK",
    "PASS",
    "ROWS",
    "A",
    "C",
    "D",
    "H",
    "P",
    "T",
    "Weight",
    "Weights",
    "a",
    "c",
    "hidden_by_batch",
    "hidden_by_rows",
    "j",
    "k",
    "merged",
    "messages",
    "s",
    "sides",
    "t0",
    "w",
    "weights",
]

C, A, P, H, a, w, k, j, s, T, t0 = sympy.symbols("C A P H a w k j s T t0", nonnegative=True)
D, c = sympy.symbols("D c", positive=True)

DEVICE: sympy.Expr = C + k * A + j * P + (1 - k) * (A - H) + (1 - j) * P / D
"""Seconds of a pass that its processors limit."""

NETWORK: sympy.Expr = A + P + C / (D * c)
"""Seconds of a pass that the network limits."""

BATCH: sympy.Expr = sympy.Piecewise((A * (1 - 1 / (c * D)), c > 1), (0, True))
"""H for chunks of the whole batch, in seconds."""

ROWS: sympy.Expr = (1 - 1 / c) * sympy.Min(a, w)
"""What chunks of one product add to H, in seconds."""

PASS: sympy.Expr = sympy.Max(DEVICE, NETWORK)
"""Seconds of a pass."""

LATENCY_SHARE = 0.2
"""Collectives that wait for nobody travel together until their latency is this share of their time."""

MERGED: sympy.Expr = sympy.Min(T, sympy.Max((T - t0) / (1 - LATENCY_SHARE), T - t0 + s * t0))
"""Seconds of a collective that may travel with others: **T** seconds by itself, **t0** of them without any bytes; it is the
share **s** of all that may travel so, which takes one message at least."""

MESSAGES: sympy.Expr = sympy.Max(1, sympy.sqrt((1 - k) * (T - t0) / t0))
"""In how many messages something is sent best: **T** seconds in one, **t0** of them without any bytes, of which the share
**k** takes the processors' time. In n messages it takes n t0 + T - t0, and is waited for while the last is under way: for
(1 - k) (T - t0) / n seconds that could have been hidden. The sum of both is least at this n."""


@dataclass(frozen=True, slots=True)
class Weight:
    """What a second of each kind counts in a weighted sum over one pass; all 1: nothing is hidden.

    Attributes:
        compute: of computing.
        activations: of communication that moves activations and their gradients.
        parameters: of communication that moves parameters and their gradients, and takes nothing of the processors' time.
            What takes all of it hides no more than activations do.
    """

    compute: float = 1.0
    activations: float = 1.0
    parameters: float = 1.0

    def of_parameters(self, contention: float) -> float:
        """What a second counts in which parameters move, by the share of it that takes the processors' time."""
        return (1 - contention) * self.parameters + contention * self.activations


@dataclass(frozen=True, slots=True)
class Weights:
    """What a second of either pass counts."""

    forward: Weight = Weight()
    backward: Weight = Weight()


def sides(
    compute: Number,
    activations: Number,
    parameters: Number,
    hidden: Number,
    depth: Number,
    chunks: Number,
    contention: tuple[Number, Number],
) -> tuple[Number, Number]:
    """(``DEVICE``, ``NETWORK``) of one pass with numbers.

    Args:
        compute, activations, parameters: seconds, of all chunks together.
        hidden: seconds of activations' communication that other chunks hide.
        depth: operators with a weight.
        chunks: how many; 1 for none.
        contention: the symbols k and j.

    Returns:
        Seconds; the pass takes the greater.
    """
    numbers = compute, activations, parameters, hidden, depth, chunks, *contention
    return _compiled(DEVICE)(*numbers), _compiled(NETWORK)(*numbers)


def hidden_by_batch(activations: Number, depth: Number, chunks: Number) -> Number:
    """``BATCH`` with numbers."""
    return _compiled(BATCH)(0.0, activations, 0.0, 0.0, depth, chunks, 0.0, 0.0)


def hidden_by_rows(communication: Number, work: Number, chunks: Number) -> Number:
    """``ROWS`` with numbers: of one product's seconds of communication and of work."""
    return _rows()(communication, work, chunks)


def merged(alone: Number, latency: Number, share: Number) -> Number:
    """``MERGED`` with numbers."""
    return _merged()(alone, latency, share)


def messages(alone: Number, latency: Number, contention: Number) -> Number:
    """``MESSAGES`` with numbers."""
    return _messages()(alone, latency, contention)


def weights(shares: tuple[float, float], depth: float) -> Weights:
    """Those of ``share`` DEVICE + (1 - ``share``) NETWORK, without chunks, with a share for either pass."""
    forward, backward = (Weight(mu + (1 - mu) / depth, 1.0, mu / depth + (1 - mu)) for mu in shares)
    return Weights(forward, backward)


@functools.cache
def _compiled(expression: sympy.Expr) -> Callable[..., Number]:
    return compile_formula((C, A, P, H, D, c, k, j), expression)


@functools.cache
def _merged() -> Callable[..., Number]:
    return compile_formula((T, t0, s), MERGED)


@functools.cache
def _messages() -> Callable[..., Number]:
    return compile_formula((T, t0, k), MESSAGES)


@functools.cache
def _rows() -> Callable[..., Number]:
    return compile_formula((a, w, c), ROWS)
