"""Resharding: the collectives that take a tensor from one layout to another.

``steps`` gives the cheapest order known for moving between two layouts of one tensor: what shrinks the tensor goes first
(local slices, reduce-scatter, all-to-all), what grows it last (all-reduce, all-gather). Nothing else in autotp decides
which collective a change of layout needs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from torch.distributed.tensor import Partial, Replicate

from passes.layout import Layout, blocks_of, fits, is_shard, local_shape, splits

__all__ = ["COMMUNICATING", "Move", "Step", "moves", "steps"]

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


@lru_cache(maxsize=1_000_000)
def moves(shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[int, ...]) -> tuple[Move, ...]:
    """``steps`` with the number of elements that each handles on one device."""
    if source == target:
        return ()
    state, found = list(source), []
    while tuple(state) != target:
        step, after = _next(shape, state, target, mesh)
        before = math.prod(local_shape(shape, tuple(state), mesh))
        found.append(Move(step, max(before, math.prod(local_shape(shape, tuple(after), mesh)))))
        state = after
    return tuple(found)


def _next(shape: tuple[int, ...], state: list, target: Layout, mesh: tuple[int, ...]) -> tuple[Step, list]:
    axes = [a for a in range(len(mesh)) if state[a] != target[a]]
    for wanted, kind in ((Replicate, "slice"), (Partial, "reduce_scatter")):
        for a in axes:
            if (
                isinstance(state[a], wanted)
                and is_shard(target[a])
                and _can_add(shape, state, target, a, mesh)
            ):
                after = _with(state, a, target[a])
                return Step(kind, (a,), target[a].dim, _local_blocks(after, a, mesh)), after  # type: ignore[attr-defined]
    for a in axes:
        if is_shard(state[a]) and is_shard(target[a]) and _can_remove(state, a):
            without = _with(state, a, Replicate())
            if _can_add(shape, without, target, a, mesh):
                after = _with(state, a, target[a])
                if _even(shape, state, mesh) and _even(shape, after, mesh):
                    source_dim, target_dim = state[a].dim, target[a].dim  # type: ignore[attr-defined]
                    if source_dim != target_dim:
                        blocks = _local_blocks(state, a, mesh), _local_blocks(after, a, mesh)
                        return Step("all_to_all", (a,), source_dim, blocks[0], target_dim, blocks[1]), after
    summed = tuple(a for a in axes if isinstance(state[a], Partial) and isinstance(target[a], Replicate))
    if summed:
        after = list(state)
        for a in summed:
            after[a] = Replicate()
        return Step("all_reduce", summed), after
    stuck = tuple(a for a in axes if isinstance(state[a], Partial))
    leaving = [a for a in axes if is_shard(state[a])]
    for a in [*leaving, *(a for a in range(len(mesh)) if is_shard(state[a]))]:
        if _can_remove(state, a) and _in_the_way(state, a, leaving):
            return _gather(shape, state, a, mesh), _with(state, a, Replicate())
    if stuck:  # a partial sum whose target dim is still taken: reduce it in place, slice later
        after = list(state)
        for a in stuck:
            after[a] = Replicate()
        return Step("all_reduce", stuck), after
    for a in axes:
        if is_shard(target[a]):  # what splits the dim now has to make way for the axis that comes before it
            dim = target[a].dim  # type: ignore[attr-defined]
            for b in reversed(range(len(mesh))):
                if is_shard(state[b]) and state[b].dim == dim and _can_remove(state, b):
                    return _gather(shape, state, b, mesh), _with(state, b, Replicate())
    masked = tuple(a for a in axes if isinstance(target[a], Partial))
    after = list(state)
    for a in masked:
        after[a] = target[a]
    return Step("mask", masked), after


def _with(state: list, axis: int, placement: object) -> list:
    after = list(state)
    after[axis] = placement
    return after


def _key(placement: object) -> tuple[int, int]:
    return placement.dim, blocks_of(placement)  # type: ignore[attr-defined, arg-type]


def _nested_inside(state: list, axis: int) -> list[int]:
    """Axes that split the chunks which ``axis`` made."""
    key = _key(state[axis])
    return [a for a in range(axis + 1, len(state)) if is_shard(state[a]) and _key(state[a]) == key]


def _can_remove(state: list, axis: int) -> bool:
    return not _nested_inside(state, axis)


def _in_the_way(state: list, axis: int, leaving: list[int]) -> bool:
    """Whether ``axis`` has to be gathered: it changes itself, or it splits the chunks of one that does."""
    return axis in leaving or any(axis in _nested_inside(state, a) for a in leaving)


def _can_add(shape: tuple[int, ...], state: list, target: Layout, axis: int, mesh: tuple[int, ...]) -> bool:
    key = _key(target[axis])
    for a in range(len(mesh)):
        same = is_shard(state[a]) and _key(state[a]) == key
        due = is_shard(target[a]) and _key(target[a]) == key
        if a > axis and same:
            return False
        if a < axis and same != due:
            return False
    return fits(shape, tuple(_with(state, axis, target[axis])), mesh)


def _local_blocks(state: list, axis: int, mesh: tuple[int, ...]) -> int:
    parts = splits(tuple(state), state[axis].dim, mesh)
    return next(s.local_blocks for s in parts if s.axis == axis)


def _even(shape: tuple[int, ...], state: list, mesh: tuple[int, ...]) -> bool:
    for dim, size in enumerate(shape):
        ways = math.prod(mesh[s.axis] for s in splits(tuple(state), dim, mesh))
        if size % ways:
            return False
    return True


def _gather(shape: tuple[int, ...], state: list, axis: int, mesh: tuple[int, ...]) -> Step:
    dim = state[axis].dim
    parts = splits(tuple(state), dim, mesh)
    ways = math.prod(mesh[s.axis] for s in parts)
    blocks = _local_blocks(state, axis, mesh)
    if shape[dim] % ways == 0:
        return Step("all_gather", (axis,), dim, blocks)
    outer = tuple(s.axis for s in parts if s.axis != axis)
    return Step("all_gather", (axis,), dim, blocks, size=shape[dim], outer=outer)
