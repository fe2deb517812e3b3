"""Architectures that are written with torch's own modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.coverage.build import BATCH, Example, example

__all__ = ["PLAIN"]


class Recurrent(nn.Module):
    """An embedding, a recurrent network of two layers (optionally bidirectional), and a class for each token."""

    def __init__(self, kind: type[nn.RNNBase], both: bool) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(96, 16), kind(16, 32, 2, batch_first=True, bidirectional=both)
        self.head = nn.Linear(64 if both else 32, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.cell(self.table(tokens))[0]).flatten(0, 1), tokens.flatten())


class Cells(nn.Module):
    """A recurrent cell that is unrolled step by step."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell, self.head = kind(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Translator(nn.Module):
    """``nn.Transformer`` with its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.body = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, source_ids: Tensor, target_ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target_ids.shape[1], dtype=self.head.weight.dtype)
        out = self.body(self.table(source_ids), self.table(target_ids), tgt_mask=mask, tgt_is_causal=True)
        return self.head(out)


class Fourier(nn.Module):
    """A two-dimensional Fourier neural operator, which multiplies the lowest frequencies by complex weights."""

    def __init__(self, width: int = 16, modes: int = 4) -> None:
        super().__init__()
        self.modes, self.lift, self.head = modes, nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        weights = (torch.randn(2, width, width, modes, modes, 2) / width for _ in range(2))
        self.weights = nn.ParameterList(weights)
        self.rest = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, m = self.lift(x), self.modes
        for weight, rest in zip(self.weights, self.rest, strict=True):
            first, second = torch.view_as_complex(weight).unbind(0)
            found = torch.fft.rfft2(x)
            out = torch.zeros_like(found)
            out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, :m, :m], first)
            out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, -m:, :m], second)
            x = F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + rest(x))
        return self.head(x)


class Recommender(nn.Module):
    """A deep learning recommendation model: embedding bags, products of all pairs, and two MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(96, 16, mode="sum") for _ in range(3))
        self.dense, self.top = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(22, 1)

    def forward(self, numbers: Tensor, sparse_ids: Tensor) -> Tensor:
        rows = [self.dense(numbers), *(bag(ids) for bag, ids in zip(self.bags, sparse_ids.unbind(1), strict=True))]
        stacked = torch.stack(rows, 1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))
        i, j = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([rows[0], pairs[:, i, j]], 1)).sigmoid()


class Graphs(nn.Module):
    """A message-passing network: messages from the features of both nodes of each edge, summed per target node."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(32, 32), nn.GRUCell(32, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, nodes: Tensor, edge_ids: Tensor) -> Tensor:
        source, target = (edge_ids % nodes.shape[0]).unbind(0)
        for _ in range(2):
            sent = F.relu(self.message(torch.cat([nodes[source], nodes[target]], 1)))
            nodes = self.update(torch.zeros(nodes.shape[0], 32, dtype=nodes.dtype).index_add(0, target, sent), nodes)
        return self.head(nodes)


class Style(nn.Module):
    """Style transfer: reflection padding, instance norms, and nearest upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(3, 16, 3), nn.InstanceNorm2d(16, affine=True), nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.InstanceNorm2d(32, affine=True), nn.ReLU(),
            nn.Upsample(scale_factor=2), nn.ReplicationPad2d(1), nn.Conv2d(32, 3, 3), nn.Tanh(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Prototypes(nn.Module):
    """Few-shot classification by distances to class means."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, queries: Tensor, support: Tensor) -> Tensor:
        return torch.cdist(self.body(queries), self.body(support).mean(1)).neg().log_softmax(-1)


class Experts(nn.Module):
    """Switch experts: the best expert of each token, by products with a one-hot vector."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(16, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 4) for shape in ((16, 32), (32, 16)))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.route(x).softmax(-1).max(-1)
        gates = F.one_hot(chosen, 4).to(x.dtype) * weight.unsqueeze(-1)
        inner = F.gelu(torch.einsum("bsh,ehf->ebsf", x, self.up))
        return torch.einsum("ebsf,efh,bse->bsh", inner, self.down, gates)


class Points(nn.Module):
    """PointNet: an MLP for every point, and the maximum of each feature over all points."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).max(-1)[0])


class Variational(nn.Module):
    """A variational autoencoder with given noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 32), nn.Linear(16, 64)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, -1)
        found = self.decode(mean + noise * (spread / 2).exp())
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).sum()
        return F.binary_cross_entropy_with_logits(found, x.sigmoid(), reduction="sum") + divergence


