"""The exact solution of a small program where memory is short: the fastest choice that fits.

The program bounds the bytes that tables count at some moments (`autotp.planner.memory`). They are close to what a choice
holds, but not equal: after each solution, its footprint decides, and a choice that does not fit is excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotp.costs.step import Moment
from autotp.planner.ilp import Deadline, Problem, minimax
from autotp.planner.memory.moments import Moments
from autotp.planner.mixing import Met

__all__ = ["Short", "settle"]


@dataclass(frozen=True, slots=True)
class Short:
    """What limits the choices of a program.

    Attributes:
        moments: the bytes that choices hold.
        prices: moments at which memory is known to be short, besides the usual ones.
        room: bytes on each device.
        alive: per node, a mask of the choices to consider.
    """

    moments: Moments
    prices: Mapping[Moment, float]
    room: float
    alive: Sequence[np.ndarray]


def settle(
    groups: Sequence[Sequence[Problem]],
    short: Short,
    offer: Callable[[tuple[int, ...]], Met],
    good: Callable[[], float],
    deadline: Deadline,
    *,
    sharp: bool,
) -> float:
    """Searches for the fastest choice that fits. Returns a lower bound on the step time, in seconds.

    Choices that do not fit are excluded one by one or, if ``sharp``, by limits on the bytes that tables estimate for their
    worst moments, which may exclude others too.

    Args:
        groups: the sides of each pass, see `autotp.planner.ilp.minimax`.
        short: what limits the choices.
        offer: measures a choice, which may be the best plan.
        good: returns the step time from which on plans are of no interest, in seconds.
        deadline: of the search.
        sharp: see above.
    """
    moments, surely = short.moments, dict.fromkeys((*short.moments.usual, *short.prices), True)
    excluded: list[tuple[int, ...]] = []
    floor = 0.0
    while not deadline.over:
        bounded = [(moments.program({moment: 1.0}, each), short.room) for moment, each in surely.items()]
        bound, choice = minimax(groups, bounded, short.alive, excluded, deadline=deadline)
        floor = max(floor, bound) if all(surely.values()) else floor
        if choice is None or bound >= good():
            break
        one = offer(choice)
        worst = one.most
        if one.held[worst] <= short.room:
            break
        if not sharp or surely.get(worst) is False:
            excluded.append(choice)
        surely[worst] = not sharp or worst not in surely
    return floor
