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

#: Steps of a plan at each turn before any is timed, and then timed. After another plan's steps a process has to ask for its
#: memory anew, page by page, which in training happens once.
WARM_UP, TIMED = 1, 2


def arguments(description: str) -> argparse.ArgumentParser:
    """What programs take that time plans of one model."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("model", help="a name that benchmarks.models.trained knows")
    parser.add_argument("plans", type=Path, help="a folder of plans, NAME.json each")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def main() -> None:
    parser = arguments(__doc__)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, args = trained(chosen.model)
    steps: dict[str, Callable[[], None]] = {}
    for file in sorted(chosen.plans.glob("*.json")):
        parallel = autotp.parallelize(model, args=args, plan=autotp.Plan.load(file), schedule="none")
        steps[file.stem] = lambda parallel=parallel: step_of(parallel, args)  # type: ignore[misc]
    finish(medians(steps, chosen.rounds), chosen.out)


def medians(
    steps: Mapping[str, Callable[[], Any]],
    rounds: int,
    timed_steps: int = TIMED,
    first: bool = True,
    clock: Callable[[Callable[[], Any]], float] | None = None,
) -> dict[str, float]:
    """Seconds of each step, which take turns of so many timed steps; ``first``, before those, one of none.

    ``clock`` runs a step and gives its seconds; left out, those from the first rank's beginning to the last one's end.

    Turns are in another order every time, the same on all ranks: what a step leaves behind, as memory that has been given
    back or is held, would else always fall on the same one after it.
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
    """Writes what was found, on rank 0, and ends the job.

    The process ends at once: threads of groups that DDP and FSDP2 still hold may abort an interpreter that ends by and by
    (pytorch issue 190489).
    """
    if dist.get_rank() == 0:
        write_atomically(out, json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def step_of(parallel: torch.nn.Module, args: tuple) -> None:
    """A forward and a backward pass."""
    parallel(*args).backward()
    for parameter in parallel.parameters():
        parameter.grad = None


def timed(step: Callable[[], Any]) -> float:
    """Seconds of a step, from the first rank to begin to the last to end."""
    dist.barrier()
    begin = time.monotonic()
    step()
    span = [None] * dist.get_world_size()
    dist.all_gather_object(span, (begin, time.monotonic()))
    return max(end for _, end in span) - min(start for start, _ in span)  # type: ignore[misc]


if __name__ == "__main__":
    main()
