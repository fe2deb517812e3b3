"""The temporary memory of reshards: the buffers of collectives, and the copies that they need.

A collective that scatters sends blocks that are contiguous in memory, and one that gathers returns such blocks: if a dim
other than the first is split, they are copied before or afterwards. The result of an all_reduce is left in the memory of
its operand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from passes.layouts.layout import Layout
from passes.layouts.reshard import COMMUNICATING, GATHERING, Move, Step, moves

__all__ = ["before_gathering", "gathers", "in_transit", "sums_in_place", "travels"]


@lru_cache(maxsize=200_000)
def in_transit(
    shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[int, ...], stays: bool, scheduled: bool
) -> int:
    """The peak number of elements that a reshard holds on one device, in addition to those in both layouts.

    Args:
        shape: the shape of the whole tensor.
        source, target: layouts.
        mesh: sizes of the mesh axes.
        stays: whether the tensor is held in the source layout to the end; otherwise, it is freed once it has been sent.
        scheduled: whether a traced graph does it; otherwise, the operand of a collective is held until that is done.
    """
    return _passing(moves(shape, source, target, mesh), mesh, stays, scheduled)


@lru_cache(maxsize=200_000)
def before_gathering(
    shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[int, ...]
) -> tuple[int, int, int] | None:
    """The elements that a device holds before the gathers with which a scheduled reshard ends; None if it does not.

    Besides them, those that the steps before hold temporarily, and those that the gathers do (`in_transit`).
    """
    found = moves(shape, source, target, mesh)
    count = sum(1 for _ in itertools.takewhile(lambda move: move.step.kind == "all_gather", reversed(found)))
    if not count:
        return None
    before, after = found[: len(found) - count], found[len(found) - count :]
    held = _sides(after[0].step, after[0].elements, mesh)[0]
    return held, _passing(before, mesh, False, True), _passing(after, mesh, False, True)


def _passing(found: Sequence[Move], mesh: tuple[int, ...], stays: bool, scheduled: bool) -> int:
    if not found:
        return 0
    first, last = _sides(found[0].step, found[0].elements, mesh)[0], _sides(found[-1].step, found[-1].elements, mesh)[1]
    held = list(_phases(*found[0], mesh, stays or not scheduled))
    for step, larger in found[1:]:
        held += [each + (first if stays or not scheduled else 0) for each in _phases(step, larger, mesh, not scheduled)]
    return max(0, max(held) - (first + last))


def _sides(step: Step, larger: int, mesh: tuple[int, ...]) -> tuple[int, int]:
    """Elements on one device before and after a step."""
    smaller = larger // math.prod(mesh[axis] for axis in step.axes)
    if step.kind == "all_gather":
        return smaller, larger
    return (larger, smaller) if step.kind in ("slice", "reduce_scatter") else (larger, larger)


def _phases(step: Step, larger: int, mesh: tuple[int, ...], stays: bool) -> list[int]:
    """Elements held while a step's blocks are packed to be sent, while they are sent, and while they are unpacked."""
    before, after = _sides(step, larger, mesh)
    if step.kind == "all_reduce":
        return [before + (after if stays else 0)]
    if step.kind in ("slice", "mask"):
        return [before + after]
    apart = (step.kind == "reduce_scatter" and (step.dim or step.blocks > 1)) or (
        step.kind == "all_to_all" and (step.to_dim or step.to_blocks > 1)
    )
    joined = step.kind in ("all_gather", "all_to_all") and (step.dim or step.blocks > 1)
    waits = before if stays else 0
    sent = before + waits if apart else before
    return [2 * before if apart else before, sent + after, waits + (2 * after if joined else after)]


@lru_cache(maxsize=200_000)
def travels(shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[int, ...]) -> bool:
    """Whether a reshard communicates."""
    return any(move.step.kind in COMMUNICATING for move in moves(shape, source, target, mesh))


@lru_cache(maxsize=200_000)
def gathers(shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[int, ...]) -> bool:
    """Whether a reshard receives other devices' parts, so that a parameter is gathered again when it is read again."""
    return any(move.step.kind in GATHERING for move in moves(shape, source, target, mesh))


@lru_cache(maxsize=200_000)
def sums_in_place(shape: tuple[int, ...], source: Layout, target: Layout, mesh: tuple[int, ...]) -> bool:
    """Whether a reshard leaves its result in the memory of its operand."""
    found = moves(shape, source, target, mesh)
    return bool(found) and all(move.step.kind == "all_reduce" for move in found)
