"""The time of a step whose communication overlaps with computation.

A step consists of two passes, one after the other: no gradient is communicated before the forward pass has ended.
Symbols, for one pass each: **C** seconds of computation; **A** seconds of communication of activations or their gradients,
which the next operator waits for; **P** seconds of communication of parameters or their gradients, which may be early or
late within the pass; **N** seconds of both on one level of the network; **D** the number of operators with a weight, the
depth of the model; **c** the number of chunks; **H** seconds of A that other chunks hide; **k** and **j** the shares of A
and P that take device time (`costmodel.Level.contention` of the level on which each second is spent).

A pass is limited either by the devices, which also wait for the first parameters, or for a share of them all (``LOST``),
and for communication that nothing hides (``DEVICE``), or by a level of the network, which also waits until there is
something to send (``NETWORK``). Levels work concurrently: communication within nodes does not delay communication between
them. Without chunks, all communication of activations is exposed, and H = 0. With chunks of the whole batch (Tensor3D's
overdecomposition), one chunk communicates while another computes, except while one pipeline fills (``BATCH``). Chunks of
the rows of single products (ATP) form a pipeline in every product, which hides at most the shorter of its **a** seconds of
communication and **w** seconds of work, except for one chunk (``ROWS``). In chunks, a pass takes longer than that by a
factor (``CHUNKED``).

    PASS = max(DEVICE, NETWORK of each level) = max over mu >= 0 of  mu_0 DEVICE + sum of mu_l NETWORK_l,  sum of mu = 1

A step takes the sum of both passes. With several micro-batches, whose gradients are reduced once, it takes both passes of
each of them, and only the last backward pass has the reductions in P and N. For any mu, the minimum of this weighted sum
over all plans, which the planner's integer program computes, is therefore a lower bound of the step time of every plan
(Lagrangian relaxation). The largest of these bounds proves that a plan is optimal.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import sympy

from .collectives import V, n
from .formula import Number, compile_formula

__all__ = [
    "BATCH",
    "CHUNKED",
    "COPIED",
    "DEVICE",
    "LATENCY_SHARE",
    "LOST",
    "MARGIN",
    "MERGED",
    "MESSAGES",
    "NETWORK",
    "PASS",
    "ROWS",
    "A",
    "C",
    "D",
    "G",
    "H",
    "HOSTED",
    "N",
    "P",
    "S",
    "T",
    "Weight",
    "Weights",
    "a",
    "c",
    "copied",
    "hidden_by_batch",
    "hidden_by_rows",
    "hosted",
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

C, A, P, N, H, a, w, k, j, s, T, t0, S, G = sympy.symbols("C A P N H a w k j s T t0 S G", nonnegative=True)
D, c = sympy.symbols("D c", positive=True)
_PASS = (C, A, P, N, H, D, c, k, j)

LOST = 0.1
"""The share of the parameters' hideable communication that is exposed nevertheless, because schedules are based on
predictions and ranks are not perfectly in step. Without it, plans would communicate more for a gain that does not occur."""

MARGIN = 0.08
"""The share of the time of a step with chunks that the formulas omit: more and smaller kernels and messages, in more
orders. In docs/overlap.md, chunks with a smaller predicted gain are often slower. This margin prevents their choice."""

CHUNKED: sympy.Expr = sympy.Piecewise((1 / (1 - MARGIN), c > 1), (1.0, True))
"""The factor by which ``MARGIN`` makes a pass with chunks longer."""

DEVICE: sympy.Expr = CHUNKED * (C + k * A + j * P + (1 - k) * (A - H) + (1 - j) * P * sympy.Max(1 / D, LOST))
"""Seconds of a pass that is limited by the devices."""

NETWORK: sympy.Expr = CHUNKED * (N + C / (D * c))
"""Seconds of a pass that is limited by a level of the network."""

BATCH: sympy.Expr = sympy.Piecewise((A * (1 - 1 / (c * D)), c > 1), (0, True))
"""H for chunks of the whole batch, in seconds."""

ROWS: sympy.Expr = (1 - 1 / c) * sympy.Min(a, w)
"""The contribution of one product's chunks to H, in seconds."""

