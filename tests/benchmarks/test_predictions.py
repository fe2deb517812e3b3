"""Tests of predictions without a cluster: prices by size and kind, rankings, and the report."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

import autotp
from autotp.costs.prices import Prices
from autotp.costs.runs import Run
from benchmarks.predictions import INTERCONNECTS, Point, emulated, kendall, report
from costmodel import KINDS, Level, compute
from passes.capture import capture
from passes.layouts.layout import local_shape
from passes.rules.factors import analyse
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import flop_of, kind_of
from passes.strategies.space import space


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        x = self.norm(torch.cat([x, x], 1))
        return torch.softmax(self.down(torch.relu(self.up(x))), -1).square().mean()


DEVICE = dataclasses.replace(
    autotp.Topology.load("cpu").device, half_size=20.0, slowdown={"product": 1.1, "norm": 2.0, "copy": 0.5}, efficiency=0.8
)


def operators():
    captured = capture(Mixed(), (torch.randint(32, (4, 8)),), None)
    return analyse(captured.graph_module.graph, captured.inputs)


def test_a_device_computes_its_part_of_an_operator():
    """Work of every strategy is that of the device's parts, and a strategy priced by itself costs what its row says."""
    levels = Level("node", 2, 1e9, 1e-5, contention=0.7), Level("network", 2, 1e8, 1e-4, contention=0.3)
    prices, mesh = Prices(autotp.Topology("nodes", DEVICE, levels), (2, 2)), (2, 2)
    kinds = set()
    for node, operator in operators().items():
        every, flop = space(operator, 2), flop_of(node)
        work = prices.work(every, flop, Run(gradient=True))
        seconds, (_, inside) = prices.computing(every, flop, Run(gradient=True)), prices.inside(every, Run(gradient=True))
        kinds.add(kind_of(node))
        for row in np.flatnonzero(every.valid(mesh)):
            strategy = every.strategy(row)
            one = prices.operator(operator, strategy, flop, Run(gradient=True))
            assert one.compute == pytest.approx(seconds[row], rel=1e-12), (node, row)
            spent = np.array(one.passes).sum(0)[1:]
            assert inside[:, row] == pytest.approx(spent, rel=1e-12), "communication, device time, each level"
            if work is None:
                assert seconds[row] == 0
                continue
            tensors = [(n.meta["val"], w.layout) for n, w in zip(operands_of(node), strategy.wants, strict=True)]
            tensors += zip(results_of(node), strategy.results, strict=True)
            moved = sum(math.prod(local_shape(t.shape, layout, mesh)) * t.element_size() for t, layout in tensors)
            assert work.bytes[row] == 3 * moved, "forward, and as much again for each operand's gradient"
            assert work.flop[row] == pytest.approx(3 * flop / strategy.ways(mesh), rel=1e-12)
            if kind_of(node) == "product":
                m, k, n = (size[row] for size in work.dims)
                assert work.flop[row] == pytest.approx(3 * 2 * m * k * n, rel=1e-12)
    assert kinds <= set(KINDS) and {"product", "convolution", "norm", "softmax", "gather", "copy"} <= kinds


def test_small_shards_are_slower():
    plain = compute.seconds(1e9, 1.0, DEVICE, "float32", dims=(1e9, 1e9, 1e9), kind="")
    assert compute.seconds(1e9, 1.0, DEVICE, "float32", dims=(20.0, 1e9, 1e9), kind="") == pytest.approx(
        2 * plain, rel=1e-3
    )
    assert compute.seconds(1e9, 1.0, DEVICE, "float32", kind="") == pytest.approx(plain, rel=1e-3)
    slow = compute.seconds(0.0, 1e9, DEVICE, "float32", kind="norm") - DEVICE.launch
    assert slow == pytest.approx(2 * 1e9 / DEVICE.memory_bandwidth)
    # Splitting a product saves less than proportionally.
    whole, half = (compute.seconds(2.0 * m * 64 * 64, 1.0, DEVICE, "float32", dims=(m, 64, 64)) for m in (64, 32))
    assert 0.5 < (half - DEVICE.launch) / (whole - DEVICE.launch) < 1


def test_kendall():
    assert kendall([1, 2, 3], [10, 20, 30]) == 1
    assert kendall([1, 2, 3], [30, 20, 10]) == -1
    assert kendall([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert kendall([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 3)


def test_the_interconnects_and_plans_that_are_compared():
    topologies = {name: emulated(name) for name in INTERCONNECTS}
    assert all(topology.devices == 4 for topology in topologies.values())
    assert topologies["2 nodes x 2, 500 Mbit/s"].levels[1].bandwidth == 62.5e6


def test_the_report_sums_up_what_was_measured():
    points = [
        Point("flat, 4 ranks", "none", "gpt", ("auto",), (4,), 0.9, 1.0),
        Point("flat, 4 ranks", "none", "gpt", ("megatron-1d 4", "atp 4"), (4,), 2.2, 2.0),
        Point("flat, 4 ranks", "none", "gpt", ("atp 2x2", "tensor3d 2x2"), (2, 2), 2.1, 2.5),
        Point("flat, 4 ranks", "none", "gpt", ("data 4",), (4,), 2.9, 3.0),
        Point("flat, 4 ranks", "overlap", "gpt", ("auto",), (4,), 0.6, 0.5),
        Point("flat, 4 ranks", "overlap", "gpt", ("data 4",), (4,), 0.7, 1.0),
    ]
    text = report(points)
    assert "| flat, 4 ranks | gpt | 4 | 10% | 0.67 | +0% | +100% |" in text
    assert "| flat, 4 ranks | gpt | 2.200 / 2.000 | 2.100 / 2.500 | (2, 2) | (4, 1) |" in text
    assert "| flat, 4 ranks | gpt | data 4 | 4 | 2.900 | 3.000 | -3% |" in text
    assert "| flat, 4 ranks | gpt | 2 | 25% | 1.00 |" in text.partition("## Plans with overlap")[2]
