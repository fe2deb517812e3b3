"""A step: its moments, and its seconds by what may hide them."""

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
    """What goes on: an operator runs, the gradients of its results arrive, or its backward pass runs."""

    FORWARD = 0
    ARRIVAL = 1
    BACKWARD = 2


class Moment(NamedTuple):
    """When something is held: at which turn of the operator of this number."""

    at: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one pass on each device, by what may hide them (see `costmodel.overlap`).

    Attributes:
        compute: of computing.
        activations: of communication that moves activations or their gradients.
        parameters: of communication that moves parameters or their gradients.
        contended_activations, contended_parameters: those of them that take compute time from the device.
        levels: of either communication on each level of the network, innermost first.
    """

    compute: float = 0.0
    activations: float = 0.0
    parameters: float = 0.0
    contended_activations: float = 0.0
    contended_parameters: float = 0.0
    levels: tuple[float, ...] = ()

    def and_so_often(self, other: Pass, times: float) -> Pass:
        """With another pass, so many times."""
        *mine, levels = astuple(self)
        *its, others = astuple(other)
        sums = (one + times * more for one, more in zip(mine, its, strict=True))
        occupied = (one + times * more for one, more in itertools.zip_longest(levels, others, fillvalue=0.0))
        return Pass(*sums, tuple(occupied))  # type: ignore[call-arg]

    def plus(self, figures: Sequence[float], *, parameter: bool) -> Pass:
        """With a pass of a `Price` more, which moves a parameter or its gradient, or something else."""
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
    """Seconds of a step on each device, by what may hide them (see `costmodel.overlap`).

    Attributes:
        forward, backward: the passes.
        depth: operators with a weight.
        chunks: in how many chunks this is done; 1 for none.
        hidden: seconds of activations' communication that other chunks hide, in both passes.
        accumulate: how many micro-batches the step has; the passes are of all of them together.
        reductions: what of the backward pass the last of several micro-batches does alone.
        update: seconds of the optimizer's step, which follows the last backward pass.
        host: seconds in which the host starts the step's kernels.
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
        """All computing."""
        return self.forward.compute + self.backward.compute + self.update

    @property
    def activations(self) -> float:
        """All communication that moves activations and their gradients."""
        return self.forward.activations + self.backward.activations

    @property
    def parameters(self) -> float:
        """All communication that moves parameters and their gradients."""
        return self.forward.parameters + self.backward.parameters

    @property
    def communication(self) -> float:
        """All communication."""
        return self.activations + self.parameters

    @property
    def sides(self) -> tuple[tuple[float, ...], ...]:
        """Of either pass: seconds if the device limits it, and if each level of the network does.

        With several micro-batches: of all forward passes, of all backward passes but the last, and of the last. At the end
        those of the optimizer's step.
        """
        share = self.hidden / self.activations if self.activations else 0.0
        passes = [self.forward, self.backward]
        if self.accumulate > 1:
            one = Pass().and_so_often(self.backward.and_so_often(self.reductions, -1), 1 / self.accumulate)
            passes[1:] = [Pass().and_so_often(one, self.accumulate - 1), one.and_so_often(self.reductions, 1)]
        return (*(each.sides(self.depth, self.chunks, share * each.activations) for each in passes), (self.update,))

    def at_least(self, chunks: int) -> Sums:
        """What the step would take in chunks that cost nothing, if all can be."""
        hidden = float(overlap.hidden_by_batch(self.activations, self.depth, chunks))
        return replace(self, chunks=chunks, hidden=hidden)

    @property
    def passes(self) -> tuple[Pass, Pass]:
        """Both passes."""
        return self.forward, self.backward

    def plus(self, price: Price, *, parameter: bool = False, times: int = 1) -> Sums:
        """With so many times something of this price, which moves a parameter or its gradient, or something else."""
        forward, backward = price.times(times).passes
        return replace(
            self,
            forward=self.forward.plus(forward, parameter=parameter),
            backward=self.backward.plus(backward, parameter=parameter),
        )

    def reducing(self, price: Price, times: int = 1) -> Sums:
        """With so many times something, counted already, that the last micro-batch does alone in its backward pass."""
        _, backward = price.times(times).passes
        return replace(self, reductions=self.reductions.plus(backward, parameter=True))

    def step(self, hides: bool) -> float:
        """Seconds of a step that never waits for the host, its communication hidden behind computing or not."""
        return sum(map(max, self.sides)) if hides else self.compute + self.communication

    def seconds(self, hides: bool) -> float:
        """Seconds of a step. Of two with equal kernels, the one that is shorter by ``step`` is shorter."""
        return overlap.hosted(self.step(hides), self.host)

    def predicted(self, hides: bool, memory_bytes: float) -> Predicted:
        """What a plan is to say of a step."""
        step, seconds = self.step(hides), self.seconds(hides)
        exposed = max(step - self.compute, 0.0)  # rounding may make it negative
        times = seconds, self.compute, self.communication, exposed
        return Predicted(*times, memory_bytes, self.update, seconds - step)
