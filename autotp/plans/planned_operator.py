"""The records of a plan about one operator, and about a step."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from costmodel.text.numbers import MOST, figure

__all__ = ["Count", "Figure", "PlannedOperator", "Predicted"]

#: Numbers in a plan file: a `Count` is at least 1; a `Figure` is a number of seconds or bytes.
Count = Annotated[int, Field(ge=1, le=MOST)]
Figure = Annotated[float, AfterValidator(functools.partial(figure, what="the figure"))]


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions for one training (or inference) step on each device, in seconds and bytes.

    Attributes:
        step_seconds: the whole step: computation, exposed communication, and waiting for the host.
        compute_seconds: all computation, in chunks if there are any, including the optimizer's step.
        communication_seconds: all communication, hidden or not.
        exposed_seconds: communication that is not hidden behind computation.
        memory_bytes: peak memory: parameters, gradients, optimizer state, saved activations and the largest gathered
            temporary.
        update_seconds: the optimizer's step, which is not an operator of the plan.
        host_seconds: the time by which launching kernels on the host lengthens the step.
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
        """Seconds of the forward and backward passes: the step without the optimizer's."""
        return self.step_seconds - self.update_seconds


@dataclass(frozen=True, slots=True)
class PlannedOperator:
    """One operator of a plan.

    Attributes:
        name, target, module: those of the captured node; the module is its path in the user's model.
        scheme: the name of the known scheme that the strategy matches (see `autotp.plans.schemes`).
        assignment: per mesh axis, the factor that the axis shards, ``+i`` for partial sums passed on, or None.
        strategy: factor -> names of the axes that shard it.
        layouts: the layouts that it requires of its operands, then those of its results, as readable text.
        count: number of identical operators (folded layers) that share one decision, this one included.
        fold: name of the operator that represents them.
        seconds, communication_seconds: of this operator alone, forward and backward. Communication includes the reshards of
            its operands, divided evenly among the operators that share one, and the reduction of the partial sums that
            it makes, wherever they are reduced.
        bytes_moved: bytes that each device receives in that communication.
        bound_bytes: for a matrix product with a weight, a lower bound on the bytes that some device must move for it,
            forward and backward, if no tensor is stored in copies (``costmodel.bounds``); otherwise 0.
        panels: number of panels in which its operands are gathered; 1: they are gathered whole.
        replicated: whether every device computes it whole, because it has no rule.
        recomputed: what the backward pass repeats because the results are not saved: ``""`` nothing, ``"local"`` the
            operator, ``"all"`` also the collectives that reshard its results.
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
        """Bytes moved, divided by the communication lower bound; None if there is no bound or it is 0."""
        return self.bytes_moved / self.bound_bytes if self.bound_bytes else None
