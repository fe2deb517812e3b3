"""Long lists of cases: a part runs with ``make test``, the rest with ``make exact``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["thinned"]


def thinned(cases: Iterable[Any], every: int = 2, *, first: int = 0, whole: bool = False) -> list[Any]:
    """Every so many of the cases as they are, or the ``first`` so many, the others marked ``exact``.

    ``whole``: a case is one argument.
    """
    kept = (lambda number: number < first) if first else (lambda number: number % every == 0)
    return [
        case if kept(number) else pytest.param(*((case,) if whole else case), marks=pytest.mark.exact)
        for number, case in enumerate(cases)
    ]
