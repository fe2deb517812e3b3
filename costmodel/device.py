"""One device: how fast it computes and how much it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import TopologyError, suggestion
from .tables import Table

__all__ = ["DTYPES", "Device"]

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The dtype names for which a device may give a peak rate."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or processor core.

    Attributes:
        name: for people.
        flops: dtype name (one of `DTYPES`; float32 is required) -> dense peak, FLOP/s.
        memory: bytes.
        memory_bandwidth: bytes/s between the device and its own memory.
        launch: seconds that starting one kernel costs.

    Raises:
        TopologyError: a figure is missing, not finite or not positive, or a dtype name is unknown.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory: float
    memory_bandwidth: float
    launch: float

    def __post_init__(self) -> None:
        """Checks the figures."""
        where = f"device {self.name!r}"
        for dtype, rate in self.flops.items():
            if dtype not in DTYPES:
                raise TopologyError(f"{where}: flops: unknown dtype {dtype!r}{suggestion(dtype, DTYPES)}")
            _positive(rate, f"{where}: flops.{dtype}")
        if "float32" not in self.flops:
            raise TopologyError(f"{where}: flops: 'float32' is missing; the other dtypes fall back on it")
        _positive(self.memory, f"{where}: memory")
        _positive(self.memory_bandwidth, f"{where}: memory_bandwidth")
        if not (math.isfinite(self.launch) and self.launch >= 0):
            raise TopologyError(f"{where}: launch is {self.launch!r}; it must be finite and not negative")
        object.__setattr__(self, "flops", {d: float(self.flops[d]) for d in DTYPES if d in self.flops})

    def peak(self, dtype: str) -> float:
        """The dense peak rate for a dtype.

        A rate that the device does not give is inferred: float64 (and complex128) runs at half of float32; an
        8-bit float runs at the better 16-bit rate; everything else (16-bit floats without hardware of their
        own, integers, booleans) runs at float32's, since it is computed in float32 or at a like rate.

        Args:
            dtype: the dtype's name, with or without ``torch.`` before it.

        Returns:
            FLOP/s.
        """
        name = dtype.removeprefix("torch.")
        if name in self.flops:
            return self.flops[name]
        single = self.flops["float32"]
        if name in ("float64", "complex128"):
            return self.flops.get("float64", single / 2)
        if name.startswith("float8"):
            return max(self.flops.get("bfloat16", single), self.flops.get("float16", single))
        return single

    def to_dict(self) -> dict[str, Any]:
        """The device as plain JSON values in base units, which `from_dict` reads back exactly."""
        return {
            "name": self.name,
            "flops": dict(self.flops),
            "memory": self.memory,
            "memory_bandwidth": self.memory_bandwidth,
            "launch": self.launch,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "device") -> Device:
        """Reads a device from a mapping whose quantities are numbers in base units or text with units.

        Args:
            data: the keys are the attributes' names.
            where: the file and table that the mapping came from, for messages.

        Raises:
            TopologyError: naming ``where``, the key and what it should have been.
        """
        table = Table(data, where, required=("name", "flops", "memory", "memory_bandwidth", "launch"))
        rates = Table(table.mapping("flops"), f"{where}: flops", required=("float32",), optional=DTYPES)
        return cls(
            name=table.text("name"),
            flops={dtype: rates.quantity(dtype, "rate", positive=True) for dtype in rates.data},
            memory=table.quantity("memory", "memory", positive=True),
            memory_bandwidth=table.quantity("memory_bandwidth", "bandwidth", positive=True),
            launch=table.quantity("launch", "time"),
        )


def _positive(value: float, where: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise TopologyError(f"{where} is {value!r}; it must be finite and positive")
