"""Long lists of cases: a part runs with ``make test``, the rest with ``make exact``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["thinned"]


def thinned(cases: Iterable[Any], every: int = 2, *, whole: bool = False) -> list[Any]:
    """Every so many of the cases as they are, the others marked ``exact``; ``whole``: a case is one argument."""
    return [
        case if number % every == 0 else pytest.param(*((case,) if whole else case), marks=pytest.mark.exact)
        for number, case in enumerate(cases)
    ]
