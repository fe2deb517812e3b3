"""Measures the device that every rank computes on, and fits the cost model's figures to it."""

from __future__ import annotations

import functools
import math
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autotp.calibrate.collectives import Clock, Effort
from autotp.calibrate.kernels import (
    Operator,
    edges,
    operators,
    product_sizes,
    time_launch,
    time_memory,
    time_operator,
    time_product,
)
from costmodel import Device, compute
from costmodel.fit import ProductFit, fit_products

__all__ = ["DeviceFit", "calibrate_device"]

_GIB = 2**30
_LEAST_SLOWDOWN = 0.05
_PROBE = (256, 256, 256)
_ABSURD = 10.0
#: On a GPU, rates are fitted to products that take more than this many times as long as the fastest one.
_TELLING = 3.0
#: Kind of device -> the dtypes that its half size is fitted to: those that models are mostly trained in there.
_DECISIVE = {"cpu": ("float32", "float64"), "cuda": ("bfloat16", "float16")}
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """The measurements of a device, besides its figures.

    Attributes:
        products: the fit of matrix products.
        slowdowns: kind of operator -> name of the function -> its slowdown at each size, smallest first.
        slow: dtypes whose products take over ten times as long as those of float32; their rates are from one small product.
        left_out: dtypes whose products cannot run.
    """

    products: ProductFit
    slowdowns: Mapping[str, Mapping[str, tuple[float, ...]]]
    slow: tuple[str, ...]
    left_out: tuple[str, ...]

    def spread(self, kind: str) -> tuple[float, float]:
        """The smallest and the largest slowdown of a kind of operator."""
        found = [value for values in self.slowdowns[kind].values() for value in values]
        return min(found), max(found)


def calibrate_device(
    clock: Clock, effort: Effort, local_ranks: int, progress: Callable[[str], None]
) -> tuple[Device, DeviceFit]:
    """Measures the device of every rank, on all ranks at once. Returns the same on every rank.

    Args:
        clock: of this rank.
        effort: how long to measure.
        local_ranks: the number of ranks that share the memory of a node.
        progress: called with a description of every stage.
    """
    seconds, turns = effort.kernel_seconds, _turns(clock)
    progress("device: memory and launches")
    (launch,) = _together(clock, turns, lambda: [time_launch(clock, 2 * seconds)])
    bandwidth = 1 / _together(clock, turns, lambda: [1 / time_memory(clock, 2 * seconds)])[0]
    dtypes, slow, left_out = _dtypes(clock)
    smallest, largest = edges(clock, effort)
    shapes = product_sizes(largest, smallest)
    times = {}
    for dtype in dtypes:
        progress(f"device: products of {dtype}")
        kind = _DTYPES[dtype]
        times[dtype] = _together(clock, turns, functools.partial(_products, shapes, kind, clock, seconds))
    decisive = [dtype for dtype in _DECISIVE[clock.device.type] if dtype in dtypes]
    # A GPU takes some microseconds for even the smallest product: the time of those that take little more shows no rate.
    least = _TELLING if clock.device.type == "cuda" else 0.0
    telling = {
        dtype: [(shape, took) for shape, took in zip(shapes, each, strict=True) if took > least * min(each)]
        for dtype, each in times.items()
    }
    products = fit_products(
        {dtype: [shape for shape, _ in each] for dtype, each in telling.items()},
        {dtype: [took for _, took in each] for dtype, each in telling.items()},
        launch,
        decisive,
    )
    plain = Device("", products.rates, 1.0, bandwidth, 0.0, half_size=products.half_size)
    rates = dict(products.rates)
    for dtype, took in slow.items():  # the ratio of times at 1 FLOP/s and as measured is the rate
        once = replace(plain, flops={"float32": 1.0, dtype: 1.0})
        rates[dtype] = float(compute.seconds(2 * math.prod(_PROBE), 0.0, once, dtype, dims=_PROBE)) / took
    progress("device: operators")
    slowdowns: dict[str, dict[str, tuple[float, ...]]] = {}
    for operator in operators(clock.device):
        (took,) = _together(clock, turns, functools.partial(_operator, operator, clock, seconds))
        factor = max(_LEAST_SLOWDOWN, (took - 3 * launch) / _ideal(operator, plain))
        names = slowdowns.setdefault(operator.kind, {})
        names[operator.name] = (*names.get(operator.name, ()), factor)
    name, memory = _identity(clock, local_ranks)
    device = Device(
        name,
        rates,
        memory,
        bandwidth,
        launch,
        half_size=products.half_size,
        slowdown={
            kind: statistics.median(value for values in names.values() for value in values)
            for kind, names in slowdowns.items()
        },
    )
    return device, DeviceFit(products, slowdowns, tuple(slow), left_out)


