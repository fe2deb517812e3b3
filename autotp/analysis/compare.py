"""Errors of tensors, and hooks that collect their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.graph import differentiable

__all__ = ["difference", "largest", "listen"]


def largest(tensor: Tensor) -> float:
    """The largest magnitude of a tensor's finite elements; 0 if there are none, and for integers."""
    if not differentiable(tensor) or not tensor.numel():
        return 0.0
    found = float(tensor.abs().max())
    return found if math.isfinite(found) else float(tensor.masked_fill(~tensor.isfinite(), 0.0).abs().max())


def difference(given: Tensor, expected: Tensor, scale: float) -> float:
    """The largest absolute difference, divided by ``scale`` unless that is 0; infinite if non-finite elements differ."""
    apart = float((given - expected).abs().max())
    if math.isfinite(apart):
        return apart / scale if scale else apart
    finite = expected.isfinite()
    if not torch.equal(given.isfinite(), finite) or not torch.equal(
        given.masked_fill(finite, 0.0).nan_to_num(), expected.masked_fill(finite, 0.0).nan_to_num()
    ):
        return math.inf
    if not finite.any():
        return 0.0
    apart = float((given[finite] - expected[finite]).abs().max())
    return apart / scale if scale else apart


def listen(values: Mapping[Any, Sequence[Tensor]]) -> dict[Any, list[Tensor | None]]:
    """Registers hooks that collect gradients.

    Returns:
        For each value that requires gradients, a list that a backward pass fills: the gradient of each of its tensors, or
        None if a tensor has none.
    """
    found: dict[Any, list[Tensor | None]] = {}
    for key, tensors in values.items():
        if not isinstance(tensors[0], Tensor) or not tensors[0].requires_grad:
            continue
        kept: list[Tensor | None] = [None] * len(tensors)
        found[key] = kept
        for index, tensor in enumerate(tensors):

            def keep(gradient: Tensor, index: int = index, kept: list[Tensor | None] = kept) -> None:
                before = kept[index]
                kept[index] = gradient if before is None else before + gradient

            tensor.register_hook(keep)
    return found
