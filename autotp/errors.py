"""Errors that a user can do something about."""

from __future__ import annotations

from costmodel.errors import AutotpError

__all__ = ["AutotpError", "BatchError", "ConstraintError", "MemoryBoundError", "PlanMismatchError", "TimeLimitError"]


class MemoryBoundError(AutotpError):
    """No plan fits the memory of a device.

    Attributes:
        needed: bytes that the smallest plan needs on each device.
        available: bytes that a device has.
    """

    def __init__(self, message: str, needed: float, available: float) -> None:
        super().__init__(message)
        self.needed, self.available = needed, available

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), (str(self), self.needed, self.available)


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
