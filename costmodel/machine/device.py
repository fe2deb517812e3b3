"""One device: its speed and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import TopologyError, require, shown, suggestion
from ..text.numbers import figure
from ..text.tables import Table

__all__ = ["DTYPES", "KINDS", "Device"]

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The dtype names for which a device may give a peak rate."""

KINDS = ("product", "convolution", "attention", "norm", "softmax", "pointwise", "gather", "copy")
"""Kinds of operators whose speed is measured separately."""

_OPTIONAL = ("efficiency", "half_size", "slowdown", "contention", "host", "idle_power", "busy_power", "price")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or CPU core.

    Attributes:
        name: a name for tables and messages.
        flops: dtype name (one of `DTYPES`; float32 is required) -> dense peak, FLOP/s.
        memory: bytes.
        memory_bandwidth: bytes/s between the device and its own memory.
        launch: seconds to start one kernel.
        efficiency: the share of the peak rate that large matrix products reach.
        half_size: the size of a dim that halves that rate: small shards are slower. With 0, the rate does not depend on it.
        slowdown: kind of operator (one of `KINDS`) -> its measured time relative to the roofline.
        contention: the share of transfer time that is taken from concurrent computation: 0 if collectives need no device
            time, 1 if the device can only communicate or compute. A level may have its own value.
        host: seconds in which the host starts one kernel of a step (`costmodel.overlap.HOSTED`): what a framework does
            between two launches. With 0, no step waits for it.
        idle_power, busy_power: watts that the device draws while it waits and while it computes, including its share of the
            node; 0 if unknown.
        price: of one device-hour, in any currency; 0 if unknown.

    Raises:
        TopologyError: a figure is missing, not finite or not positive, or the name of a dtype or kind is unknown.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory: float
    memory_bandwidth: float
    launch: float
    efficiency: float = 1.0
    half_size: float = 0.0
    slowdown: Mapping[str, float] = field(default_factory=dict, hash=False)
    contention: float = 0.0
    host: float = 0.0
    idle_power: float = 0.0
    busy_power: float = 0.0
    price: float = 0.0

    def __post_init__(self) -> None:
        """Checks the figures."""
        where = f"device {shown(self.name)}"
        if not isinstance(self.name, str):
            raise TopologyError(f"{where}: give its name as text")
        require(self.flops, Mapping, f"{where}: flops", "rates by dtype, such as {'float32': 19.5e12}")
        require(self.slowdown, Mapping, f"{where}: slowdown", "factors by kind of operator")
        for dtype, rate in self.flops.items():
            if dtype not in DTYPES:
                raise TopologyError(f"{where}: flops: unknown dtype {shown(dtype)}{suggestion(str(dtype), DTYPES)}")
            _positive(rate, f"{where}: flops.{dtype}")
        if "float32" not in self.flops:
            raise TopologyError(f"{where}: flops: 'float32' is missing; the other dtypes fall back on it")
        _positive(self.memory, f"{where}: memory")
        _positive(self.memory_bandwidth, f"{where}: memory_bandwidth")
        for key in ("launch", "half_size", "host", "idle_power", "busy_power", "price"):
            figure(getattr(self, key), f"{where}: {key}", error=TopologyError)
        if _positive(self.efficiency, f"{where}: efficiency") > 1:
            raise TopologyError(f"{where}: efficiency is {shown(self.efficiency)}; it must be above 0 and at most 1")
        if figure(self.contention, f"{where}: contention", error=TopologyError) > 1:
            raise TopologyError(f"{where}: contention is {shown(self.contention)}; it must be between 0 and 1")
        if self.idle_power > self.busy_power:
            idle, busy = float(self.idle_power), float(self.busy_power)
            raise TopologyError(f"{where}: idle_power {idle:g} W is more than busy_power {busy:g} W")
        for kind, factor in self.slowdown.items():
            if kind not in KINDS:
                raise TopologyError(f"{where}: slowdown: unknown kind {shown(kind)}{suggestion(str(kind), KINDS)}")
            _positive(factor, f"{where}: slowdown.{kind}")
        object.__setattr__(self, "flops", {d: float(self.flops[d]) for d in DTYPES if d in self.flops})

    def peak(self, dtype: str) -> float:
        """The dense peak rate for a dtype.

        A missing rate is inferred: float64 (and complex128) runs at half the rate of float32; 8-bit floats run at the
        higher of the 16-bit rates; everything else (16-bit floats without hardware support, integers, booleans) runs at the
        rate of float32, since it is computed in float32 or at a similar rate.

        Args:
            dtype: the dtype's name, with or without the prefix ``torch.``.

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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "device") -> Device:
        """Reads a device from a mapping whose quantities are numbers in base units or text with units.

        Args:
            data: the keys are the attributes' names.
            where: the file and table that the mapping came from, for messages.

        Raises:
            TopologyError: a value is invalid; the message names ``where``, the key and the expected value.
        """
        table = Table(data, where, required=("name", "flops", "memory", "memory_bandwidth", "launch"), optional=_OPTIONAL)
        rates = Table(table.mapping("flops"), f"{where}: flops", required=("float32",), optional=DTYPES)
        return cls(
            name=table.text("name"),
            flops={dtype: rates.quantity(dtype, "rate", positive=True) for dtype in rates.data},
            memory=table.quantity("memory", "memory", positive=True),
            memory_bandwidth=table.quantity("memory_bandwidth", "bandwidth", positive=True),
            launch=table.quantity("launch", "time"),
            **{key: _optional(table, key) for key in _OPTIONAL if key in table.data},
        )


def _optional(table: Table, key: str) -> Any:
    if key == "slowdown":
        factors = Table(table.mapping(key), f"{table.where}: {key}", required=(), optional=KINDS)
        return {kind: factors.number(kind) for kind in factors.data}
    if key == "host":
        return table.quantity(key, "time")
    return table.quantity(key, "power") if key.endswith("_power") else table.number(key)


def _positive(value: float, where: str) -> float:
    return figure(value, where, positive=True, error=TopologyError)