PASS: sympy.Expr = sympy.Max(DEVICE, NETWORK)
"""Seconds of a pass, with N of the level with the most communication."""

HOSTED: sympy.Expr = sympy.sqrt(S**2 + G**2)
"""Seconds of a step whose passes take **S** if they never wait for the host, which needs **G** to launch all kernels. The
host runs ahead during long kernels, and the device waits for it during short ones, so neither hides all of the other. The
form is fitted: of (S^p + G^p)^(1/p), p = 2.2 fits Megatron-LM's runs on A100s best (docs/published.md), and 2 is used; a
maximum, p = infinity, is up to a third off. It grows with S, so of plans with equal kernels, the one with the least S is
fastest."""

LATENCY_SHARE = 0.2
"""The assumed share of latency in the time of messages that merge collectives. With fewer messages (``MESSAGES``) the
share is smaller, but more communication is exposed at the end."""

MERGED: sympy.Expr = sympy.Min(T, sympy.Max((T - t0) / (1 - LATENCY_SHARE), T - t0 + s * t0))
"""Seconds of a collective that may be merged with others: **T** seconds by itself, of which **t0** are independent of its
bytes. **s** is its share of all collectives that may be merged, which take at least one message."""

COPIED: Mapping[str, sympy.Expr] = MappingProxyType(
    {"all_reduce": V, "all_gather": V + V / n, "reduce_scatter": V, "all_to_all": 2 * V}
)
"""Bytes of **V** on one of **n** devices that are copied if collectives are merged: into the message, and out of it. The
result of an all_reduce or a reduce_scatter is read in place. A gather along a dim other than the first one needs a copy
even if it is not merged; the formula does not distinguish this case."""

MESSAGES: sympy.Expr = sympy.Max(1, sympy.sqrt((1 - k) * (T - t0) / t0))
"""The best number of messages for communication that takes **T** seconds in one message, of which **t0** are independent of
its bytes, and of which the share **k** takes device time. n messages take n t0 + T - t0 seconds, and the last of them is
exposed: (1 - k) (T - t0) / n seconds that could have been hidden. The sum of both is smallest for this n."""


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of each kind of time in a weighted sum over one pass; with weights of 1, nothing is hidden.

    Attributes:
        compute: the weight of computation.
        activations: the weight of communication of activations and their gradients.
        parameters: the weight of communication of parameters and their gradients that takes no device time.
        levels: the additional weight of all communication on each level of the network.
        taken: the weight of communication that takes device time; None: that of ``activations``.
    """

    compute: float = 1.0
    activations: float = 1.0
    parameters: float = 1.0
    levels: tuple[float, ...] = ()
    taken: float | None = None

    def of(self, spent: np.ndarray, *, parameter: bool) -> np.ndarray:
        """The weighted seconds of communication.

        Args:
            spent: ``[2 + levels, ...]``: seconds of communication, the part that takes device time, the part on each level.
            parameter: whether it moves parameters or their gradients.
        """
        seconds, taken, *levels = spent
        rest = self.parameters if parameter else self.activations
        device = rest * (seconds - taken) + (self.activations if self.taken is None else self.taken) * taken
        return np.asarray(sum((mu * level for mu, level in zip(self.levels, levels, strict=False) if mu), start=device))

    def mean(self, other: Weight, count: int) -> Weight:
        """The mean of this weight, ``count - 1`` times, and another one."""

        def of(mine: float, its: float) -> float:
            return ((count - 1) * mine + its) / count

        kinds = (
            of(self.compute, other.compute),
            of(self.activations, other.activations),
            of(self.parameters, other.parameters),
        )
        levels = itertools.zip_longest(self.levels, other.levels, fillvalue=0.0)
        taken = None if self.taken is None or other.taken is None else of(self.taken, other.taken)
        return Weight(*kinds, tuple(itertools.starmap(of, levels)), taken)


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of both passes.

    Attributes:
        forward, backward: the weights of either pass, on average over all micro-batches.
        last: the weights of the backward pass of the last micro-batch, if there are several; it reduces the gradients.
        update: the weight of the optimizer's step, which hides nothing.
    """

    forward: Weight = Weight()
    backward: Weight = Weight()
    last: Weight | None = None
    update: float = 1.0

    @property
    def reductions(self) -> Weight:
        """The weights of the reductions of parameters' gradients."""
        return self.backward if self.last is None else self.last


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
    """Evaluates (``DEVICE``, ``NETWORK`` of each level) for one pass.

    Args:
        compute, activations, parameters: seconds, for all chunks together.
        hidden: seconds of the activations' communication that other chunks hide.
        depth: the number of operators with a weight.
        chunks: the number of chunks; 1 without chunks.
        contention: the symbols k and j.
        levels: seconds of communication on each level; None for a single level.

    Returns:
        Seconds; the pass takes the largest of them.
    """
    device = compile_formula(_PASS, DEVICE)(compute, activations, parameters, 0.0, hidden, depth, chunks, *contention)
    occupied = [activations + parameters] if levels is None else levels
    networks = (compile_formula(_PASS, NETWORK)(compute, 0.0, 0.0, one, 0.0, depth, chunks, 0.0, 0.0) for one in occupied)
    return device, *networks


