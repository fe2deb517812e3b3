"""The machine: one kind of device, and the levels of interconnect between them.

In TOML, the device and each level are tables (``costmodel/presets/*.toml`` are examples):

    name = "two-boxes"

    [device]
    name = "some accelerator"
    memory = "80 GB"
    memory_bandwidth = "2 TB/s"
    launch = "4 us"                                # seconds per kernel
    flops = { float32 = "19.5 TFLOP/s", bfloat16 = "312 TFLOP/s" }

    [[levels]]                                     # innermost first
    name = "nvlink"
    size = 8                                       # devices per box
    bandwidth = "300 GB/s"                         # one device's, one direction
    latency = "2 us"                               # per message

    [[levels]]
    name = "infiniband"
    size = 2                                       # boxes
    bandwidth = "200 GB/s"                         # one whole box's uplink, shared by the rings through it
    latency = "4 us"
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from numbers import Integral
from pathlib import Path
from typing import Any

from .collectives import LIBRARIES
from .errors import TopologyError, require, shown, suggestion
from .machine.device import Device
from .machine.groups import group_link
from .machine.links import COLLECTIVES, Level, Link
from .machine.local import DRIVER, local_topology
from .text.numbers import MOST_DEVICES, whole
from .text.tables import Table, plain, read_toml
from .text.units import parse_quantity

__all__ = ["Device", "Level", "Link", "Topology", "TopologyError"]

_MOST_LEVELS = 16


@dataclass(frozen=True, slots=True)
class Topology:
    """A machine of equal devices, connected by one or more levels of interconnect.

    Attributes:
        name: a name for tables and messages.
        device: the device of every rank.
        levels: innermost (fastest) first. Rank ``r`` is device ``r`` counted innermost first, as torchrun
            numbers them.
        library: the library whose algorithms the collectives use, a key of `costmodel.collectives.LIBRARIES`.

    Raises:
        TopologyError: there is no level, two levels have the same name, there are more than 262,144 devices, or the library
            is unknown.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    library: str = "nccl"

    def __post_init__(self) -> None:
        """Checks the figures."""
        levels = self.levels if isinstance(self.levels, Iterable) else (None,)
        object.__setattr__(self, "levels", tuple(levels))
        if not isinstance(self.device, Device) or not all(isinstance(level, Level) for level in self.levels):
            raise TopologyError(f"topology {shown(self.name)}: give a Device, and a list of Levels")
        names = [level.name for level in self.levels]
        where = f"topology {shown(self.name)}"
        if not isinstance(self.name, str) or not self.name.strip():
            raise TopologyError(f"{where}: the name is empty; give it one")
        if not 1 <= len(names) <= _MOST_LEVELS:
            raise TopologyError(
                f"{where}: it has {len(names)} levels; it needs at least one level, and at most {_MOST_LEVELS}"
            )
        for name in names:
            if names.count(name) > 1:
                raise TopologyError(f"{where}: two levels are named {shown(name)}; give each its own name")
        if not isinstance(self.library, str) or self.library not in LIBRARIES:
            raise TopologyError(f"{where}: library {shown(self.library)} is not known{suggestion(self.library, LIBRARIES)}")
        whole(self.devices, f"{where}: the number of devices", most=MOST_DEVICES, error=TopologyError)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(level.size for level in self.levels)

    def links(self, mesh_shape: Sequence[int]) -> tuple[Link, ...]:
        """The link between the devices along each axis of a mesh.

        Axis 0 is outermost and the last axis innermost, so neighbouring ranks lie along the last one. An axis may cross
        several levels, and gets the smallest bandwidth and the largest latency of these. On each level, the bandwidth is
        that of the uplink of one group of the level below, divided by the number of rings of this axis that share it:
        ``min(devices in that group, product of the mesh axes nested inside this one)``. Sources: ATP, arXiv 2301.08658
        (hierarchical communication matrix); AxoNN, arXiv 2502.08145 (the number of rings).

        An axis of size 1 crosses no level: it has the bandwidth of level 0, and no latency.

        Args:
            mesh_shape: sizes of the mesh axes, outermost first.

        Returns:
            One link per axis.

        Raises:
            TopologyError: a size is less than 1, or the product of the sizes is not `devices`.
        """
        return tuple(self.link(mesh_shape, (axis,)) for axis in range(len(_wholes(mesh_shape, "the mesh")) or 1))

    def link(self, mesh_shape: Sequence[int], axes: Sequence[int], kind: str | None = None) -> Link:
        """The link between the devices along one mesh axis, or along several together; see `links`.

        Args:
            mesh_shape: sizes of the mesh axes, outermost first.
            axes: the axes whose devices communicate.
            kind: the collective (one of `costmodel.COLLECTIVES`) whose measured figures to take, where there are any.

        Raises:
            TopologyError: a size is less than 1, the product of the sizes is not `devices`, or the mesh has no such axis or
                an axis is given twice.
        """
        shape, along = _wholes(mesh_shape, "the mesh"), _wholes(axes, "axes")
        if not shape or min(shape) < 1 or math.prod(shape) != self.devices:
            raise TopologyError(
                f"mesh {shape} holds {math.prod(shape)} devices, and topology {self.name!r} has "
                f"{self.devices} ({self._shape()}); choose sizes of at least 1 "
                f"whose product is {self.devices}"
            )
        if kind is not None and (not isinstance(kind, str) or kind not in COLLECTIVES):
            raise TopologyError(f"no collective is called {shown(kind)}; choose {', '.join(COLLECTIVES)}")
        if along and not (0 <= min(along) <= max(along) < len(shape) and len({*along}) == len(along)):
            raise TopologyError(f"axes {along}: mesh {shape} has the axes 0 to {len(shape) - 1}, each of them once")
        return group_link(self.levels, shape, along, kind, self.device.contention)

    def resized(self, devices: int) -> Topology:
        """The same machine with a different number of devices.

        Inner levels are filled first. Only the outermost level may grow beyond its size, and a level is used
        only once the levels inside it are full.

        Args:
            devices: the new number of devices.

        Returns:
            A topology with the same levels and names. A level that has shrunk does not keep its original size, so resize
            the original topology rather than a resized one.

        Raises:
            TopologyError: some group would be filled only partly; the message names numbers of devices that fit; or
                there are more than 262,144 devices.
        """
        what = f"topology {shown(self.name)}: the number of devices"
        whole(devices, what, most=MOST_DEVICES, error=TopologyError)
        if devices == self.devices:
            return self
        inner, sizes = 1, [1] * len(self.levels)
        for index, level in enumerate(self.levels):
            last = index == len(self.levels) - 1
            if devices <= inner * level.size or last:
                if devices < 1 or devices % inner:
                    raise TopologyError(self._misfit(devices, inner))
                sizes[index] = devices // inner
                break
            sizes[index] = level.size
            inner *= level.size
        levels = tuple(level.resized(size) for level, size in zip(self.levels, sizes, strict=True))
        return dataclasses.replace(self, levels=levels)

    def to_dict(self) -> dict[str, Any]:
        """The topology as plain JSON values in base units, which `from_dict` reads back exactly."""
        return {
            "name": self.name,
            "device": plain(self.device),
            "library": self.library,
            "levels": [plain(level) for level in self.levels],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "topology") -> Topology:
        """Reads a topology from a mapping whose quantities are numbers in base units or text with units.

        Args:
            data: a mapping as returned by `to_dict` or read from a TOML file.
            where: the file that the mapping came from, for messages.

        Raises:
            TopologyError: a value is invalid; the message names ``where``, the table, the key and the expected value.
        """
        top = Table(data, where, required=("name", "device", "levels"), optional=("library",))
        levels = [
            Level.from_dict(entry, f"{where}: [[levels]] number {number}")
            for number, entry in enumerate(top.mappings("levels"), start=1)
        ]
        try:
            device = Device.from_dict(top.mapping("device"), f"{where}: [device]")
        except TopologyError as error:
            raise error if str(error).startswith(where) else TopologyError(f"{where}: [device]: {error}") from None
        name, library = top.text("name"), top.text("library") if "library" in top.data else "nccl"
        try:
            return cls(name, device, tuple(levels), library)
        except TopologyError as error:
            raise TopologyError(f"{where}: {error}") from None

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Topology:
        """Reads a preset or a TOML file.

        Args:
            name_or_path: a preset's name (see `preset_names`), or the path of a TOML file. Text that ends in
                ``.toml`` or contains a path separator is a path.

        Raises:
            TopologyError: there is no such preset or file, or the file is invalid; the message names file, table and
                key.
        """
        if not isinstance(name_or_path, str | os.PathLike):
            raise TopologyError(f"topology {shown(name_or_path)}: give a preset's name or the path of a .toml file")
        text = os.fspath(name_or_path)
        presets = _presets()
        if isinstance(name_or_path, str) and text in presets:
            with resources.as_file(presets[text]) as path:
                return cls.from_dict(read_toml(path), str(path))
        path = Path(text)
        if isinstance(name_or_path, str) and path.suffix != ".toml" and path.name == text and not os.path.isfile(text):
            raise TopologyError(
                f"no topology preset is named {shown(text)}{suggestion(text, presets)} (or the path of a .toml file)"
            )
        return cls.from_dict(read_toml(path), str(path))

    @staticmethod
    def preset_names() -> tuple[str, ...]:
        """The names of all presets, sorted."""
        return tuple(_presets())

    @classmethod
    def flat(
        cls,
        devices: int,
        *,
        bandwidth: float | str = "100 GB/s",
        latency: float | str = "5 us",
        device: Device | str = "dgx-a100",
    ) -> Topology:
        """A machine of one level, in which every device has its own link of the same speed.

        Args:
            devices: the number of devices.
            bandwidth: bytes/s per device in one direction, or text with a unit.
            latency: seconds per message, or text with a unit.
            device: the device, or the name of the preset whose device is used.

        Raises:
            TopologyError: a figure is not positive, or no preset has that name.
            UnitError: a quantity cannot be parsed.
        """
        level = Level("flat", devices, parse_quantity(bandwidth, "bandwidth"), parse_quantity(latency, "time"))
        chosen = device if isinstance(device, Device) else cls.load(device).device
        return cls(f"flat-{devices}", chosen, (level,))

    @classmethod
    def local(cls, environ: Mapping[str, str] | None = None, driver: Path = DRIVER) -> Topology:
        """A guess at the machine that this process runs on, named ``local``; see `costmodel.machine.local.local_topology`.

        Args:
            environ: environment variables as set by torchrun; by default, those of this process.
            driver: where the GPU driver lists its devices.

        Raises:
            TopologyError: a variable is not a positive integer, or the ranks do not fill whole nodes.
        """
        found = os.environ if environ is None else environ
        require(found, Mapping, "environ", "environment variables by name, such as os.environ")
        require(driver, Path, "driver", "the folder in which the GPU driver lists its devices, as a pathlib.Path")
        return cls("local", *local_topology(found, cls.load, driver))

    def _shape(self) -> str:
        return " x ".join(f"{level.size} {level.name}" for level in reversed(self.levels))

    def _misfit(self, devices: int, unit: int) -> str:
        nearest = sorted({max(devices // unit, 1) * unit, (max(devices, 0) // unit + 1) * unit})
        fits = f"{' or '.join(map(str, nearest))} would fit"
        if unit == 1:
            return f"topology {self.name!r} cannot have {devices} devices; {fits}"
        return (
            f"topology {self.name!r} cannot have {devices} devices: they come in whole groups of {unit} "
            f"({self._shape()}); {fits}, as would any multiple of {unit}"
        )


def _wholes(numbers: Sequence[int], what: str) -> tuple[int, ...]:
    instead = "whole numbers, such as (2, 4)"
    require(numbers, Sequence, what, instead)
    for one in numbers:
        require(one, Integral, f"{what}: {shown(numbers)}: a number", instead)
    return tuple(map(int, numbers))


def _presets() -> dict[str, Traversable]:
    folder = resources.files(__package__) / "presets"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {file.name.removesuffix(".toml"): file for file in files}
