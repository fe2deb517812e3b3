"""Random choices for the builders of operators' arguments, and the operands that they request."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

__all__ = [
    "Arguments", "Builder", "Draw", "Operand", "Seeded", "a_dim", "complex_", "constant", "ids", "mask", "places", "ranked",
    "real", "shaped", "sizes", "some", "some_dims", "unit",
]  # fmt: skip

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
        kind: "real" of any value, "unit" inside (0, 1), "above" 1, "ranked" (positive, no two alike: there is one order of
            them), "sorted" along the one dim, "complex", "ids" below ``high``, "places" (ids that differ along ``axis``),
            or "mask".
        high: of ids and places.
        constant: torch has no derivative by it.
        axis: of places.
    """

    shape: tuple[int, ...]
    kind: str = "real"
    high: int = 0
    constant: bool = False
    axis: int = 0

    def make(self) -> torch.Tensor:
        """One drawn from torch's own generator, in float64."""
        if self.kind == "ids":
            return torch.randint(0, self.high, self.shape)
        if self.kind == "places":
            wide = (*self.shape[: self.axis], self.high, *self.shape[self.axis + 1 :])
            return torch.rand(wide).argsort(self.axis).narrow(self.axis, 0, self.shape[self.axis]).contiguous()
        if self.kind == "ranked":
            return (torch.randperm(math.prod(self.shape)).reshape(self.shape).double() + 1) / 512
        value = torch.rand(self.shape, dtype=torch.float64) * 0.8 + 0.1
        if self.kind == "complex":
            return torch.complex(value, torch.rand_like(value) * 0.8 + 0.1)
        if self.kind == "sorted":
            return value.sort().values
        return value > 0.5 if self.kind == "mask" else value + (self.kind == "above")


def real(*shape: int) -> Operand:
    """Of any value."""
    return Operand(shape)


def unit(*shape: int) -> Operand:
    """Between 0 and 1: for logarithms, roots, divisors."""
    return Operand(shape, "unit")


def ids(high: int, *shape: int) -> Operand:
    """Whole numbers below ``high``."""
    return Operand(shape, "ids", high)


def ranked(*shape: int) -> Operand:
    """No two alike: for what depends on their order."""
    return Operand(shape, "ranked")


def complex_(*shape: int) -> Operand:
    """Complex numbers."""
    return Operand(shape, "complex")


def constant(*shape: int) -> Operand:
    """Between 0 and 1, and without a derivative: weights of a loss."""
    return Operand(shape, "unit", constant=True)


def places(high: int, *shape: int, axis: int = 0) -> Operand:
    """Whole numbers below ``high`` that differ along a dim: places that are written to, each once."""
    return Operand(shape, "places", high, axis=axis)


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


def a_dim(draw: Draw, rank: int) -> int:
    """A dim, counted from either end."""
    return draw.pick(range(-rank, rank))


def some_dims(draw: Draw, rank: int) -> list[int]:
    """One dim or two."""
    return draw.pick([[a_dim(draw, rank)], [0, -1] if rank > 1 else [0]])
