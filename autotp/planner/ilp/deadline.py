"""When planning has to end: one object, made when it starts, which every loop asks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["NEVER", "Deadline", "Expired"]


class Expired(TimeoutError):
    """The time is over: whoever knows an answer already goes on with that.

    Attributes:
        bound: what no answer costs less than, as far as that is known.
    """

    def __init__(self, message: str, bound: float = 0.0) -> None:
        super().__init__(message)
        self.bound = bound


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time on a clock.

    Attributes:
        at: seconds on the clock.
        clock: gives seconds.
        shared: the time is short: phases that others follow get a part of it (`part`), otherwise all of it.
    """

    at: float = math.inf
    clock: Callable[[], float] = time.perf_counter
    shared: bool = False

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.perf_counter) -> Deadline:
        """So many seconds from now."""
        return cls(clock() + seconds, clock)

    @property
    def left(self) -> float:
        """Seconds until then, at least 0."""
        return max(0.0, self.at - self.clock())

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.clock() >= self.at

    def check(self, bound: float = 0.0) -> None:
        """Goes on only while there is time; ``bound``: see `Expired`.

        Raises:
            Expired: the time is over.
        """
        if self.over:
            raise Expired("no plan was found within the time limit; raise time_limit", bound)

    def within(self, seconds: float) -> Deadline:
        """This deadline, or so many seconds from now if that is earlier."""
        return replace(self, at=min(self.at, self.clock() + seconds))

    def part(self, share: float) -> Deadline:
        """A share of the time that is left, where that is short."""
        return self.within(share * self.left) if self.shared and math.isfinite(self.at) else self


#: No limit.
NEVER = Deadline()
