"""Times one plan with and without overlap, under torchrun: -m benchmarks.overlap_steps MODEL PLAN.json OUT.json

The ways to run it take turns. What computing takes alone is timed with collectives that answer at once, and what
communicating takes alone by repeating the step's collectives, one after the other, without anything between them.
"""

from __future__ import annotations

import argparse
import math
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autotp
from autotp.durations import overlap_of
from benchmarks.models import trained
from benchmarks.steps import TIMED, finish, medians, step_of
from passes.world import Pending, ProcessWorld

#: name -> (schedule, chunks, whether small collectives are merged); None: the chunks that the planner chose.
WAYS: dict[str, tuple[str, dict[str, int] | None, bool]] = {
    "no overlap": ("none", {}, False),
    "chunked": ("overlap", {"rows": 2}, False),
    "overdecomposed": ("overlap", {"batch": 2}, False),
    "both": ("overlap", {"batch": 2, "rows": 2}, False),
    "+ bucketing": ("overlap", {"batch": 2, "rows": 2}, True),
    "bucketing alone": ("overlap", {}, True),
    "as planned": ("overlap", None, True),
}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a name that benchmarks.models.trained knows")
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, args = trained(chosen.model)
    planned = autotp.Plan.load(chosen.plan)
    plan = replace(planned, chunks={})
    steps: dict[str, Callable[[], Any]] = {}
    for way in chosen.ways:
        schedule, chunks, merge = WAYS[way]
        cut = planned if chunks is None else replace(plan, chunks=chunks)
        parallel = autotp.parallelize(model, args=args, plan=cut, schedule=schedule)
        if parallel._overlapping is not None:
            parallel._overlapping.how = overlap_of(plan, merge=merge)
        steps[way] = lambda parallel=parallel: step_of(parallel, args)  # type: ignore[misc]
        if way == "no overlap":
            calls, sizes = _recorded(parallel, args)
            alone = autotp.parallelize(model, args=args, plan=plan, schedule="none")
            world: Any = alone.get_submodule("autotp_world")
            for kind in KINDS:
                setattr(world, kind, getattr(_Mute(world), kind))
            steps["compute alone"] = lambda parallel=alone: step_of(parallel, args)  # type: ignore[misc]
            steps["communication alone"] = lambda calls=calls: [call().wait() for call in calls]  # type: ignore[misc]
    found = medians(steps, chosen.rounds, timed_steps=3)
    if "communication alone" in steps:
        found["processor"] = _processor_seconds(steps["communication alone"])
        found["sent"] = sum(map(_sent, sizes))
    finish(found, chosen.out)


class _Mute:
    """Collectives that answer at once, with something of the right shape."""

    def __init__(self, world: ProcessWorld) -> None:
        self.shape = world.mesh_shape

    def all_reduce(self, parts: Any, axes: Any, op: str = "sum") -> Pending:
        return Pending(parts)

    def all_gather(self, parts: Any, axis: int) -> Pending:
        return Pending([parts[0].expand(self.shape[axis], *parts[0].shape)])

    def reduce_scatter(self, parts: Any, axis: int) -> Pending:
        return Pending([parts[0][0]])

    def all_to_all(self, parts: Any, axis: int) -> Pending:
        return Pending(parts)


def _processor_seconds(step: Callable[[], Any]) -> float:
    """Seconds of a core that a step of this process takes."""
    begun = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(TIMED):
        step()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    return (ended.ru_utime - begun.ru_utime + ended.ru_stime - begun.ru_stime) / TIMED


def _sent(call: tuple[str, int, float]) -> float:
    """Bytes that a rank sends in a collective, by a ring: of so many ranks, and so many bytes given by each."""
    kind, ways, size = call
    share = {"all_reduce": 2 * (ways - 1) / ways, "all_gather": ways - 1}.get(kind, (ways - 1) / ways)
    return share * size


def _recorded(
    parallel: torch.nn.Module, args: tuple[Tensor, ...]
) -> tuple[list[Callable[[], Pending]], list[tuple[str, int, float]]]:
    """The collectives of one step, to be called again, and their kinds, ranks and bytes."""
    world: Any = parallel.get_submodule("autotp_world")
    calls: list[Callable[[], Pending]] = []
    sizes: list[tuple[str, int, float]] = []

    def listen(kind: str) -> None:
        original = getattr(world, kind)

        def call(parts: Any, *rest: Any) -> Pending:
            mine = [part.detach().clone() for part in parts]
            calls.append(lambda: original(mine, *rest))
            axes = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
            ways = math.prod(world.mesh_shape[axis] for axis in axes)
            sizes.append((kind, ways, float(sum(part.numel() * part.element_size() for part in mine))))
            return original(parts, *rest)

        setattr(world, kind, call)

    for kind in KINDS:
        listen(kind)
    step_of(parallel, args)
    for kind in KINDS:
        delattr(world, kind)
    return calls, sizes


if __name__ == "__main__":
    main()
