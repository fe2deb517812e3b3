"""``--html``: a plan's report, for commands that have loaded the plan and its model."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.progress import Progress
from torch import nn

from autotp.analysis.report import content, save_report
from autotp.analysis.trace import predicted_events, scheduled, trainable
from autotp.cli.arguments import working
from autotp.cli.terminal import Terminal, make_console
from autotp.errors import AutotpError
from autotp.plans.plan import Plan
from passes.capture import Captured

__all__ = ["write_report"]

#: The most operators for which the schedule is shown by default: tracing takes about a millisecond per operator.
SCHEDULED = 20_000


def write_report(path: Path, model: nn.Module, captured: Captured, plan: Plan, timeline: bool | None, name: str) -> None:
    """Writes a plan's report.

    Args:
        path: path of the HTML file, which is written completely or not at all.
        model: the model that was planned.
        captured: the model's graph.
        plan: the plan.
        timeline: whether to show the schedule; None: if the plan is for ``overlap``, and the model not very large.
        name: the name of the model, for the title.

    Raises:
        AutotpError: the file cannot be written, or ``timeline`` is true and the graph cannot be scheduled.
        PlanMismatchError: the plan is for another model or other inputs.
    """
    wanted = timeline
    if wanted is None:
        wanted = plan.schedule == "overlap" and len(plan.operators) <= SCHEDULED
    events = []
    if wanted:
        try:
            with working("scheduling"):
                events = predicted_events(scheduled(captured, plan, trainable(model)))
        except AutotpError as error:
            if timeline:
                raise
            print(f"no timeline: {error}", file=sys.stderr)
    with Progress(console=Terminal(stderr=True), transient=True) as progress:
        task = progress.add_task("explaining operators")

        def explained(done: int, of: int) -> None:
            progress.update(task, completed=done, total=of)

        title = f"{name} on {plan.devices} devices"
        contents = content(captured, plan, events=events, title=title, progress=explained)
    save_report(path, contents)
    make_console().print(f"written to {path}", soft_wrap=True)
