"""``autotp inspect --graph``: the forward or backward graph that a device runs, with its predicted schedule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text
from torch import nn

from autotp.analysis.graph_rows import GraphRow, filtered, graph_rows
from autotp.analysis.trace import scheduled, trainable
from autotp.cli.render import bytes_of, time_of
from autotp.cli.terminal import make_console
from autotp.errors import AutotpError
from autotp.plans.plan import Plan
from costmodel import format_quantity
from passes.capture import Captured

__all__ = ["GRAPHS", "show_graph"]

GRAPHS = ("forward", "backward")


def show_graph(
    which: str,
    model: nn.Module,
    captured: Captured,
    plan: Plan,
    *,
    op: str | None,
    collectives: bool,
    top: int | None,
    as_json: bool,
) -> None:
    """Prints the scheduled forward or backward graph of a plan's first device.

    Raises:
        AutotpError: ``which`` is not one of `GRAPHS`, or the graph cannot be scheduled.
        PlanMismatchError: the plan is for another model or other inputs.
    """
    if which not in GRAPHS:
        raise AutotpError(f"--graph {which!r}: choose {' or '.join(GRAPHS)}")
    rows = graph_rows(scheduled(captured, plan, trainable(model))[GRAPHS.index(which)], plan.mesh_axes)
    shown = filtered(rows, op, collectives, top)
    if as_json:
        print(json.dumps([asdict(row) for row in shown], indent=1))
    else:
        console = make_console()
        console.print(_table(shown))
        console.print(_summary(rows), soft_wrap=True)


def _table(rows: Sequence[GraphRow]) -> Table:
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in ("begins", "takes", "exposed", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("node", "operator", "shape"):
        table.add_column(name)
    for row in rows:
        moves = Text(f"{row.target}@{','.join(row.axes)}", style="bold") if row.axes else row.target
        shapes = " ".join("×".join(map(str, shape)) or "()" for shape in row.shapes)
        exposed = time_of(row.exposed) if row.exposed else ""
        figures = time_of(row.begin), time_of(row.seconds), exposed
        table.add_row(*figures, bytes_of(row.bytes), row.name, moves, shapes)
    return table


def _summary(rows: Sequence[GraphRow]) -> str:
    computing = sum(row.seconds for row in rows if not row.axes)
    moving = sum(row.seconds for row in rows if row.axes)
    exposed = sum(row.exposed for row in rows)
    parts = [f"{len(rows):,} nodes, {sum(bool(row.axes) for row in rows):,} of them collectives"]
    parts += [f"computing {format_quantity(computing, 'time')}", f"communicating {format_quantity(moving, 'time')}"]
    parts.append(f"of which nothing hides {format_quantity(exposed, 'time')}")
    return ", ".join(parts)
