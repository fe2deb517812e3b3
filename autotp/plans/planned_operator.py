"""What a plan says of an operator, and of a step."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from costmodel.text.numbers import MOST, figure

__all__ = ["Count", "Figure", "PlannedOperator", "Predicted"]

#: A number as a plan's file may have it: at least 1, or seconds or bytes.
Count = Annotated[int, Field(ge=1, le=MOST)]
Figure = Annotated[float, AfterValidator(functools.partial(figure, what="the figure"))]


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions for one training (or inference) step on each device, in seconds and bytes.

    Attributes:
        step_seconds: the whole step: computing, the communication that nothing hides, and waiting for the host.
        compute_seconds: of computing, in chunks if there are any, with the optimizer's step.
        communication_seconds: of all communication, hidden or not.
        exposed_seconds: of communication that nothing hides.
        memory_bytes: parameters, gradients, optimizer state, saved activations and the largest gathered temporary.
        update_seconds: of the optimizer's step, which is no operator.
        host_seconds: by which the step is longer because the host has to start its kernels.
    """

    step_seconds: Figure
    compute_seconds: Figure
    communication_seconds: Figure
    exposed_seconds: Figure
    memory_bytes: Figure
    update_seconds: Figure = 0.0
    host_seconds: Figure = 0.0

    @property
    def passes_seconds(self) -> float:
        """Of the forward and the backward pass: the step without the optimizer's."""
        return self.step_seconds - self.update_seconds


@dataclass(frozen=True, slots=True)
class PlannedOperator:
    """One operator of a plan.

    Attributes:
        name, target, module: of the captured node; the module's path in the user's model.
        scheme: the known scheme that its strategy is.
        assignment: per mesh axis the factor that the axis shards, ``+i`` for partial sums passed through, or None.
        strategy: factor -> names of the axes that shard it.
        layouts: operands, then results, for people.
        count: how many identical operators (folded layers) were decided together with this one, itself included.
        fold: name of the operator that stands for them.
        seconds, communication_seconds: of this one operator, forward and backward. Communication includes the reshards of
            its operands, divided evenly among the operators that share one, and the reduction of the partial sums that
            it makes, wherever that happens.
        bytes_moved: bytes that each device receives for that communication.
        bound_bytes: for a matrix product with a weight, the least bytes that some device must move for it, forward and
            backward, when nothing rests in copies (``costmodel.bounds``); else 0.
        panels: how many panels its gathered operands come in; 1: they are gathered whole.
        replicated: it has no rule, so every device computes it whole.
        recomputed: what the backward pass repeats, as its results are not kept: ``""`` nothing, ``"local"`` the
            operator, ``"all"`` also the collectives that bring its results into other layouts.
    """

    name: str
    target: str
    module: str
    scheme: str
    assignment: tuple[str | None, ...]
    strategy: Mapping[str, tuple[str, ...]]
    layouts: tuple[str, ...]
    count: Count
    fold: str
    seconds: Figure
    communication_seconds: Figure
    bytes_moved: Figure
    bound_bytes: Figure
    panels: Count
    replicated: bool
    recomputed: Literal["", "local", "all"] = ""

    @property
    def bound_ratio(self) -> float | None:
        """Bytes moved over the communication lower bound; None where there is no bound or it is 0."""
        return self.bytes_moved / self.bound_bytes if self.bound_bytes else None
