"""Which values can have a gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["differentiable"]


def differentiable(value: Any) -> bool:
    """Whether a value is a tensor of floating-point or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
