"""Long lists of cases: some run with ``make test``, the rest with ``make slow`` or ``make exact``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["SCHEDULES", "thinned"]


def thinned(cases: Iterable[Any], every: int = 2, *, first: int = 0, slow: int = 0, whole: bool = False) -> list[Any]:
    """Keeps one case of ``every``, or the ``first`` ones, and marks the others ``exact``.

    ``slow``: so many cases after the first are marked ``slow`` instead. ``whole``: each case is one argument.
    """
    kept = (lambda number: number < first) if first or slow else (lambda number: number % every == 0)

    def marked(number: int, case: Any) -> Any:
        mark = pytest.mark.slow if number < first + slow else pytest.mark.exact
        return pytest.param(*((case,) if whole else case), marks=mark)

    return [case if kept(number) else marked(number, case) for number, case in enumerate(cases)]


#: With overlap; with ``make slow`` also the sharded graph without a schedule.
SCHEDULES = thinned(["overlap", "none"], first=1, slow=1, whole=True)
