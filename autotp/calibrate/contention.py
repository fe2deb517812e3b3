"""How much computation and communication slow each other down.

Collectives take compute time (sockets and sums on a CPU, some streaming multiprocessors on a GPU) and memory bandwidth,
which slows down concurrent computation. So a workload is timed alone, then collectives that take about as long, and then
both at once. If they share no resources, both at once take as long as the longer one; if they share all, as long as the
sum.

On a CPU, the core seconds that collectives use are also known, whatever else the machine runs: the part that idle cores do
not cover is a lower bound on what is taken. Latency, during which no resources are taken, is counted as communication, too:
it is a small part of it for this many bytes, with several collectives in flight.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

from autotp.calibrate.collectives import Clock, Effort, Workload, job
from passes.world.process import ProcessWorld

__all__ = ["time_contention"]

_BYTES = 4 * 2**20
_LASTING = 8  # the most collectives in a round
_TRIALS = 3


def time_contention(world: ProcessWorld, axis: int, effort: Effort, clock: Clock) -> float:
    """The share of communication time that is taken from concurrent computation. Every rank must call this.

    Args:
        world: has a process group for the axis.
        axis: the mesh axis.
        effort: how long to measure.
        clock: of this rank.

    Returns:
        A number from 0 (nothing is taken) to 1: the median of several rounds, the same on every rank.
    """
    _, tensor, _ = job("all_reduce", axis, world.mesh_shape[axis], _BYTES, clock.device)
    workload = Workload(clock.device)

    def communicate(count: int) -> list[Callable[[], object]]:
        return [world.all_reduce([tensor], (axis,)).wait for _ in range(count)]

    def span(pieces: int, collectives: int) -> float:
        clock.barrier()
        begun = time.perf_counter()
        waits = communicate(collectives)
        for _ in range(pieces):
            workload.run()
        for wait in waits:
            wait()
        clock.synchronize()
        return time.perf_counter() - begun

    def usual(pieces: int, collectives: int) -> float:
        return statistics.median(clock.slowest([span(pieces, collectives) for _ in range(_TRIALS)]))

    span(1, 1)
    one, moving = usual(1, 0), usual(0, 1)
    count = max(1, min(_LASTING, round(effort.longest / moving)))
    moving = usual(0, count)
    pieces = max(1, round(moving / one))
    taken = _processor_share(lambda: span(0, count)) if clock.device.type == "cpu" else 0.0
    rounds = [(pieces, 0), (0, count), (pieces, count)] * effort.fewest
    spans = clock.slowest([span(*each) for each in rounds])
    shares = [(both - max(alone)) / min(alone) for *alone, both in (spans[i : i + 3] for i in range(0, len(spans), 3))]
    (least,) = clock.slowest([taken])
    return min(1.0, max(least, statistics.median(shares)))


def _processor_share(communicate: Callable[[], float]) -> float:
    """The share of this node's cores that its ranks use to communicate, beyond the cores that no rank computes on."""
    begun = time.process_time()
    seconds = sum(communicate() for _ in range(_TRIALS))
    busy = (time.process_time() - begun) / seconds
    ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), len(os.sched_getaffinity(0))
    return max(0.0, ranks * busy - max(0, cores - ranks)) / cores
