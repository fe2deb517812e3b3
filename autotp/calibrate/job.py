"""Calibration: measures the machine that this job runs on, and fits a topology to it.

Two levels are distinguished by torchrun's numbering: the ranks of a node, and the nodes. For each level, the times of every
collective at many sizes give a latency and a bandwidth; for the device, the times of kernels give its rates. Then the
predictions for the group of all ranks, to which no bandwidth is fitted, are compared with measurements. Last, whole steps
of small models show the rates that kernels and collectives reach in a step. In a job of one process, no collectives are
measured.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autotp.calibrate.collectives import FULL, KINDS, QUICK, Clock, Effort, Timing, time_collective, time_sizes
from autotp.calibrate.contention import time_contention
from autotp.calibrate.device import DeviceFit, calibrate_device
from autotp.calibrate.step import StepFit, fit_steps
from autotp.errors import AutotpError
from costmodel import Level, Measured, Topology, collectives
from costmodel.fit import LinkFit, fit_link, split_copying, split_overhead
from costmodel.text.numbers import MOST_DEVICES, whole_of
from passes.world.process import ProcessWorld

__all__ = ["Calibration", "Check", "LevelFit", "calibrate", "shape_of_job"]

_NOT_SHARED = 1.25
#: Bytes of a collective whose time is latency alone.
_SMALL = 4096
#: The number of sizes, the largest ones, at which pairs are compared with all ranks of a level.
_LARGEST = 3


@dataclass(frozen=True, slots=True)
class LevelFit:
    """The fit of one collective on one level.

    Attributes:
        level: the name of the level.
        link: latency and bandwidth of one ring, and the errors of the fit.
        timings: the measurements, smallest size first.
    """

    level: str
    link: LinkFit
    timings: tuple[Timing, ...]

    @property
    def outliers(self) -> int:
        """The number of repetitions that were dropped."""
        return sum(timing.sample.outliers for timing in self.timings)

    @property
    def repetitions(self) -> int:
        """The number of repetitions, including the dropped ones."""
        return sum(timing.sample.repetitions for timing in self.timings)


@dataclass(frozen=True, slots=True)
class Check:
    """The predicted and the measured time of one collective over all ranks, to which no bandwidth is fitted.

    Attributes:
        kind: one of `costmodel.COLLECTIVES`.
        volume: bytes of the whole tensor.
        predicted: seconds predicted with the topology.
        measured: seconds measured.
    """

    kind: str
    volume: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured seconds, minus 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured machine.

    Attributes:
        topology: the machine, for planning.
        fits: the fit of each collective on each level, innermost level first.
        checks: predicted and measured times of collectives over all ranks; empty unless there are two levels.
        device: the fit of the device's figures.
        concurrency: how many times longer an all_gather between the nodes takes if all ranks take part than if one rank of
            each node does; None if nodes have one rank, or there is one node.
        steps: how much longer the parts of a step take than by themselves, and the topology as steps reach it.
    """

    topology: Topology
    fits: tuple[LevelFit, ...]
    checks: tuple[Check, ...]
    device: DeviceFit
    concurrency: float | None
    steps: StepFit


def shape_of_job(world_size: int, environ: dict[str, str] | os._Environ[str]) -> tuple[int, int]:
    """(nodes, ranks of each node), from torchrun's environment variables; one node if they are not set.

    Raises:
        AutotpError: the nodes have different numbers of ranks.
    """
    text = environ.get("LOCAL_WORLD_SIZE", str(world_size))
    local = whole_of(text, "environment: LOCAL_WORLD_SIZE", most=MOST_DEVICES)
    if world_size % local:
        raise AutotpError(
            f"WORLD_SIZE={world_size} is not a multiple of LOCAL_WORLD_SIZE={text}; "
            "start the same number of processes on every node"
        )
    return world_size // local, local


