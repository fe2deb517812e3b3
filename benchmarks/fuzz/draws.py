"""Random choices for the builders of operator arguments, and the operands that the builders request."""

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
    """A source of random choices: a seeded generator, or a wrapper of hypothesis's ``draw``."""

    def pick(self, options: Sequence[T]) -> T:
        """Picks one of the options."""

    def size(self) -> int:
        """Picks the size of a dim."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a builder requests.

    Attributes:
        shape: The shape of the tensor.
        kind: "real" (any values), "unit" (inside (0, 1)), "above" (above 1), "ranked" (positive and distinct, so that
            their order is unique), "sorted" (ascending, one dim), "complex", "ids" (integers below ``high``), "places"
            (ids that are distinct along ``axis``), or "mask" (bool).
        high: The exclusive upper bound of ids and places.
        constant: Whether torch has no derivative with respect to this operand.
        axis: The dim along which places are distinct.
    """

    shape: tuple[int, ...]
    kind: str = "real"
    high: int = 0
    constant: bool = False
    axis: int = 0

    def make(self) -> torch.Tensor:
        """Draws the tensor from torch's default generator; floating-point values are in float64."""
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
    """An operand with any values."""
    return Operand(shape)


def unit(*shape: int) -> Operand:
    """An operand with values inside (0, 1): for logarithms, roots, divisors."""
    return Operand(shape, "unit")


def ids(high: int, *shape: int) -> Operand:
    """An operand with integers in [0, ``high``)."""
    return Operand(shape, "ids", high)


def ranked(*shape: int) -> Operand:
    """An operand with distinct values, for operators that depend on their order."""
    return Operand(shape, "ranked")


def complex_(*shape: int) -> Operand:
    """An operand with complex values."""
    return Operand(shape, "complex")


def constant(*shape: int) -> Operand:
    """An operand with values inside (0, 1) and no derivative: for example, the weights of a loss."""
    return Operand(shape, "unit", constant=True)


def places(high: int, *shape: int, axis: int = 0) -> Operand:
    """An operand with integers in [0, ``high``) that are distinct along a dim: indices that are each written once."""
    return Operand(shape, "places", high, axis=axis)


def mask(*shape: int) -> Operand:
    """An operand with bool values."""
    return Operand(shape, "mask")


@dataclass(frozen=True, slots=True)
class Seeded:
    """Choices of a seeded generator. Sizes come from a palette, so that the shapes of one model often match."""

    rng: random.Random
    palette: tuple[int, ...]

    def pick(self, options: Sequence[Any]) -> Any:
        """Picks one of the options."""
        return self.rng.choice(list(options))

    def size(self) -> int:
        """Picks a size of the palette."""
        return self.rng.choice(self.palette)


Arguments = tuple[list[Any], dict[str, Any]]
Builder = Callable[[Draw], Any]


def sizes(draw: Draw, count: int) -> list[int]:
    """Draws ``count`` sizes."""
    return [draw.size() for _ in range(count)]


def shaped(make: Callable[..., list[Any]], count: int) -> Builder:
    """A builder that calls ``make`` with ``count`` random sizes."""
    return lambda draw: make(*sizes(draw, count))


def some(draw: Draw, least: int = 1, most: int = 4) -> list[int]:
    """Draws a shape with ``least`` to ``most`` dims."""
    return sizes(draw, draw.pick(range(least, most + 1)))


def a_dim(draw: Draw, rank: int) -> int:
    """Draws a dim of a tensor of this rank, possibly negative."""
    return draw.pick(range(-rank, rank))


def some_dims(draw: Draw, rank: int) -> list[int]:
    """Draws a list of one dim, or of the first and the last."""
    return draw.pick([[a_dim(draw, rank)], [0, -1] if rank > 1 else [0]])
