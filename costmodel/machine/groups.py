"""The interconnect between the devices along some axes of a mesh, from the levels of the machine and the mesh's shape.

The rule is ATP's hierarchical communication matrix (arXiv 2301.08658): a group gets the smallest bandwidth of the levels
that it crosses, divided by the number of rings that share the link. AxoNN (Tensor3D's follow-up, arXiv 2502.08145) computes
this number as beta = beta_inter / min(devices per node, product of the group sizes nested inside). Here, the rings through
each uplink are counted, which gives the same number if sizes divide one another, and is also correct if they do not.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from .links import Level, Link, Measured, Stage
from .matrix import ring_bandwidth

__all__ = ["group_link"]


def group_link(
    levels: tuple[Level, ...], mesh_shape: tuple[int, ...], axes: tuple[int, ...], kind: str | None, contention: float = 0.0
) -> Link:
    """The link of the groups of devices along ``axes``; ranks are laid out row-major, the last axis innermost.

    Args:
        levels: innermost first.
        mesh_shape: sizes of the mesh axes; their product is that of the levels.
        axes: one axis or several that communicate together.
        kind: the collective whose measured figures are used, on levels that have them.
        contention: the contention of levels without their own.
    """
    size = math.prod(mesh_shape[a] for a in axes)
    crossed = _crossed(tuple(level.size for level in levels), mesh_shape, tuple(axes))
    if not crossed:
        return Link(size, levels[0].bandwidth, 0.0)
    stages = []
    for index, ways, members, steps, sharing in crossed:
        level = levels[index]
        figures = level.measured.get(kind or "", level)
        rings = sharing if level.shared else 1
        if figures is not level:
            bandwidth = figures.bandwidth / rings
        elif level.matrix is not None:
            within = math.prod(lv.size for lv in levels[:index])
            sets = _member_sets(mesh_shape, tuple(axes), within, level.size)
            bandwidth = min(ring_bandwidth(level.matrix, numbers) for numbers in sets) / rings
        else:
            used = ways - 1 if level.direct else members
            bandwidth = level.efficiency * min(level.bandwidth / rings, level.one_link * min(used, level.links))
        copying = 1 / figures.copying if isinstance(figures, Measured) and figures.copying is not None else 0.0
        rates = bandwidth, figures.latency, figures.overhead, copying
        own = contention if level.contention is None else level.contention
        stages.append(Stage(level.name, ways, members, steps, *rates, level.shared, own))
    return Link(
        size=size,
        bandwidth=min(stage.bandwidth for stage in stages),
        latency=max(stage.latency for stage in stages),
        levels=tuple(stage.level for stage in stages),
        stages=tuple(stages),
    )


@functools.lru_cache(maxsize=16384)
def _crossed(
    sizes: tuple[int, ...], mesh_shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[tuple[int, int, int, int, int], ...]:
    """For each crossed level: (its index, ways, members, steps, rings through the busiest uplink); see ``Stage``."""
    below = [math.prod(sizes[:index]) for index in range(len(sizes) + 1)]
    groups = _groups(mesh_shape, axes)
    crossed = []
    for level in range(len(sizes)):
        inner, outer = groups // below[level], groups // below[level + 1]
        # Ranks ascend within a group, so those in one lower group are adjacent: comparing adjacent pairs is enough.
        apart = inner[:, 1:] != inner[:, :-1]
        hops = apart & (outer[:, 1:] == outer[:, :-1])
        steps = hops.sum(axis=1)
        if not steps.any():
            continue
        lower = 1 + apart.sum(axis=1)
        upper = 1 + (outer[:, 1:] != outer[:, :-1]).sum(axis=1)
        members = math.ceil(groups.shape[1] / int(lower.max()))
        regular = lower.min() == lower.max() and members * lower[0] == groups.shape[1] and below[level] % members == 0
        sharing = below[level] // members if regular and steps.min() > 0 else _busiest(inner, hops)
        ways = math.ceil(int(lower.max()) / int(upper.min()))
        crossed.append((level, ways, members, int(steps.max()), max(1, sharing)))
    return tuple(crossed)


def _groups(mesh_shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """Ranks as ``[groups, devices in each]``, ascending within a group."""
    ranks = np.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    moved = np.moveaxis(ranks, sorted(axes), range(len(mesh_shape) - len(axes), len(mesh_shape)))
    return moved.reshape(-1, math.prod(mesh_shape[a] for a in axes))


def _busiest(inner: np.ndarray, hops: np.ndarray) -> int:
    """The number of groups with a hop across the most used uplink; ``inner`` numbers the uplinks."""
    ring = np.broadcast_to(np.arange(len(inner))[:, None], hops.shape)
    uses = np.concatenate([np.stack([ring[hops], side[hops]]) for side in (inner[:, :-1], inner[:, 1:])], axis=1)
    return int(np.bincount(np.unique(uses, axis=1)[1]).max())


@functools.lru_cache(maxsize=4096)
def _member_sets(mesh_shape: tuple[int, ...], axes: tuple[int, ...], within: int, size: int) -> tuple[tuple[int, ...], ...]:
    """The distinct sets of lower groups that contain a group's devices, numbered within one group of a level."""
    sets = set()
    for group in _groups(mesh_shape, axes) // within:
        for outer in np.unique(group // size):
            members = tuple(int(i) for i in np.unique(group[group // size == outer] % size))
            if len(members) > 1:
                sets.add(members)
    return tuple(sorted(sets))
