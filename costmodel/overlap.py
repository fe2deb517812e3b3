"""What a step takes when its communication goes on while something is computed.

A step is two passes, one after the other: nothing of the backward pass, in which gradients travel, begins before the
forward pass has ended. Symbols, each of one pass: **C** seconds of computing; **A** seconds of communication that moves
activations or their gradients, which what follows has to wait for; **P** seconds of communication that moves parameters or
their gradients, which may come early or late within the pass; **N** seconds of either on one level of the network; **D**
operators with a weight, the depth of the model; **c** chunks in which devices work; **H** seconds of A that other chunks
hide; **k** and **j** the shares of A and of P that take the processors' time (`costmodel.Level.contention`, each second by
the level that it is spent on).

Either the processors are what limits, and wait for the first parameters, or for a share of all (``LOST``), and for what
nothing hides (``DEVICE``), or a level of the network is, and waits for the first thing to send (``NETWORK``): the
pipeline's filling. Levels work at the same time: what goes within nodes does not keep from its way what goes between
them. Without chunks all activations are waited for, H = 0. With chunks of the whole batch (Tensor3D's overdecomposition)
one chunk communicates while another computes, all the time but for the filling of one pipeline (``BATCH``). Chunks of the
rows of single products (ATP) have a pipeline in every product, which hides no more than the product takes: of its **a**
seconds of communication and **w** seconds of work the shorter, but for one chunk (``ROWS``).

    PASS = max(DEVICE, NETWORK of each level) = max over mu >= 0 of  mu_0 DEVICE + sum of mu_l NETWORK_l,  sum of mu = 1

and a step takes as long as both passes. So the least of any such weighted sum over all plans, which the planner's integer
program finds for the mu of either pass, is below the step of every plan (Lagrange), and the greatest of them is the bound
that a plan is proven optimal by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import sympy

from .collectives import V, n
from .formula import Number, compile_formula

__all__ = [
    "BATCH",
    "COPIED",
    "DEVICE",
    "LATENCY_SHARE",
    "LOST",
    "MERGED",
    "MESSAGES",
    "NETWORK",
    "PASS",
    "ROWS",
    "A",
    "C",
    "D",
    "H",
    "N",
    "P",
    "T",
    "Weight",
    "Weights",
    "a",
    "c",
    "copied",
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

C, A, P, N, H, a, w, k, j, s, T, t0 = sympy.symbols("C A P N H a w k j s T t0", nonnegative=True)
D, c = sympy.symbols("D c", positive=True)

LOST = 0.1
"""Of parameters' communication that could be hidden this share is waited for all the same: schedules are made of
predictions, and ranks are not all at the same place. So nothing is moved more often for a gain that is not there."""

DEVICE: sympy.Expr = C + k * A + j * P + (1 - k) * (A - H) + (1 - j) * P * sympy.Max(1 / D, LOST)
"""Seconds of a pass that its processors limit."""

NETWORK: sympy.Expr = N + C / (D * c)
"""Seconds of a pass that a level of the network limits."""

BATCH: sympy.Expr = sympy.Piecewise((A * (1 - 1 / (c * D)), c > 1), (0, True))
"""H for chunks of the whole batch, in seconds."""

ROWS: sympy.Expr = (1 - 1 / c) * sympy.Min(a, w)
"""What chunks of one product add to H, in seconds."""

PASS: sympy.Expr = sympy.Max(DEVICE, NETWORK)
"""Seconds of a pass, N on the level that is occupied longest."""

LATENCY_SHARE = 0.2
"""Collectives that wait for nobody are counted as sent in messages of which latency is this share. In fewer messages
(``MESSAGES``) it may be less, where more is waited for at the end."""

MERGED: sympy.Expr = sympy.Min(T, sympy.Max((T - t0) / (1 - LATENCY_SHARE), T - t0 + s * t0))
"""Seconds of a collective that may travel with others: **T** seconds by itself, **t0** of them without any bytes; it is the
share **s** of all that may travel so, which takes one message at least."""

COPIED: Mapping[str, sympy.Expr] = MappingProxyType(
    {"all_reduce": V, "all_gather": V + V / n, "reduce_scatter": V, "all_to_all": 2 * V}
)
"""Bytes of **V** on one of **n** devices that are copied where collectives travel together: into the message, and out of
it. What an all_reduce or a reduce_scatter gives is read where it lies. What is gathered along another dim than the first is
put together by a copy in any case; that is not told apart here."""

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
        levels: of either communication on each level of the network, besides.
    """

    compute: float = 1.0
    activations: float = 1.0
    parameters: float = 1.0
    levels: tuple[float, ...] = ()

    def of(self, spent: np.ndarray, *, parameter: bool) -> np.ndarray:
        """What communication counts.

        Args:
            spent: ``[2 + levels, ...]`` seconds of it, of those that take the processors' time, and of those on each level.
            parameter: it moves parameters or their gradients.
        """
        seconds, taken, *levels = spent
        rest = self.parameters if parameter else self.activations
        found = rest * (seconds - taken) + self.activations * taken
        return np.asarray(sum((mu * level for mu, level in zip(self.levels, levels, strict=False) if mu), start=found))


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
    levels: Sequence[Number] | None = None,
) -> tuple[Number, ...]:
    """(``DEVICE``, ``NETWORK`` of each level) of one pass with numbers.

    Args:
        compute, activations, parameters: seconds, of all chunks together.
        hidden: seconds of activations' communication that other chunks hide.
        depth: operators with a weight.
        chunks: how many; 1 for none.
        contention: the symbols k and j.
        levels: seconds of communication on each level; None: there is one.

    Returns:
        Seconds; the pass takes the greatest.
    """
    device = _compiled(DEVICE)(compute, activations, parameters, 0.0, hidden, depth, chunks, *contention)
    occupied = [activations + parameters] if levels is None else levels
    networks = (_compiled(NETWORK)(compute, 0.0, 0.0, one, 0.0, depth, chunks, 0.0, 0.0) for one in occupied)
    return device, *networks


