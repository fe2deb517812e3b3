"""Times steps of several plans of one model, under torchrun: -m benchmarks.steps MODEL PLANS_DIR OUT.json [--rounds N]

A step is a forward and a backward pass. Plans take turns, so that other load on the machine affects all of them equally. A
step is timed from its beginning on the first rank to its end on the last one; the time of a plan is the median of all its
steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import autotp
from benchmarks.models import trained
from costmodel.text.files import write_atomically

#: The numbers of untimed and then of timed steps in each turn of a plan. After steps of another plan, a process has to
#: request its memory from the system again, page by page, which happens only once in training.
WARM_UP, TIMED = 1, 2


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser for the arguments of all programs that time plans of one model."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("model", help="a name that benchmarks.models.trained knows")
    parser.add_argument("plans", type=Path, help="a folder of plans, NAME.json each")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--schedule", default="none")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, args = trained(chosen.model)
    steps: dict[str, Callable[[], None]] = {}
    for file in sorted(chosen.plans.glob("*.json")):
        parallel = autotp.parallelize(model, args=args, plan=autotp.Plan.load(file), schedule=chosen.schedule)
        steps[file.stem] = lambda parallel=parallel: step_of(parallel, args)  # type: ignore[misc]
    finish(medians(steps, chosen.rounds), chosen.out)


def medians(
    steps: Mapping[str, Callable[[], Any]],
    rounds: int,
    timed_steps: int = TIMED,
    first: bool = True,
    clock: Callable[[Callable[[], Any]], float] | None = None,
) -> dict[str, float]:
    """Median seconds of each step. Steps take turns: in every round, each has warm-up steps and then timed steps.

    Each round has another random order, the same on all ranks. Otherwise, the state that a step leaves behind, such as
    memory that is held or was returned, would always affect the same step after it.

    Args:
        steps: Name -> a function that runs the step.
        rounds: The number of rounds.
        timed_steps: The number of timed steps of each turn.
        first: Whether to run an untimed round first.
        clock: Runs a step and returns its seconds; `timed` by default.
    """
    clock = clock or timed
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(0 if first else 1, 1 + rounds):
        for name in random.Random(number).sample(list(steps), len(steps)):
            for _ in range(WARM_UP):
                clock(steps[name])
            for _ in range(timed_steps if number else 0):
                times[name].append(clock(steps[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def finish(found: Mapping[str, float] | float, out: Path) -> NoReturn:
    """Writes the results on rank 0, and ends the job.

    The process exits without the interpreter's shutdown, in which threads of process groups that DDP and FSDP2 still hold
    may abort it (pytorch issue 190489).
    """
    if dist.get_rank() == 0:
        write_atomically(out, json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def step_of(parallel: torch.nn.Module, args: tuple) -> None:
    """Runs a forward and a backward pass, and drops the gradients."""
    parallel(*args).backward()
    for parameter in parallel.parameters():
        parameter.grad = None


def timed(step: Callable[[], Any]) -> float:
    """Runs a step; returns the seconds from its start on the first rank to its end on the last one."""
    dist.barrier()
    begin = time.monotonic()
    step()
    span = [None] * dist.get_world_size()
    dist.all_gather_object(span, (begin, time.monotonic()))
    return max(end for _, end in span) - min(start for start, _ in span)  # type: ignore[misc]


if __name__ == "__main__":
    main()
