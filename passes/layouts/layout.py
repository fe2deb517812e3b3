"""Layouts: how a tensor is distributed on a mesh, as one placement per mesh axis.

A layout is a tuple of torch's own placements. ``Shard(dim)`` splits a dim into contiguous chunks (``torch.chunk``
semantics, so the last chunk may be smaller). A dim that is a product of factors, ``(blocks rest)``, can also be split in
its minor factor: that is torch's ``_StridedShard(dim, split_factor=blocks)``, each block split equally. With it a fused
query-key-value projection is sharded by heads, and a flattened ``(batch sequence)`` by sequence, without moving data.

Where several axes split one dim, they apply in the order (blocks, axis): coarser cuts first, outer axes first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes.torch_internals import StridedShard

__all__ = [
    "Layout",
    "Placements",
    "Split",
    "blocks_of",
    "describe",
    "even_chunk",
    "extent",
    "in_one_format",
    "is_shard",
    "local_shape",
    "place",
    "splits",
    "take",
    "take_block",
]

Layout = tuple[Placement, ...]


class Placements(tuple[Placement, ...]):
    """A layout that caches its hash: torch's placements compute theirs, in Python, at every lookup."""

    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash

    def __reduce__(self) -> tuple[type, tuple[Layout]]:
        return tuple, (tuple(self),)  # without the hash, which differs between processes


class Split(NamedTuple):
    """One mesh axis that splits a dim; ``local_blocks`` is the number of its blocks on a device after all coarser cuts.

    0 means that its blocks are not aligned with the chunks of the coarser cuts; such a layout is invalid.
    """

    axis: int
    local_blocks: int


def place(dim: int, blocks: int = 1) -> Placement:
    """The placement that splits ``dim``, seen as ``(blocks rest)``, in ``rest``."""
    return Shard(dim) if blocks == 1 else StridedShard(dim, split_factor=blocks)


def is_shard(placement: Placement) -> bool:
    """Whether the placement splits a dim."""
    return isinstance(placement, (Shard, StridedShard))


def blocks_of(placement: Placement) -> int:
    """The number of blocks that a shard placement splits the same way (1 for ``Shard``)."""
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


@lru_cache(maxsize=200_000)
def splits(layout: Layout, dim: int, mesh: tuple[int, ...]) -> tuple[Split, ...]:
    """The axes that split ``dim``, in the order in which they apply."""
    cuts = sorted(
        (blocks_of(p), axis)
        for axis, p in enumerate(layout)
        if is_shard(p) and p.dim == dim  # type: ignore[attr-defined]
    )
    found = []
    for blocks, axis in cuts:
        coarser = math.prod(mesh[a] for b, a in cuts if b < blocks)
        nested = all(blocks % (b * math.prod(mesh[a] for c, a in cuts if c == b)) == 0 for b, _ in cuts if b < blocks)
        found.append(Split(axis, blocks // coarser if nested else 0))
    return tuple(found)


def even_chunk(size: int, parts: int) -> int:
    """The length of all chunks except possibly the last ones, as in ``torch.chunk``."""
    return -(-size // parts)


def extent(size: int, ways: Sequence[int], coordinates: Sequence[int]) -> int:
    """The length that remains of ``size`` after nested contiguous splits ``ways`` at ``coordinates``."""
    for parts, index in zip(ways, coordinates, strict=True):
        chunk = even_chunk(size, parts)
        size = max(0, min(chunk, size - index * chunk))
    return size


def local_shape(
    shape: Sequence[int], layout: Layout, mesh: tuple[int, ...], coordinates: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The shape of one device's part; by default, the largest part, that of the device at the origin."""
    result = []
    for dim, size in enumerate(shape):
        parts = splits(layout, dim, mesh)
        if parts:
            ways = [mesh[s.axis] for s in parts]
            at = [0 if coordinates is None else coordinates[s.axis] for s in parts]
            size = extent(size, ways, at)
        result.append(size)
    return tuple(result)


def take_block(tensor: torch.Tensor, dim: int, local_blocks: int, ways: int, index: int) -> torch.Tensor:
    """Chunk ``index`` of ``ways`` of each of ``local_blocks`` blocks of ``dim``; a view if possible."""
    size = tensor.shape[dim] // local_blocks
    chunk = even_chunk(size, ways)
    start, length = index * chunk, max(0, min(chunk, size - index * chunk))
    if local_blocks == 1:
        return tensor.narrow(dim, start, length)
    return tensor.unflatten(dim, (local_blocks, size)).narrow(dim + 1, start, length).flatten(dim, dim + 1)


def take(tensor: torch.Tensor, layout: Layout, mesh: tuple[int, ...], coordinates: Sequence[int]) -> torch.Tensor:
    """One device's part of a whole tensor. Partial axes are not split: the caller decides which device holds the value."""
    for dim in range(tensor.dim()):
        for axis, local_blocks in splits(layout, dim, mesh):
            tensor = take_block(tensor, dim, local_blocks, mesh[axis], coordinates[axis])
    return tensor


def in_one_format(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in an unambiguous memory format: channels-last if it is that and not contiguous too; contiguous otherwise.

    Some of torch's kernels read one operand as if it had the memory format of another, and are wrong if it does not. The
    stride of a dim of size 1 has no meaning, so a tensor with such a dim can have two memory formats at once, and a kernel
    that queries one operand's format may get a different one than for another: batch norm's backward on CPU does, and so do
    convolutions in float64. The former also assumes that a weight is contiguous. docs/upstream.md has minimal programs.
    """
    if 1 not in tensor.shape and tensor.is_contiguous():
        return tensor
    last = _CHANNELS_LAST.get(tensor.dim())
    if last is not None and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last):
        order = [0, *range(2, tensor.dim()), 1]
    else:
        tensor, order = tensor.contiguous(), list(range(tensor.dim()))
    sizes = [tensor.shape[d] for d in order]
    strides = tuple(math.prod(sizes[order.index(d) + 1 :]) for d in range(tensor.dim()))
    # The caller makes a view of a tensor that is returned unchanged, and that may change the strides of dims of size 1.
    same = tensor.stride() == strides and 1 not in tensor.shape
    return tensor if same or tensor.numel() == 0 else tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def describe(layout: Layout, names: Sequence[str]) -> str:
    """A layout as readable text, such as ``S(0)@x P@y``; ``R`` if it is replicated along all axes."""
    parts = []
    for name, placement in zip(names, layout, strict=True):
        if is_shard(placement):
            blocks = blocks_of(placement)
            dim = placement.dim  # type: ignore[attr-defined]
            parts.append(f"S({dim})@{name}" if blocks == 1 else f"S({dim}/{blocks})@{name}")
        elif isinstance(placement, Partial):
            parts.append(f"P@{name}")
        else:
            assert isinstance(placement, Replicate)
    return " ".join(parts) or "R"
