"""What something costs in a step on one device."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Price"]


class Price(tuple):
    """Bytes received, and of the forward and of the backward pass the same figures each.

    Those of a pass are seconds: of computing; of communicating; of those that take compute time; and then, for
    every level of the network, innermost first, those in which it is occupied.
    """

    __slots__ = ()

    def __new__(cls, received: float, forward: Sequence[float], backward: Sequence[float]) -> Price:
        """As many figures of either pass."""
        return super().__new__(cls, (received, *forward, *backward))

    @property
    def received(self) -> float:
        """Bytes."""
        return float(self[0])

    @property
    def passes(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The figures of the forward and of the backward pass."""
        half = (len(self) + 1) // 2
        return self[1:half], self[half:]

    @property
    def compute(self) -> float:
        """Seconds of computing."""
        return float(sum(one[0] for one in self.passes))

    @property
    def communication(self) -> float:
        """Seconds of communicating."""
        return float(sum(one[1] for one in self.passes))

    @property
    def seconds(self) -> float:
        """Compute and communication together."""
        return self.compute + self.communication

    @property
    def backward(self) -> Price:
        """The same, all of it in the backward pass."""
        both = [ahead + behind for ahead, behind in zip(*self.passes, strict=True)]
        return Price(self.received, [0.0] * len(both), both)

    def plus(self, other: Price) -> Price:
        """Both."""
        return tuple.__new__(Price, (mine + more for mine, more in zip(self, other, strict=True)))

    def times(self, count: float) -> Price:
        """So many of them."""
        return tuple.__new__(Price, (count * figure for figure in self))
