"""The base class of autotp's errors, the errors of the cost model, and the suggestions in their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["AutotpError", "TopologyError", "UnitError", "suggestion"]


class AutotpError(ValueError):
    """A request that autotp cannot fulfil; the message says what is wrong, where, and what to do instead."""


class UnitError(AutotpError):
    """A quantity that cannot be parsed: an unknown unit, a unit of another quantity, or an invalid number."""


class TopologyError(AutotpError):
    """A topology that cannot be read or built, or a mesh that does not fit on it."""


def suggestion(wrong: str, allowed: Iterable[str]) -> str:
    """The most similar allowed name, and all allowed names.

    Args:
        wrong: the name that was given.
        allowed: the valid names.

    Returns:
        A clause to append to an error message, such as ``"; did you mean 'size'? Allowed: name, size"``.
    """
    names = list(allowed)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    return f"{meant} Allowed: {', '.join(names)}"
