"""Memory saved for the backward pass, compared with arXiv 2205.05198's figures for its largest single-node model (22B)."""

from __future__ import annotations

import math

import pytest
import torch
from thinned import thinned
from torch import nn
from torch.nn import functional as F

import autotp
from autotp.analysis.explain import priced_plan
from autotp.costs.needs import BESIDES, Needs
from autotp.costs.storages import Storages
from passes.capture import capture

#: Tensor parallelism as in the paper: norms, dropouts and sums of the residual stream are replicated.
TENSOR = {
    "strategy": "megatron-1d",
    "constraints": [
        *(f"layers.*.{name}=-@x" for name in ("norm1", "norm2")),
        *(f"layers.*.{name}=n@x" for name in ("q", "k", "v", "up")),
        *(f"layers.*.{name}=k@x" for name in ("o", "down")),
        "layers.?:dropout=-@x",
    ],
}
SEQUENCES = {"strategy": "megatron-sp", "panels": 8}
HIDDEN, HEADS, SEQUENCE, BATCH, WAYS, DROP = 6144, 64, 2048, 4, 8, 0.1


class Core(nn.Module):
    """Attention as separate operators."""

    def forward(self, q, k, v):
        weights = F.softmax(q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1])), -1)
        return F.dropout(weights, DROP) @ v


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down, self.core = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN), Core()

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + F.dropout(self.o(self.core(q, k, v).transpose(1, 2).flatten(2)), DROP)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), DROP)


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def kept(layers, **options):
    """Bytes of tensors, without parameters and inputs, that a device keeps for the backward pass."""
    with torch.device("meta"):
        model, args = Model(layers).half(), (torch.zeros(BATCH, SEQUENCE, HIDDEN, dtype=torch.float16),)
    topology = autotp.Topology.load("dgx-a100").resized(WAYS)
    plan = autotp.plan(model, topology, args, mesh=(WAYS,), memory=math.inf, **options)
    priced = priced_plan(capture(model, args), plan)
    storages = Storages(priced, traced=False)
    needs, found = Needs(priced, storages), 0.0
    for (node, number), layout in needs.kept:
        if node.op == "placeholder":
            continue
        if number != BESIDES:
            found += priced.prices.bytes(storages.results[node][number], layout)
            continue
        for position, size in needs.besides[node]:
            tensor = storages.results[node][0] if position < 0 else storages.operands[node][position].meta["val"]
            found += priced.prices.bytes(tensor, layout) / tensor.element_size() * size
    return found


def of_a_layer(**options):
    """Bytes that one more layer adds, which leaves out what is there once."""
    cores, found = options.pop("cores", False), []
    for layers in (2, 3):
        recompute = [f"layers.{i}.core" for i in range(layers)] if cores else "none"
        found.append(kept(layers, **{"recompute": recompute, **options}))
    return found[1] - found[0]


@pytest.fixture(scope="module")
def baseline():
    return of_a_layer(**TENSOR)


def test_a_layer_keeps_what_the_formula_says(baseline):
    attention = 5 * HEADS * SEQUENCE / HIDDEN
    formula = SEQUENCE * BATCH * HIDDEN * (10 + 24 / WAYS + attention / WAYS)
    assert baseline == pytest.approx(formula, rel=0.01)


@pytest.mark.parametrize(
    ("share", "options"),
    thinned(
        [
            (66.84, SEQUENCES),
            (49.42, {**TENSOR, "cores": True}),
            (16.18, {**SEQUENCES, "cores": True}),
            (7.64, {**TENSOR, "recompute": "full"}),
        ],
        first=1,
    ),
    ids=["sequence parallel", "selective", "both", "full"],
)
def test_shares_of_the_baseline_are_those_of_the_paper(baseline, share, options):
    assert 100 * of_a_layer(**options) / baseline == pytest.approx(share, abs=2.0)
