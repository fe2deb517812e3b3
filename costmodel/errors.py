"""The base class of autotp's errors, the errors of the cost model, and helpers for their messages."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

__all__ = ["AutotpError", "TopologyError", "UnitError", "require", "shown", "suggestion"]


class AutotpError(ValueError):
    """A request that autotp cannot fulfil; the message says what is wrong, where, and what to do instead."""


class UnitError(AutotpError):
    """A quantity that cannot be parsed: an unknown unit, a unit of another quantity, or an invalid number."""


class TopologyError(AutotpError):
    """A topology that cannot be read or built, or a mesh that does not fit on it."""


class _Shown(reprlib.Repr):
    """A bounded ``repr`` of any value of a user, for messages."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write integers of more than 4,300 digits.
        return repr(x) if x.bit_length() < 128 else f"a whole number of about {x.bit_length() * 3 // 10:,} digits"

    def repr_instance(self, x: Any, level: int) -> str:
        try:
            return super().repr_instance(x, level)
        except Exception:  # noqa: BLE001 - repr() of a user's class may fail in any way
            return f"<{type(x).__name__}>"


def shown(value: Any) -> str:
    """A value for a message: its ``repr``, shortened if it is long."""
    return _Shown().repr(value)


def require(value: Any, kind: type, what: str, instead: str) -> None:
    """Checks the type of an argument. Text is always refused, since it is a sequence too.

    Args:
        value: the argument.
        kind: the required class.
        what, instead: for the message, a description of the argument, and of valid ones.

    Raises:
        AutotpError: ``value`` is not an instance of ``kind``, or is text.
    """
    if not isinstance(value, kind) or isinstance(value, str):
        found = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}, {shown(value)}"
        raise AutotpError(f"{what} is {found}: give {instead}")


def suggestion(wrong: object, allowed: Iterable[str]) -> str:
    """The most similar allowed name, and all allowed names.

    Args:
        wrong: the name that was given.
        allowed: the valid names.

    Returns:
        A clause to append to an error message, such as ``"; did you mean 'size'? Allowed: name, size"``.
    """
    names = list(allowed)
    close = difflib.get_close_matches(wrong[:100] if isinstance(wrong, str) else "", names, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    return f"{meant} Allowed: {', '.join(names)}"
