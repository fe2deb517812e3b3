"""The slices of a whole tensor that a device holds: several if the blocks of a dim are sharded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from passes.layouts.layout import Layout, Split, even_chunk, splits

__all__ = ["parts_of", "resting"]


def resting(value: Tensor) -> tuple[Sequence[int], Layout, tuple[int, ...], Sequence[int]]:
    """A tensor's global shape and its layout, the mesh's shape, and this rank's coordinates in the mesh."""
    if not isinstance(value, DTensor):
        return value.shape, (), (), ()
    coordinates = value.device_mesh.get_coordinate()
    assert coordinates is not None
    return value.shape, tuple(value.placements), tuple(value.device_mesh.shape), coordinates


def parts_of(
    shape: Sequence[int], layout: Layout, mesh: tuple[int, ...], coordinates: Sequence[int]
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yields pairs of slices, of a device's part and of the whole tensor, that `passes.layouts.layout.take` would copy.

    Args:
        shape: of the whole tensor.
        layout: of the tensor.
        mesh: the mesh's shape.
        coordinates: of the device in the mesh.
    """
    dims: list[list[tuple[slice, slice]]] = []
    for dim, size in enumerate(shape):
        runs, end = [], 0
        for start, stop in _runs(size, splits(layout, dim, mesh), mesh, coordinates):
            runs.append((slice(end, end + stop - start), slice(start, stop)))
            end += stop - start
        dims.append(runs)
    for each in itertools.product(*dims):
        yield tuple(here for here, _ in each), tuple(there for _, there in each)


def _runs(size: int, cuts: Sequence[Split], mesh: Sequence[int], coordinates: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges ``(start, stop)`` of a dim that a device holds: several if the blocks of the dim are sharded."""
    runs = [(0, size)]
    for axis, blocks in cuts:
        size = sum(stop - start for start, stop in runs) // blocks
        chunk = even_chunk(size, mesh[axis])
        start, stop = (min(size, chunk * (coordinates[axis] + end)) for end in (0, 1))
        runs = [run for block in range(blocks) for run in _within(runs, block * size + start, block * size + stop)]
    return runs


def _within(runs: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Elements ``start`` to ``stop`` (exclusive) of the concatenation of ``runs``, as ranges."""
    before = 0
    for first, last in runs:
        low, high = max(first, first + start - before), min(last, first + stop - before)
        if low < high:
            yield low, high
        before += last - first
