"""Virtual mesh axes, whose "devices" are chunks of one device's work, which run one after the other on it.

Strategies treat a chunk of a batch, or of a matrix product's rows, like a device: as a part into which a mesh axis splits a
factor. Collectives along a virtual axis are local sums and concatenations. Along the other axes, each chunk has its own
collectives, so that one chunk communicates while another computes. Values that are equal for all chunks are computed once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.layouts.reshard import Step, sums_first
from passes.world.pending import Pending
from passes.world.world import Salt, World, groups

__all__ = ["ChunkedWorld"]


class ChunkedWorld(World):
    """A world whose devices are the chunks of the devices that another world hosts.

    Args:
        base: the world of the devices.
        chunks: sizes of the virtual axes, which follow the mesh axes.
        places: the coordinates of each chunk on the virtual axes. ``hosted`` lists ``base.hosted`` for each.
    """

    base: World

    def __init__(self, base: World, chunks: tuple[int, ...], places: Sequence[tuple[int, ...]]) -> None:
        super().__init__(base.mesh_shape + chunks, [at + place for place in places for at in base.hosted])
        self.__dict__["base"] = base  # not as a submodule, since another object owns it
        self.whereabouts = base.whereabouts
        self.real, self.count, self.places = len(base.mesh_shape), len(base.hosted), list(places)
        self._values: list[Hashable] = list(range(len(self.places)))

    def launch(self, steps: Iterable[Step], parts: Sequence[Tensor], values: Sequence[int] | None = None) -> Pending:
        """See ``World.launch``. Sums over chunks first, so that one collective communicates their sum."""
        distinct, pending = self._values, Pending(parts)
        self._values = list(distinct if values is None else values)
        for step in sums_first(steps, self.real):
            pending = super().launch([step], pending.wait())
            self._values = self._after(step)
        self._values = distinct
        return pending

    def _after(self, step: Step) -> list[Hashable]:
        """A key for each chunk's value after a step; chunks with equal values have equal keys."""
        _, virtual = self._split_axes(step.axes)
        if not virtual:
            return self._values
        where = [tuple(place[a - self.real] for a in virtual) for place in self.places]
        grouped = groups(self.places, [axis - self.real for axis in virtual])
        joined: dict[int, Hashable] = {
            i: tuple(self._values[other] for other in members) for members in grouped for i in members
        }
        if step.kind in ("slice", "mask"):
            return list(zip(self._values, where, strict=True))
        if step.kind in ("reduce_scatter", "all_to_all"):
            return [(joined[i], at) for i, at in enumerate(where)]
        return [joined[i] for i in range(len(self.places))]

    def _split_axes(self, axes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(a for a in axes if a < self.real), tuple(a for a in axes if a >= self.real)

    def _each(self, collective: Callable[[list[Tensor]], Pending], parts: Sequence[Tensor]) -> Pending:
        """Runs a collective of the base world for every chunk; chunks with equal values share one."""
        known: dict[Hashable, Pending] = {}
        order = list(self._values)
        for i, value in enumerate(order):
            if value not in known:
                known[value] = collective(list(parts[i * self.count : (i + 1) * self.count]))

        def finish(_: list[Tensor]) -> list[Tensor]:
            results = {value: pending.wait() for value, pending in known.items()}
            return [part for value in order for part in results[value]]

        return Pending(parts).then(finish)

    def _locally(
        self, parts: Sequence[Tensor], axes: tuple[int, ...], join: Callable[[list[Tensor]], Tensor], own: bool
    ) -> list[Tensor]:
        """Joins the tensors of each group along virtual axes; with ``own``, each member gets only its part."""
        results = list(parts)
        for members in groups(self.hosted, axes):
            joined = join([parts[i] for i in members])
            for position, i in enumerate(members):
                results[i] = joined[position].clone() if own else joined
        return results

    def all_reduce(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        """See ``World.all_reduce``."""
        real, virtual = self._split_axes(axes)
        if virtual:
            parts = self._locally(parts, virtual, _summed if op == "sum" else _largest, False)
        return self._each(lambda mine: self.base.all_reduce(mine, real, op), parts) if real else Pending(parts)

    def all_gather(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_gather``."""
        if axis < self.real:
            return self._each(lambda mine: self.base.all_gather(mine, axis), parts)
        return Pending(self._locally(parts, (axis,), torch.stack, False))

    def reduce_scatter(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.reduce_scatter``."""
        if axis < self.real:
            return self._each(lambda mine: self.base.reduce_scatter(mine, axis), parts)
        return Pending(self._locally(parts, (axis,), _summed, True))

    def all_to_all(self, parts: Sequence[Tensor], axis: int) -> Pending:
        """See ``World.all_to_all``."""
        if axis < self.real:
            return self._each(lambda mine: self.base.all_to_all(mine, axis), parts)
        return Pending(self._locally(parts, (axis,), lambda group: torch.stack(group, 1), True))

    def offset(self, size: int, axes: Sequence[int], like: Any = None) -> list[Any]:
        """See ``World.offset``. Virtual axes split the parts that the other axes leave."""
        real, virtual = self._split_axes(axes)
        starts = self.base.offset(size, real, like) * len(self.places) if real else [0] * len(self.hosted)
        for axis in real:
            size //= self.mesh_shape[axis]
        return [start + more for start, more in zip(starts, super().offset(size, virtual), strict=True)]

    def own(self, tensor: Tensor, step: Step, index: int) -> Tensor:
        """See ``World.own``."""
        if step.axes[0] < self.real:
            return self.base.own(tensor, step, index % self.count)
        return super().own(tensor, step, index)

    def masked(self, tensor: Tensor, axes: Sequence[int], index: int) -> Tensor:
        """See ``World.masked``."""
        real, virtual = self._split_axes(axes)
        tensor = self.base.masked(tensor, real, index % self.count) if real else tensor
        return super().masked(tensor, virtual, index)

    def local(self, name: str, tensor: Tensor, *args: Any) -> Tensor:
        """See ``World.local``."""
        return self.base.local(name, tensor, *args)

    def seeded(
        self, seed: Any, salt: Salt, axes: Sequence[int], index: int, function: Callable, args: Any, kwargs: Any
    ) -> Any:
        """See ``World.seeded``. Chunks at different places on a virtual axis draw different numbers."""
        real, virtual = self._split_axes(axes)
        at = self.hosted[index]
        chunk = [at[axis] if axis in virtual else 0 for axis in range(self.real, len(at))]
        return self.base.seeded(seed, (*salt, *chunk), real, index % self.count, function, args, kwargs)


def _summed(group: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, group)


def _largest(group: list[Tensor]) -> Tensor:
    return functools.reduce(torch.maximum, group)
