"""Levels of a machine's interconnect, and what a group of devices sees of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import TopologyError
from .matrix import check_matrix
from .tables import Table

__all__ = ["COLLECTIVES", "Level", "Link", "Measured", "Stage"]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""The collectives that have a cost."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one collective was measured to reach on a level.

    Attributes:
        bandwidth: bytes/s in the sense of `Level.bandwidth`.
        latency: seconds per message.
        overhead: seconds of a collective beside its messages: starting it, and waiting for the last one to come to it.
    """

    bandwidth: float
    latency: float
    overhead: float = 0.0

    def __post_init__(self) -> None:
        """Checks the figures."""
        _check(self.bandwidth, self.latency, "measured collective")
        _check(1.0, self.overhead, "measured collective")

    def to_dict(self) -> dict[str, float]:
        """The figures as plain JSON values in base units, an overhead of 0 left out."""
        found = {"bandwidth": self.bandwidth, "latency": self.latency}
        return found | ({"overhead": self.overhead} if self.overhead else {})


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the interconnect: ``size`` groups of the level below, joined into one group.

    Attributes:
        name: for people; unique within a topology.
        size: how many groups of the level below make one group of this level. At level 0 the groups below are
            the devices themselves.
        bandwidth: bytes/s, in one direction, of the uplink that joins ONE group of the level below to this
            level. At level 0 that is one device's own bandwidth. Further out it is what a whole node (or pod)
            has. An uplink cannot carry more than the uplinks below feed into it, so it should not be given more
            than their sum.
        latency: seconds per message.
        links: the uplink is so many equal links side by side (network adapters). A ring that has k devices in the
            group below uses at most k of them at once.
        point_to_point: bytes/s that one of those links carries; left out, the uplink's bandwidth over ``links``.
        shared: rings that leave one group of the level below at the same time share its uplink. Where not (a torus, in
            which every device has its own link to the next group), each ring gets all of ``bandwidth``.
        matrix: for irregular machines, bytes/s between any two of the groups that this level joins, 0 for no direct
            link; then ``bandwidth`` is not looked at. Groups without a link reach each other through others.
        measured: collective -> its own figures, which replace the level's.
        contention: share of a second in which bytes move over this level that is taken from what is computed meanwhile: 0
            where they need nothing of the devices, 1 where they can do only one at a time. Left out, it is the device's.

    Raises:
        TopologyError: a figure is not finite, the size or the bandwidth is not positive, the latency is
            negative, or the matrix is not square, not symmetric or leaves a group unreachable.
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    links: int = 1
    point_to_point: float | None = None
    shared: bool = True
    matrix: tuple[tuple[float, ...], ...] | None = None
    measured: Mapping[str, Measured] = field(default_factory=dict, hash=False)
    contention: float | None = None

    def __post_init__(self) -> None:
        """Checks the figures."""
        where = f"level {self.name!r}"
        for key, value in (("size", self.size), ("links", self.links)):
            if value < 1:
                raise TopologyError(f"{where}: {key} is {value!r}; it must be at least 1")
        _check(self.bandwidth, self.latency, where)
        if self.point_to_point is not None and not (math.isfinite(self.point_to_point) and self.point_to_point > 0):
            raise TopologyError(f"{where}: point_to_point is {self.point_to_point!r}; it must be finite and positive")
        if self.matrix is not None:
            object.__setattr__(self, "matrix", tuple(tuple(float(v) for v in row) for row in self.matrix))
            check_matrix(self.matrix, self.size, where)
        if self.contention is not None and not 0 <= self.contention <= 1:
            raise TopologyError(f"{where}: contention is {self.contention!r}; it must be between 0 and 1")
        for kind in self.measured:
            if kind not in COLLECTIVES:
                raise TopologyError(f"{where}: measured: no collective is called {kind!r}; choose {', '.join(COLLECTIVES)}")

    @property
    def one_link(self) -> float:
        """Bytes/s of one of the links of the uplink."""
        return self.bandwidth / self.links if self.point_to_point is None else self.point_to_point

    def resized(self, size: int) -> Level:
        """The same level joining another number of groups.

        Raises:
            TopologyError: it is irregular, and its matrix has no entries for more groups.
        """
        if self.matrix is None or size == self.size:
            return dataclasses.replace(self, size=size)
        if size > self.size:
            raise TopologyError(f"level {self.name!r}: its matrix joins {self.size} groups; {size} need one of their own")
        return dataclasses.replace(self, size=size, matrix=tuple(row[:size] for row in self.matrix[:size]))

    def to_dict(self) -> dict[str, Any]:
        """The level as plain JSON values in base units, defaults left out."""
        found: dict[str, Any] = {
            "name": self.name,
            "size": self.size,
            "bandwidth": self.bandwidth,
            "latency": self.latency,
        }
        if self.links != 1:
            found["links"] = self.links
        if self.point_to_point is not None:
            found["point_to_point"] = self.point_to_point
        if not self.shared:
            found["shared"] = False
        if self.matrix is not None:
            found["matrix"] = [list(row) for row in self.matrix]
        if self.measured:
            found["measured"] = {kind: one.to_dict() for kind, one in self.measured.items()}
        if self.contention is not None:
            found["contention"] = self.contention
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> Level:
        """Reads a level from a mapping whose quantities are numbers in base units or text with units.

        Raises:
            TopologyError: naming ``where``, the key and what it should have been.
        """
        table = Table(
            data,
            where,
            required=("name", "size", "latency") + (() if "matrix" in data else ("bandwidth",)),
            optional=("bandwidth", "links", "point_to_point", "shared", "matrix", "measured", "contention"),
        )
        matrix = table.quantities("matrix", "bandwidth") if "matrix" in table.data else None
        measured = {}
        for kind, entry in (table.mapping("measured") if "measured" in table.data else {}).items():
            figures = Table(entry, f"{where}: measured: {kind}", ("bandwidth", "latency"), ("overhead",))
            measured[kind] = Measured(
                figures.quantity("bandwidth", "bandwidth", positive=True),
                figures.quantity("latency", "time"),
                figures.quantity("overhead", "time") if "overhead" in figures.data else 0.0,
            )
        widest = max((rate for row in matrix for rate in row), default=0.0) if matrix else 0.0
        optional: dict[str, Any] = {}
        if "links" in table.data:
            optional["links"] = table.integer("links")
        if "point_to_point" in table.data:
            optional["point_to_point"] = table.quantity("point_to_point", "bandwidth", positive=True)
        if "shared" in table.data:
            optional["shared"] = table.boolean("shared")
        if "contention" in table.data:
            optional["contention"] = table.number("contention")
        try:
            return cls(
                table.text("name"),
                table.integer("size"),
                table.quantity("bandwidth", "bandwidth", positive=True) if "bandwidth" in table.data else widest,
                table.quantity("latency", "time"),
                matrix=matrix,
                measured=measured,
                **optional,
            )
        except TopologyError as error:
            raise TopologyError(f"{where}: {error}") from None