def hidden_by_batch(activations: Number, depth: Number, chunks: Number) -> Number:
    """Evaluates ``BATCH``."""
    return compile_formula(_PASS, BATCH)(0.0, activations, 0.0, 0.0, 0.0, depth, chunks, 0.0, 0.0)


def hidden_by_rows(communication: Number, work: Number, chunks: Number) -> Number:
    """Evaluates ``ROWS`` for one product's seconds of communication and of work."""
    return compile_formula((a, w, c), ROWS)(communication, work, chunks)


def hosted(passes: float, host: float) -> float:
    """Evaluates ``HOSTED``; exactly ``passes`` if ``host`` is 0."""
    return float(compile_formula((S, G), HOSTED)(passes, host)) if host else passes


def merged(alone: Number, latency: Number, share: Number) -> Number:
    """Evaluates ``MERGED``."""
    return compile_formula((T, t0, s), MERGED)(alone, latency, share)


def copied(kind: str, ways: Number, volume: Number) -> Number:
    """Evaluates ``COPIED``: bytes, each of which is read and written."""
    return compile_formula((n, V), COPIED[kind])(ways, volume)


def messages(alone: Number, latency: Number, contention: Number) -> Number:
    """Evaluates ``MESSAGES``."""
    return compile_formula((T, t0, k), MESSAGES)(alone, latency, contention)


def weights(shares: Sequence[Sequence[float]], depth: float, accumulate: int = 1, chunks: int = 1) -> Weights:
    """The weights of a weighted sum of the ``sides``.

    With chunks, it is a lower bound: all that can be divided into chunks is, and costs nothing more than ``CHUNKED``.

    Args:
        shares: for each pass, the mu of DEVICE and of each level's NETWORK, whose sum is 1. With several micro-batches, the
            backward passes of all but the last, and that of the last one, which reduces gradients, have their own. The last
            entry is that of the optimizer's step, which has one side.
        depth: the number of operators with a weight.
        accumulate: the number of micro-batches of a step.
        chunks: the number of chunks; the sides of a step with 2 to this number of chunks are not smaller.
    """
    factor = float(CHUNKED.subs(c, chunks))
    exposed = 1.0 if chunks == 1 else 1 / (chunks * depth)
    *passes, (update,) = shares
    forward, backward, *last = (
        Weight(
            factor * (device + sum(levels) / (depth * chunks)),
            factor * device * exposed,
            factor * device * max(1 / depth, LOST),
            tuple(factor * level for level in levels),
            factor * device,
        )
        for device, *levels in passes
    )
    if not last:
        return Weights(forward, backward, update=update)
    return Weights(forward, backward.mean(last[0], accumulate), last[0], update)
