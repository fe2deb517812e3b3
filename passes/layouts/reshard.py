"""Resharding: the collectives that take a tensor from one layout to another.

``steps`` gives the cheapest order known for moving between two layouts of one tensor: what shrinks the tensor goes first
(local slices, reduce-scatter, all-to-all), what grows it last (all-reduce, all-gather). Of several axes the inner ones
scatter first and gather last, so that the outer ones, whose links are slower, move what is smallest. Nothing else in autotp
decides which collective a change of layout needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from passes.layouts.codes import DIM, codes, is_even
from passes.layouts.layout import Layout, is_shard, local_shape, splits

__all__ = ["COMMUNICATING", "AxisConflicts", "Move", "Step", "contended", "moves", "steps", "sums_first"]

#: The kinds of step that use the network; the others are local.
COMMUNICATING = frozenset({"all_gather", "all_reduce", "reduce_scatter", "all_to_all"})


class Step(NamedTuple):
    """One collective or local step.

    kind: ``slice``, ``mask``, ``reduce_scatter``, ``all_to_all``, ``all_reduce`` or ``all_gather``.
    axes: the mesh axes of the group (several only for ``all_reduce`` and ``mask``).
    dim, blocks: the dim that is split (``slice``, ``reduce_scatter``, the source of ``all_to_all``) or joined.
    to_dim, to_blocks: the dim that an ``all_to_all`` splits.
    size, outer: for the ``all_gather`` of an uneven dim, its whole size and the axes that split it further out.
    """

    kind: str
    axes: tuple[int, ...]
    dim: int = -1
    blocks: int = 1
    to_dim: int = -1
    to_blocks: int = 1
    size: int = 0
    outer: tuple[int, ...] = ()


class Move(NamedTuple):
    """A step with what it moves: ``elements`` of the larger of its input and output on one device."""

    step: Step
    elements: int


def steps(shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[int, ...]) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target`` for a tensor of whole ``shape``."""
    return tuple(move.step for move in moves(shape, source, target, mesh))


@lru_cache(maxsize=200_000)
def moves(shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[int, ...]) -> tuple[Move, ...]:
    """``steps`` with the number of elements that each handles on one device."""
    if source == target:
        return ()
    have, want = codes([source]), codes([target])
    even = is_even(shape, have, mesh) & is_even(shape, want, mesh)
    contending = contended(have, want, even, mesh)[0]
    recorder = _MoveRecorder(shape, list(source), mesh)
    axes = range(len(mesh))
    plain = [a for a in axes if not contending[a]]
    for a in plain:
        if isinstance(source[a], Replicate) and is_shard(target[a]):
            recorder.split("slice", a, target[a])
    scattered = [a for a in plain if isinstance(source[a], Partial) and is_shard(target[a])]
    whole = tuple(target[a] if a in scattered else now for a, now in enumerate(recorder.state))
    for a in reversed(scattered) if even else scattered:  # what is cut unevenly has no equal blocks to go between
        recorder.split("reduce_scatter", a, target[a], whole if even else None)
    for a in plain:
        if is_shard(source[a]) and is_shard(target[a]) and source[a] != target[a]:
            recorder.exchange(a, target[a])
    recorder.reduce(
        a for a in axes if isinstance(source[a], Partial) and not isinstance(target[a], Partial) and recorder.partial(a)
    )
    for a in plain:
        if is_shard(source[a]) and not is_shard(target[a]):
            recorder.gather(a)
    whole = tuple(recorder.state)
    for a in axes if even else reversed(axes):
        if contending[a] and is_shard(source[a]):
            recorder.gather(a, whole if even else None)
    recorder.mask(a for a in axes if isinstance(target[a], Partial) and not isinstance(source[a], Partial))
    for a in axes:
        if contending[a] and is_shard(target[a]):
            recorder.split("slice", a, target[a])
    assert tuple(recorder.state) == target
    return tuple(recorder.found)


