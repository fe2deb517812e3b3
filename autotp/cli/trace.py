"""``autotp trace``: a plan's schedule, predicted and, under torchrun, measured, as one file for Perfetto."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from autotp.analysis.trace import events_of, predicted, save_trace
from autotp.cli.arguments import load_model, output_option, working
from autotp.cli.terminal import make_console
from autotp.errors import AutotpError
from autotp.plans.plan import Plan
from autotp.runtime.agreement import join_job
from autotp.runtime.parallelize import parallelize
from autotp.runtime.recording import Event
from costmodel.text.numbers import MOST_DEVICES, whole_of
from passes.torch_internals import tree_leaves

__all__ = ["trace_command"]

_WARM_UP = 3


def trace_command(
    model: Annotated[str, typer.Option(help="FILE.py:FACTORY or package.module:factory, as for `plan`.")],
    plan: Annotated[Path, typer.Option(help="The plan, as `autotp plan --save` writes it.")],
    output: Annotated[Path, output_option("The trace to write, such as trace.json.")],
) -> None:
    """Write the schedule of a plan as a trace, for ui.perfetto.dev or chrome://tracing.

    Without torchrun, the schedule is only predicted. Under torchrun, with as many processes as the plan has devices, a step
    is measured too, and every rank is a process of the trace, beside the prediction. Both schedules overlap communication
    with computation, even if the plan was made with --schedule none.
    """
    wanted = Plan.load(plan)
    world = whole_of(os.environ.get("WORLD_SIZE", "1"), "environment: WORLD_SIZE", most=MOST_DEVICES)
    measured = _measure(model, wanted) if world > 1 else []
    if not dist.is_initialized() or dist.get_rank() == 0:
        module, args, kwargs = load_model(model, wanted.devices)
        with working("predicting the schedule"):
            events = events_of("predicted", 0, predicted(module, wanted, args, kwargs), 0.0)
        origin = min((e["begin"] for mine in measured for e in mine), default=0.0)
        for rank, mine in enumerate(measured):
            events += events_of(f"rank {rank}", rank + 1, mine, origin)
        try:
            save_trace(output, events)
        except OSError as error:
            raise AutotpError(f"--output {output}: cannot be written ({error.strerror})") from error
        ranks = len(measured) or "no"
        make_console().print(
            f"written to {output}: {ranks} measured ranks; open it at https://ui.perfetto.dev", soft_wrap=True
        )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _measure(model: str, plan: Plan) -> list[list[Event]]:
    """Runs a step after some warm-up, and returns the events of every rank."""
    if torch.cuda.is_available():
        raise AutotpError("trace measures steps on CPUs only; on GPUs, use torch.profiler, which records their streams")
    join_job("trace measures a step on the processes of a job: start it by torchrun", "gloo")
    module, args, kwargs = load_model(model, plan.devices)
    parallel: Any = parallelize(module, args=args, kwargs=kwargs, plan=plan, schedule="overlap")
    with torch.set_grad_enabled(plan.mode == "train"):
        for _ in range(_WARM_UP):
            _step(parallel, args, kwargs)
        with parallel.recording() as events:
            dist.barrier()
            _step(parallel, args, kwargs)
    found: list[Any] = [None] * dist.get_world_size()
    dist.barrier()
    dist.all_gather_object(found, [dict(event) for event in events])
    return [[Event(event) for event in mine] for mine in found]


def _step(parallel: Any, args: Any, kwargs: Any) -> None:
    output = parallel(*args, **(kwargs or {}))
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
    for parameter in parallel.parameters():
        parameter.grad = None
