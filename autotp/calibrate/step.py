"""Times whole steps of two reference models, and corrects the fitted figures to those that a step reaches.

Kernels and collectives are timed one by one. In a step, each finds other data in the caches, ranks reach a collective at
different times, and Python runs in between: kernels take longer than by themselves, collectives more or less. So steps of a
small transformer and of a small convolutional network are timed under plans of different families, and without a plan, on
every rank by itself. The predicted time of each is a sum of parts: of launches, of every kind of operator, and of every
figure of every collective on every level. A factor for each part is fitted to all steps together
(`costmodel.fit.fit_parts`). Last, the contention of every level is fitted to steps that overlap communication with
computation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from autotp.analysis.reprice import repriced
from autotp.calibrate.collectives import Clock, Effort
from autotp.calibrate.kernels import TRAINED
from autotp.planner import plan_captured
from autotp.plans.options import Options
from autotp.plans.plan import Plan
from autotp.runtime.parallelize import parallelize
from costmodel import KINDS, Level, Measured, Topology
from costmodel.fit import fit_parts
from passes.capture import Captured, capture

__all__ = ["StepFit", "TimedStep", "contended", "corrected", "fit_steps", "parts_of"]

#: Width, tokens of a sequence, and blocks of the transformer; width and height of an image; sequences and images; on a CPU
#: core and on a GPU. The convolutional network begins with an eighth as many channels.
_SIZES = {"cpu": (512, 64, 1, 32, 16), "cuda": (4096, 2048, 2, 64, 16)}
#: Families that are timed on one mesh axis, and on two; each moves other tensors, or by other collectives.
_ALONG_ONE = ("data", "megatron-1d", "zero3", "3d")
_ALONG_TWO = ("megatron-1d", "tensor3d", "summa-2d", "3d")
_OVERLAPPED = ("data", "zero3", "megatron-1d", "3d")  # are timed with overlap, too
_FIGURES = ("bandwidth", "latency", "overhead", "copying")  # of `costmodel.Measured`
_STEP = 1e-3  # the relative change of a figure that shows how much of a step depends on it
#: The error of one step's time, and of a contention that is measured by itself, in units of which both are fitted.
_ERROR, _DEVIATION = 0.05, 0.3
#: The distances of the contentions that are tried, first from 0 to 1, then around the best one.
_COARSE, _FINE = 0.2, 0.05


@dataclass(frozen=True, slots=True)
class StepFit:
    """How long steps take, compared with the sum of their parts.

    Attributes:
        topology: the topology as a step reaches it: with the factors, and with the contention of each level that overlapped
            steps show.
        factors: part -> how many times as long it takes in a step as by itself. A part is a kind of operator (one of
            `costmodel.KINDS`), ``"launch"``, or a figure of a collective on a level: ``"network all_gather latency"``.
        before: reference model and plan -> predicted over measured seconds, minus 1, without the factors.
        errors: the same, on ``topology``.
    """

    topology: Topology
    factors: Mapping[str, float]
    before: Mapping[str, float]
    errors: Mapping[str, float]


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


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, out)
        self.first, self.second = nn.Conv2d(channels, out, 3, stride, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(nn.functional.silu(self.norm1(x)))
        return self.shortcut(x) + self.second(nn.functional.silu(self.norm2(y)))


class _Loss(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def _references(device: torch.device, ranks: int) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """The name of each reference model, the model, and its input for all ranks."""
    width, tokens, blocks, side, sequences = _SIZES[device.type]
    torch.manual_seed(0)
    batch, channels, to = math.lcm(sequences, ranks), width // 8, (device, TRAINED[device.type])
    yield "transformer", _Loss(*(_Block(width) for _ in range(blocks))).to(*to), torch.randn(batch, tokens, width).to(*to)
    first = nn.Conv2d(4, channels, 3, padding=1)
    layers = first, _Residual(channels, channels, 1), _Residual(channels, 2 * channels, 2)
    yield "convolutions", _Loss(*layers).to(*to), torch.randn(batch, 4, side, side).to(*to)


def fit_steps(
    topology: Topology, shape: tuple[int, int], clock: Clock, effort: Effort, progress: Callable[[str], None]
) -> StepFit:
    """Times steps of the reference models on all ranks, under several plans. Returns the same fit on every rank.

    Args:
        topology: the fitted topology, for the predictions.
        shape: (nodes, ranks of each node).
        clock: of this rank.
        effort: how long to measure.
        progress: called with a description of every stage.
    """
    steps: dict[str, TimedStep] = {}

    def compare(label: str, captured: Captured, plan: Plan, module: nn.Module, batch: Tensor) -> None:
        progress(f"steps: {label}")
        steps[label] = TimedStep(captured, plan, _seconds(module, batch, clock, effort))

    ranks = math.prod(shape)
    for name, model, batch in _references(clock.device, ranks):
        own = batch[: len(batch) // ranks]
        captured = capture(model, (own,), None)
        alone = plan_captured(captured, topology.resized(1), Options(schedule="none"))
        compare(f"{name} alone", captured, alone, model, own)
        captured, seen = capture(model, (batch,), None), set()
        for family, mesh, schedule in _families(shape):
            plan = plan_captured(captured, topology, Options(family, mesh=mesh, panels=1, schedule=schedule))
            if (plan.hash, schedule) not in seen:
                seen.add((plan.hash, schedule))
                parallel = parallelize(model, topology, (batch,), plan=plan, schedule=schedule)
                label = f"{name} {family} {'x'.join(map(str, mesh))}{', overlap' if schedule == 'overlap' else ''}"
                compare(label, captured, plan, parallel, batch)
    serial = [step for step in steps.values() if step.plan.schedule == "none"]
    parts = [parts_of(step.captured, step.plan) for step in serial]
    factors, _ = fit_parts([list(one.values()) for one in parts], [step.seconds for step in serial])
    found = dict(zip(parts[0], factors, strict=True))
    overlapped = [step for step in steps.values() if step.plan.schedule != "none"]
    reached = corrected(topology, found)
    for place in range(len(topology.levels) if overlapped else 0):
        reached = contended(reached, place, overlapped)
    before = {label: step.error(topology) for label, step in steps.items()}
    return StepFit(reached, found, before, {label: step.error(reached) for label, step in steps.items()})


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step of a plan, and the seconds that it takes."""

    captured: Captured
    plan: Plan
    seconds: float

    def error(self, topology: Topology) -> float:
        """Its predicted seconds on a topology over the measured ones, minus 1."""
        topology = topology.resized(self.plan.topology.devices)
        return repriced(self.captured, self.plan, topology).predicted.passes_seconds / self.seconds - 1