@dataclass(frozen=True, slots=True)
class Stage:
    """What a group of devices sees of one level that it crosses.

    Attributes:
        level: the level's name.
        ways: how many groups of the level below the group's devices lie in, within one group of this level.
        members: how many of its devices lie in one group of the level below.
        steps: how many hops of a ring through all its devices cross this level.
        bandwidth: bytes/s of the ring there, after sharing.
        latency: seconds per message.
        overhead: seconds of a collective beside its messages.
        shared: whether the group's devices in one group of the level below share what they have there.
        contention: the level's, or the device's.
    """

    level: str
    ways: int
    members: int
    steps: int
    bandwidth: float
    latency: float
    overhead: float = 0.0
    shared: bool = True
    contention: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """What one group of devices, such as those along a mesh axis, has to communicate with.

    Attributes:
        size: devices in the group.
        bandwidth: bytes/s of a ring through them in one direction: the least of the levels crossed, after sharing.
        latency: seconds per message: the largest of the levels crossed.
        levels: names of the levels crossed, innermost first; empty for a group of one.
        stages: the same level by level; left out, one level.
    """

    size: int
    bandwidth: float
    latency: float
    levels: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = field(default=(), compare=False)

    def _stages(self) -> tuple[Stage, ...]:
        name = self.levels[0] if self.levels else ""
        return self.stages or (Stage(name, self.size, 1, self.size - 1, self.bandwidth, self.latency),)

    @property
    def overhead(self) -> float:
        """Seconds of a collective beside its messages, known only where it was measured."""
        return max(stage.overhead for stage in self._stages())

    @property
    def contention(self) -> float:
        """Share of a collective's seconds that processors spend, on average of the devices.

        Of a ring's hops some cross one level and some another: each level's share counts by how many do, and by how long
        the bytes take there. The hop that closes the ring crosses the outermost level.
        """
        stages = self._stages()
        hops = [stage.steps + (stage is stages[-1]) for stage in stages]
        shares = (
            hop / sum(hops) * stage.contention * self.busy[stage.level] for hop, stage in zip(hops, stages, strict=True)
        )
        return min(1.0, sum(shares))

    @property
    def busy(self) -> dict[str, float]:
        """By level crossed, the share of a collective's seconds that the bytes take there."""
        return {stage.level: self.bandwidth / stage.bandwidth for stage in self._stages()}

    @property
    def ring_latency(self) -> float:
        """Seconds for a message to go round the ring, through all but one hop."""
        return sum(stage.steps * stage.latency for stage in self._stages())

    @property
    def tree_latency(self) -> float:
        """Seconds from a tree's leaves to its root: level by level, the binary logarithm of the groups joined."""
        return sum((stage.ways - 1).bit_length() * stage.latency for stage in self._stages())

    @property
    def staged_latency(self) -> float:
        """Seconds of latency of one ring per level, one level after the other."""
        return sum((stage.ways - 1) * stage.latency for stage in self._stages())

    @property
    def exchange_latency(self) -> float:
        """Seconds of latency when every device sends to each other one in turn."""
        return sum((stage.ways - 1) * stage.members * stage.latency for stage in self._stages())

    @property
    def staged_rate(self) -> float:
        """Seconds per byte of the whole tensor when it is gathered by one ring per level, one level after the other."""
        return sum((stage.ways - 1) / stage.ways / stage.bandwidth for stage in self._stages())

    @property
    def exchange_rate(self) -> float:
        """Seconds per byte of one device's tensor when every device sends an equal part to each: the busiest level's."""
        outside = ((stage, self.size - stage.members) for stage in self._stages())
        return max(
            (stage.members if stage.shared else 1) * others / self.size / stage.bandwidth for stage, others in outside
        )


def _check(bandwidth: float, latency: float, where: str) -> None:
    if not (math.isfinite(bandwidth) and bandwidth > 0):
        raise TopologyError(f"{where}: bandwidth is {bandwidth!r}; it must be finite and positive")
    if not (math.isfinite(latency) and latency >= 0):
        raise TopologyError(f"{where}: latency is {latency!r}; it must be finite and not negative")
