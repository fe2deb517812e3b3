"""Resharding: the collectives that convert a tensor from one layout to another.

``steps`` returns what a device does at each step between two layouts of one tensor, in the cheapest known order, which
`phases` determines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from passes.layouts.codes import codes, decode, is_even
from passes.layouts.layout import Layout, local_shape, splits
from passes.layouts.phases import COMMUNICATING, AxisConflicts, Change, changes

__all__ = ["COMMUNICATING", "GATHERING", "Move", "Step", "moves", "steps", "sums_first"]

#: The kinds of steps by which a device receives other devices' parts, rather than sums of them.
GATHERING = ("all_gather", "all_to_all")


class Step(NamedTuple):
    """One collective or local step.

    kind: ``slice``, ``mask``, ``reduce_scatter``, ``all_to_all``, ``all_reduce`` or ``all_gather``.
    axes: the mesh axes of the group (several only for ``all_reduce`` and ``mask``).
    dim, blocks: the dim that is split (``slice``, ``reduce_scatter``, the source of ``all_to_all``) or joined.
    to_dim, to_blocks: the dim that an ``all_to_all`` splits.
    size, outer: for the ``all_gather`` of an uneven dim, its whole size and the outer axes that split it too.
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
    """A step; ``elements`` is the number of elements of the larger of its input and output on one device."""

    step: Step
    elements: int


def steps(shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[int, ...]) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target`` for a tensor of whole ``shape``."""
    return tuple(move.step for move in moves(shape, source, target, mesh))


@lru_cache(maxsize=200_000)
def moves(shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[int, ...]) -> tuple[Move, ...]:
    """``steps``, each with the number of elements of its larger tensor on one device."""
    if source == target:
        return ()
    have, want = codes([source]), codes([target])
    even = is_even(shape, have, mesh) & is_even(shape, want, mesh)
    masks = AxisConflicts(have, want, even).masks(mesh)
    return tuple(_move(shape, mesh, change) for change in changes(have, want, masks, even=bool(even[0])))


def _move(shape: tuple[int, ...], mesh: tuple[int, ...], change: Change) -> Move:
    """The move of a change with a single pair of layouts."""
    before, after, cut = (decode(rows[0].tolist(), mesh) for rows in (change.before, change.after, change.cut))
    kind, axes = change.kind, change.axes
    step = Step(kind, axes)
    if kind == "all_to_all":
        step = Step(kind, axes, *_split(axes[0], before, before, mesh), *_split(axes[0], after, after, mesh))
    elif kind == "all_gather":
        step = Step(kind, axes, *_split(axes[0], cut, before, mesh))
        parts = [part.axis for part in splits(before, step.dim, mesh)]
        if shape[step.dim] % math.prod(mesh[a] for a in parts):
            step = step._replace(size=shape[step.dim], outer=tuple(a for a in parts if a != axes[0]))
    elif kind in ("slice", "reduce_scatter"):
        step = Step(kind, axes, *_split(axes[0], cut, after, mesh))
    larger = before if change.larger is change.before else after
    return Move(step, math.prod(local_shape(shape, larger, mesh)))


def _split(axis: int, cut: Layout, now: Layout, mesh: tuple[int, ...]) -> tuple[int, int]:
    """The dim that ``axis`` splits in ``cut``, and its blocks on a device with only those earlier cuts that ``now`` has."""
    dim = cut[axis].dim  # type: ignore[attr-defined]
    cuts = splits(cut, dim, mesh)
    place = next(i for i, part in enumerate(cuts) if part.axis == axis)
    made = {part.axis for part in splits(now, dim, mesh)}
    return dim, cuts[place].local_blocks * math.prod(mesh[part.axis] for part in cuts[:place] if part.axis not in made)


def sums_first(steps: Iterable[Step], real: int) -> list[Step]:
    """Reshard steps, with the sums over virtual axes, which follow ``real`` others, separated and moved to the front.

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
