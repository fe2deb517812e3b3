"""Lowerings: sharded forms of operators that need collectives inside, such as norms, softmax, losses, vocabulary lookups.

Each function takes ``at`` (which axes shard which factor, and the collectives) and the operator's own arguments, with
tensors replaced by proxies of their local parts; computing with them emits the sharded form into the graph. Statistics are
reduced over the axes that shard the normalised dim; each device's gradient of a statistic is partial, so ``at.sum`` reduces
in the backward pass too. Like torch's own kernels, they compute half-precision operands in float32 and round once, at the
end: a sum of squares would overflow in float16, and sums of sums would lose precision.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "At",
    "attention",
    "bags",
    "batch_norm",
    "cross_entropy",
    "embedding",
    "group_norm",
    "layer_norm",
    "log_softmax",
    "loss_with_logits",
    "mean",
    "mean_loss",
    "nll_loss",
    "rms_norm",
    "softmax",
    "total",
    "weighted_loss",
]


class At(Protocol):
    """The context of a lowering: the operator's strategy, and collectives to call."""

    def axes(self, *factors: str) -> tuple[int, ...]:
        """The mesh axes that shard any of the factors."""

    def size(self, factor: str) -> int:
        """The whole size of a factor (with every part it was cut into)."""

    @property
    def reduced(self) -> tuple[int, ...]:
        """The mesh axes that shard reduced factors, or factors in ``Rule.contiguous``."""

    def whole(self, operand: int) -> tuple[int, ...]:
        """The whole shape of a tensor operand."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in: that of the result, but float32 for half precision."""

    def wide(self, value: Any) -> Any:
        """An operand, or a value of its dtype, cast to ``dtype``."""

    def rounded(self, value: Any) -> Any:
        """The result, computed in ``dtype``, cast to its own dtype."""

    def partial(self, value: Any) -> Any:
        """``rounded`` for a possible partial sum, which is rounded after it is reduced: the terms may overflow."""

    def sum(self, value: Any, axes: tuple[int, ...]) -> Any:
        """All-reduce whose gradient is all-reduced too."""

    def reduce(self, value: Any, axes: tuple[int, ...]) -> Any:
        """All-reduce of a value that all devices then use in the same way, so that its gradient is already whole."""

    def max(self, value: Any, axes: tuple[int, ...]) -> Any:
        """All-reduce by maximum, without gradient."""

    def offset(self, size: int, axes: tuple[int, ...], like: Any) -> Any:
        """Where this device's part of a dim begins."""

    @property
    def target(self) -> Any:
        """The operator that is being lowered."""

    def random(self, draws: bool, *args: Any, **kwargs: Any) -> Any:
        """A node that calls the operator itself, which may draw random numbers."""

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A node that calls a local function."""


def _normalise(at: At, x: Any, dims: list[int], count: int, axes: tuple[int, ...], eps: float) -> Any:
    x = at.wide(x)
    count = max(1, count)
    mean = at.sum(x.sum(dims, keepdim=True), axes) / count
    centred = x - mean
    variance = at.sum((centred * centred).sum(dims, keepdim=True), axes) / count
    return centred * torch.rsqrt(variance + eps), mean, variance


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _last(at: At, shape: list[int]) -> tuple[list[int], int, tuple[int, ...]]:
    """The trailing dims that a norm is over, from their shape: dims, number of elements, and the axes that shard them."""
    dims = range(len(shape))
    return [i - len(shape) for i in dims], math.prod(shape), at.axes(*(f"h{i}" for i in dims))


def _by_channel(x: Any, weight: Any, bias: Any, rank: int) -> Any:
    """`_affine` with a weight and a bias per channel (dim 1)."""
    channels = [1, -1] + [1] * (rank - 2)
    return _affine(x, *(None if each is None else each.view(channels) for each in (weight, bias)))


def layer_norm(at: At, x: Any, shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    """layer_norm with a sharded normalised dim."""
    out, _mean, _variance = _normalise(at, x, *_last(at, shape), eps)
    return at.rounded(_affine(out, weight, bias))


def rms_norm(at: At, x: Any, shape: list[int], weight: Any = None, eps: float | None = None) -> Any:
    """rms_norm with a sharded normalised dim."""
    dims, count, axes = _last(at, shape)
    x = at.wide(x)
    square = at.sum((x * x).sum(dims, keepdim=True), axes) / count
    eps = torch.finfo(at.dtype).eps if eps is None else eps
    return at.rounded(_affine(x * torch.rsqrt(square + eps), weight, None))


def group_norm(at: At, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    """group_norm with the channels of each group sharded."""
    shape = at.whole(0)
    grouped = at.call(_group, x, groups)
    out, _mean, _variance = _normalise(at, grouped, [2, 3], math.prod(shape[1:]) // at.size("g"), at.axes("c"), eps)
    return at.rounded(_by_channel(at.call(torch.reshape, out, x.shape), weight, bias, len(shape)))


def _group(x: Tensor, groups: int) -> Tensor:
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(x.shape[2:]))


def batch_norm(
    at: At, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: Any, eps: float
) -> Any:
    """Training-mode batch_norm over a sharded batch: (output, new running mean, new running variance)."""
    shape = at.whole(0)
    dims = [0, *range(2, len(shape))]
    count = math.prod(shape[d] for d in dims)
    out, mean, variance = _normalise(at, x, dims, count, at.axes("n"), eps)
    out = at.rounded(_by_channel(out, weight, bias, len(shape)))
    if running_mean is None:
        return out, None, None
    if count == 0:  # as `passes.capture.functional.batch_norm_train`: no data, no update
        return out, running_mean.clone(), running_var.clone()
    new_mean = at.call(_track, running_mean, mean, momentum, 1.0)
    return out, new_mean, at.call(_track, running_var, variance, momentum, count / max(1, count - 1))


def _track(running: Tensor, batch: Tensor, momentum: float, unbias: float) -> Tensor:
    batch = batch.detach().reshape(-1).to(torch.promote_types(batch.dtype, running.dtype))
    return ((1 - momentum) * running.to(batch.dtype) + momentum * unbias * batch).to(running.dtype)


def softmax(at: At, x: Any, dim: int, *_: Any) -> Any:
    """softmax along a sharded dim."""
    shifted, axes = _shift(at, x, dim)
    weights = torch.exp(shifted)
    return at.rounded(weights / at.sum(weights.sum(dim, keepdim=True), axes))


def log_softmax(at: At, x: Any, dim: int, *_: Any) -> Any:
    """log_softmax along a sharded dim."""
    shifted, axes = _shift(at, x, dim)
    return at.rounded(shifted - torch.log(at.sum(torch.exp(shifted).sum(dim, keepdim=True), axes)))


def _shift(at: At, x: Any, dim: int) -> tuple[Any, tuple[int, ...]]:
    axes = at.axes(f"v{dim % len(at.whole(0))}")
    x = at.wide(x)
    return x - at.max(x.amax(dim, keepdim=True), axes), axes


def cross_entropy(
    at: At,
    logits: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """cross_entropy with sharded tokens, classes or both; a mean divides by the number of tokens of all devices."""
    vocabulary = at.axes("v")
    if vocabulary:
        logits = at.wide(logits)
        largest = at.max(logits.amax(1, keepdim=True), vocabulary)
        shifted = logits - largest
        total = at.reduce(torch.exp(shifted).sum(1), vocabulary)
        start = at.offset(at.whole(0)[1], vocabulary, target)
        chosen = at.reduce(at.call(_pick, shifted, target, start), vocabulary)
        losses = at.call(_ignore, torch.log(total) - chosen, target, ignore_index)
    else:
        losses = at.call(_token_losses, logits, target, weight, ignore_index, label_smoothing)
    return _over_tokens(at, losses, target, weight, reduction, ignore_index)


def nll_loss(at: At, scores: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100) -> Any:
    """nll_loss with sharded tokens; see `cross_entropy`."""
    # The kernel's gradient wants contiguous scores; those of expanded ones are, and of one device's part need not be.
    losses = at.call(at.target, scores.contiguous(), target, weight, 0, ignore_index)
    return _over_tokens(at, losses, target, weight, reduction, ignore_index)


def _over_tokens(at: At, losses: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    if reduction == 0:
        return at.rounded(losses)
    loss, tokens = at.wide(losses).sum(), at.axes("m")
    if reduction == 2:
        return at.partial(loss)
    count = at.call(_token_weight, target, weight, ignore_index, at.dtype)
    return at.partial(loss / (at.sum(count, tokens) if tokens else count))


def _pick(shifted: Tensor, target: Tensor, start: int) -> Tensor:
    local = target - start
    here = (local >= 0) & (local < shifted.shape[1])
    picked = shifted.gather(1, torch.where(here, local, 0).unsqueeze(1)).squeeze(1)
    return torch.where(here, picked, torch.zeros_like(picked))


def _ignore(losses: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return torch.where(target == ignore_index, torch.zeros_like(losses), losses)


def _token_losses(logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float) -> Tensor:
    return F.cross_entropy(logits, target, weight, reduction="none", ignore_index=ignore_index, label_smoothing=smoothing)


def _token_weight(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    counted = target != ignore_index
    if weight is None:
        return counted.sum().to(dtype)
    return torch.where(counted, weight[torch.where(counted, target, 0)], 0).sum(dtype=dtype)


def embedding(at: At, weight: Any, ids: Any, padding_idx: int = -1, *_: Any) -> Any:
    """embedding with a sharded vocabulary: each device looks up its own rows; the result is a partial sum."""
    start = at.offset(at.whole(0)[0], at.axes("v"), ids)
    return at.call(_lookup, weight, ids, start, padding_idx)


def _lookup(weight: Tensor, ids: Tensor, start: int, padding_idx: int) -> Tensor:
    local = ids - start
    here = (local >= 0) & (local < weight.shape[0])
    rows = F.embedding(torch.where(here, local, 0), weight)
    if padding_idx >= 0:
        rows = torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return torch.where(here.unsqueeze(-1), rows, torch.zeros_like(rows))


def bags(at: At, weight: Any, ids: Any, factors: Any, mode: int) -> Any:
    """Bags of embeddings with a sharded vocabulary: each device sums its own rows; the result is a partial sum."""
    start = at.offset(at.whole(0)[0], at.axes("v"), ids)
    return at.call(_rows_of_bags, weight, ids, factors, mode, start)


def _rows_of_bags(weight: Tensor, ids: Tensor, factors: Tensor | None, mode: int, start: int) -> Tensor:
    local = ids - start
    here = (local >= 0) & (local < weight.shape[0])
    each = weight.new_full(ids.shape, 1 / max(1, ids.shape[1]) if mode == 1 else 1.0) if factors is None else factors
    return F.embedding_bag(torch.where(here, local, 0), weight, mode="sum", per_sample_weights=torch.where(here, each, 0))


def mean(at: At, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """mean over a sharded dim: the local sum divided by the whole count, as a partial sum."""
    shape = at.whole(0)
    chosen = range(len(shape)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    count = math.prod(shape[d] for d in {d % len(shape) for d in chosen})
    x = at.wide(x)
    return at.partial((x.sum() if dim is None else x.sum(list(chosen), keepdim=keepdim)) / count)


def total(at: At, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """sum over a sharded dim, as a partial sum."""
    x = at.wide(x)
    return at.partial(x.sum() if dim is None else x.sum([dim] if isinstance(dim, int) else list(dim), keepdim=keepdim))


def mean_loss(at: At, x: Any, target: Any, reduction: int = 1, *args: Any, **kwargs: Any) -> Any:
    """An element-wise loss over sharded dims: the local sum, for a mean divided by the whole count, as a partial sum."""
    return _of_sum(at, at.call(at.target, at.wide(x), at.wide(target), 2, *args, **kwargs), reduction)


def weighted_loss(at: At, x: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    """`mean_loss` for a loss with a weight per element."""
    return _of_sum(at, at.call(at.target, *_wide(at, x, target, weight), 2), reduction)


def loss_with_logits(at: At, x: Any, target: Any, weight: Any = None, positive: Any = None, reduction: int = 1) -> Any:
    """`weighted_loss` for a loss that also has weights of positive targets."""
    return _of_sum(at, at.call(at.target, *_wide(at, x, target, weight, positive), 2), reduction)


def _wide(at: At, *values: Any) -> list[Any]:
    return [None if value is None else at.wide(value) for value in values]


def _of_sum(at: At, total: Any, reduction: int) -> Any:
    return at.partial(total / math.prod(at.whole(0)) if reduction == 1 else total)


def attention(
    at: At,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with sharded query positions: a causal mask starts at this device's first position."""
    if causal:
        mask = at.call(_causal, q, k, at.offset(at.whole(0)[-2], at.axes("s"), q))
    return at.random(dropout > 0, q, k, v, mask, dropout, scale=scale, enable_gqa=enable_gqa)


def _causal(q: Tensor, k: Tensor, start: int) -> Tensor:
    rows = (torch.arange(q.shape[-2], device=q.device) + start).unsqueeze(1)
    return torch.arange(k.shape[-2], device=q.device).unsqueeze(0) <= rows
