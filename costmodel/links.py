"""From levels of a machine and a mesh's shape to what each mesh axis sees of the interconnect.

The rule is ATP's hierarchical communication matrix (arXiv 2301.08658): an axis gets the least bandwidth of
the levels that it crosses, divided by the rings that share the link. The number of rings is AxoNN's
(Tensor3D's follow-up, arXiv 2502.08145): beta = beta_inter / min(devices per node, product of the group sizes
nested inside).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from .errors import TopologyError

__all__ = ["Level", "Link", "levels_crossed", "links"]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the interconnect: ``size`` groups of the level below, joined into one group.

    Attributes:
        name: for people; unique within a topology.
        size: how many groups of the level below make one group of this level. At level 0 the groups below are
            the devices themselves.
        bandwidth: bytes/s, in one direction, of the uplink that joins ONE group of the level below to this
            level. At level 0 that is one device's own bandwidth. Further out it is what a whole node (or pod)
            has, shared by all the rings through it: a ring gets ``bandwidth / min(devices in the group below,
            product of the mesh axes nested inside the ring's axis)``. An uplink cannot carry more than the
            uplinks below feed into it, so it should not be given more than their sum.
        latency: seconds per message.

    Raises:
        TopologyError: a figure is not finite, the size or the bandwidth is not positive, the latency is
            negative.
    """

    name: str
    size: int
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        """Checks the figures."""
        where = f"level {self.name!r}"
        if self.size < 1:
            raise TopologyError(f"{where}: size is {self.size!r}; it must be at least 1")
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise TopologyError(f"{where}: bandwidth is {self.bandwidth!r}; it must be finite and positive")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise TopologyError(f"{where}: latency is {self.latency!r}; it must be finite and not negative")


@dataclass(frozen=True, slots=True)
class Link:
    """What the rings along one mesh axis have to communicate with.

    Attributes:
        size: ranks along the axis.
        bandwidth: bytes/s per ring: least of the levels crossed, after sharing.
        latency: seconds per message: largest of the levels crossed.
        levels: names of the levels crossed, innermost first; empty for an axis of size 1.
    """

    size: int
    bandwidth: float
    latency: float
    levels: tuple[str, ...] = ()


@functools.lru_cache(maxsize=4096)
def levels_crossed(sizes: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Which levels each mesh axis crosses, ranks being laid out row-major with the last axis innermost.

    A ring crosses a level where two neighbours on it share that level's group but not the group below. This
    holds for axes that straddle levels, and for axis sizes that do not divide a level's size.

    Args:
        sizes: the levels' sizes, innermost first.
        mesh_shape: sizes of the mesh axes, outermost first; both products must be equal.

    Returns:
        For each mesh axis the indices of the levels that it crosses, innermost first.
    """
    ranks = np.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    below = [math.prod(sizes[:index]) for index in range(len(sizes) + 1)]
    crossed = []
    for axis in range(len(mesh_shape)):
        # Ranks grow along a ring, so those of one group are neighbours on it: adjacent pairs tell everything.
        ring = np.moveaxis(ranks, axis, -1)
        left, right = ring[..., :-1], ring[..., 1:]
        crossed.append(
            tuple(
                level
                for level in range(len(sizes))
                if bool(
                    np.any(
                        (left // below[level + 1] == right // below[level + 1])
                        & (left // below[level] != right // below[level])
                    )
                )
            )
        )
    return tuple(crossed)


def links(levels: tuple[Level, ...], mesh_shape: tuple[int, ...]) -> tuple[Link, ...]:
    """The link of each mesh axis; see `costmodel.topology.Topology.links`."""
    sizes = tuple(level.size for level in levels)
    below = [math.prod(sizes[:index]) for index in range(len(sizes))]
    result = []
    for axis, crossed in enumerate(levels_crossed(sizes, mesh_shape)):
        if not crossed:
            result.append(Link(mesh_shape[axis], levels[0].bandwidth, 0.0))
            continue
        nested = math.prod(mesh_shape[axis + 1 :])
        result.append(
            Link(
                size=mesh_shape[axis],
                bandwidth=min(levels[i].bandwidth / min(below[i], nested) for i in crossed),
                latency=max(levels[i].latency for i in crossed),
                levels=tuple(levels[i].name for i in crossed),
            )
        )
    return tuple(result)
