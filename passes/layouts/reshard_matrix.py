"""The costs of all reshards of one tensor at once: a matrix over (current layout, required layout), in seconds.

If every dim is split evenly, the collectives between two layouts are the same on all meshes with the same number of axes,
and each moves the tensor's size over the sizes of the axes that shard it at that moment. So ``ReshardPricer`` finds the
collectives once, and computes only the costs of the few distinct ones for each mesh. If a pair cuts one dim differently,
it depends on the mesh whether the cuts are nested; the collectives of such pairs are found once for each distinct case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from passes.layouts.codes import DIM, dims_of, fitting
from passes.layouts.phases import COMMUNICATING, AxisConflicts, changes

__all__ = ["Collective", "Tariff", "ReshardPricer"]

#: (kind, axes, bytes of the larger tensor) -> seconds, over arrays.
Collective = Callable[[str, tuple[int, ...], np.ndarray], np.ndarray]


class _Step(NamedTuple):
    """A collective, the pairs that need it, the distinct sets of axes that then shard each dim, and each pair's index."""

    kind: str
    axes: tuple[int, ...]
    where: np.ndarray
    shards: np.ndarray
    place: np.ndarray


class _Uneven:
    """The costs of reshards between layouts, at least one of which splits a dim unevenly: sizes are rounded up per dim.

    Args:
        source, goal: coded layouts, ``[pairs, axes]``.
        even: per pair, whether both split all dims evenly.
    """

    def __init__(self, source: np.ndarray, goal: np.ndarray, even: np.ndarray) -> None:
        self.source, self.goal = source, goal
        self.conflicts = AxisConflicts(source, goal, even)
        self.dims = int(dims_of(np.concatenate([source, goal])).max(initial=-1)) + 1
        self.steps: dict[bytes, list[_Step]] = {}

    def price(self, shape: tuple[int, ...], itemsize: int, mesh: tuple[int, ...], collective: Collective) -> np.ndarray:
        """Seconds for every pair."""
        masks = self.conflicts.masks(mesh)
        key = masks.tobytes()
        if key not in self.steps:
            self.steps[key] = self._steps_of(masks)
        parts = [_parts(size, mesh) for size in shape]
        seconds = np.zeros(len(self.source))
        for step in self.steps[key]:
            total = np.full(len(step.shards), float(itemsize))
            for d, table in enumerate(parts):
                total *= table[step.shards[:, d]] if d < self.dims else shape[d]
            seconds[step.where] += collective(step.kind, step.axes, total)[step.place]
        return seconds

    def _steps_of(self, masks: np.ndarray) -> list[_Step]:
        axes = self.source.shape[1]
        found: list[_Step] = []
        for change in changes(self.source, self.goal, masks, even=False, local=False):
            dims = dims_of(change.larger[change.pairs])
            shards = np.stack([(dims == d) @ (1 << np.arange(axes)) for d in range(self.dims)], axis=1)
            distinct, index = np.unique(shards, axis=0, return_inverse=True)
            found.append(_Step(change.kind, change.axes, np.flatnonzero(change.pairs), distinct, index.ravel()))
        return found