def calibrate(
    *, quick: bool = False, name: str = "calibrated", progress: Callable[[str], None] | None = None
) -> Calibration:
    """Measures this job's machine. Every process of an initialised process group must call this with the same arguments.

    Args:
        quick: whether to measure fewer and smaller sizes, with fewer repetitions.
        name: of the topology.
        progress: called with a description of every stage, on every rank.

    Returns:
        The calibration, the same on every rank.

    Raises:
        AutotpError: there is no process group, or nodes have different numbers of processes.
    """
    if not dist.is_initialized():
        raise AutotpError(
            "calibrate() needs a process group: call torch.distributed.init_process_group first, under torchrun"
        )
    shape = shape_of_job(dist.get_world_size(), os.environ)
    gpu = "nccl" in dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    job = _Job(shape, Clock(device), QUICK if quick else FULL, "nccl" if gpu else "gloo", progress or (lambda stage: None))
    return job.run(name)


class _Job:
    def __init__(
        self, shape: tuple[int, int], clock: Clock, effort: Effort, library: str, progress: Callable[[str], None]
    ) -> None:
        self.shape, self.clock, self.effort, self.library, self.progress = shape, clock, effort, library, progress
        self.world = ProcessWorld(init_device_mesh(clock.device.type, shape), [(0,), (1,)])

    def run(self, name: str) -> Calibration:
        levels, fits = [], []
        concurrency = None
        kinds: dict[int, list[LevelFit]] = {}
        # Mesh axis 1 is the inner one: the ranks of a node.
        for level, axis in (("node", 1), ("network", 0)):
            if self.shape[axis] == 1:
                continue
            found = [self.fit(level, axis, kind) for kind in KINDS]
            kinds[axis] = found
            rings = 1 if axis == 1 else self.shape[1]
            if rings > 1:
                concurrency = self.concurrency(axis, next(fit for fit in found if fit.link.kind == "all_gather"))
            shared = concurrency is None or concurrency > _NOT_SHARED
            levels.append(_level(level, self.shape[axis], found, rings if shared else 1, shared))
            fits += found
        levels = self.split(levels, list(kinds.values()))
        if kinds:
            self.progress("computing and communicating at once")
        shares = [time_contention(self.world, axis, self.effort, self.clock) for axis in kinds]
        levels = [replace(level, contention=share) for level, share in zip(levels, shares, strict=True)]
        device, device_fit = calibrate_device(self.clock, self.effort, self.shape[1], self.progress)
        # A topology has at least one level, even if a single device exchanges nothing on it.
        topology = Topology(name, device, tuple(levels) or (Level("node", 1, device.memory_bandwidth, 0.0),), self.library)
        checks = self.checks(topology) if len(levels) > 1 else ()
        steps = fit_steps(topology, self.shape, self.clock, self.effort, self.progress)
        return Calibration(steps.topology, tuple(fits), checks, device_fit, concurrency, steps)

    def fit(self, level: str, axis: int, kind: str) -> LevelFit:
        self.progress(f"{level}: {kind}")

        def measure(volume: float) -> Timing:
            return self.time(self.world, axis, kind, volume)

        timings = time_sizes(measure, self.effort.volumes, self.effort.longest)
        volumes, seconds = [t.volume for t in timings], [t.sample.seconds for t in timings]
        return LevelFit(level, fit_link(kind, self.shape[axis], volumes, seconds, self.library), timings)

    def split(self, levels: Sequence[Level], fits: Sequence[Sequence[LevelFit]]) -> list[Level]:
        """The levels with each collective's overhead separated from its latency, which the fit of one level cannot do.

        A fit has the time of an empty collective in the groups of one level. Groups of another size show how much of that
        grows with the hops of a ring: the group of all ranks if there are two levels, else pairs. Pairs also show how much
        of the time of large tensors is the same in groups of all sizes.
        """
        sizes = [fit[0].link.ranks for fit in fits]
        if not levels or len(levels) == 1 and (sizes[0] < 4 or sizes[0] % 2):
            return list(levels)
        ranks = math.prod(self.shape)
        other = ProcessWorld(
            init_device_mesh(self.clock.device.type, (ranks,) if len(levels) > 1 else (ranks // 2, 2)),
            [(0,) if len(levels) > 1 else (1,)],
        )
        hops = [size - 1 for size in sizes]
        steps = [self.shape[0] * (self.shape[1] - 1), self.shape[0] - 1] if len(levels) > 1 else [1]
        measured: list[dict[str, Measured]] = [dict(level.measured) for level in levels]
        for number, kind in enumerate(KINDS):
            self.progress(f"overhead: {kind}")
            timing = self.time(other, len(other.mesh_shape) - 1, kind, _SMALL)
            turns = 2 if kind == "all_reduce" else 1
            crossed = steps
            if kind == "all_to_all" and len(levels) > 1:  # every rank sends to each rank of other nodes
                crossed = [self.shape[1] - 1, (self.shape[0] - 1) * self.shape[1]]
            links = [fit[number].link for fit in fits]
            intercepts = [turns * h * link.latency for h, link in zip(hops, links, strict=True)]
            moving = float(collectives.bytes_moved(kind, other.mesh_shape[-1], timing.volume)) / min(
                link.bandwidth for link in links
            )
            overhead = split_overhead(intercepts, hops, crossed, timing.sample.seconds - moving)
            for place, (intercept, h) in enumerate(zip(intercepts, hops, strict=True)):
                latency = max(0.0, (intercept - overhead) / (turns * h))
                bandwidth = measured[place][kind].bandwidth
                measured[place][kind] = Measured(bandwidth, latency, min(overhead, intercept))
            if len(levels) == 1:
                large = [self.time(other, 1, kind, v) for v in [t.volume for t in fits[0][number].timings][-_LARGEST:]]
                volumes, seconds = zip(*((t.volume, t.sample.seconds) for t in (timing, *large)), strict=True)
                of_pairs = fit_link(kind, 2, volumes, seconds, self.library).bandwidth
                bandwidth, copying = split_copying(kind, sizes[0], links[0].bandwidth, of_pairs)
                measured[0][kind] = replace(measured[0][kind], bandwidth=bandwidth, copying=copying)
        return [replace(level, measured=found) for level, found in zip(levels, measured, strict=True)]

    def time(self, world: ProcessWorld, axis: int, kind: str, volume: float) -> Timing:
        return time_collective(world, axis, kind, volume, self.effort, self.clock)

    def concurrency(self, axis: int, together: LevelFit) -> float:
        """How many times longer the largest all_gathers take with all groups at once than with one group alone."""
        self.progress("network: one ring alone")
        ratios = []
        for timing in together.timings[-2:]:
            alone = time_collective(self.world, axis, "all_gather", timing.volume, self.effort, self.clock, alone=True)
            ratios.append(timing.sample.seconds / alone.sample.seconds)
        return statistics.fmean(ratios)

    def checks(self, topology: Topology) -> tuple[Check, ...]:
        ranks = self.shape[0] * self.shape[1]
        whole = ProcessWorld(init_device_mesh(self.clock.device.type, (ranks,)), [(0,)])
        found = []
        for kind in KINDS:
            self.progress(f"all ranks: {kind}")
            link = topology.link(self.shape, (0, 1), kind)

            def predict(volume: float, kind: str = kind, link: object = link) -> float:
                return float(collectives.of_link(kind, volume, link, self.library))  # type: ignore[arg-type]

            for volume in _two([v for v in self.effort.volumes if predict(v) <= self.effort.longest / 2]):
                timing = self.time(whole, 0, kind, volume)
                found.append(Check(kind, timing.volume, predict(timing.volume), timing.sample.seconds))
        return tuple(found)


def _two(volumes: Sequence[int]) -> list[int]:
    """The middle one and the last of some volumes."""
    return sorted({volumes[(len(volumes) - 1) // 2], volumes[-1]}) if volumes else []


def _level(name: str, size: int, fits: Sequence[LevelFit], rings: int, shared: bool) -> Level:
    """A level from the fits of its collectives; its uplink has the bandwidth of all ``rings`` measured through it."""
    measured = {fit.link.kind: Measured(fit.link.bandwidth * rings, fit.link.latency) for fit in fits}
    own = measured["all_gather"]
    return Level(name, size, own.bandwidth, own.latency, shared=shared, measured=measured)
