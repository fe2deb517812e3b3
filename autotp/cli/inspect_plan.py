"""``autotp inspect``, ``diff`` and ``reprice``: shows a plan, compares two, and prices a plan on another machine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotp.analysis.difference import Difference, difference
from autotp.analysis.drawing import draw
from autotp.analysis.explain import priced_plan
from autotp.analysis.inspection import Filters, Reshard, Row, inspect_plan
from autotp.analysis.reprice import repriced
from autotp.cli.arguments import (
    AsJson,
    Everything,
    Html,
    PlannedModel,
    SavedPlan,
    Timeline,
    check_timeline,
    load_model,
    output_option,
    save_plan,
    working,
)
from autotp.cli.explain_plan import captured_for
from autotp.cli.inspect_graph import show_graph
from autotp.cli.render import bytes_of, short_target, show_plan, time_of
from autotp.cli.report import write_report
from autotp.cli.terminal import make_console, show
from autotp.errors import AutotpError
from autotp.plans.folded import unnumbered
from autotp.plans.plan import Plan
from autotp.runtime.rewrite import apply
from costmodel import Topology, format_quantity
from passes.capture import capture

__all__ = ["diff_command", "inspect_command", "reprice_command"]

_SHOWN = 30


def inspect_command(
    plan: SavedPlan,
    model: PlannedModel,
    op: Annotated[str | None, typer.Option(help="Only operators of this name or kind, such as addmm or linear_3.")] = None,
    module: Annotated[str | None, typer.Option(help="Only those in this module, such as h.0.mlp or h.*.attn.")] = None,
    collectives: Annotated[bool, typer.Option("--collectives", help="Only those that communicate.")] = False,
    unsharded: Annotated[bool, typer.Option("--unsharded", help="Only operators that are not sharded.")] = False,
    top: Annotated[int | None, typer.Option(min=0, help="Only this many, the most expensive first.")] = None,
    code: Annotated[bool, typer.Option("--code", help="Print the Python code of the distributed graph.")] = False,
    dot: Annotated[
        Path | None,
        output_option("Draw the graph: FILE.dot, or with graphviz installed FILE.svg, .pdf or .png."),
    ] = None,
    graph: Annotated[
        str | None, typer.Option(help="Show instead the graph that a device runs, in scheduled order: forward or backward.")
    ] = None,
    html: Html = None,
    timeline: Timeline = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan by module: the layouts, the collectives with their cost, the work and the memory of every operator."""
    forms = {"--code": code, "--dot": dot, "--graph": graph, "--html": html, "--json": as_json and graph is None}
    if len(asked := [option for option, given in forms.items() if given not in (None, False)]) > 1:
        raise AutotpError(f"{' and '.join(asked)} show a plan in different forms: give one of them")
    selecting = {"--op": op, "--module": module, "--collectives": collectives, "--unsharded": unsharded, "--top": top}
    of_all = {"--code", "--html"}.intersection(asked)
    for option, given in selecting.items():
        if given not in (None, False) and (of_all or (graph is not None and option in ("--module", "--unsharded"))):
            raise AutotpError(f"{option} selects nothing of what {asked[0]} shows: leave it out")
    check_timeline(timeline, html)
    loaded = Plan.load(plan)
    with working("reading the plan"):
        module_, args, kwargs = load_model(model, loaded.devices)
        captured = capture(module_, args, kwargs, loaded.precision, loaded.outputs, loaded.observe)
    if html is not None:
        write_report(html, module_, captured, loaded, timeline, model)
        return
    if graph is not None:
        show_graph(graph, module_, captured, loaded, op=op, collectives=collectives, top=top, as_json=as_json)
        return
    if code:
        with working("reading the plan"):
            text = apply(captured, loaded).graph_module.code
        print(text)
        return
    with working("reading the plan"):
        priced = priced_plan(captured, loaded)
        rows = Filters(op, module, collectives, unsharded, top)(inspect_plan(loaded, priced))
    if dot is not None:
        draw(dot, rows, priced.model)
        make_console().print(f"written to {dot}", soft_wrap=True)
    else:
        show([asdict(row) for row in rows], _rows_shown(rows), as_json, wraps=False)