def _parts(size: int, mesh: tuple[int, ...]) -> np.ndarray:
    """The length of the longest part of a dim, for every set of axes (bits) that may split it."""
    found = np.full(1 << len(mesh), size)
    for a, n in enumerate(mesh):
        found = np.where(np.arange(len(found)) >> a & 1, -(-found // n), found)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Tariff:
    """The costs of all collectives for tensors of one size on one mesh: ``seconds[feature]``, 0 for feature 0."""

    seconds: np.ndarray

    @classmethod
    def of(cls, sizes: Sequence[float], mesh: tuple[int, ...], collective: Collective) -> list[Tariff]:
        """One tariff for each size in bytes."""
        axes = len(mesh)
        shared = np.array([math.prod(n for a, n in enumerate(mesh) if mask >> a & 1) for mask in range(1 << axes)])
        local = np.asarray(sizes, float)[:, None] / shared
        found = np.zeros((len(sizes), len(COMMUNICATING) << 2 * axes))
        for k, kind in enumerate(COMMUNICATING):
            for group in range(1, 1 << axes):
                chosen = tuple(a for a in range(axes) if group >> a & 1)
                if kind == "all_reduce" or len(chosen) == 1:
                    start = _feature(k, group, 0, axes)
                    found[:, start : start + (1 << axes)] = collective(kind, chosen, local)
        return [cls(row) for row in found]


def _feature(kind: int, group: int, shards: int, axes: int) -> int:
    """The number of a kind of collective over a set of axes, of a tensor that a set of axes shards; never 0."""
    return (kind << 2 * axes) + (group << axes) + shards


@dataclass(frozen=True, slots=True, eq=False)
class _Sequences:
    """The distinct sequences of collectives, ``[sequences, steps]`` features, and the index of each pair's sequence."""

    sequences: np.ndarray
    index: np.ndarray

    def price(self, tariff: Tariff) -> np.ndarray:
        """Seconds of each pair."""
        return np.asarray(tariff.seconds[self.sequences].sum(axis=-1)[self.index])


@dataclass(slots=True, eq=False)
class _Depending:
    """Pairs of layouts whose collectives depend on the mesh; ``found``: these, for each set of conflicting axes, or -1."""

    source: np.ndarray
    goal: np.ndarray
    conflicts: AxisConflicts
    found: np.ndarray


class _Pairs:
    """The collectives between layouts on meshes with ``axes`` axes, found once for every requested pair.

    Tensors of a model share most of their layouts, so most pairs are requested many times.

    Attributes:
        sequences: ``[sequences, steps]`` features; their order within a sequence does not matter.
        usual: the row of every pair of layouts in ``sequences``, if cuts that differ are nested; -1 if not known yet.
        depending: each pair's number among those whose sequence depends on the mesh; -1 if it does not.
    """

    def __init__(self, axes: int) -> None:
        self.rows = np.zeros((0, axes), np.int64)
        self.numbers: dict[bytes, int] = {}
        self.sequences, self.known = np.zeros((0, 1), np.int16), dict[bytes, int]()
        self.usual, self.depending = np.full((2, 0, 0), -1, np.int32)
        self.special: list[_Depending] = []
        self.under: dict[tuple[int, ...], list[np.ndarray]] = {}

    def of(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of layouts; adds the layouts that are new."""
        new = {row.tobytes(): row for row in rows if row.tobytes() not in self.numbers}
        if new:
            self.numbers |= {key: len(self.rows) + number for number, key in enumerate(new)}
            self.rows = np.concatenate([self.rows, *(row[None] for row in new.values())])
            more = len(self.rows) * 5 // 4 - len(self.usual) if len(self.rows) > len(self.usual) else 0
            self.usual, self.depending = (
                np.pad(table, (0, more), constant_values=-1) for table in (self.usual, self.depending)
            )
        return np.array([self.numbers[row.tobytes()] for row in rows], np.int64)

    def find(self, have: np.ndarray, want: np.ndarray) -> None:
        """Finds the sequences, if not known yet, of all pairs of the layouts with these numbers."""
        missing = np.argwhere(self.usual[np.ix_(have, want)] < 0)
        if not len(missing):
            return
        at = have[missing[:, 0]], want[missing[:, 1]]
        source, goal = (self.rows[numbers] for numbers in at)
        conflicts = AxisConflicts(source, goal, np.ones(len(source), bool))
        self.usual[at] = self._numbers_of(_sequences_of(source, goal, conflicts.masks(None)))
        if len(pairs := conflicts.depending):
            count = sum(len(each.source) for each in self.special)
            self.depending[at[0][pairs], at[1][pairs]] = np.arange(count, count + len(pairs))
            some, found = (source[pairs], goal[pairs]), np.full((len(pairs), 1 << source.shape[1]), -1, np.int32)
            self.special.append(_Depending(*some, AxisConflicts(*some, np.ones(len(pairs), bool)), found))

    def on(self, mesh: tuple[int, ...]) -> np.ndarray:
        """The sequences, on a mesh, of all pairs whose sequence depends on it."""
        found = self.under.setdefault(mesh, [])
        found += [self._on(each, mesh) for each in self.special[len(found) :]]
        return np.concatenate(found)

    def _on(self, some: _Depending, mesh: tuple[int, ...]) -> np.ndarray:
        masks = some.conflicts.masks(mesh)
        at = np.arange(len(masks)), masks
        new = np.flatnonzero(some.found[at] < 0)
        for mask in np.unique(masks[new]).tolist():
            where = new[masks[new] == mask]
            some.found[where, mask] = self._numbers_of(_sequences_of(some.source[where], some.goal[where], masks[where]))
        return some.found[at]

    def _numbers_of(self, found: _Sequences) -> np.ndarray:
        ordered, fresh = -np.sort(-found.sequences, axis=1), list[np.ndarray]()
        numbers = np.empty(len(ordered), np.int32)
        for place, row in enumerate(ordered):
            key = row[row > 0].tobytes()
            if key not in self.known:
                self.known[key] = len(self.known)
                fresh.append(row)
            numbers[place] = self.known[key]
        width = max(self.sequences.shape[1], ordered.shape[1])
        every = self.sequences, *(row[None] for row in fresh)
        self.sequences = np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in every])
        return numbers[found.index]

    def some(self, numbers: np.ndarray) -> _Sequences:
        """The sequences with these numbers, and no others."""
        met = np.zeros(len(self.sequences), bool)
        met[numbers] = True
        place = np.cumsum(met, dtype=np.int32) - 1
        sequences = self.sequences[met]
        return _Sequences(sequences[:, : max(1, int((sequences > 0).sum(axis=1).max(initial=0)))], place[numbers])


class _Routes:
    """The collectives between all pairs of some layouts.

    Attributes:
        usual: the sequences of all pairs, if cuts that differ are nested.
        pairs: flat indices of the pairs whose sequence depends on the mesh, because of such cuts.
    """

    def __init__(self, known: _Pairs, have: np.ndarray, want: np.ndarray) -> None:
        axes = have.shape[1]
        mine, theirs = known.of(have), known.of(want)
        known.find(mine, theirs)
        self.known, cells = known, np.ix_(mine, theirs)
        self.usual = known.some(known.usual[cells].ravel())
        depending = known.depending[cells].ravel()
        self.pairs = np.flatnonzero(depending >= 0)
        self.depending = depending[self.pairs]
        self.special: dict[Hashable, _Sequences] = {}
        self.odd: dict[Hashable, np.ndarray] = {}
        rows = np.concatenate([have, want])
        dims, bits = dims_of(rows), 1 << np.arange(axes)
        self.shards = [((dims == d) * bits).sum(axis=1) for d in range(int(dims.max(initial=-1)) + 1)]
        self.rows = rows

    def price(self, mesh: tuple[int, ...], tariff: Tariff) -> np.ndarray:
        """Seconds for every pair, flat, if dims are split evenly."""
        seconds = self.usual.price(tariff)
        if len(self.pairs):
            signature = _cuts_apart(self.rows, mesh)
            if signature not in self.special:
                self.special[signature] = self.known.some(self.known.on(mesh)[self.depending])
            seconds[self.pairs] = self.special[signature].price(tariff)
        return seconds

    def uneven(self, shape: tuple[int, ...], mesh: tuple[int, ...]) -> np.ndarray:
        """Indices of the layouts, ``have`` then ``want``, that are valid for a tensor but split a dim unevenly."""
        if (shape, mesh) not in self.odd:
            odd = self._uneven(shape, mesh)
            self.odd[shape, mesh] = odd[fitting(shape, self.rows[odd], mesh)] if len(odd) else odd
        return self.odd[shape, mesh]

    def _uneven(self, shape: tuple[int, ...], mesh: tuple[int, ...]) -> np.ndarray:
        products = [math.prod(n for a, n in enumerate(mesh) if mask >> a & 1) for mask in range(1 << len(mesh))]
        odd, possible = np.zeros(len(self.rows), bool), np.ones(len(self.rows), bool)
        for size, shards in zip(shape, self.shards, strict=False):
            splits = np.array([size % ways != 0 for ways in products])
            if splits.any():
                odd |= splits[shards]
                possible &= np.array([ways <= size for ways in products])[shards]
        return np.flatnonzero(odd & possible)


class ReshardPricer:
    """Computes the costs of reshards on many meshes; finds the collectives between layouts only once."""

    def __init__(self) -> None:
        self._pairs: dict[int, _Pairs] = {}
        self._routes: dict[Hashable, _Routes] = {}
        self._uneven: dict[Hashable, _Uneven] = {}

    def seconds(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        have: np.ndarray,
        want: np.ndarray,
        mesh: tuple[int, ...],
        tariff: Tariff,
        collective: Collective,
    ) -> np.ndarray:
        """The cost of the reshard of each pair of layouts in seconds, ``[H, W]``.

        Args:
            shape: of the whole tensor.
            itemsize: bytes of an element.
            have, want: H and W coded layouts; the costs of those that are invalid for the shape have no meaning.
            mesh: sizes of the axes.
            tariff: the costs of collectives for the tensor's size.
            collective: the function from which the tariff was computed.
        """
        key = have.tobytes(), want.tobytes()
        if key not in self._routes:
            known = self._pairs.setdefault(len(mesh), _Pairs(len(mesh)))
            self._routes[key] = _Routes(known, have, want)
        routes = self._routes[key]
        seconds = routes.price(mesh, tariff)
        if len(odd := routes.uneven(shape, mesh)):
            uneven = np.zeros(len(routes.rows), bool)
            uneven[odd] = True
            pairs = np.flatnonzero((uneven[: len(have), None] | uneven[None, len(have) :]).ravel())
            if (*key, pairs.tobytes()) not in self._uneven:
                source, goal = have[pairs // len(want)], want[pairs % len(want)]
                self._uneven[*key, pairs.tobytes()] = _Uneven(source, goal, np.zeros(len(pairs), bool))
            seconds[pairs] = self._uneven[*key, pairs.tobytes()].price(shape, itemsize, mesh, collective)
        return seconds.reshape(len(have), len(want))


def _sequences_of(source: np.ndarray, goal: np.ndarray, masks: np.ndarray) -> _Sequences:
    """The collectives between pairs of coded layouts, given the sets of conflicting axes."""
    axes = source.shape[-1]
    steps: list[np.ndarray] = []
    for change in changes(source, goal, masks, even=True, local=False):
        group = sum(1 << a for a in change.axes)
        shards = (change.larger >= 0) @ (1 << np.arange(axes, dtype=np.int16))
        feature = _feature(COMMUNICATING.index(change.kind), group, 0, axes)
        steps.append(np.where(change.pairs, feature + shards, 0).astype(np.int16))
    return _distinct(steps, len(source), len(COMMUNICATING) << 2 * axes)


def _distinct(steps: Sequence[np.ndarray], count: int, kinds: int) -> _Sequences:
    """The distinct sequences among steps, each an array of ``count`` numbers below ``kinds``."""
    index, first = np.zeros(count, np.int64), np.zeros(1, np.int64)
    at_once = max(1, (62 - index.size.bit_length()) // kinds.bit_length())  # as many as a 64-bit key has room for
    for start in range(0, len(steps), at_once):
        for step in steps[start : start + at_once]:
            index = index * kinds + step
        _, first, index = np.unique(index, return_index=True, return_inverse=True)
    sequences = np.stack([np.zeros_like(first), *(step[first] for step in steps)], axis=1)
    return _Sequences(sequences, index.astype(np.int32))


def _cuts_apart(rows: np.ndarray, mesh: tuple[int, ...]) -> Hashable:
    """A key that is equal for meshes on which the same cuts of one dim are nested in each other."""
    found: dict[int, set[int]] = {}
    for code in np.unique(rows[rows >= 0]):
        found.setdefault(int(code) // DIM, set()).add(int(code) % DIM)
    pairs = {(lo, hi) for blocks in found.values() for lo in blocks for hi in blocks if lo < hi}
    if not pairs:
        return ()
    products = [math.prod(n for a, n in enumerate(mesh) if mask >> a & 1) for mask in range(1, 1 << len(mesh))]
    return tuple((lo, hi, tuple(hi % (lo * n) == 0 for n in products)) for lo, hi in sorted(pairs))