def _ideal(operator: Operator, device: Device) -> float:
    """Seconds of an operator with its backward pass by the roofline, without launches."""
    dtype = str(operator.inputs[0].dtype)
    return float(compute.seconds(3 * operator.flop, 3 * operator.bytes, device, dtype, dims=operator.dims))


def _products(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, clock: Clock, seconds: float) -> list[float]:
    return [time_product(shape, dtype, clock, seconds) for shape in shapes]


def _operator(operator: Operator, clock: Clock, seconds: float) -> list[float]:
    return [time_operator(operator, clock, seconds)]


def _together(clock: Clock, turns: float, measure: Callable[[], list[float]]) -> list[float]:
    """Medians over the ranks of the seconds that each measures, while all of them compute at the same time.

    Ranks that share cores cannot all be timed together: the time of each depends on the time slices that the scheduler
    happens to assign. Then only one rank per core is timed, and its seconds are multiplied by ``turns``.
    """
    clock.barrier()
    mine = measure() if dist.get_rank() % math.ceil(turns) == 0 else []
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [turns * statistics.median(each) for each in zip(*(values for values in every if values), strict=True)]


def _dtypes(clock: Clock) -> tuple[list[str], Mapping[str, float], tuple[str, ...]]:
    """(dtypes to measure, dtypes that would take too long -> seconds of a small product, dtypes that cannot run).

    A CPU without units for 16-bit floats converts them one by one.
    """

    def probe(dtype: str) -> float:
        try:
            return time_product(_PROBE, _DTYPES[dtype], clock, 0.0)
        except (RuntimeError, NotImplementedError):
            return float("inf")

    clock.barrier()
    times = dict(zip(_DTYPES, clock.slowest([probe(dtype) for dtype in _DTYPES]), strict=True))
    found = [dtype for dtype in _DTYPES if dtype == "float32" or times[dtype] <= _ABSURD * times["float32"]]
    slow = {dtype: took for dtype, took in times.items() if dtype not in found and math.isfinite(took)}
    return found, slow, tuple(dtype for dtype in _DTYPES if dtype not in found and dtype not in slow)


def _turns(clock: Clock) -> float:
    """The most threads of ranks per core on any machine, at least 1. More in containers, or in an emulated cluster."""
    if clock.device.type != "cpu":
        return 1.0
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        machine = platform.node()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (machine, torch.get_num_threads(), os.sched_getaffinity(0)))
    threads: dict[str, int] = defaultdict(int)
    cores: dict[str, set[int]] = defaultdict(set)
    for name, count, mine in found:
        threads[name] += count
        cores[name] |= mine
    return max(1.0, *(threads[name] / len(cores[name]) for name in threads))


def _identity(clock: Clock, local_ranks: int) -> tuple[str, float]:
    """The name of rank 0's device, and the smallest memory of any rank, in bytes."""
    if clock.device.type == "cuda":
        properties = torch.cuda.get_device_properties(clock.device)
        name, memory = properties.name, float(properties.total_memory)
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # Whole GiB: nodes that differ by a few pages reserved by the firmware must give the same plan.
        name, memory = _cpu_name(), float(max(total // local_ranks // _GIB, 1) * _GIB)
    names = [name]
    dist.broadcast_object_list(names, src=0, device=clock.device)
    return names[0], -clock.slowest([-memory])[0]


def _cpu_name() -> str:
    threads = torch.get_num_threads()
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "") or "cpu"
    return f"{model}, {threads} thread{'' if threads == 1 else 's'}"