def _rows_shown(rows: Sequence[Row]) -> RenderableType:
    """The operators by module, each with its layouts and costs, followed by its reshards."""
    lines: list[RenderableType] = []
    module = None
    for row in rows:
        if row.module != module:
            module = row.module
            lines.append(Text(module or "(the model itself)", style="bold cyan"))
        times = f" × {row.count}" if row.count > 1 else ""
        scheme = row.scheme, "yellow" if row.replicated else "bold"
        place = f"  {row.source}" if row.source else "", "dim"
        lines.append(Text.assemble(f"  {row.name}{times}  ", (row.target, "dim"), "  ", scheme, place))
        costs = [
            f"compute {format_quantity(row.compute_seconds, 'time')}",
            f"communication {format_quantity(row.communication_seconds, 'time')}",
            f"{row.flop:.3g} FLOP",
            f"results {format_quantity(row.bytes, 'memory')}",
        ]
        lines.append(f"      {', '.join(row.operands)} → {', '.join(row.results)}")
        lines.append(f"      {', '.join(costs)}")
        lines += [f"      {_collective(step)}" for step in row.reshards]
        lines += [Text(f"      not in chunks of the {row.whole}", style="yellow")] if row.whole else []
    return Group(*lines, f"{sum(row.count for row in rows):,} operators, {len(rows):,} of them different")


def _collective(step: Reshard) -> str:
    way = "gradient of " if step.gradient else ""
    if not step.seconds:
        return f"{way}{step.tensor}: {step.kind}@{','.join(step.axes)}"
    times = f"{step.times} × " if step.times > 1 else ""
    cost = f"{times}{format_quantity(step.bytes, 'memory')}, {format_quantity(step.seconds, 'time')}"
    when = "beside computing" if step.hidden else "waited for"
    return f"{way}{step.tensor}: {step.kind}@{','.join(step.axes)} {cost}, {when}"


def diff_command(
    first: SavedPlan,
    second: Annotated[Path, typer.Argument(help="Another plan of the same model.")],
    as_json: AsJson = False,
) -> None:
    """Compare two plans of one model, operator by operator. Exits with 1 if they differ."""
    found = difference(Plan.load(first), Plan.load(second))
    show(asdict(found), _difference_table(found), as_json)
    if found.settings or found.parameters or found.operators:
        raise typer.Exit(1)


def reprice_command(
    plan: SavedPlan,
    model: PlannedModel,
    topology: Annotated[
        str, typer.Option(help="The other machine: a preset's name or a TOML file; resized to the plan's devices.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    save: Annotated[Path | None, output_option("Also write the plan with these prices to this JSON file.")] = None,
    everything: Everything = False,
) -> None:
    """Price a plan on another machine, with all of its decisions unchanged.

    The result is an ordinary plan: inspect, explain and diff work as for a plan that was made for that machine.
    """
    loaded = Plan.load(plan)
    machine = Topology.load(topology).resized(loaded.devices)
    with working("pricing the plan"):
        found = repriced(captured_for(loaded, model), loaded, machine)
    save_plan(found, save)
    show_plan(found, as_json, everything)


def _difference_table(found: Difference) -> RenderableType:
    parts: list[RenderableType] = []
    if not (found.settings or found.parameters or found.operators):
        parts.append(Text("the plans are the same", style="green"))
    figures = Table("", "first", "second", "change", header_style="bold", box=None, padding=(0, 2, 0, 0))
    for name, (one, two) in found.settings.items():
        figures.add_row(name, one, two, "")
    for name, (before, after) in found.predicted.items():
        show = bytes_of if name.endswith("bytes") else time_of
        more = f"{after / before - 1:+.1%}" if before and not math.isclose(before, after) else ""
        figures.add_row(name.replace("_", " "), show(before), show(after), more)
    parts.append(figures)
    if found.operators:
        table = Table(header_style="bold")
        for title in ("operator", "×", "first", "second"):
            table.add_column(title, overflow="fold")
        for title in ("seconds", "received"):
            table.add_column(title, no_wrap=True)
        for change in found.operators[:_SHOWN]:
            ways = zip(change.schemes, change.layouts, strict=True)
            table.add_row(
                Text.assemble(short_target(change.target), (f"\n{change.module}" if change.module else "", "dim")),
                str(change.count),
                *(f"{scheme}:\n{', '.join(layouts)}" for scheme, layouts in ways),
                f"{format_quantity(change.seconds[0], 'time')} → {format_quantity(change.seconds[1], 'time')}",
                f"{format_quantity(change.bytes[0], 'memory')} → {format_quantity(change.bytes[1], 'memory')}",
            )
        parts.append(table)
        left = len(found.operators) - _SHOWN
        if left > 0:
            parts.append(f"… and {left} more that differ (all of them with --json)")
    if found.parameters:
        table = Table("parameter", "×", "rests in the first", "in the second", header_style="bold")
        counts = Counter((unnumbered(name), *both) for name, both in found.parameters.items())
        for (name, one, two), count in list(counts.items())[:_SHOWN]:
            table.add_row(name, str(count), one, two)
        parts.append(table)
        left = sum(list(counts.values())[_SHOWN:])
        if left > 0:
            parts.append(f"… and {left} more parameters")
    return Group(*parts)
