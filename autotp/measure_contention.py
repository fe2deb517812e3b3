"""How much computing and communicating at once take from one another.

Collectives take processor time (sockets and sums on a CPU, some multiprocessors on a GPU) and memory bandwidth, and what
goes on behind them is slowed down. So some work is timed alone, collectives that take about as long are timed alone, and
then both at once. Where nothing is taken, both take what the longer one takes; where everything is, the sum.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from autotp.measure import Clock, Effort, Work, job
from passes.world import ProcessWorld

__all__ = ["time_contention"]

_BYTES = 4 * 2**20
_LASTING = 8  # collectives


def time_contention(world: ProcessWorld, axis: int, effort: Effort, clock: Clock) -> float:
    """The share of a second of communicating that is taken from what is computed meanwhile; every rank must call it alike.

    Args:
        world: has a process group for the axis.
        axis: the mesh axis.
        effort: how long to measure.
        clock: of this rank.

    Returns:
        Between 0, nothing is, and 1; the median of some rounds, the same on every rank.
    """
    _, tensor, _ = job("all_reduce", axis, world.mesh_shape[axis], _BYTES, clock.device)
    work = Work(clock.device)

    def communicate(count: int) -> list[Callable[[], object]]:
        return [world.all_reduce([tensor], (axis,)).wait for _ in range(count)]

    def span(pieces: int, collectives: int) -> float:
        clock.barrier()
        begun = time.perf_counter()
        waits = communicate(collectives)
        for _ in range(pieces):
            work.run()
        for wait in waits:
            wait()
        clock.synchronize()
        return time.perf_counter() - begun

    span(1, 1)
    one, moving = clock.slowest([span(1, 0), span(0, 1)])
    count = max(1, min(_LASTING, round(effort.longest / moving)))
    (moving,) = clock.slowest([span(0, count)])
    pieces = max(1, round(moving / one))
    rounds = [(pieces, 0), (0, count), (pieces, count)] * effort.fewest
    spans = clock.slowest([span(*each) for each in rounds])
    shares = [(both - max(alone)) / min(alone) for *alone, both in (spans[i : i + 3] for i in range(0, len(spans), 3))]
    return min(1.0, max(0.0, statistics.median(shares)))
