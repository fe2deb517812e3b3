"""Physical quantities as people write them: ``"600 GB/s"``, ``"25 Gbit/s"``, ``"3 us"``, ``"80 GiB"``.

Everywhere else, a quantity is a plain float in its base unit: bytes, bytes per second, seconds,
or FLOP per second.
"""

from __future__ import annotations

import decimal
import math
import re
from typing import Literal, get_args

from ..errors import UnitError, shown, suggestion
from .numbers import figure

__all__ = ["Quantity", "format_quantity", "parse_quantity"]

Quantity = Literal["memory", "bandwidth", "time", "rate", "power", "energy"]
"""The kind of a quantity: bytes, bytes per second, seconds, FLOP per second, watts or joules."""

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_HOURS = {prefix: 3600 * scale for prefix, scale in _DECIMAL.items()}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def _scaled(suffix: str, divisor: int, *tables: dict[str, int]) -> dict[str, tuple[int, int]]:
    # (numerator, denominator) rather than one float, so that "1.9 us" is exactly the float literal 1.9e-6.
    return {prefix + suffix: (scale, divisor) for table in tables for prefix, scale in table.items()}


_UNITS: dict[str, dict[str, tuple[int, int]]] = {
    "memory": _scaled("B", 1, _DECIMAL, _BINARY),
    "bandwidth": _scaled("B/s", 1, _DECIMAL, _BINARY) | _scaled("bit/s", 8, _DECIMAL),
    "time": {"s": (1, 1), "ms": (1, 10**3), "us": (1, 10**6), "ns": (1, 10**9)},
    "rate": _scaled("FLOP/s", 1, _DECIMAL) | _scaled("FLOPS", 1, _DECIMAL),
    "power": {"mW": (1, 10**3)} | _scaled("W", 1, _DECIMAL),
    "energy": {"mJ": (1, 10**3), "uJ": (1, 10**6)} | _scaled("J", 1, _DECIMAL) | _scaled("Wh", 1, _HOURS),
}
_SHOWN: dict[str, tuple[str, ...]] = {
    "memory": ("PB", "TB", "GB", "MB", "kB", "B"),
    "bandwidth": ("TB/s", "GB/s", "MB/s", "kB/s", "B/s"),
    "time": ("s", "ms", "us", "ns"),
    "power": ("MW", "kW", "W", "mW"),
    "energy": ("GJ", "MJ", "kJ", "J", "mJ", "uJ"),
    "rate": ("PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "FLOP/s"),
}
_PATTERN = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*", re.ASCII)
_LONGEST = 100  # characters of a quantity
_BIT_SHORTHAND = re.compile(r"([kMGTPE]?)(?:b/s|bps|Bps)")


def parse_quantity(value: str | int | float, quantity: Quantity) -> float:
    """Parses one quantity.

    Args:
        value: a number in the base unit, or text: a number, optionally followed by a unit.
        quantity: the kind of the quantity, which determines the accepted units.

    Returns:
        The value in the base unit of ``quantity`` (bytes, bytes/s, s or FLOP/s); see `costmodel.text.numbers.figure`.

    Raises:
        UnitError: ``value`` is not a number, is negative or out of range, or has a unit of a different kind.
    """
    units = _UNITS[quantity]
    if not isinstance(value, str):
        return figure(value, f"the {quantity}")
    match = _PATTERN.fullmatch(value) if len(value) <= _LONGEST else None
    if match is None:
        raise UnitError(f"{shown(value)} is not a {quantity}: write a number and a unit, such as {_example(quantity)!r}")
    unit = match[2].replace("µ", "u").replace("μ", "u")
    scale, divisor = (1, 1) if not unit else units.get(unit, (0, 0))
    if divisor == 0:
        raise UnitError(_unknown_unit(value, match[2], quantity))
    # Without traps, an exponent out of range becomes an infinity, which is refused below.
    with decimal.localcontext(decimal.Context(prec=60, traps=[])):
        result = float(decimal.Decimal(match[1]) * scale / divisor)
    return figure(result, f"{shown(value)} is not a {quantity}: the value in base units")


def format_quantity(value: float, quantity: Quantity, digits: int = 3) -> str:
    """Formats a quantity in the largest decimal unit in which it is at least one.

    Args:
        value: in the base unit of ``quantity``.
        quantity: the kind of the quantity.
        digits: significant digits.

    Returns:
        Text that `parse_quantity` converts back to the same value, up to the digits shown.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {_SHOWN[quantity][-1] if quantity != 'time' else 's'}"
    units = _UNITS[quantity]
    unit = _SHOWN[quantity][-1]
    for candidate in _SHOWN[quantity]:
        scale, divisor = units[candidate]
        if float(f"{abs(value) * divisor / scale:.{digits}g}") >= 1:
            unit = candidate
            break
    scale, divisor = units[unit]
    return f"{float(f'{value * divisor / scale:.{digits}g}'):.12g} {unit}"


def _example(quantity: Quantity) -> str:
    return {"memory": "80 GB", "bandwidth": "25 Gbit/s", "time": "3 us", "rate": "312 TFLOP/s"}.get(
        quantity, {"power": "400 W", "energy": "5 kJ"}.get(quantity, "")
    )


def _unknown_unit(value: str, unit: str, quantity: Quantity) -> str:
    shorthand = _BIT_SHORTHAND.fullmatch(unit)
    if quantity == "bandwidth" and shorthand is not None:
        prefix = shorthand[1]
        return f"{value!r}: {unit!r} is read as bits by some and as bytes by others; write '{prefix}bit/s' or '{prefix}B/s'"
    other = next((kind for kind in get_args(Quantity) if kind != quantity and unit in _UNITS[kind]), None)
    if other is not None:
        return f"{value!r} is a {other}, but a {quantity} is needed, such as {_example(quantity)!r}"
    return f"{value!r}: unknown unit {unit!r} for a {quantity}{suggestion(unit, _UNITS[quantity])}"