def contended(topology: Topology, place: int, steps: Sequence[TimedStep]) -> Topology:
    """The topology with the contention of one level with which overlapped steps are predicted best.

    If they do not depend on it, it stays as it is.
    """
    level = topology.levels[place]
    own = topology.device.contention if level.contention is None else level.contention
    tried: dict[float, float] = {}  # contention -> the squared deviations from what is measured

    def other(contention: float) -> Topology:
        levels = list(topology.levels)
        levels[place] = replace(level, contention=contention)
        return replace(topology, levels=tuple(levels))

    def best(contentions: Iterable[float]) -> float:
        for one in {min(1.0, max(0.0, each)) for each in contentions} - tried.keys():
            errors = [math.log1p(step.error(other(one))) for step in steps]
            tried[one] = sum((error / _ERROR) ** 2 for error in errors) + ((one - own) / _DEVIATION) ** 2
        return min(tried, key=tried.__getitem__)

    around = best((own, *(number * _COARSE for number in range(round(1 / _COARSE) + 1))))
    return other(best(around + number * _FINE for number in range(-3, 4)))


def _families(shape: tuple[int, int]) -> list[tuple[str, tuple[int, ...], str]]:
    """The families, meshes and schedules to time: all ranks on one axis, and on two: nodes, or as even as they divide."""
    ranks = math.prod(shape)
    if ranks == 1:
        return []
    inner = max(ways for ways in range(1, math.isqrt(ranks) + 1) if ranks % ways == 0)
    two = shape if min(shape) > 1 else (inner, ranks // inner)
    found: list[tuple[str, tuple[int, ...]]] = [(name, (ranks,)) for name in _ALONG_ONE]
    found += [(name, two) for name in _ALONG_TWO] if min(two) > 1 else []
    return [(*one, "none") for one in found] + [(*one, "overlap") for one in found if one[0] in _OVERLAPPED]


def _seconds(module: nn.Module, batch: Tensor, clock: Clock, effort: Effort) -> float:
    """The median time of both passes on the slowest rank, after the first step."""
    spans = []
    for _ in range(1 + effort.fewest):
        clock.barrier()
        begun = time.perf_counter()
        module(batch).backward()
        for parameter in module.parameters():
            parameter.grad = None
        clock.synchronize()
        spans.append(time.perf_counter() - begun)
    return statistics.median(clock.slowest(spans[1:]))


def parts_of(captured: Captured, plan: Plan) -> dict[str, float]:
    """Part -> its predicted seconds in a plan's passes: the change of the prediction if only this part takes longer."""
    topology, seconds = plan.topology, plan.predicted.passes_seconds

    def more(part: str) -> float:
        return repriced(captured, plan, corrected(topology, {part: 1 + _STEP})).predicted.passes_seconds - seconds

    figures = [_part(level, kind, figure) for level in topology.levels for kind in level.measured for figure in _FIGURES]
    return {part: more(part) / _STEP for part in ["launch", *KINDS, *figures]}


def corrected(topology: Topology, factors: Mapping[str, float]) -> Topology:
    """The topology on which every part of a step takes a factor as long: 1 for parts without one."""
    slowdown = {kind: topology.device.slowdown.get(kind, 1.0) * factors.get(kind, 1.0) for kind in KINDS}
    device = replace(topology.device, launch=topology.device.launch * factors.get("launch", 1.0), slowdown=slowdown)
    levels = []
    for level in topology.levels:
        measured = {}
        for kind, one in level.measured.items():
            moving, waiting, starting, copied = (factors.get(_part(level, kind, figure), 1.0) for figure in _FIGURES)
            copying = None if one.copying is None else one.copying / copied
            measured[kind] = Measured(one.bandwidth / moving, one.latency * waiting, one.overhead * starting, copying)
        own = measured.get("all_gather", level)
        levels.append(replace(level, bandwidth=own.bandwidth, latency=own.latency, measured=measured))
    return replace(topology, device=device, levels=tuple(levels))


def _part(level: Level, kind: str, figure: str) -> str:
    return f"{level.name} {kind} {figure}"
