"""Random choices for the builders of operators' arguments, and the operands that they request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["Arguments", "Builder", "Draw", "Operand", "Seeded", "ids", "mask", "real", "shaped", "sizes", "some", "unit"]

T = TypeVar("T")


class Draw(Protocol):
    """A source of choices: a seeded generator, or one over hypothesis's ``draw``."""

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""

    def size(self) -> int:
        """The size of a dim."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a builder requests.

    Attributes:
        shape: of it.
        kind: "real" of any value, "unit" inside (0, 1), "ids" below ``high``, or "mask".
        high: of ids.
        constant: torch has no derivative by it.
    """

    shape: tuple[int, ...]
    kind: str = "real"
    high: int = 0
    constant: bool = False

    def make(self) -> torch.Tensor:
        """One drawn from torch's own generator, in float64."""
        if self.kind == "ids":
            return torch.randint(0, self.high, self.shape)
        value = torch.rand(self.shape, dtype=torch.float64) * 0.8 + 0.1
        return value > 0.5 if self.kind == "mask" else value


def real(*shape: int) -> Operand:
    """Of any value."""
    return Operand(shape)


def unit(*shape: int) -> Operand:
    """Between 0 and 1: for logarithms, roots, divisors."""
    return Operand(shape, "unit")


def ids(high: int, *shape: int) -> Operand:
    """Whole numbers below ``high``."""
    return Operand(shape, "ids", high)


def mask(*shape: int) -> Operand:
    """Of truth values."""
    return Operand(shape, "mask")


@dataclass(frozen=True, slots=True)
class Seeded:
    """Choices of a seeded generator; sizes come from a palette, so that tensors of one model often fit each other."""

    rng: random.Random
    palette: tuple[int, ...]

    def pick(self, options: Sequence[Any]) -> Any:
        """One of the options."""
        return self.rng.choice(list(options))

    def size(self) -> int:
        """A size of the palette."""
        return self.rng.choice(self.palette)


Arguments = tuple[list[Any], dict[str, Any]]
Builder = Callable[[Draw], Any]


def sizes(draw: Draw, count: int) -> list[int]:
    """So many sizes."""
    return [draw.size() for _ in range(count)]


def shaped(make: Callable[..., list[Any]], count: int) -> Builder:
    """A builder whose arguments follow from so many sizes."""
    return lambda draw: make(*sizes(draw, count))


def some(draw: Draw, least: int = 1, most: int = 4) -> list[int]:
    """A shape of some rank."""
    return sizes(draw, draw.pick(range(least, most + 1)))
