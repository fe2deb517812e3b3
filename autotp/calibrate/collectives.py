"""Times collectives as a sharded step runs them, on the processes of this job.

What counts is how much longer a step takes because of a collective. So some work is timed with the collective after each
piece and without it, from a barrier until the slowest rank ends, and the difference is the collective's time: with cold
caches, and with ranks that arrive one after the other, as in a step. All groups of a mesh axis communicate at once, since
that is how a sharded step runs, and padding, stacking and joining are part of it, since `passes.world.world` does them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from costmodel.fit import Sample, robust
from passes.layouts.reshard import Step
from passes.world.process import ProcessWorld

__all__ = ["FULL", "KINDS", "QUICK", "Clock", "Effort", "Timing", "Workload", "job", "time_collective", "time_sizes"]

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""The collectives that a sharded graph calls."""

_ITEM = 4
_PIECES = 8
#: How many of a kind follow one another: a step gathers and reduces the parameters of a layer together, activations singly.
_TOGETHER = {"all_gather": 2, "reduce_scatter": 2}
#: Seconds that a collective takes at least, however little the difference of two noisy times.
_LEAST = 1e-6
_MEGABYTE = 2**20
#: Sizes that are measured however long they take, a fit needing some.
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        volumes: bytes of the whole tensors, ascending.
        fewest, most: repetitions of each size.
        seconds: that the repetitions of one size should take together.
        longest: seconds that one repetition may take, beyond which larger sizes are left out.
        kernel_seconds: that the repetitions of one kernel should take together.
        largest_product: the longest side of a matrix product, on a CPU and on a GPU.
    """

    volumes: tuple[int, ...]
    fewest: int
    most: int
    seconds: float
    longest: float
    kernel_seconds: float
    largest_product: tuple[int, int]


FULL = Effort(tuple(1024 * 4**k for k in range(8)), 5, 25, 0.2, 0.5, 0.075, (1024, 8192))
QUICK = Effort(tuple(1024 * 16**k for k in range(4)), 5, 9, 0.05, 0.15, 0.02, (512, 4096))


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one collective takes.

    Attributes:
        volume: bytes of the whole tensor, as `costmodel.collectives` counts them.
        sample: the repetitions, each the slowest rank's.
    """

    volume: float
    sample: Sample


class Clock:
    """Waits for the device, and for the other ranks.

    Args:
        device: what this rank computes on.

    Attributes:
        least: seconds that a repetition of calls of a kernel must last to stand out from noise.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A GPU is waited for once in a repetition, which must be long beside that.
        self.least = 2e-3 if device.type == "cuda" else 2e-4

    def synchronize(self) -> None:
        """Waits until the device has done everything that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Waits for every rank."""
        if self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()
        self.synchronize()

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, one by one; the same on every rank."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()


def job(kind: str, axis: int, ways: int, volume: float, device: torch.device) -> tuple[Step, Tensor, float]:
    """A step of one collective, the float32 tensor that it takes, and the bytes of its whole tensor.

    Args:
        kind: one of `KINDS`.
        axis: the mesh axis.
        ways: its size.
        volume: bytes wanted, rounded to what splits evenly.
        device: where the tensor lies.
    """
    side = max(1, round(math.sqrt(volume / _ITEM) / ways)) * ways
    rows = max(1, round(volume / _ITEM / side / ways)) * ways
    whole = float(rows * side * _ITEM)
    if kind == "all_to_all":
        return Step(kind, (axis,), dim=0, to_dim=1), torch.ones(rows, side, device=device), whole
    if kind == "all_reduce":
        return Step(kind, (axis,), dim=0), torch.ones(rows, side, device=device), whole
    # Of the dim that is not outermost in memory: what arrives, or is sent, has to be laid out, as most is in a step, by its
    # dim or by the bucket that it travels in.
    part = side // ways if kind == "all_gather" else side
    return Step(kind, (axis,), dim=1), torch.ones(rows, part, device=device), whole


def time_collective(
    world: ProcessWorld, axis: int, kind: str, volume: float, effort: Effort, clock: Clock, *, alone: bool = False
) -> Timing:
    """Times one size of one collective along a mesh axis; every rank must call it with the same arguments.

    Args:
        world: has a process group for the axis.
        axis: the mesh axis.
        kind: one of `KINDS`.
        volume: bytes of the whole tensor, about.
        effort: how long to measure.
        clock: of this rank.
        alone: only the first of the axis' groups communicates, while the others wait at the barrier.
    """
    step, tensor, whole = job(kind, axis, world.mesh_shape[axis], volume, clock.device)
    first = all(at == 0 for other, at in enumerate(world.hosted[0]) if other != axis)
    takes_part = first or not alone
    workload, together = Workload(clock.device), _TOGETHER.get(kind, 1)

    def once(pieces: int, communicating: bool) -> float:
        clock.barrier()
        if not takes_part:
            return 0.0
        begun = time.perf_counter()
        for _ in range(pieces):
            workload.run()
            for _ in range(together if communicating else 0):
                world.run([step], [tensor])
        clock.synchronize()
        return time.perf_counter() - begun

    once(1, True)
    (each,) = clock.slowest([once(1, True)])
    pieces = max(1, min(_PIECES, int(effort.longest / each)))
    repetitions = min(effort.most, max(effort.fewest, int(effort.seconds / each / pieces)))
    # What every rank measured is compared afterwards, so that comparing delays no repetition.
    spans = clock.slowest([once(pieces, communicating) for _ in range(repetitions) for communicating in (True, False)])
    more = [max(with_it - without, _LEAST) for with_it, without in zip(spans[::2], spans[1::2], strict=True)]
    return Timing(whole, robust([seconds / pieces / together for seconds in more]))


class Workload:
    """A piece of what a step computes: some products and what follows them, on more memory than caches hold."""

    def __init__(self, device: torch.device) -> None:
        side = 4096 if device.type == "cuda" else 512
        self.weights = [torch.rand(side, side, device=device) for _ in range(8)]
        self.rows = torch.rand(side // 2, side, device=device)
        self.turn = 0

    def run(self) -> None:
        """Two products, each with an activation behind it."""
        value = self.rows
        for _ in range(2):
            value = torch.nn.functional.gelu(value @ self.weights[self.turn])
            self.turn = (self.turn + 1) % len(self.weights)


def time_sizes(measure: Callable[[float], Timing], volumes: Sequence[float], longest: float) -> tuple[Timing, ...]:
    """Times sizes from the smallest on, until one would take too long.

    Args:
        measure: times one size.
        volumes: bytes, ascending.
        longest: seconds that one repetition may take.
    """
    found: list[Timing] = []
    for volume in volumes:
        if len(found) >= _FEWEST:
            # From the last two sizes on, time grows with size: what the next takes is known well enough.
            expected = found[-1].sample.seconds * volume / found[-1].volume
            if found[-1].sample.seconds > longest or (expected > longest and found[-1].volume >= _MEGABYTE / 4):
                break
        found.append(measure(volume))
    return tuple(found)
