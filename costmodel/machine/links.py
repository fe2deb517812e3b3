"""Levels of a machine's interconnect, and the links that groups of devices have on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import TopologyError, require, shown
from ..text.numbers import MOST, MOST_DEVICES, figure, whole
from ..text.tables import Table
from .matrix import check_matrix

__all__ = ["COLLECTIVES", "Level", "Link", "Measured", "Stage"]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""The collectives that have a cost."""

_SHARES = ("contention", "efficiency", "overhead")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured figures of one collective on a level.

    Attributes:
        bandwidth: bytes/s as in `Level.bandwidth`.
        latency: seconds per message.
        overhead: seconds of a collective in addition to its messages: starting it, and waiting for the last rank.
        copying: bytes/s of the whole tensor in addition to its messages: what takes as long in a small group as in a large
            one, such as copying between tensors and messages; None if nothing does.
    """

    bandwidth: float
    latency: float
    overhead: float = 0.0
    copying: float | None = None

    def __post_init__(self) -> None:
        """Checks the figures."""
        _check(self.bandwidth, self.latency, "measured collective")
        _check(1.0 if self.copying is None else self.copying, self.overhead, "measured collective")


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the interconnect: ``size`` groups of the level below, joined into one group.

    Attributes:
        name: unique within a topology.
        size: the number of groups of the level below in one group of this level. At level 0, the groups below are
            the devices themselves.
        bandwidth: bytes/s, in one direction, of the uplink that joins ONE group of the level below to this
            level. At level 0, it is the bandwidth of one device; on outer levels, that of a whole node (or pod).
            An uplink cannot carry more than the uplinks below feed into it, so it should not exceed
            their sum.
        latency: seconds per message.
        efficiency: the share of the bandwidth that rings reach.
        overhead: seconds of a collective in addition to its messages: starting it, and waiting for the last rank.
        links: the number of equal, parallel links of the uplink (network adapters). A ring with k devices in the
            group below uses at most k of them.
        point_to_point: bytes/s of one of those links; by default, the uplink's bandwidth over ``links``.
        direct: whether each of these links goes to one other group, so that a ring through k groups uses k - 1 of them.
        shared: whether rings that leave one group of the level below at the same time share its uplink. If False (a torus,
            in which every device has its own link to the next group), each ring gets the full ``bandwidth``.
        matrix: for irregular machines, bytes/s between any two of the groups that this level joins, 0 for no direct
            link; ``bandwidth`` is then ignored. Groups without a link reach each other through others.
        measured: collective -> its own figures, which replace those of the level.
        contention: the share of transfer time on this level that is taken from concurrent computation: 0 if transfers need
            no device time, 1 if devices can only communicate or compute. By default, that of the device.

    Raises:
        TopologyError: a figure is out of range (see `costmodel.text.numbers`), the size or the bandwidth is not positive,
            or the matrix is not square, not symmetric or leaves a group unreachable.
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    links: int = 1
    point_to_point: float | None = None
    direct: bool = False
    shared: bool = True
    matrix: tuple[tuple[float, ...], ...] | None = None
    measured: Mapping[str, Measured] = field(default_factory=dict, hash=False)
    contention: float | None = None
    overhead: float = 0.0
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        """Checks the figures."""
        where = f"level {shown(self.name)}"
        if not isinstance(self.name, str):
            raise TopologyError(f"{where}: give its name as text")
        for key, most in (("size", MOST_DEVICES), ("links", MOST)):
            whole(getattr(self, key), f"{where}: {key}", most=most, error=TopologyError)
        _check(self.bandwidth, self.latency, where)
        figure(self.overhead, f"{where}: overhead", error=TopologyError)
        if figure(self.efficiency, f"{where}: efficiency", positive=True, error=TopologyError) > 1:
            raise TopologyError(f"{where}: efficiency is {shown(self.efficiency)}; it must be above 0 and at most 1")
        if self.point_to_point is not None:
            figure(self.point_to_point, f"{where}: point_to_point", positive=True, error=TopologyError)
        if self.matrix is not None:
            check_matrix(self.matrix, self.size, where)
            object.__setattr__(self, "matrix", tuple(tuple(float(v) for v in row) for row in self.matrix))
        if self.contention is not None and figure(self.contention, f"{where}: contention", error=TopologyError) > 1:
            raise TopologyError(f"{where}: contention is {shown(self.contention)}; it must be between 0 and 1")
        require(self.measured, Mapping, f"{where}: measured", "measured figures by collective")
        for kind in self.measured:
            require(self.measured[kind], Measured, f"{where}: measured: {shown(kind)}", "a costmodel.Measured")
            if kind not in COLLECTIVES:
                raise TopologyError(
                    f"{where}: measured: no collective is called {shown(kind)}; choose {', '.join(COLLECTIVES)}"
                )

    @property
    def one_link(self) -> float:
        """Bytes/s of one of the links of the uplink."""
        return self.bandwidth / self.links if self.point_to_point is None else self.point_to_point

    def resized(self, size: int) -> Level:
        """The same level with a different number of groups.

        Raises:
            TopologyError: the level is irregular, and its matrix has fewer entries.
        """
        if self.matrix is None or size == self.size:
            return dataclasses.replace(self, size=size)
        if size > self.size:
            raise TopologyError(f"level {self.name!r}: its matrix joins {self.size} groups; {size} need one of their own")
        return dataclasses.replace(self, size=size, matrix=tuple(row[:size] for row in self.matrix[:size]))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> Level:
        """Reads a level from a mapping whose quantities are numbers in base units or text with units.

        Raises:
            TopologyError: a value is invalid; the message names ``where``, the key and the expected value.
        """
        table = Table(
            data,
            where,
            required=("name", "size", "latency") + (() if "matrix" in data else ("bandwidth",)),
            optional=("bandwidth", "links", "point_to_point", "direct", "shared", "matrix", "measured", *_SHARES),
        )
        matrix = table.quantities("matrix", "bandwidth") if "matrix" in table.data else None
        measured = {}
        for kind, entry in (table.mapping("measured") if "measured" in table.data else {}).items():
            figures = Table(entry, f"{where}: measured: {shown(kind)}", ("bandwidth", "latency"), ("overhead", "copying"))
            measured[kind] = Measured(
                figures.quantity("bandwidth", "bandwidth", positive=True),
                figures.quantity("latency", "time"),
                figures.quantity("overhead", "time") if "overhead" in figures.data else 0.0,
                figures.quantity("copying", "bandwidth", positive=True) if "copying" in figures.data else None,
            )
        widest = max((rate for row in matrix for rate in row), default=0.0) if matrix else 0.0
        if matrix is not None and not widest and "bandwidth" not in table.data:
            raise TopologyError(f"{where}: matrix has no bandwidth above 0; give rows such as [[0, 1e9], [1e9, 0]]")
        read: dict[str, Callable[[str], Any]] = {
            "links": table.integer,
            "point_to_point": lambda key: table.quantity(key, "bandwidth", positive=True),
            "direct": table.boolean,
            "shared": table.boolean,
            "contention": table.number,
            "efficiency": table.number,
            "overhead": lambda key: table.quantity(key, "time"),
        }
        fields: dict[str, Any] = {key: value(key) for key, value in read.items() if key in table.data}
        fields |= {"name": table.text("name"), "size": table.integer("size", MOST_DEVICES), "matrix": matrix}
        fields |= {"latency": table.quantity("latency", "time"), "measured": measured, "bandwidth": widest}
        if "bandwidth" in table.data:
            fields["bandwidth"] = table.quantity("bandwidth", "bandwidth", positive=True)
        try:
            return cls(**fields)
        except TopologyError as error:
            raise TopologyError(f"{where}: {error}") from None


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a link on one level that a group of devices crosses.

    Attributes:
        level: the level's name.
        ways: the number of groups of the level below that contain the group's devices, within one group of this level.
        members: the number of the group's devices in one group of the level below.
        steps: the number of hops on this level of a ring through all devices of the group.
        bandwidth: bytes/s of the ring on this level, after sharing.
        latency: seconds per message.
        overhead: seconds of a collective in addition to its messages.
        copying: seconds per byte of the whole tensor in addition to its messages.
        shared: whether the group's devices in one group of the level below share its uplink.
        contention: that of the level, or of the device.
    """

    level: str
    ways: int
    members: int
    steps: int
    bandwidth: float
    latency: float
    overhead: float = 0.0
    copying: float = 0.0
    shared: bool = True
    contention: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """The interconnect between the devices of one group, such as those along a mesh axis.

    Attributes:
        size: devices in the group.
        bandwidth: bytes/s of a ring through them in one direction: the smallest of the crossed levels, after sharing.
        latency: seconds per message: the largest of the crossed levels.
        levels: names of the crossed levels, innermost first; empty for a group of one.
        stages: the same figures for each level; by default, there is one level.
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
        """Seconds of a collective in addition to its messages; 0 unless measured."""
        return max(stage.overhead for stage in self._stages())

    @property
    def copying(self) -> float:
        """Seconds per byte of the whole tensor in addition to its messages; 0 unless measured."""
        return max(stage.copying for stage in self._stages())

    @property
    def contention(self) -> float:
        """The share of a collective's time that is taken from computation, on average over the devices.

        The hops of a ring cross different levels. The contention of each level is weighted by its number of hops and by the
        time that the bytes take there. The hop that closes the ring crosses the outermost level.
        """
        stages = self._stages()
        hops = [stage.steps + (stage is stages[-1]) for stage in stages]
        shares = (
            hop / sum(hops) * stage.contention * self.busy[stage.level] for hop, stage in zip(hops, stages, strict=True)
        )
        return min(1.0, sum(shares))

    @property
    def busy(self) -> dict[str, float]:
        """For each crossed level, the share of a collective's time that the bytes take there."""
        return {stage.level: self.bandwidth / stage.bandwidth for stage in self._stages()}

    @property
    def ring_latency(self) -> float:
        """Seconds for a message to travel around the ring, through all hops except one."""
        return sum(stage.steps * stage.latency for stage in self._stages())

    @property
    def tree_latency(self) -> float:
        """Seconds from a tree's leaves to its root: for each level, the binary logarithm of the number of joined groups."""
        return sum((stage.ways - 1).bit_length() * stage.latency for stage in self._stages())

    @property
    def staged_latency(self) -> float:
        """Latency in seconds of one ring per level, one level after the other."""
        return sum((stage.ways - 1) * stage.latency for stage in self._stages())

    @property
    def exchange_latency(self) -> float:
        """Latency in seconds if every device sends to every other one in turn."""
        return sum((stage.ways - 1) * stage.members * stage.latency for stage in self._stages())

    @property
    def staged_rate(self) -> float:
        """Seconds per byte of the whole tensor if it is gathered by one ring per level, one level after the other."""
        return sum((stage.ways - 1) / stage.ways / stage.bandwidth for stage in self._stages())

    @property
    def exchange_rate(self) -> float:
        """Seconds per byte of one device's tensor, on the busiest level, if every device sends an equal part to each."""
        outside = ((stage, self.size - stage.members) for stage in self._stages())
        return max(
            (stage.members if stage.shared else 1) * others / self.size / stage.bandwidth for stage, others in outside
        )


def _check(bandwidth: float, latency: float, where: str) -> None:
    figure(bandwidth, f"{where}: bandwidth", positive=True, error=TopologyError)
    figure(latency, f"{where}: latency", error=TopologyError)
