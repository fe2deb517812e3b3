"""The collectives that convert tensors from one layout to another, and their order, for many pairs of layouts at once.

Changes that shrink a tensor come first (local slices, reduce-scatter, all-to-all), those that do not come last (all-reduce,
all-gather). Of several axes, the inner ones scatter first and gather last, so that the outer ones, whose links are slower,
move the smallest tensors. Nothing else in autotp decides which collective a change of layout needs: `reshard` converts the
changes of one pair to steps, and `reshard_matrix` computes the costs of all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from costmodel import COLLECTIVES
from passes.layouts.codes import DIM, PARTIAL, WHOLE

__all__ = ["COMMUNICATING", "AxisConflicts", "Change", "changes"]

#: The kinds of change that use the network; the others are local.
COMMUNICATING = tuple(kind for kind in COLLECTIVES if kind != "broadcast")


class Change(NamedTuple):
    """A collective or local step that some pairs of layouts need; coded layouts are ``[pairs, axes]``.

    kind: ``slice``, ``mask``, ``reduce_scatter``, ``all_to_all``, ``all_reduce`` or ``all_gather``.
    axes: the mesh axes of the group (several only for ``all_reduce`` and ``mask``).
    pairs: ``[pairs]``, whether each pair needs it.
    before, after: the layouts before and after it.
    cut: the layouts with all cuts that it and the adjacent changes of its kind make or remove.
    """

    kind: str
    axes: tuple[int, ...]
    pairs: np.ndarray
    before: np.ndarray
    after: np.ndarray
    cut: np.ndarray

    @property
    def larger(self) -> np.ndarray:
        """``before`` or ``after``: the one in which a device has more elements."""
        return self.before if self.kind in ("slice", "reduce_scatter") else self.after


def changes(source: np.ndarray, goal: np.ndarray, masks: np.ndarray, *, even: bool, local: bool = True) -> Iterator[Change]:
    """Yields the changes that convert each pair's source to its goal, in order.

    Args:
        source, goal: coded layouts, ``[pairs, axes]``.
        masks: ``[pairs]`` sets of conflicting axes (`AxisConflicts`).
        even: whether in all pairs, both layouts split every dim evenly; otherwise, this must be so in none of the pairs.
        local: whether to yield local changes too, which do not use the network.
    """
    outwards = range(source.shape[-1])[::-1]
    inwards = outwards[::-1]
    # Uneven chunks are not equal blocks, which inner axes could split before outer ones: outer axes split first, join last.
    scattering, joining = (outwards, inwards) if even else (inwards, outwards)
    contend = (masks[:, None] >> np.arange(len(inwards)) & 1).astype(bool)
    had, made = source >= 0, goal >= 0
    scattered = (source == PARTIAL) & made & ~contend
    summed = (source == PARTIAL) & (goal != PARTIAL) & ~scattered
    whole, partial = np.full_like(source, WHOLE), np.full_like(source, PARTIAL)
    state = source
    for kind, order, where, result in (
        ("slice", inwards, (source == WHOLE) & made & ~contend, goal),
        ("reduce_scatter", scattering, scattered, goal),
        ("all_to_all", inwards, had & made & (source != goal) & ~contend, goal),
        ("all_reduce", None, summed, whole),
        ("all_gather", inwards, had & ~made & ~contend, whole),
        ("all_gather", joining, had & contend, whole),
        ("mask", None, (goal == PARTIAL) & (source != PARTIAL), partial),
        ("slice", inwards, made & contend, goal),
    ):
        if not where.any():
            continue
        end = np.where(where, result, state)
        if not local and kind not in COMMUNICATING:
            state = end
            continue
        if order is None:
            sets = (where * (1 << np.arange(len(inwards)))).sum(axis=-1)
            for chosen in np.unique(sets[sets > 0]).tolist():
                axes = tuple(a for a in inwards if chosen >> a & 1)
                yield Change(kind, axes, sets == chosen, state, end, end)
            state = end
            continue
        cut = state if kind == "all_gather" else end
        for a in (a for a in order if where[:, a].any()):
            after = state.copy()
            after[:, a] = end[:, a]
            yield Change(kind, (a,), where[:, a], state, after, cut)
            state = after


@dataclass(frozen=True, slots=True, eq=False)
class _Atoms:
    """Pairs in which two axes cut one dim differently: their indices, those in the table of ``_close``, and the dims."""

    pairs: np.ndarray
    place: np.ndarray
    dims: np.ndarray


class AxisConflicts:
    """The axes that cannot be changed independently, because they change a dim that others split too; for any mesh.

    An inner axis can be added to a dim that outer axes split already, and removed again, without a conflict. So can an axis
    be changed whose cuts are nested with the others', and thus independent of them, like digits of a number. Conflicting
    axes are gathered, and sliced again at the end; so are all axes that share a dim with them.

    Args:
        source, target: coded layouts, ``[pairs, axes]``.
        even: per pair, whether both split every dim evenly.
    """

    def __init__(self, source: np.ndarray, target: np.ndarray, even: np.ndarray) -> None:
        codes = np.unique(np.concatenate([source.ravel(), target.ravel()]))
        self.codes = codes[codes >= 0]
        self.axes = source.shape[-1]
        source, target = (np.where(r < 0, r, np.searchsorted(self.codes, r)).astype(np.int8) for r in (source, target))
        dims = np.append(1 << (self.codes // DIM), [0, 0]).astype(np.int32)  # -1 and -2 (`WHOLE`, `PARTIAL`) index the end
        self.touched = [dims[source[:, a]] | dims[target[:, a]] for a in range(self.axes)]
        self.dims = np.zeros(len(source), np.int32)
        self.atoms: list[_Atoms] = []
        for a in range(self.axes):
            s, t = source[:, a], target[:, a]
            recut = (s != t) & (s >= 0) & (t >= 0) & ((dims[s] == dims[t]) | ~even)
            self.dims |= np.where(recut, self.touched[a], 0)
            for b in range(a + 1, self.axes):
                self._meet(source, target, even, a, b)

    def _meet(self, source: np.ndarray, target: np.ndarray, even: np.ndarray, a: int, b: int) -> None:
        s, t, u, v = source[:, a], target[:, a], source[:, b], target[:, b]
        changed, moved, both = s != t, u != v, self.touched[a] | self.touched[b]
        found = (s >= 0) & (s == u) & changed
        found |= (t >= 0) & (t == v) & changed & ~(moved & (s == u) & (s < 0))
        found |= (t >= 0) & (t == u) & changed
        found |= (s >= 0) & (s == v) & changed & moved
        count = len(self.codes)
        mixed = np.zeros((count + 2, count + 2), bool)
        dims = self.codes // DIM
        mixed[:count, :count] = (dims[:, None] == dims[None, :]) & ~np.eye(count, dtype=bool)
        for one, other in ((s, u), (t, v), (s, v), (t, u)):
            differ = mixed[one, other] & (changed | moved)
            found |= differ & ~even
            pairs = np.flatnonzero(differ & even & ~found)
            if len(pairs):
                coarse, fine = np.minimum(one, other)[pairs], np.maximum(one, other)[pairs]
                using = ((source[pairs] == coarse[:, None]) | (target[pairs] == coarse[:, None])) @ (
                    1 << np.arange(self.axes)
                )
                place = (coarse.astype(np.int64) * count + fine << self.axes) + using
                self.atoms.append(_Atoms(pairs, place, both[pairs]))
        self.dims |= np.where(found, both, 0)

    @property
    def depending(self) -> np.ndarray:
        """The indices of the pairs whose conflicts depend on the mesh."""
        return np.unique(np.concatenate([np.zeros(0, np.int64), *(atoms.pairs for atoms in self.atoms)]))

    def masks(self, mesh: tuple[int, ...] | None) -> np.ndarray:
        """``[pairs]`` sets of conflicting axes (bits); without a mesh, cuts that differ count as nested."""
        dims = self.dims.copy()
        if mesh is not None and self.atoms:
            close = self._close(mesh)
            for atoms in self.atoms:
                bad = close[atoms.place]
                dims[atoms.pairs[bad]] |= atoms.dims[bad]
        for _ in range(self.axes):
            for touched in self.touched:
                dims |= np.where(dims & touched, touched, 0)
        return sum(
            ((dims & touched != 0).astype(np.int8) << a for a, touched in enumerate(self.touched)), np.zeros((), np.int8)
        )

    def _close(self, mesh: tuple[int, ...]) -> np.ndarray:
        """``[coarse, fine, axes]``, flat: whether the fine cut is not nested in the coarse one, made by a set of axes."""
        blocks = self.codes % DIM
        ways = np.array([math.prod(n for a, n in enumerate(mesh) if mask >> a & 1) for mask in range(1 << self.axes)])
        divides = np.maximum(blocks, 1)[:, None, None] * ways[None, None, :]
        return (blocks[None, :, None] % divides != 0).ravel()
