"""Times eager and compiled plans under torchrun: -m benchmarks.compiled_steps MODEL PLANS_DIR OUT.json

A step is a forward and a backward pass over the same global batch; the ways take turns. With one process, the plain model
takes turns, too, in eager mode and under ``torch.compile``. The time of a step is the CPU time of the first rank, which
other load on the machine does not increase.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autotp
from benchmarks.models import trained
from benchmarks.steps import arguments, finish, medians, step_of


def main() -> None:
    chosen = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, args = trained(chosen.model)
    ways: dict[str, nn.Module] = {}
    for file in sorted(chosen.plans.glob("*.json")):
        plan = autotp.Plan.load(file)
        ways[file.stem] = autotp.parallelize(model, args=args, plan=plan, schedule="overlap", compile=plan.compile)
    if dist.get_world_size() == 1:
        plain: Any = torch.compile(copy.deepcopy(model))
        ways |= {"eager": model, "torch.compile": plain}
    steps = {name: functools.partial(step_of, each, args) for name, each in ways.items()}
    finish(medians(steps, chosen.rounds, clock=_computing), chosen.out)


def _computing(step: Callable[[], Any]) -> float:
    """Runs a step; returns the CPU seconds of this process."""
    dist.barrier()
    begin = time.process_time()
    step()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
