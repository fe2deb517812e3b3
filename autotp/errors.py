"""Errors that a user can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodel.errors import AutotpError
from passes.world.whereabouts import CollectiveError

__all__ = [
    "AutotpError",
    "BatchError",
    "Change",
    "CollectiveError",
    "ConstraintError",
    "MemoryBoundError",
    "PlanMismatchError",
    "TimeLimitError",
    "gigabytes",
]


def gigabytes(size: float) -> str:
    """A number of bytes as text in GB, for messages."""
    return f"{size / 1e9:.3g} GB"


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a job that does not fit in memory, and whether the job fits with it.

    Attributes:
        name: the change, such as ``16 devices`` or ``recompute='auto'``.
        fits: whether the job fits with the change; None if that was not tried.
        needed: bytes per device: if the job fits, those of a plan that does; otherwise, a lower bound for all plans.
        reason: why it was not tried.
    """

    name: str
    fits: bool | None
    needed: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.needed is None:
            return self.name
        return f"{self.name} ({'takes' if self.fits else 'needs at least'} {gigabytes(self.needed)})"


class MemoryBoundError(AutotpError):
    """No plan fits in the memory of a device.

    Attributes:
        needed: bytes that the smallest plan found needs on each device.
        available: bytes that a plan may use on each device.
        consists: kind of tensor -> its bytes at the peak of that plan's memory, largest first; they sum to ``needed``.
        changes: single changes to the job, and whether it fits with each.
    """

    def __init__(
        self,
        message: str,
        needed: float,
        available: float,
        consists: Mapping[str, float] | None = None,
        changes: Sequence[Change] = (),
    ) -> None:
        super().__init__(message)
        self.needed, self.available = needed, available
        self.consists, self.changes = dict(consists or {}), tuple(changes)

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), (str(self), self.needed, self.available, self.consists, self.changes)


class BatchError(AutotpError):
    """The batch of the example inputs cannot be split into as many equal parts as the strategy requires."""


class ConstraintError(AutotpError):
    """No plan satisfies the constraints.

    Attributes:
        conflict: the texts of a minimal infeasible subset of the constraints.
    """

    def __init__(self, message: str, conflict: tuple[str, ...]) -> None:
        super().__init__(message)
        self.conflict = conflict

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), (str(self), self.conflict)


class TimeLimitError(AutotpError):
    """The time limit expired before any plan was found."""


class PlanMismatchError(AutotpError):
    """A plan does not match the model, the inputs or the processes that it is used with."""
