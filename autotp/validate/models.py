"""The two architectures of published training runs, with their loss: GPT (and MPT) and Llama."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autotp.errors import AutotpError
from autotp.validate.runs import Architecture

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """A decoder that returns the mean cross-entropy of its labels.

    Args:
        of: its architecture.
        sequence: the number of positions.

    Raises:
        AutotpError: the width is not a multiple of the heads, or the heads are not a multiple of the key-value heads.
    """

    def __init__(self, of: Architecture, sequence: int) -> None:
        super().__init__()
        if of.hidden % of.heads or of.heads % of.kv_heads:
            sizes = f"hidden {of.hidden}, heads {of.heads} and kv_heads {of.kv_heads}"
            raise AutotpError(f"the sizes {sizes} do not go together: each has to be a multiple of the next")
        self.llama, self.dropout, self.float_loss = of.kind == "llama", of.dropout, of.float_loss
        self.tokens = nn.Embedding(of.vocabulary, of.hidden)
        if self.llama:
            for name in ("cos", "sin"):
                self.register_buffer(name, torch.zeros(sequence, of.hidden // of.heads))
        else:
            self.places = nn.Embedding(sequence, of.hidden)
        self.blocks = nn.ModuleList(_Llama(of) if self.llama else _GPT(of) for _ in range(of.layers))
        self.norm = _norm(of)
        self.head = nn.Linear(of.hidden, of.vocabulary, bias=False)
        if of.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of ``labels`` given ``ids``, both ``[batch, sequence]``."""
        x = self.tokens(ids)
        if not self.llama:
            x = F.dropout(x + self.places.weight[: ids.shape[1]], self.dropout, self.dropout > 0)
        for block in self.blocks:
            x = block(x, self.cos.to(x.dtype), self.sin.to(x.dtype)) if self.llama else block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float() if self.float_loss else logits, labels.flatten())


class _GPT(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.heads, self.dropout, self.fused = of.heads, of.dropout, of.fused_attention
        self.norm1, self.norm2 = _norm(of), _norm(of)
        self.qkv, self.out = nn.Linear(of.hidden, 3 * of.hidden), nn.Linear(of.hidden, of.hidden)
        self.up, self.down = nn.Linear(of.hidden, of.ffn), nn.Linear(of.ffn, of.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True) if self.fused else self._written_out(q, k, v)
        x = x + self._dropped(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self._dropped(self.down(F.gelu(self.up(self.norm2(x)))))

    def _written_out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention with all scores in memory, as in Megatron-LM's kernels: mask and scale have no kernels of their own."""
        length, size = q.shape[-2:]
        mask = torch.full((length, length), -1e4, dtype=q.dtype, device=q.device).triu(1)
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        scores = torch.baddbmm(mask.expand(len(q), -1, -1), q, k.mT, alpha=size**-0.5)
        return (self._dropped(scores.softmax(-1)) @ v).unflatten(0, (-1, self.heads))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class _Llama(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.size, self.grouped = of.hidden // of.heads, of.kv_heads != of.heads
        self.norm1, self.norm2 = _norm(of), _norm(of)
        self.q, self.out = (nn.Linear(of.hidden, of.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(of.hidden, of.kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(of.hidden, of.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(of.ffn, of.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _norm(of: Architecture) -> nn.Module:
    return nn.RMSNorm(of.hidden) if of.kind == "llama" else nn.LayerNorm(of.hidden)