def hidden_by_batch(activations: Number, depth: Number, chunks: Number) -> Number:
    """``BATCH`` with numbers."""
    return _compiled(BATCH)(0.0, activations, 0.0, 0.0, 0.0, depth, chunks, 0.0, 0.0)


def hidden_by_rows(communication: Number, work: Number, chunks: Number) -> Number:
    """``ROWS`` with numbers: of one product's seconds of communication and of work."""
    return _rows()(communication, work, chunks)


def merged(alone: Number, latency: Number, share: Number) -> Number:
    """``MERGED`` with numbers."""
    return _merged()(alone, latency, share)


def copied(kind: str, ways: Number, volume: Number) -> Number:
    """``COPIED`` with numbers: bytes, each of which is read and written."""
    return _copied(kind)(ways, volume)


def messages(alone: Number, latency: Number, contention: Number) -> Number:
    """``MESSAGES`` with numbers."""
    return _messages()(alone, latency, contention)


def weights(shares: Sequence[Sequence[float]], depth: float) -> Weights:
    """Those of a weighted sum of the ``sides`` without chunks.

    Args:
        shares: of either pass the mu of DEVICE and of each level's NETWORK, whose sum is 1.
        depth: operators with a weight.
    """
    forward, backward = (
        Weight(device + sum(levels) / depth, device, device * max(1 / depth, LOST), tuple(levels))
        for device, *levels in shares
    )
    return Weights(forward, backward)


@functools.cache
def _compiled(expression: sympy.Expr) -> Callable[..., Number]:
    return compile_formula((C, A, P, N, H, D, c, k, j), expression)


@functools.cache
def _merged() -> Callable[..., Number]:
    return compile_formula((T, t0, s), MERGED)


@functools.cache
def _copied(kind: str) -> Callable[..., Number]:
    return compile_formula((n, V), COPIED[kind])


@functools.cache
def _messages() -> Callable[..., Number]:
    return compile_formula((T, t0, k), MESSAGES)


@functools.cache
def _rows() -> Callable[..., Number]:
    return compile_formula((a, w, c), ROWS)