class Reader(nn.Module):
    """Text recognition in images: convolutions, and a recurrent network over columns."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1)
        )
        self.read, self.head = nn.LSTM(64, 16, bidirectional=True), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.see(x).flatten(1, 2).permute(2, 0, 1)
        return self.head(self.read(columns)[0]).log_softmax(-1)


class Flow(nn.Module):
    """A neural ODE, solved by a two-stage Runge-Kutta method."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            a = self.slope(x)
            b = self.slope(x + a / 20)
            x = x + (a + 2 * b) / 30
        return x


class Temporal(nn.Module):
    """A temporal convolutional network: dilated causal convolutions with weight norm."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(norm(nn.Conv1d(8 if i == 0 else 16, 16, 3, dilation=2**i)) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.elu(layer(F.pad(x, (2 * 2**i, 0))))
        return x


class Rays(nn.Module):
    """A radiance field: a sinusoidal encoding of positions, an MLP with a skip, and opacities along each ray."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 32), nn.Linear(56, 4)

    def forward(self, x: Tensor) -> Tensor:
        waves = (x.unsqueeze(-1) * (2.0 ** torch.arange(4, dtype=x.dtype)) * math.pi).flatten(-2)
        seen = torch.cat([waves.sin(), waves.cos()], -1)
        out = self.second(torch.cat([F.relu(self.first(seen)), seen], -1))
        opacity = 1 - torch.exp(-F.softplus(out[..., 3]))
        left = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity[:, :-1]], 1), 1)
        return ((opacity * left).unsqueeze(-1) * out[..., :3].sigmoid()).sum(1)


PLAIN: Mapping[str, Callable[[], Example]] = {
    "LSTM": lambda: example(Recurrent(nn.LSTM, False), (torch.randint(96, (BATCH, 8)),)),
    "bidirectional LSTM": lambda: example(Recurrent(nn.LSTM, True), (torch.randint(96, (BATCH, 8)),)),
    "GRU": lambda: example(Recurrent(nn.GRU, False), (torch.randint(96, (BATCH, 8)),)),
    "RNN": lambda: example(Recurrent(nn.RNN, False), (torch.randint(96, (BATCH, 8)),)),
    "LSTM cell": lambda: example(Cells(nn.LSTMCell), ((BATCH, 4, 16),)),
    "GRU cell": lambda: example(Cells(nn.GRUCell), ((BATCH, 4, 16),)),
    "nn.Transformer": lambda: example(Translator(), {"source_ids": (BATCH, 8), "target_ids": (BATCH, 8)}),
    "Fourier neural operator": lambda: example(Fourier(), ((BATCH, 1, 16, 16),)),
    "recommender (DLRM)": lambda: example(Recommender(), {"numbers": (BATCH, 8), "sparse_ids": (BATCH, 3, 4)}),
    "graph network": lambda: example(Graphs(), {"nodes": (16, 16), "edge_ids": (2, 40)}),
    "style transfer": lambda: example(Style(), ((BATCH, 3, 16, 16),)),
    "prototypical network": lambda: example(Prototypes(), ((16, 16), (8, 3, 16))),
    "switch experts": lambda: example(Experts(), ((BATCH, 8, 16),)),
    "PointNet": lambda: example(Points(), ((BATCH, 3, 32),)),
    "variational autoencoder": lambda: example(Variational(), ((BATCH, 64), (BATCH, 16))),
    "CRNN": lambda: example(Reader(), ((BATCH, 1, 8, 16),)),
    "neural ODE": lambda: example(Flow(), ((BATCH, 16),)),
    "temporal convolutions": lambda: example(Temporal(), ((BATCH, 8, 16),)),
    "radiance field": lambda: example(Rays(), ((BATCH, 8, 3),)),
}
"""Name -> builder."""
