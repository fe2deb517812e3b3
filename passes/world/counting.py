"""A world that counts: what one device receives in every collective of a rewritten graph."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from passes.world.world import LocalWorld, Pending

__all__ = ["CountingWorld"]


class CountingWorld(LocalWorld):
    """Runs every device of a mesh in this process and adds up the elements that one device receives.

    Attributes:
        elements: kind of collective -> elements received, in a ring: 2 (n-1)/n of the tensor for an all-reduce over n
            devices, (n-1)/n for the others (of the whole result of an all-gather).
    """

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        super().__init__(mesh_shape)
        self.elements: dict[str, float] = defaultdict(float)

    @property
    def total(self) -> float:
        """Elements received in all."""
        return sum(self.elements.values())

    def _count(self, kind: str, axes: tuple[int, ...], sent: float) -> None:
        ways = math.prod(self.mesh_shape[axis] for axis in axes)
        self.elements[kind] += sent * (ways - 1) / ways

    def all_reduce(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """See ``World.all_reduce``."""
        self._count("all_reduce", axes, 2 * parts[0].numel())
        return super().all_reduce(parts, axes, op)

    def all_gather(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_gather``."""
        self._count("all_gather", (axis,), parts[0].numel() * self.mesh_shape[axis])
        return super().all_gather(parts, axis)

    def reduce_scatter(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.reduce_scatter``."""
        self._count("reduce_scatter", (axis,), parts[0].numel())
        return super().reduce_scatter(parts, axis)

    def all_to_all(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_to_all``."""
        self._count("all_to_all", (axis,), parts[0].numel())
        return super().all_to_all(parts, axis)
