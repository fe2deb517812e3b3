"""Times plans of one model with and without overlap, under torchrun: -m benchmarks.overlap_steps MODEL FOLDER

Requests arrive as files (`benchmarks.phases`): a plan, and the ways to run it, which take turns. Computation alone is timed
with the same graphs and collectives that return immediately, and communication alone by repeating the collectives of the
step with no computation between them: unmerged in sequence, and merged as in the schedule, all at once. Graphs are traced
once for all plans that shard the model in the same way; only the schedule is made anew for the machine of each plan.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autotp
from autotp.calibrate.collectives import QUICK, Clock
from autotp.calibrate.contention import time_contention
from autotp.runtime.durations import overlap_of
from autotp.runtime.schedules import Schedules
from benchmarks.models import trained
from benchmarks.phases import answered
from benchmarks.steps import TIMED, medians, step_of
from passes.world.pending import Pending
from passes.world.process import ProcessWorld

#: name -> (schedule, chunks, whether small collectives are merged); chunks of None are those that the planner chose.
WAYS: dict[str, tuple[str, dict[str, int] | None, bool]] = {
    "no overlap": ("none", {}, False),
    "chunked": ("overlap", {"rows": 2}, False),
    "overdecomposed": ("overlap", {"batch": 2}, False),
    "both": ("overlap", {"batch": 2, "rows": 2}, False),
    "+ bucketing": ("overlap", {"batch": 2, "rows": 2}, True),
    "bucketing alone": ("overlap", {}, True),
    "as planned": ("overlap", None, True),
}
KINDS = ("all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "all_to_all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a name that benchmarks.models.trained knows")
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runner = _Runner(*trained(chosen.model))
    world = ProcessWorld(init_device_mesh("cpu", (dist.get_world_size(),)), [(0,)])

    def answer(asked: dict[str, Any]) -> dict[str, float]:
        if asked["what"] == "contention":
            return {"contention": time_contention(world, 0, QUICK, Clock(torch.device("cpu")))}
        return runner.times(autotp.Plan.load(asked["plan"]), asked["ways"], asked["rounds"])

    answered(chosen.folder, answer)
    dist.barrier()
    dist.destroy_process_group()


class _Runner:
    """Runs plans of one model, and reuses the graphs of plans with the same sharding."""

    def __init__(self, model: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self.model, self.args = model, args
        self.known: dict[tuple[str, str], Any] = {}

    def times(self, planned: autotp.Plan, ways: list[str], rounds: int) -> dict[str, float]:
        """Median seconds of each way of running a plan, of computation alone, and of communication alone.

        Also returns the "core seconds" of communication, and the bytes "sent" by a rank in a step.
        """
        cuts = ({} if chunks is None else chunks for _, chunks, _ in WAYS.values())
        needed = {planned.hash, *(replace(planned, chunks=each).hash for each in cuts)}
        # Every module has its own parameters; modules for the plans of all rates may not fit in memory.
        self.known = {key: module for key, module in self.known.items() if key[0] in needed}
        gc.collect()
        steps: dict[str, Callable[[], Any]] = {}
        for way in ways:
            steps[way] = self.step(planned, *WAYS[way])
        plain = replace(planned, chunks={})
        calls, sizes = _recorded(self.world(plain, "none"), self.step(plain, "none", None, merge=False))
        steps["communication alone"] = lambda: [call().wait() for call in calls]
        world, whole = self.world(plain, "overlap"), self.step(plain, "overlap", None, merge=True)
        merged, _ = _recorded(world, whole)
        steps["communication at once"] = lambda: [pending.wait() for pending in [call() for call in merged]]
        steps["compute alone"] = lambda: _muted(world, whole)
        found = medians(steps, rounds, timed_steps=1, first=False)
        found["core seconds"] = _core_seconds(steps["communication at once"])
        found["sent"] = sum(map(_sent, sizes))
        return found

    def step(self, planned: autotp.Plan, schedule: str, chunks: dict[str, int] | None, merge: bool) -> Callable[[], None]:
        """A function that runs a step of a plan in one way; None for ``chunks`` keeps those of the plan."""
        plan = planned if chunks is None else replace(planned, chunks=chunks)
        parallel = self.parallel(plan, schedule)
        if schedule == "none":
            return lambda: step_of(parallel, self.args)
        (program,) = parallel.programs
        known = program.schedules
        scheduled = replace(
            program, schedules=Schedules(known.sharded, known.world, overlap_of(plan, merge=merge), known.agreement)
        )

        def run() -> None:
            parallel._programs.known[program.key] = scheduled
            step_of(parallel, self.args)

        run()  # compute the schedules before any step is timed
        return run

    def world(self, plan: autotp.Plan, schedule: str) -> Any:
        """The world on which the module of a plan calls its collectives."""
        return self.parallel(plan, schedule).get_submodule("autotp_world")

    def parallel(self, plan: autotp.Plan, schedule: str) -> Any:
        """The cached distributed module of a plan, which has run one step."""
        key = plan.hash, schedule
        if key not in self.known:
            self.known[key] = autotp.parallelize(self.model, args=self.args, plan=plan, schedule=schedule)
            step_of(self.known[key], self.args)
        return self.known[key]


class _Mute:
    """Collectives that return immediately, with tensors of the correct shape."""

    def __init__(self, world: ProcessWorld) -> None:
        self.shape = world.mesh_shape

    def all_reduce(self, parts: Any, axes: Any, op: str = "sum") -> Pending:
        return Pending(parts)

    all_reduce_ = all_reduce

    def all_gather(self, parts: Any, axis: int) -> Pending:
        return Pending([parts[0].expand(self.shape[axis], *parts[0].shape).contiguous()])

    def reduce_scatter(self, parts: Any, axis: int) -> Pending:
        return Pending([parts[0][0]])

    def all_to_all(self, parts: Any, axis: int) -> Pending:
        return Pending(parts)


def _muted(world: ProcessWorld, step: Callable[[], None]) -> None:
    """Runs a step with collectives that return immediately."""
    mute = _Mute(world)
    for kind in KINDS:
        setattr(world, kind, getattr(mute, kind))
    step()
    for kind in KINDS:
        delattr(world, kind)


def _core_seconds(step: Callable[[], Any]) -> float:
    """Busy seconds per core of this machine in a step of all ranks, including kernel work outside of processes."""
    dist.barrier()
    begun = _busy()
    for _ in range(TIMED):
        step()
    dist.barrier()
    return (_busy() - begun) / TIMED


def _busy() -> float:
    """Seconds that a core of this machine has been busy since boot, averaged over all cores."""
    aggregate, *cores = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    user, nice, system, _idle, _waiting, hard, soft = map(int, aggregate[1:8])
    return (user + nice + system + hard + soft) / os.sysconf("SC_CLK_TCK") / len(cores)


def _sent(call: tuple[str, int, float]) -> float:
    """Bytes that a rank sends in a ring collective, given as (kind, number of ranks, bytes of each rank's operand)."""
    kind, ways, size = call
    share = {"all_reduce": 2 * (ways - 1) / ways, "all_gather": ways - 1}.get(kind.rstrip("_"), (ways - 1) / ways)
    return share * size


def _recorded(world: Any, step: Callable[[], Any]) -> tuple[list[Callable[[], Pending]], list[tuple[str, int, float]]]:
    """Runs one step; returns its collectives as functions to be repeated, and their kinds, numbers of ranks and bytes."""
    calls: list[Callable[[], Pending]] = []
    sizes: list[tuple[str, int, float]] = []
    inside = False

    def listen(kind: str) -> None:
        original = getattr(world, kind)

        def call(parts: Any, *rest: Any) -> Pending:
            nonlocal inside
            if inside:  # this collective is implemented by another, and only the outer one is recorded
                return original(parts, *rest)
            mine = [part.detach().clone() for part in parts]
            calls.append(lambda: original(mine, *rest))
            axes = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
            ways = math.prod(world.mesh_shape[axis] for axis in axes)
            sizes.append((kind, ways, float(sum(part.nbytes for part in mine))))
            inside = True
            pending = original(parts, *rest)
            inside = False
            return pending

        setattr(world, kind, call)

    for kind in KINDS:
        listen(kind)
    step()
    for kind in KINDS:
        delattr(world, kind)
    return calls, sizes


if __name__ == "__main__":
    main()
