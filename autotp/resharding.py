"""Prices of all reshards of one tensor at once: a matrix over (layout it has, layout that is wanted).

``passes.reshard.moves`` is the definition; this follows the same phases with arrays in place of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from passes.layout import Layout
from passes.reshard import DIM, SUM, WHOLE, codes, contended, is_even

__all__ = ["Collective", "volumes"]

#: (kind, axes, bytes of the larger tensor) -> (seconds, bytes received), over arrays.
Collective = Callable[[str, tuple[int, ...], np.ndarray], tuple[np.ndarray, np.ndarray]]


def volumes(
    shape: tuple[int, ...],
    itemsize: int,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    mesh: tuple[int, ...],
    collective: Collective,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes received for every pair, ``[sources, targets]``."""
    have, want = codes(sources), codes(targets)
    even = is_even(shape, have, mesh)[:, None] & is_even(shape, want, mesh)[None, :]
    source, target = have[:, None, :], want[None, :, :]
    contending = contended(source, target, even, mesh)
    state = np.broadcast_to(source, contending.shape).copy()
    goal = np.broadcast_to(target, contending.shape)
    seconds = np.zeros(contending.shape[:-1])
    received = np.zeros_like(seconds)
    axes = range(len(mesh))

    def bytes_now(where: np.ndarray) -> np.ndarray:
        now, total = state[where], np.full(int(where.sum()), float(itemsize))
        for d, size in enumerate(shape):
            local = np.full(len(now), size)
            for a, n in enumerate(mesh):
                local = np.where((now[:, a] >= 0) & (now[:, a] // DIM == d), -(-local // n), local)
            total *= local
        return total

    def go(kind: str, chosen: tuple[int, ...], where: np.ndarray, result: np.ndarray | int) -> None:
        if not where.any():
            return
        before = bytes_now(where)
        for a in chosen:
            state[..., a] = np.where(where, result, state[..., a])
        time, size = collective(kind, chosen, np.maximum(before, bytes_now(where)))
        seconds[where] += time
        received[where] += size

    for a in axes:
        free = (source[..., a] == WHOLE) & (target[..., a] >= 0) & ~contending[..., a]
        state[..., a] = np.where(free, goal[..., a], state[..., a])
    for a in axes:
        where = (source[..., a] == SUM) & (target[..., a] >= 0) & ~contending[..., a]
        go("reduce_scatter", (a,), where, goal[..., a])
    for a in axes:
        crossing = (source[..., a] >= 0) & (target[..., a] >= 0) & (source[..., a] != target[..., a])
        go("all_to_all", (a,), crossing & ~contending[..., a], goal[..., a])
    summed = sum(((state[..., a] == SUM) & (goal[..., a] != SUM)) * (1 << a) for a in axes)
    for chosen in range(1, 1 << len(mesh)):
        go("all_reduce", tuple(a for a in axes if chosen >> a & 1), summed == chosen, WHOLE)
    for a in axes:
        go("all_gather", (a,), (source[..., a] >= 0) & (target[..., a] < 0) & ~contending[..., a], WHOLE)
    for a in reversed(axes):
        go("all_gather", (a,), (source[..., a] >= 0) & contending[..., a], WHOLE)
    return seconds, received
