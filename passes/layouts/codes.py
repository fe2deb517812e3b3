"""Layouts as integers, so that many can be processed at once.

A layout is a row of codes, one per mesh axis: ``WHOLE``, ``PARTIAL``, or ``dim * DIM + blocks`` for a shard of ``dim``
that splits each of ``blocks`` blocks the same way. ``INNER`` in place of ``blocks`` stands for a cut inside all other cuts
of the dim, on any mesh; only this code needs a mesh to be converted to a placement.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from passes.layouts.layout import Layout, Placements, blocks_of, is_shard, place

__all__ = [
    "DIM",
    "INNER",
    "PARTIAL",
    "WHOLE",
    "code_of",
    "codes",
    "decode",
    "dims_of",
    "fits",
    "fitting",
    "is_even",
    "local_elements",
    "resolved",
    "restorable",
    "restoring",
    "ways",
]

WHOLE, PARTIAL, DIM = -1, -2, 1 << 40

#: Blocks of a cut inside all others; divisible by usual sizes of mesh axes, so that it counts as nested in other cuts.
INNER = 2**20 * 3**6 * 5**3 * 7


def code_of(placement: Placement) -> int:
    """The code of one placement."""
    if is_shard(placement):
        return placement.dim * DIM + blocks_of(placement)  # type: ignore[attr-defined]
    return PARTIAL if isinstance(placement, Partial) else WHOLE


def codes(layouts: Sequence[Layout]) -> np.ndarray:
    """Layouts as codes, ``[layouts, axes]``."""
    return np.array([[code_of(p) for p in layout] for layout in layouts], dtype=np.int64)


def decode(row: Sequence[int], mesh: tuple[int, ...]) -> Layout:
    """The layout that a row of codes stands for on a mesh."""
    if any(code % DIM == INNER for code in row if code >= 0):
        row = resolved(np.asarray(row, np.int64), mesh).tolist()
    return Placements(place(*divmod(code, DIM)) if code >= 0 else _UNCUT[code] for code in map(int, row))


_UNCUT: dict[int, Placement] = {WHOLE: Replicate(), PARTIAL: Partial()}


def resolved(rows: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """The same layouts, with ``INNER`` replaced by the number of blocks on this mesh."""
    inner = (rows >= 0) & (rows % DIM == INNER)
    if not inner.any():
        return rows
    dims, others = dims_of(rows), np.where(inner, WHOLE, rows)
    made = np.maximum(others % DIM * _parts_together(others, mesh), 1)  # parts of the dim after all cuts with this code
    finest = [np.where(dims_of(others) == dims[..., a : a + 1], made, 1).max(axis=-1) for a in range(len(mesh))]
    return np.where(inner, dims * DIM + np.stack(finest, axis=-1), rows)


def _parts_together(rows: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """For each axis, the number of parts into which all axes with its code together split a block."""
    same = [np.where(rows == rows[..., a : a + 1], mesh, 1).prod(axis=-1) for a in range(len(mesh))]
    return np.stack(same, axis=-1)


def dims_of(rows: np.ndarray) -> np.ndarray:
    """The dim that each code shards; -1 if none."""
    return np.where(rows >= 0, rows // DIM, -1)


def ways(rows: np.ndarray, dim: int, mesh: tuple[int, ...]) -> np.ndarray:
    """The number of parts into which each layout splits ``dim``."""
    return np.where(dims_of(rows) == dim, np.array(mesh, dtype=np.int64), 1).prod(axis=-1)


def is_even(shape: tuple[int, ...], rows: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """Whether each of the coded layouts splits every dim evenly."""
    even = np.ones(rows.shape[:-1], bool)
    for d, size in enumerate(shape):
        even &= size % ways(rows, d, mesh) == 0
    return even


def local_elements(shape: tuple[int, ...], rows: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """The number of elements on the device with the most, for each coded layout; a read-only array."""
    return _local_elements(tuple(shape), rows.tobytes(), rows.shape, tuple(mesh))


@functools.lru_cache(maxsize=4096)
def _local_elements(shape: tuple[int, ...], data: bytes, form: tuple[int, ...], mesh: tuple[int, ...]) -> np.ndarray:
    dims = dims_of(np.frombuffer(data, np.int64).reshape(form))
    total = np.ones(form[:-1])
    for d, size in enumerate(shape):
        here = dims == d
        total *= -(-size // np.where(here, mesh, 1).prod(axis=-1)) if here.any() else size
    total.flags.writeable = False
    return total


def restoring(rows: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """Whether torch's ``DTensor`` can restore the whole tensor from its parts, for each of the coded layouts.

    It can if every dim is split by a single axis, or only by ``Shard``. Otherwise, it must understand every dim: contiguous
    parts are split contiguously, by one axis after the other, and the split factor of a ``_StridedShard`` is the number of
    parts made before, all by axes behind its own (torch/distributed/tensor/_dtensor_spec.py). For other layouts, DTensor
    joins the parts in a wrong order, without an error.
    """
    return _restoring(rows.tobytes(), tuple(mesh)).copy()


def restorable(layout: Layout, mesh: tuple[int, ...]) -> bool:
    """`restoring` for one layout."""
    return bool(restoring(codes([layout]), mesh)[0])


@functools.lru_cache(maxsize=4096)
def _restoring(data: bytes, mesh: tuple[int, ...]) -> np.ndarray:
    rows = resolved(np.frombuffer(data, np.int64).reshape(-1, len(mesh)), mesh)
    dims, blocks = dims_of(rows), np.where(rows >= 0, rows % DIM, 0)
    simple, understood = np.ones(rows.shape[:-1], bool), np.ones(rows.shape[:-1], bool)
    for a in range(len(mesh)):
        beside = (dims == dims[..., a : a + 1]) & (rows[..., a : a + 1] >= 0)
        coarser = np.where(beside & (blocks < blocks[..., a : a + 1]), mesh, 1)
        simple &= (blocks[..., a] <= 1) | (beside.sum(axis=-1) == 1)
        for made in (coarser.prod(axis=-1), coarser[..., a + 1 :].prod(axis=-1)):
            understood &= (rows[..., a] < 0) | (blocks[..., a] == made)
    return simple | understood


def fitting(shape: tuple[int, ...], rows: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """Whether each coded layout is valid for a tensor of ``shape``: no device is empty, no block is split unevenly."""
    # Cached, since a model has many tensors of the same shape.
    return _fitting(tuple(shape), rows.tobytes(), tuple(mesh)).copy()


@functools.lru_cache(maxsize=200_000)
def fits(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...]) -> bool:
    """`fitting` for one layout."""
    return bool(fitting(shape, codes([layout]), mesh)[0])


@functools.lru_cache(maxsize=4096)
def _fitting(shape: tuple[int, ...], data: bytes, mesh: tuple[int, ...]) -> np.ndarray:
    rows = resolved(np.frombuffer(data, np.int64).reshape(-1, len(mesh)), mesh)
    dims, blocks = dims_of(rows), np.where(rows >= 0, rows % DIM, 0)
    found: np.ndarray = np.asarray((dims < len(shape)).all(axis=-1))
    for d, size in enumerate(shape):
        here = dims == d
        if here.any():
            blocked = (here & (blocks > 1)).any(axis=-1)
            found &= blocked | _in_chunks(size, here, mesh)
            found[blocked] &= _in_blocks(size, np.where(here, rows, WHOLE)[blocked], mesh)
    return found


def _in_chunks(size: int, here: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """Whether every device has elements if the axes split a dim into chunks, and those into chunks, one after the other."""
    # All chunks but the last are equal. Both lengths are checked, since the longer one may fail alone: among four devices,
    # 4 elements leave one for each, but 5 are split into chunks of 2, and none is left for the fourth.
    lengths, found = np.full((len(here), 1), size, dtype=np.int64), np.ones(len(here), bool)
    for axis, n in enumerate(mesh):
        cut = here[:, axis, None]
        chunks = np.where(cut, -(-lengths // n), lengths)
        last = np.where(cut, lengths - chunks * (n - 1), lengths)
        found &= (~cut | (last > 0)).all(axis=-1)
        lengths = chunks if (chunks == last).all() else np.concatenate([chunks, last], axis=-1)
    return found


def _in_blocks(size: int, rows: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """Whether the cuts of one dim, some of them in blocks, are even, and the finer ones are aligned with the coarser."""
    here, blocks = rows >= 0, np.where(rows >= 0, rows % DIM, 0)
    parts = np.where(here, blocks * _parts_together(rows, mesh), 1)
    finer = here[:, :, None] & (blocks[:, :, None] < blocks[:, None, :])
    lined_up = (blocks[:, None, :] % parts[:, :, None] == 0) | ~finer
    return (
        (size % parts == 0).all(axis=-1) & (size % np.where(here, mesh, 1).prod(axis=-1) == 0) & lined_up.all(axis=(1, 2))
    )