class _MoveRecorder:
    """A layout on its way to another, with the moves so far."""

    def __init__(self, shape: tuple[int, ...], state: list[Placement], mesh: tuple[int, ...]) -> None:
        self.shape, self.state, self.mesh = shape, state, mesh
        self.found: list[Move] = []

    def partial(self, axis: int) -> bool:
        return isinstance(self.state[axis], Partial)

    def _elements(self) -> int:
        return math.prod(local_shape(self.shape, tuple(self.state), self.mesh))

    def _blocks(self, axis: int, whole: Layout | None = None) -> int:
        """Blocks of the dim that ``axis`` splits on one device: of all cuts of ``whole``, without those not made now."""
        now, dim = tuple(self.state), self.state[axis].dim  # type: ignore[attr-defined]
        cuts = splits(whole or now, dim, self.mesh)
        place = next(i for i, cut in enumerate(cuts) if cut.axis == axis)
        made = {cut.axis for cut in splits(now, dim, self.mesh)}
        return cuts[place].local_blocks * math.prod(self.mesh[c.axis] for c in cuts[:place] if c.axis not in made)

    def _go(self, axes: Iterable[int], placement: Placement) -> int:
        before = self._elements()
        for axis in axes:
            self.state[axis] = placement
        return max(before, self._elements())

    def split(self, kind: str, axis: int, placement: Placement, whole: Layout | None = None) -> None:
        elements = self._go([axis], placement)
        step = Step(kind, (axis,), placement.dim, self._blocks(axis, whole))  # type: ignore[attr-defined]
        self.found.append(Move(step, elements))

    def exchange(self, axis: int, placement: Placement) -> None:
        dim, blocks = self.state[axis].dim, self._blocks(axis)  # type: ignore[attr-defined]
        elements = self._go([axis], placement)
        to_dim = placement.dim  # type: ignore[attr-defined]
        self.found.append(Move(Step("all_to_all", (axis,), dim, blocks, to_dim, self._blocks(axis)), elements))

    def reduce(self, axes: Iterable[int]) -> None:
        chosen = tuple(axes)
        if chosen:
            self.found.append(Move(Step("all_reduce", chosen), self._go(chosen, Replicate())))

    def mask(self, axes: Iterable[int]) -> None:
        chosen = tuple(axes)
        if chosen:
            self.found.append(Move(Step("mask", chosen), self._go(chosen, Partial())))

    def gather(self, axis: int, whole: Layout | None = None) -> None:
        dim, blocks = self.state[axis].dim, self._blocks(axis, whole)  # type: ignore[attr-defined]
        parts = splits(tuple(self.state), dim, self.mesh)
        step = Step("all_gather", (axis,), dim, blocks)
        if self.shape[dim] % math.prod(self.mesh[s.axis] for s in parts):
            outer = tuple(s.axis for s in parts if s.axis != axis)
            step = step._replace(size=self.shape[dim], outer=outer)
        self.found.append(Move(step, self._go([axis], Replicate())))


def contended(source: np.ndarray, target: np.ndarray, even: np.ndarray, mesh: tuple[int, ...]) -> np.ndarray:
    """``[..., axes]``: which axes cannot simply move, because they change a dim that others split too.

    Joining an inner axis to a dim that outer axes split already is simple, and so is removing it again; so is changing an
    axis that cuts the dim apart from where the others cut it, as digits of a number are apart. Contending axes are
    gathered and sliced again at the end; so are all that share a dim with them.

    Args:
        source, target: coded layouts, which broadcast together.
        even: whether both split every dim evenly.
        mesh: sizes of the axes.
    """
    axes = source.shape[-1]
    shape = np.broadcast_shapes(source.shape[:-1], target.shape[:-1])
    flat_source, flat_target = (np.broadcast_to(rows, (*shape, axes)).reshape(-1, axes) for rows in (source, target))
    masks = AxisConflicts(flat_source, flat_target, np.broadcast_to(even, shape).ravel()).masks(mesh)
    return (masks[:, None] >> np.arange(axes) & 1).astype(bool).reshape(*shape, axes)


@dataclass(frozen=True, slots=True, eq=False)
class _Atoms:
    """Pairs in which two axes cut one dim differently: which, where to look up whether they are apart, and their dims."""

    pairs: np.ndarray
    place: np.ndarray
    dims: np.ndarray


class AxisConflicts:
    """Which axes contend between pairs of layouts, ``[pairs, axes]``, on any mesh; see ``contended``."""

    def __init__(self, source: np.ndarray, target: np.ndarray, even: np.ndarray) -> None:
        codes = np.unique(np.concatenate([source.ravel(), target.ravel()]))
        self.codes = codes[codes >= 0]
        self.axes = source.shape[-1]
        source, target = (np.where(r < 0, r, np.searchsorted(self.codes, r)).astype(np.int8) for r in (source, target))
        dims = np.append(1 << (self.codes // DIM), [0, 0]).astype(np.int32)  # negative numbers look at the end
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
        """The pairs whose answer depends on the mesh."""
        return np.unique(np.concatenate([np.zeros(0, np.int64), *(atoms.pairs for atoms in self.atoms)]))

    def masks(self, mesh: tuple[int, ...] | None) -> np.ndarray:
        """``[pairs]`` sets of axes (bits) that contend; without a mesh, cuts that differ count as apart."""
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
        """For cuts and sets of axes: whether the finer cut's blocks do not hold all that the coarser one divides."""
        blocks = self.codes % DIM
        ways = np.array([math.prod(n for a, n in enumerate(mesh) if mask >> a & 1) for mask in range(1 << self.axes)])
        divides = np.maximum(blocks, 1)[:, None, None] * ways[None, None, :]
        return (blocks[None, :, None] % divides != 0).ravel()


def sums_first(steps: Iterable[Step], real: int) -> list[Step]:
    """Reshard steps with the sums over virtual axes, which come behind ``real`` others, taken out and put first.

    All steps are linear, and each acts on its own axes, so the result is the same.
    """
    sums, rest = [], []
    for step in steps:
        virtual = tuple(a for a in step.axes if a >= real) if step.kind == "all_reduce" else ()
        if virtual:
            sums.append(step._replace(axes=virtual))
            step = step._replace(axes=tuple(a for a in step.axes if a < real))
        if step.axes:
            rest.append(step)
    return sums + rest
