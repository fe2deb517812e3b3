"""The moments of a step at which memory is counted."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["Moment", "Turn"]


class Turn(enum.IntEnum):
    """What goes on: an operator runs, the gradients of its results arrive, or its backward pass runs."""

    FORWARD = 0
    ARRIVAL = 1
    BACKWARD = 2


class Moment(NamedTuple):
    """When something is held: at which turn of the operator of this number."""

    at: int
    turn: Turn
