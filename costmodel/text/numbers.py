"""Checks all numbers that users give: whole numbers and figures, in a range in which all formulas can be computed."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from ..errors import AutotpError, UnitError, shown

__all__ = ["LARGEST", "MOST", "MOST_DEVICES", "SMALLEST", "figure", "whole", "whole_of"]

#: The largest whole number that is accepted anywhere.
MOST = 2**48

#: The most devices of a machine: a few times what the largest ones have.
MOST_DEVICES = 2**18

#: Figures other than 0 are in this range, so that no product or quotient of a few of them is infinite or subnormal.
SMALLEST, LARGEST = 1e-30, 1e30


def whole(value: Any, what: str, least: int = 1, most: int = MOST, error: type[AutotpError] = UnitError) -> int:
    """Checks that a value is a whole number in a range, and returns it as an int.

    Args:
        value: the value to check.
        what: a description of the value, for the message.
        least, most: the range, both included.
        error: the class of the error to raise.

    Raises:
        AutotpError: the value is not a whole number, or out of range.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        found = operator.index(value)
        if least <= found <= most:
            return found
        if found > most:
            raise error(f"{what} is {shown(value)}; it must be at most {most:,}")
    raise error(f"{what} is {shown(value)}; it must be a whole number of at least {least}")


def whole_of(text: str, what: str, least: int = 1, most: int = MOST, error: type[AutotpError] = UnitError) -> int:
    """Parses a whole number that is written in ASCII digits, and checks it; see `whole`."""
    word = text.strip() if isinstance(text, str) else ""
    # Longer words are out of every range, and int() takes quadratic time for them.
    written = word.isascii() and word.isdigit() and len(word.lstrip("0")) <= len(str(MOST)) + 1
    return whole(int(word.lstrip("0") or 0) if written else text, what, least, most, error)


def figure(value: Any, what: str, *, positive: bool = False, error: type[AutotpError] = UnitError) -> float:
    """Checks that a value is a number, not negative, and not too small or too large to compute with; returns it as a float.

    Args:
        value: the value to check.
        what: a description of the value, for the message.
        positive: whether to refuse 0 too.
        error: the class of the error to raise.

    Raises:
        AutotpError: the value is not a number, is negative, or is neither 0 nor between `SMALLEST` and `LARGEST`.
    """
    least = "positive" if positive else "not negative"
    if not _is_number(value):
        raise error(f"{what} is {shown(value)}; it must be a number, finite and {least}")
    # Comparing an integer with a float is exact at any size; converting it, as math.isnan does, may overflow.
    if value != value or value < 0 or value == math.inf or (positive and value == 0):
        raise error(f"{what} is {shown(value)}; it must be finite and {least}")
    if value != 0 and (value < SMALLEST or value > LARGEST):
        raise error(f"{what} is {shown(value)}; it must be between {SMALLEST:g} and {LARGEST:g} in base units")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
