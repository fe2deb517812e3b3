"""The price of a part of a step on one device."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Price"]


class Price(tuple):
    """Bytes received, then the figures of the forward pass, then the same figures of the backward pass.

    The figures of a pass are seconds: of computation; of communication; of the communication that takes compute time; and
    then, for every level of the network, innermost first, of the communication that occupies it.
    """

    __slots__ = ()

    def __new__(cls, received: float, forward: Sequence[float], backward: Sequence[float]) -> Price:
        """Both passes have the same number of figures."""
        return super().__new__(cls, (received, *forward, *backward))

    @property
    def received(self) -> float:
        """Bytes received."""
        return float(self[0])

    @property
    def passes(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The figures of the forward and of the backward pass."""
        half = (len(self) + 1) // 2
        return self[1:half], self[half:]

    @property
    def compute(self) -> float:
        """Seconds of computation."""
        return float(sum(one[0] for one in self.passes))

    @property
    def communication(self) -> float:
        """Seconds of communication."""
        return float(sum(one[1] for one in self.passes))

    @property
    def seconds(self) -> float:
        """Seconds of computation and communication, without overlap."""
        return self.compute + self.communication

    @property
    def backward(self) -> Price:
        """The same price, with all seconds in the backward pass."""
        both = [ahead + behind for ahead, behind in zip(*self.passes, strict=True)]
        return Price(self.received, [0.0] * len(both), both)

    def plus(self, other: Price) -> Price:
        """The sum of two prices."""
        return tuple.__new__(Price, (mine + more for mine, more in zip(self, other, strict=True)))

    def times(self, count: float) -> Price:
        """``count`` times the price."""
        return tuple.__new__(Price, (count * figure for figure in self))
