"""A common interface to distribute a model with autotp or FSDP2, for rows that are written once for both."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import autotp

__all__ = ["Different", "Net", "Side", "batch", "check", "whole"]


class Different(Exception):
    """Raised if the distributed model behaves differently from the plain model."""


def check(same: bool) -> None:
    """Raises `Different` unless ``same`` is true."""
    if not same:
        raise Different("it is not as with the plain model")


class Net(nn.Module):
    """Token embeddings, two blocks with a norm and dropout, and a tied head; returns the loss if labels are given."""

    def __init__(self, dropout: float = 0.0, width: int = 16, words: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(2 * width, width),
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Logits ``[batch, tokens, words]``, or the mean loss if labels are given."""
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(self.norm(x)) * scale
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(rows: int = 8, tokens: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random ids and labels ``[rows, tokens]``, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(32, (rows, tokens), generator=generator) for _ in range(2))
    return ids, labels


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Side:
    """A way to distribute a model: autotp or FSDP2.

    Args:
        name: ``autotp`` or ``FSDP2``.
    """

    def __init__(self, name: str) -> None:
        self.name, self.ours = name, name == "autotp"
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def model(self, dropout: float = 0.0, kind: type[Net] = Net) -> tuple[Net, Net]:
        """A model to distribute and its plain copy, in float64 and equal on all ranks."""
        torch.manual_seed(0)
        made = kind(dropout).double()
        return made, copy.deepcopy(made)

    def distribute(self, model: nn.Module, args: Sequence[Any] | None = None, **options: Any) -> Any:
        """Distributes a model, by default with ``zero3``, or with ``fully_shard`` of every block: both are exact."""
        if self.ours:
            options = {"strategy": "zero3", "mesh": (self.ranks,)} | options
            return autotp.parallelize(model, None, batch() if args is None else args, **options)
        options.pop("precision", None)
        for block in getattr(model, "blocks", ()):
            fully_shard(block, **options)
        return fully_shard(model, **options)

    def folder(self) -> str:
        """A new folder, the same on all ranks."""
        made = [tempfile.mkdtemp() if self.rank == 0 else ""]
        dist.broadcast_object_list(made)
        return made[0]

    def part(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The arguments that a rank passes: the global batch with autotp, this rank's part of it with FSDP2."""
        if self.ours:
            return tensors
        return tuple(tensor.tensor_split(self.ranks)[self.rank] for tensor in tensors)

    def mean(self, loss: Tensor) -> Tensor:
        """The loss of the global batch, averaged over the ranks with FSDP2."""
        found = whole(loss.detach().clone())
        if not self.ours:
            dist.all_reduce(found)
            found /= self.ranks
        return found

    def logits(self, value: Tensor) -> Tensor:
        """The logits of the global batch, on every rank."""
        if self.ours:
            return whole(value)
        parts = [None] * self.ranks
        dist.all_gather_object(parts, value.detach())
        return torch.cat(parts)  # type: ignore[arg-type]

    def step(
        self, module: Any, plain: Any, optimizers: Iterable[torch.optim.Optimizer], data: tuple[Tensor, Tensor]
    ) -> float:
        """Trains both models for a step; returns the absolute difference of their losses."""
        losses = []
        for each, given, optimizer in zip((module, plain), (self.part(*data), data), optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(*given)
            loss.backward()
            optimizer.step()
            losses.append(self.mean(loss) if each is module else loss.detach())
        return float((losses[0] - losses[1]).abs())

    def apart(self, module: nn.Module, plain: nn.Module, *, gradients: bool = False) -> float:
        """The largest difference of parameters (or gradients), relative to the largest magnitude of each tensor."""
        mine, theirs = dict(module.named_parameters()), dict(plain.named_parameters())
        found = [0.0]
        for name, value in theirs.items():
            a, b = (value, mine[name]) if not gradients else (value.grad, mine[name].grad)
            if a is not None and b is not None:
                found.append(
                    float((whole(b).detach().to(a) - a.detach()).abs().max() / a.detach().abs().max().clamp(min=1e-12))
                )
            elif (a is None) != (b is None):
                raise Different(f"{name} has a gradient on one side only")
        return max(found)
