"""Random operators, decomposed into draws and deterministic operators, so that a repeated pass draws the same numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["DRAWN", "Noise"]

_aten = torch.ops.aten
#: Minus the limit of SELU at minus infinity.
_ALPHA = 1.7580993408473766

#: (a tensor like the result, the name of the tensor method that fills it, the method's arguments) -> random numbers
Noise = Callable[..., Tensor]


def _dropout(noise: Noise, x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros_like(x)
    kept = noise(x, "bernoulli_", 1 - p) != 0  # one byte per element, saved for the backward pass
    return x * (1 / (1 - p)) * kept


def _alpha_dropout(noise: Noise, x: Tensor, p: float, train: bool) -> Tensor:
    """A dropout that keeps mean and variance: dropped elements get SELU's lower limit (see ``torch.nn.AlphaDropout``)."""
    if not train or p in (0, 1) or x.numel() == 0:
        return _dropout(noise, x, p, train)
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    kept = noise(x, "bernoulli_", 1 - p)
    return x * (kept * scale) + ((kept - 1) * (_ALPHA * scale) + _ALPHA * scale * p)


def _channels(dropout: Callable[..., Tensor], noise: Noise, x: Tensor, p: float, train: bool) -> Tensor:
    """A dropout of whole channels; ``x`` is [batch, channels, ...]."""
    return dropout(lambda like, *how: noise(like.new_empty((*like.shape[:2], *[1] * (like.dim() - 2))), *how), x, p, train)


def _attention(
    noise: Noise,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    lead = q.shape[:-2] if enable_gqa else torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    weights = q.new_empty((*lead, q.shape[-2], k.shape[-2]))
    kept = noise(weights, "bernoulli_", 1 - dropout) != 0
    if mask is not None and mask.dtype == torch.bool:  # the operator below would add it
        mask = q.new_zeros(mask.shape).masked_fill(mask.logical_not(), -math.inf)
    return _aten._scaled_dot_product_attention_math.default(
        q, k, v, mask, dropout, causal, kept, scale=scale, enable_gqa=enable_gqa
    )[0]


def _refilled(method: str, *default: float) -> Callable[..., Tensor]:
    """The out-of-place form, as in captured graphs, of a method that fills a tensor in place."""
    return lambda noise, x, *by, generator=None: noise(x, method, *by, *default[len(by) :])


def _filled(empty: Callable[..., Tensor], method: str) -> Callable[..., Tensor]:
    """An operator that draws noise in the shape of the tensor that ``empty`` returns."""
    return lambda noise, *args, **options: noise(empty(*args, **options), method)


#: Operators that draw random numbers -> their decompositions, which take a `Noise` and the operator's arguments.
DRAWN: Mapping[Any, Callable[..., Tensor]] = {
    _aten.dropout.default: _dropout,
    _aten.feature_dropout.default: functools.partial(_channels, _dropout),
    _aten.alpha_dropout.default: _alpha_dropout,
    _aten.feature_alpha_dropout.default: functools.partial(_channels, _alpha_dropout),
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.rand_like.default: _filled(torch.empty_like, "uniform_"),
    _aten.randn_like.default: _filled(torch.empty_like, "normal_"),
    _aten.rand.default: _filled(torch.empty, "uniform_"),
    _aten.randn.default: _filled(torch.empty, "normal_"),
    _aten.bernoulli.p: _refilled("bernoulli_"),
    _aten.uniform.default: _refilled("uniform_", 0.0, 1.0),
    _aten.normal_functional.default: _refilled("normal_", 0.0, 1.0),
    _aten.exponential.default: _refilled("exponential_", 1.0),
}
