"""Layouts as integers, so that many can be looked at at once.

A layout is a row of codes, one per mesh axis: ``WHOLE``, ``PARTIAL``, or ``dim * DIM + blocks`` for a shard of
``dim`` that splits every one of ``blocks`` blocks alike. ``INNER`` in place of ``blocks`` means inside whatever else splits
the dim, on whichever mesh; it is the one code that needs a mesh to become a placement.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from passes.layouts.layout import Layout, blocks_of, is_shard, place, restorable

__all__ = [
    "DIM",
    "INNER",
    "PARTIAL",
    "WHOLE",
    "code_of",
    "codes",
    "decode",
    "dims_of",
    "fitting",
    "is_even",
    "local_elements",
    "restoring",
    "ways",
]

WHOLE, PARTIAL, DIM = -1, -2, 1 << 40

#: Blocks of a cut inside all others; divisible by what meshes are made of, so that it counts as apart from other cuts.
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
    """The layout of one row of codes on a mesh."""
    found: list[Placement] = []
    for code in row:
        if code < 0:
            found.append(Partial() if code == PARTIAL else Replicate())
            continue
        dim, blocks = divmod(int(code), DIM)
        if blocks == INNER:
            cuts = [(int(c) % DIM, n) for c, n in zip(row, mesh, strict=True) if c >= 0 and c // DIM == dim]
            cuts = [(b, n) for b, n in cuts if b != INNER]
            blocks = max((b * math.prod(n for c, n in cuts if c == b) for b, _ in cuts), default=1)
        found.append(place(dim, blocks))
    return tuple(found)


def dims_of(rows: np.ndarray) -> np.ndarray:
    """The dim that each code shards, -1 for none."""
    return np.where(rows >= 0, rows // DIM, -1)


def ways(rows: np.ndarray, dim: int, mesh: tuple[int, ...]) -> np.ndarray:
    """In how many parts each layout splits ``dim``."""
    return np.where(dims_of(rows) == dim, np.array(mesh, dtype=np.int64), 1).prod(axis=-1)


def is_even(shape: tuple[int, ...], rows: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """Which of the coded layouts split every dim evenly."""
    even = np.ones(rows.shape[:-1], bool)
    for d, size in enumerate(shape):
        even &= size % ways(rows, d, mesh) == 0
    return even


def local_elements(shape: tuple[int, ...], rows: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """Elements on one device (the one with most), per coded layout."""
    total = np.ones(rows.shape[:-1])
    for d, size in enumerate(shape):
        total = total * -(-size // ways(rows, d, mesh))
    return total


def restoring(rows: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """Which coded layouts torch can put together again: ``passes.layouts.layout.restorable`` for many at once."""
    return _restoring(rows.tobytes(), rows.dtype, tuple(mesh)).copy()


@functools.lru_cache(maxsize=4096)
def _restoring(data: bytes, dtype: np.dtype, mesh: tuple[int, ...]) -> np.ndarray:
    rows = np.frombuffer(data, dtype).reshape(-1, len(mesh))
    return np.array([restorable(decode(row, mesh), mesh) for row in rows.tolist()], dtype=bool)


def fitting(shape: tuple[int, ...], rows: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """Which coded layouts a tensor of ``shape`` can rest in: ``passes.layouts.layout.fits`` for many at once."""
    # Tensors of one shape are many in a model.
    return _fitting(tuple(shape), rows.tobytes(), rows.dtype, tuple(mesh)).copy()


@functools.lru_cache(maxsize=4096)
def _fitting(shape: tuple[int, ...], data: bytes, dtype: np.dtype, mesh: tuple[int, ...]) -> np.ndarray:
    rows = np.frombuffer(data, dtype).reshape(-1, len(mesh))
    dims, blocks, sizes = dims_of(rows), np.where(rows >= 0, rows % DIM, 0), np.array(mesh, dtype=np.int64)
    found: np.ndarray = np.asarray((dims < len(shape)).all(axis=-1))
    for d, size in enumerate(shape):
        here = dims == d
        if not here.any():
            continue
        blocked = (here & (blocks > 1)).any(axis=-1)
        lengths, contiguous = np.full((len(rows), 1), size, dtype=np.int64), np.ones(len(rows), bool)
        for axis, n in enumerate(mesh):
            cut = here[:, axis, None]
            chunks = np.where(cut, -(-lengths // n), lengths)
            last = np.where(cut, lengths - chunks * (n - 1), lengths)
            contiguous &= (~cut | (last > 0)).all(axis=-1)
            lengths = chunks if (chunks == last).all() else np.concatenate([chunks, last], axis=-1)
        nested = size % ways(rows, d, mesh) == 0
        inner = np.where(here & (blocks == INNER), sizes, 1).prod(axis=-1)
        for a in range(len(mesh) if blocked.any() else 0):
            known = blocks[:, a] != INNER
            stacked = np.where(here & (blocks == blocks[:, a : a + 1]), sizes, 1).prod(axis=-1)
            nested &= ~(here[:, a] & known) | (size % (np.maximum(blocks[:, a], 1) * stacked * inner) == 0)
            for b in range(len(mesh)):
                finer = here[:, a] & here[:, b] & (blocks[:, a] < blocks[:, b]) & (blocks[:, b] != INNER)
                nested &= ~finer | (blocks[:, b] % (np.maximum(blocks[:, a], 1) * stacked) == 0)
        found &= np.where(blocked, nested, contiguous)
    return found
