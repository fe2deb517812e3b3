"""What the search is told, and the parts into which it cuts the space of choices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["Piece", "Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Knobs of the search.

    Attributes:
        deadline: on the monotonic clock.
        threads: for solvers that take a count.
        cutoff: objective values at or above this are of no interest.
        tolerance: relative; a piece is done when its bound is this close to the best value.
        labels: most labels in a table, see :mod:`autotp.planner.ilp.labels`.
        work: most entries that exact elimination may visit before a solver is the better bet.
        small: most cells of a piece that is handed to the solver without further splitting.
        enough: stop as soon as a choice of at most this value is found.
        solver: which one.
    """

    deadline: float
    threads: int = 2
    cutoff: float = math.inf
    tolerance: float = 2e-10
    labels: int = 2_000_000
    work: float = 2e9
    small: int = 4000
    enough: float = -math.inf
    solver: str = "highs"


@dataclass(slots=True)
class Piece:
    """A part of the search space: a range of the largest temporary, the strategies left, and bounds
    through each.
    """

    low: float
    high: float
    alive: list[np.ndarray]
    floors: list[np.ndarray]
    bound: float
    price: float = 0.0

    def copy(self) -> Piece:
        """The same with arrays of its own."""
        alive, floors = [mask.copy() for mask in self.alive], [floor.copy() for floor in self.floors]
        return replace(self, alive=alive, floors=floors)
