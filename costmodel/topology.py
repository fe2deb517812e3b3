"""The machine: one kind of device, and the levels of interconnect that join them.

Written as TOML, one table per thing (``costmodel/presets/*.toml`` are examples):

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from .collectives import LIBRARIES
from .device import Device
from .errors import TopologyError, suggestion
from .groups import group_link
from .links import Level, Link
from .local import DRIVER, local_topology
from .tables import Table, read_toml
from .units import parse_quantity

__all__ = ["Device", "Level", "Link", "Topology", "TopologyError"]


@dataclass(frozen=True, slots=True)
class Topology:
    """A machine of equal devices, joined level by level.

    Attributes:
        name: for people.
        device: what every rank runs on.
        levels: innermost (fastest) first. Rank ``r`` is device ``r`` counted innermost first, as torchrun
            numbers them.
        library: whose algorithms the collectives use: a key of `costmodel.collectives.LIBRARIES`.

    Raises:
        TopologyError: there is no level, two have one name, or the library is not known.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    library: str = "nccl"

    def __post_init__(self) -> None:
        """Checks the figures."""
        object.__setattr__(self, "levels", tuple(self.levels))
        names = [level.name for level in self.levels]
        if not self.name.strip():
            raise TopologyError("topology: its name is empty; give it one, for people")
        if not names:
            raise TopologyError(f"topology {self.name!r}: it needs one level at least")
        for name in names:
            if names.count(name) > 1:
                raise TopologyError(f"topology {self.name!r}: two levels are named {name!r}; give each its own name")
        if self.library not in LIBRARIES:
            known = suggestion(self.library, LIBRARIES)
            raise TopologyError(f"topology {self.name!r}: library {self.library!r} is not known{known}")

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return math.prod(level.size for level in self.levels)

    def links(self, mesh_shape: Sequence[int]) -> tuple[Link, ...]:
        """What each axis of a mesh sees of the interconnect.

        Axis 0 is outermost and the last axis innermost, so that neighbouring ranks lie along the last one. An
        axis crosses every level in which it has extent, and may straddle several. It gets the least bandwidth
        and the largest latency of the levels that it crosses. At each of them the bandwidth is the uplink of
        one group of the level below, divided by the rings of this axis that share it: ``min(devices in that
        group, product of the mesh axes nested inside this one)``. Sources: ATP, arXiv 2301.08658
        (hierarchical communication matrix); AxoNN, arXiv 2502.08145 (the number of rings).

        An axis of size 1 crosses nothing: it has level 0's bandwidth and no latency.

        Args:
            mesh_shape: sizes of the mesh axes, outermost first.

        Returns:
            One link per axis.

        Raises:
            TopologyError: an axis has no size, or the sizes do not multiply to `devices`.
        """
        shape = tuple(int(size) for size in mesh_shape) or (0,)
        return tuple(self.link(shape, (axis,)) for axis in range(len(shape)))

    def link(self, mesh_shape: Sequence[int], axes: Sequence[int], kind: str | None = None) -> Link:
        """What the devices along one mesh axis, or several together, see of the interconnect; see `links`.

        Args:
            mesh_shape: sizes of the mesh axes, outermost first.
            axes: the axes whose devices communicate.
            kind: the collective (one of `costmodel.COLLECTIVES`) whose measured figures to take, where there are any.

        Raises:
            TopologyError: an axis has no size, or the sizes do not multiply to `devices`.
        """
        shape = tuple(int(size) for size in mesh_shape)
        if not shape or min(shape) < 1 or math.prod(shape) != self.devices:
            raise TopologyError(
                f"mesh {shape} holds {math.prod(shape)} devices, and topology {self.name!r} has "
                f"{self.devices} ({self._shape()}); choose sizes of at least 1 "
                f"whose product is {self.devices}"
            )
        return group_link(self.levels, shape, tuple(axes), kind, self.device.contention)

    def resized(self, devices: int) -> Topology:
        """The same machine with another number of devices.

        Inner levels are filled first. Only the outermost level may grow beyond its size, and a level is used
        only once the levels inside it are full.

        Args:
            devices: how many are wanted.

        Returns:
            A topology with the same levels and names. Levels that are shrunk forget their size: resize from
            the original rather than in steps.

        Raises:
            TopologyError: that many devices would fill some group in part; the message names counts that fit.
        """
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
            "device": self.device.to_dict(),
            "library": self.library,
            "levels": [level.to_dict() for level in self.levels],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "topology") -> Topology:
        """Reads a topology from a mapping whose quantities are numbers in base units or text with units.

        Args:
            data: as `to_dict` writes it, or as a TOML file holds it.
            where: the file that the mapping came from, for messages.

        Raises:
            TopologyError: naming ``where``, the table, the key and what it should have been.
        """
        top = Table(data, where, required=("name", "device", "levels"), optional=("library",))
        levels = [
            Level.from_dict(entry, f"{where}: [[levels]] number {number}")
            for number, entry in enumerate(top.mappings("levels"), start=1)
        ]
        device = Device.from_dict(top.mapping("device"), f"{where}: [device]")
        try:
            return cls(top.text("name"), device, tuple(levels), top.text("library") if "library" in top.data else "nccl")
        except TopologyError as error:
            raise TopologyError(f"{where}: {error}") from None

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Topology:
        """Reads a preset or a TOML file.

        Args:
            name_or_path: a preset's name (see `preset_names`), or the path of a TOML file. Text that ends in
                ``.toml`` or holds a path separator is a path.

        Raises:
            TopologyError: no such preset or file, or the file is wrong; the message names file, table and
                key.
        """
        text = os.fspath(name_or_path)
        presets = _presets()
        if isinstance(name_or_path, str) and text in presets:
            with resources.as_file(presets[text]) as path:
                return cls.from_dict(read_toml(path), str(path))
        path = Path(text)
        if isinstance(name_or_path, str) and path.suffix != ".toml" and path.name == text and not path.is_file():
            raise TopologyError(
                f"no topology preset is named {text!r}{suggestion(text, presets)} (or the path of a .toml file)"
            )
        return cls.from_dict(read_toml(path), str(path))

    @staticmethod
    def preset_names() -> tuple[str, ...]:
        """The names that `load` knows, sorted."""
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
        """A machine of one level, in which every device has the same link of its own.

        Args:
            devices: how many.
            bandwidth: bytes/s per device in one direction, or text with a unit.
            latency: seconds per message, or text with a unit.
            device: the device, or the name of a preset whose device to take.

        Raises:
            TopologyError: a figure is not positive, or no preset has that name.
            UnitError: a quantity cannot be read.
        """
        level = Level("flat", devices, parse_quantity(bandwidth, "bandwidth"), parse_quantity(latency, "time"))
        chosen = device if isinstance(device, Device) else cls.load(device).device
        return cls(f"flat-{devices}", chosen, (level,))

    @classmethod
    def local(cls, environ: Mapping[str, str] | None = None, driver: Path = DRIVER) -> Topology:
        """A guess at the machine that this process runs on, named ``local``; see `costmodel.local.local_topology`.

        Args:
            environ: read for what torchrun sets; left out, this process's own.
            driver: where the GPU driver lists its devices.

        Raises:
            TopologyError: a variable is no positive whole number, or the ranks do not fill whole nodes.
        """
        return cls("local", *local_topology(os.environ if environ is None else environ, cls.load, driver))

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


def _presets() -> dict[str, Traversable]:
    folder = resources.files(__package__) / "presets"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {file.name.removesuffix(".toml"): file for file in files}
