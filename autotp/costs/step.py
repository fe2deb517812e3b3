"""A step: its moments, and its seconds, grouped by what may hide them."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from autotp.costs.price import Price
from autotp.plans.planned_operator import Predicted
from costmodel import overlap

__all__ = ["Moment", "Pass", "Sums", "Turn"]


class Turn(enum.IntEnum):
    """The turns of an operator: it runs, the gradients of its results arrive, or its backward pass runs."""

    FORWARD = 0
    ARRIVAL = 1
    BACKWARD = 2


class Moment(NamedTuple):
    """A moment of a step: a turn of the operator with the number ``at``."""

    at: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass on each device, grouped by what may hide them (see `costmodel.overlap`).

    Attributes:
        compute: seconds of computation.
        activations: seconds of communication of activations or their gradients.
        parameters: seconds of communication of parameters or their gradients.
        contended_activations, contended_parameters: the part of these that takes compute time from the device.
        levels: seconds of all communication on each level of the network, innermost first.
    """

    compute: float = 0.0
    activations: float = 0.0
    parameters: float = 0.0
    contended_activations: float = 0.0
    contended_parameters: float = 0.0
    levels: tuple[float, ...] = ()

    def and_so_often(self, other: Pass, times: float) -> Pass:
        """The sum of this pass and ``times`` times another one."""
        *mine, levels = astuple(self)
        *its, others = astuple(other)
        sums = (one + times * more for one, more in zip(mine, its, strict=True))
        occupied = (one + times * more for one, more in itertools.zip_longest(levels, others, fillvalue=0.0))
        return Pass(*sums, tuple(occupied))  # type: ignore[call-arg]

    def plus(self, figures: Sequence[float], *, parameter: bool) -> Pass:
        """The sum of this pass and one of a `Price`; ``parameter``: whether that moves a parameter or its gradient."""
        compute, communication, contended, *levels = figures
        every = tuple(mine + more for mine, more in itertools.zip_longest(self.levels, levels, fillvalue=0.0))
        found = replace(self, compute=self.compute + compute, levels=every)
        if parameter:
            more, taken = self.parameters + communication, self.contended_parameters + contended
            return replace(found, parameters=more, contended_parameters=taken)
        more, taken = self.activations + communication, self.contended_activations + contended
        return replace(found, activations=more, contended_activations=taken)

    def sides(self, depth: int, chunks: int, hidden: float) -> tuple[float, ...]:
        """Seconds of the pass if the device limits it, and if each level of the network does."""
        seconds = self.compute, self.activations, self.parameters, hidden
        shares = (
            self.contended_activations / self.activations if self.activations else 0.0,
            self.contended_parameters / self.parameters if self.parameters else 0.0,
        )
        return tuple(map(float, overlap.sides(*seconds, depth, chunks, shares, self.levels)))


@dataclass(frozen=True, slots=True)
class Sums:
    """Seconds of a step on each device, grouped by what may hide them (see `costmodel.overlap`).

    Attributes:
        forward, backward: the passes, summed over all micro-batches.
        depth: the number of operators with a weight.
        chunks: the number of chunks; 1 without chunks.
        hidden: seconds of communication of activations that other chunks hide, in both passes.
        accumulate: the number of micro-batches of the step.
        reductions: the part of the backward pass that only the last of several micro-batches has.
        update: seconds of the optimizer's step, which follows the last backward pass.
        host: seconds in which the host launches the step's kernels.
    """

    forward: Pass
    backward: Pass
    depth: int
    chunks: int = 1
    hidden: float = 0.0
    accumulate: int = 1
    reductions: Pass = Pass()
    update: float = 0.0
    host: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of computation, with the optimizer's step."""
        return self.forward.compute + self.backward.compute + self.update

    @property
    def activations(self) -> float:
        """Seconds of communication of activations and their gradients."""
        return self.forward.activations + self.backward.activations

    @property
    def parameters(self) -> float:
        """Seconds of communication of parameters and their gradients."""
        return self.forward.parameters + self.backward.parameters

    @property
    def communication(self) -> float:
        """Seconds of communication."""
        return self.activations + self.parameters

    @property
    def sides(self) -> tuple[tuple[float, ...], ...]:
        """For each pass, the seconds if the device limits it, and if each level of the network does.

        With several micro-batches: for all forward passes, for all backward passes but the last, and for the last. The
        last entry is that of the optimizer's step.
        """
        share = self.hidden / self.activations if self.activations else 0.0
        passes = [self.forward, self.backward]
        if self.accumulate > 1:
            one = Pass().and_so_often(self.backward.and_so_often(self.reductions, -1), 1 / self.accumulate)
            passes[1:] = [Pass().and_so_often(one, self.accumulate - 1), one.and_so_often(self.reductions, 1)]
        return (*(each.sides(self.depth, self.chunks, share * each.activations) for each in passes), (self.update,))

    def at_least(self, chunks: int) -> Sums:
        """The sums in ``chunks`` chunks of the whole batch, in the best case: no additional work, all of it in chunks."""
        hidden = float(overlap.hidden_by_batch(self.activations, self.depth, chunks))
        return replace(self, chunks=chunks, hidden=hidden)

    @property
    def passes(self) -> tuple[Pass, Pass]:
        """Both passes."""
        return self.forward, self.backward

    def plus(self, price: Price, *, parameter: bool = False, times: int = 1) -> Sums:
        """These sums plus ``times`` times a price; ``parameter``: whether that moves a parameter or its gradient."""
        forward, backward = price.times(times).passes
        return replace(
            self,
            forward=self.forward.plus(forward, parameter=parameter),
            backward=self.backward.plus(backward, parameter=parameter),
        )

    def reducing(self, price: Price, times: int = 1) -> Sums:
        """Mark ``times`` times a price, already counted, as paid in the backward pass of the last micro-batch only."""
        _, backward = price.times(times).passes
        return replace(self, reductions=self.reductions.plus(backward, parameter=True))

    def step(self, hides: bool) -> float:
        """Seconds of a step that never waits for the host; ``hides``: whether communication overlaps with computation."""
        return sum(map(max, self.sides)) if hides else self.compute + self.communication

    def seconds(self, hides: bool) -> float:
        """Seconds of a step, with waits for the host. For equal kernels, they increase with ``step``."""
        return overlap.hosted(self.step(hides), self.host)

    def predicted(self, hides: bool, memory_bytes: float) -> Predicted:
        """The prediction of a step that a plan reports."""
        step, seconds = self.step(hides), self.seconds(hides)
        exposed = max(step - self.compute, 0.0)  # rounding may make it negative
        times = seconds, self.compute, self.communication, exposed
        return Predicted(*times, memory_bytes, self.update, seconds - step)
