"""Times collectives as a sharded step runs them, on the processes of this job.

The time of a collective is the time that it adds to a step. So a workload is timed with and without the collective after
each of its pieces, from a barrier until the slowest rank ends, and the difference is the collective's time: with cold
caches, and with ranks that arrive at different times, as in a step. All groups of a mesh axis communicate at once, as in a
sharded step, and padding, stacking and joining are included, since `passes.world.world` does them.
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
#: Kind -> how many follow one another: a step gathers and reduces a layer's parameters together, activations one by one.
_TOGETHER = {"all_gather": 2, "reduce_scatter": 2}
#: A lower bound on the seconds of a collective, since the difference of two noisy times may be smaller.
_LEAST = 1e-6
_MEGABYTE = 2**20
#: The number of sizes that are measured however long they take, since a fit needs some.
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        volumes: bytes of the whole tensors, ascending.
        fewest, most: bounds on the repetitions of each size.
        seconds: the desired total of the repetitions of one size.
        longest: seconds of one repetition beyond which larger sizes are left out.
        kernel_seconds: the desired total of the repetitions of one kernel.
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
    """The measured time of one collective.

    Attributes:
        volume: bytes of the whole tensor, as `costmodel.collectives` counts them.
        sample: the repetitions, each with the time of the slowest rank.
    """

    volume: float
    sample: Sample


class Clock:
    """Synchronizes a rank with its device, and with the other ranks.

    Args:
        device: the device that this rank computes on.

    Attributes:
        least: seconds that a repetition of calls of a kernel must last to stand out from noise.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A repetition synchronizes with the GPU once, and must take much longer than that.
        self.least = 2e-3 if device.type == "cuda" else 2e-4

    def synchronize(self) -> None:
        """Waits until the device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Waits for all ranks, and for the device."""
        if self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()
        self.synchronize()

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The elementwise maximum of all ranks' values; the same on every rank."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()


def job(kind: str, axis: int, ways: int, volume: float, device: torch.device) -> tuple[Step, Tensor, float]:
    """The step of one collective, its float32 operand on this rank, and the bytes of the whole tensor.

    Args:
        kind: one of `KINDS`.
        axis: the mesh axis.
        ways: its size.
        volume: desired bytes of the whole tensor, which are rounded to sizes that split evenly.
        device: of the operand.
    """
    side = max(1, round(math.sqrt(volume / _ITEM) / ways)) * ways
    rows = max(1, round(volume / _ITEM / side / ways)) * ways
    whole = float(rows * side * _ITEM)
    if kind == "all_to_all":
        return Step(kind, (axis,), dim=0, to_dim=1), torch.ones(rows, side, device=device), whole
    if kind == "all_reduce":
        return Step(kind, (axis,), dim=0), torch.ones(rows, side, device=device), whole
    # Along the dim that is not outermost in memory: the received or sent data has to be copied into place, as for most
    # tensors in a step, because of their dim or of the bucket that they are sent in.
    part = side // ways if kind == "all_gather" else side
    return Step(kind, (axis,), dim=1), torch.ones(rows, part, device=device), whole


def time_collective(
    world: ProcessWorld, axis: int, kind: str, volume: float, effort: Effort, clock: Clock, *, alone: bool = False
) -> Timing:
    """Times one collective at one size along a mesh axis. Every rank must call this with the same arguments.

    Args:
        world: has a process group for the axis.
        axis: the mesh axis.
        kind: one of `KINDS`.
        volume: approximate bytes of the whole tensor.
        effort: how long to measure.
        clock: of this rank.
        alone: whether only the first group of the axis communicates, while the others wait at the barrier.
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
    # Ranks exchange their times after the last repetition, so that this delays no repetition.
    spans = clock.slowest([once(pieces, communicating) for _ in range(repetitions) for communicating in (True, False)])
    more = [max(with_it - without, _LEAST) for with_it, without in zip(spans[::2], spans[1::2], strict=True)]
    return Timing(whole, robust([seconds / pieces / together for seconds in more]))


class Workload:
    """A piece of a step's computation: products with activation functions, on more memory than caches hold."""

    def __init__(self, device: torch.device) -> None:
        side = 4096 if device.type == "cuda" else 512
        self.weights = [torch.rand(side, side, device=device) for _ in range(8)]
        self.rows = torch.rand(side // 2, side, device=device)
        self.turn = 0

    def run(self) -> None:
        """Computes two products, each followed by an activation function."""
        value = self.rows
        for _ in range(2):
            value = torch.nn.functional.gelu(value @ self.weights[self.turn])
            self.turn = (self.turn + 1) % len(self.weights)


def time_sizes(measure: Callable[[float], Timing], volumes: Sequence[float], longest: float) -> tuple[Timing, ...]:
    """Times sizes in ascending order, until the next one would take too long.

    Args:
        measure: times the size that it is given.
        volumes: bytes, ascending.
        longest: seconds that one repetition may take.
    """
    found: list[Timing] = []
    for volume in volumes:
        if len(found) >= _FEWEST:
            # For large sizes, time grows in proportion to size, so that of the next size can be extrapolated.
            expected = found[-1].sample.seconds * volume / found[-1].volume
            if found[-1].sample.seconds > longest or (expected > longest and found[-1].volume >= _MEGABYTE / 4):
                break
        found.append(measure(volume))
    return tuple(found)
