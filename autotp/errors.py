"""Errors that a user can do something about."""

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
    """Bytes as messages have them, in GB."""
    return f"{size / 1e9:.3g} GB"


@dataclass(frozen=True, slots=True)
class Change:
    """One change to a job that does not fit, tried by the planner.

    Attributes:
        name: what would be different, such as ``16 devices`` or ``recompute='auto'``.
        fits: whether the job would fit then; None if that was not tried.
        needed: bytes of each device that a plan then takes, if it fits; else that no plan takes less than.
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
    """No plan fits the memory of a device.

    Attributes:
        needed: bytes that the smallest plan found needs on each device.
        available: bytes that a device has.
        consists: what that plan holds at its worst moment, in bytes by kind, most first; sums to ``needed``.
        changes: single changes of the job, and whether it would fit with each.
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
    """A strategy splits the batch, and the batch of the example inputs does not divide so."""


class ConstraintError(AutotpError):
    """No plan keeps the constraints.

    Attributes:
        conflict: the texts of a minimal subset that cannot hold.
    """

    def __init__(self, message: str, conflict: tuple[str, ...]) -> None:
        super().__init__(message)
        self.conflict = conflict

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), (str(self), self.conflict)


class TimeLimitError(AutotpError):
    """The time limit passed before any plan was found."""


class PlanMismatchError(AutotpError):
    """A plan does not belong to the model, the inputs or the processes that it was given."""
