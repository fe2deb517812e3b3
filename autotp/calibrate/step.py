"""Times whole steps of a reference model, and reduces the fitted rates to those that a step reaches.

Kernels and collectives are timed one by one. In a step, each finds other data in the caches, ranks reach a collective at
different times, and Python runs in between. The ratio of a step's time to the sum of its parts is about the same for all
plans. So steps of a small reference model are timed under some plans, and every rate is divided by the mean ratio.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autotp.calibrate.collectives import Clock, Effort
from autotp.calibrate.kernels import TRAINED
from autotp.runtime.parallelize import parallelize
from costmodel import Device, Level, Topology

__all__ = ["StepFit", "fit_steps", "slowed"]

#: Width, tokens of a sequence, sequences and blocks of the reference model, on a CPU core and on a GPU.
_SIZES = {"cpu": (256, 64, 16, 2), "cuda": (4096, 2048, 16, 2)}
_RANGE = (1.0, 2.0)


@dataclass(frozen=True, slots=True)
class StepFit:
    """How much longer steps take than the sum of their parts.

    Attributes:
        factor: the geometric mean of the ratios, clamped to [1, 2], by which rates are divided.
        ratios: plan -> measured over predicted seconds.
    """

    factor: float
    ratios: Mapping[str, float]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(8, width // 128)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class _Reference(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def fit_steps(
    topology: Topology, shape: tuple[int, int], clock: Clock, effort: Effort, progress: Callable[[str], None]
) -> StepFit:
    """Times steps of the reference model on all ranks, under several plans. Returns the same fit on every rank.

    Args:
        topology: the fitted topology, for the predictions.
        shape: (nodes, ranks of each node).
        clock: of this rank.
        effort: how long to measure.
        progress: called with the name of each plan.
    """
    ranks = math.prod(shape)
    names = ("data", "megatron-1d", "zero3") if ranks > 1 else ("data",)
    plans: list[tuple[str, tuple[int, ...]]] = [(name, (ranks,)) for name in names]
    if min(shape) > 1:
        plans += [("megatron-1d", shape), ("tensor3d", shape)]
    width, tokens, sequences, blocks = _SIZES[clock.device.type]
    torch.manual_seed(0)
    dtype = TRAINED[clock.device.type]
    model = _Reference(width, blocks).to(clock.device, dtype)
    args = (torch.randn(math.lcm(sequences, ranks), tokens, width, device=clock.device, dtype=dtype),)
    ratios = {}
    for name, mesh in plans:
        label = f"{name} {'x'.join(map(str, mesh))}"
        progress(f"steps: {label}")
        parallel: Any = parallelize(model, topology, args, strategy=name, mesh=mesh, panels=1, schedule="none")
        _step(parallel, args)
        spans = []
        for _ in range(effort.fewest):
            clock.barrier()
            begun = time.perf_counter()
            _step(parallel, args)
            clock.synchronize()
            spans.append(time.perf_counter() - begun)
        ratios[label] = statistics.median(clock.slowest(spans)) / parallel.plan.predicted.passes_seconds
    mean = statistics.geometric_mean(ratios.values())
    return StepFit(min(max(mean, _RANGE[0]), _RANGE[1]), ratios)


def _step(parallel: nn.Module, args: tuple[Tensor, ...]) -> None:
    parallel(*args).backward()
    for parameter in parallel.parameters():
        parameter.grad = None


def slowed(topology: Topology, factor: float) -> Topology:
    """The topology with every rate divided by a factor, and every latency and overhead multiplied by it."""
    return replace(
        topology, device=_slower_device(topology.device, factor), levels=tuple(_slower(x, factor) for x in topology.levels)
    )


def _slower_device(device: Device, factor: float) -> Device:
    return replace(
        device,
        flops={dtype: rate / factor for dtype, rate in device.flops.items()},
        memory_bandwidth=device.memory_bandwidth / factor,
        launch=device.launch * factor,
    )


def _slower(level: Level, factor: float) -> Level:
    return replace(
        level,
        bandwidth=level.bandwidth / factor,
        latency=level.latency * factor,
        measured={
            kind: replace(
                one, bandwidth=one.bandwidth / factor, latency=one.latency * factor, overhead=one.overhead * factor
            )
            for kind, one in level.measured.items()
        },
    )
