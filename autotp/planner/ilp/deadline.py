"""The deadline of planning: one object, created when planning starts, which every loop checks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["NEVER", "Deadline", "Expired"]


class Expired(TimeoutError):
    """Raised when the deadline has passed. Callers that already have a result continue with it.

    Attributes:
        bound: a lower bound on the cost of every result, in seconds; 0 if none is known.
    """

    def __init__(self, message: str, bound: float = 0.0) -> None:
        super().__init__(message)
        self.bound = bound


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time on a clock.

    Attributes:
        at: the time, in seconds on the clock; ``inf`` for no limit.
        clock: returns the current time in seconds.
        shared: whether time is short, so that a phase followed by others gets only a part of the time left (`part`).
    """

    at: float = math.inf
    clock: Callable[[], float] = time.perf_counter
    shared: bool = False

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.perf_counter) -> Deadline:
        """A deadline ``seconds`` from now."""
        return cls(clock() + seconds, clock)

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.at - self.clock())

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return self.clock() >= self.at

    def check(self, bound: float = 0.0) -> None:
        """Raise `Expired`, with the given ``bound``, if the deadline has passed.

        Raises:
            Expired: the deadline has passed.
        """
        if self.over:
            raise Expired("no plan was found within the time limit; raise time_limit", bound)

    def within(self, seconds: float) -> Deadline:
        """This deadline, or one ``seconds`` from now if that is earlier."""
        return replace(self, at=min(self.at, self.clock() + seconds))

    def part(self, share: float) -> Deadline:
        """A deadline after the given share of the time left, if time is `shared`; otherwise this deadline."""
        return self.within(share * self.left) if self.shared and math.isfinite(self.at) else self


#: A deadline that never passes.
NEVER = Deadline()
