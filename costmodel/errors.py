"""What all errors that a user may meet are, those of the cost model, and the "did you mean" that they share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["AutotpError", "TopologyError", "UnitError", "suggestion"]


class AutotpError(ValueError):
    """Something asked of autotp cannot be done; the message says what, where, and what to do instead."""


class UnitError(AutotpError):
    """A quantity that cannot be read: an unknown unit, a wrong kind of unit, or an impossible number."""


class TopologyError(AutotpError):
    """A topology that cannot be read or built, or a mesh that does not fit on it."""


def suggestion(wrong: str, allowed: Iterable[str]) -> str:
    """Says what was probably meant and what is allowed.

    Args:
        wrong: the name that was given.
        allowed: the names that would have been right.

    Returns:
        A clause to append to an error message, such as ``"; did you mean 'size'? Allowed: name, size"``.
    """
    names = list(allowed)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    return f"{meant} Allowed: {', '.join(names)}"
