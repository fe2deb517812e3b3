"""Plans and topologies in a terminal, as rich renderables.

Nothing here computes a cost or decides anything: every figure shown is a field of the plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from autotp.cli.terminal import make_console
from autotp.plans.folded import FoldedOperator, fold_operators, unnumbered
from costmodel import Topology, format_quantity

if TYPE_CHECKING:
    from autotp.plans.plan import Plan

__all__ = [
    "bytes_of",
    "place_of",
    "plan_table",
    "presets_table",
    "short_target",
    "show_plan",
    "time_of",
    "topology_table",
]

#: Share of the operators' time below which a row is left out of the table.
NEGLIGIBLE = 0.002

#: Columns that a terminal needs for the layouts to be shown.
ROOM_FOR_LAYOUTS = 120

#: The most operators that are listed below the table as not in chunks, or as replicated.
_LISTED = 12


def show_plan(plan: Plan, as_json: bool, everything: bool) -> None:
    """Prints a plan as JSON or as a table; ``everything`` shows the cheap operators too."""
    if as_json:
        print(plan.to_json())
    else:
        make_console().print(plan_table(plan, limit=None if everything else 40))


def place_of(module: str, source: str | None) -> str:
    """The place of an operator in the model, as text: its module and its source line."""
    return " ".join(filter(None, (f"in {module}" if module else "", f"({source})" if source else "")))


def plan_table(plan: Plan, limit: int | None = 40) -> RenderableType:
    """A plan as tables: the mesh, a strategy for every operator, the predicted step and memory, operators without a rule.

    Args:
        plan: The plan.
        limit: The most rows to show. The cheapest rows, and all below `NEGLIGIBLE`, are left out and counted. None shows
            all.

    Returns:
        A rich renderable.
    """
    parts: list[RenderableType] = [
        _header(plan),
        _Operators(fold_operators(plan.operators), limit),
        _prediction(plan),
    ]
    if plan.whole:
        parts.append(_whole(plan))
    if plan.replicated:
        parts.append(_replicated(plan.replicated))
    return Group(*parts)


def _header(plan: Plan) -> Table:
    topology = plan.topology
    mesh = " × ".join(f"{axis}={size}" for axis, size in zip(plan.mesh_axes, plan.mesh_shape, strict=True))
    grid = _grid()
    grid.add_row("strategy", _noted(str(plan.strategy), "  (compiled)" if plan.compile else ""))
    grid.add_row("mesh", _noted(mesh or "1 device", "  (outermost first)"))
    grid.add_row("topology", f"{topology.name}: {_levels(topology)}")
    if plan.precision is not None:
        grid.add_row("precision", plan.precision)
    if plan.schedule == "none" and plan.topology.devices > 1:
        grid.add_row("schedule", _noted("none", "  (no communication is hidden)"))
    if plan.chunks:
        of = {"batch": "of the batch", "rows": "of products' rows"}
        said = (f"{n} {of[kind]}, in {plan.chunked.get(kind, 0):,} operators" for kind, n in plan.chunks.items())
        grid.add_row("chunks", _noted("; ".join(said), f" of {len(plan.operators):,}"))
    if plan.accumulate > 1:
        grid.add_row("accumulate", _noted(f"{plan.accumulate} micro-batches a step", "  (gradients are reduced once)"))
    if plan.gathered_once:
        kept = f"{len(plan.gathered_once):,} of {len(plan.layouts):,} parameters"
        grid.add_row("gathered once", _noted(kept, "  (kept for the backward pass)"))
    grid.add_row("plan", _noted(plan.hash, _planning(plan.planning)))
    return grid


def _noted(text: str, note: str) -> Text:
    return Text.assemble(text, (note, "dim"))


def _planning(stats: Mapping[str, Any]) -> str:
    said = []
    if "capture_seconds" in stats:
        said.append(f"captured in {time_of(stats['capture_seconds'])}")
    if "seconds" in stats:
        said.append(f"planned in {time_of(stats['seconds'])}")
    if stats.get("variables"):
        said.append(f"{stats['variables']:,} variables")
    if "meshes" in stats:
        meshes = stats["meshes"]
        number = meshes if isinstance(meshes, int) else len(meshes)
        said.append(f"{number} mesh{'es' if number != 1 else ''}")
    return f"  ({', '.join(said)})" if said else ""


@dataclass(frozen=True, slots=True)
class _Operators:
    """The table of operators; omits layouts and bounds if there is no room for them."""

    rows: Sequence[FoldedOperator]
    limit: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows, hidden = _dearest(self.rows, self.limit)
        layouts = options.max_width >= ROOM_FOR_LAYOUTS
        table = Table(header_style="bold", row_styles=("", "on grey7"))
        table.add_column("module", overflow="fold")
        table.add_column("operator", overflow="fold")
        table.add_column("×", justify="right", no_wrap=True)
        table.add_column("scheme", overflow="fold")
        table.add_column("factor → axes", overflow="fold")
        if layouts:
            table.add_column("layouts (operands, results)", overflow="fold")
        table.add_column("received", justify="right", no_wrap=True)
        if layouts:
            table.add_column("/ bound", justify="right", no_wrap=True)
        table.add_column("time a step", justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*_cells(row, layouts))
        yield table
        if hidden:
            time = time_of(sum(row.seconds for row in hidden))
            yield Text(
                f"and {len(hidden)} cheaper row{'' if len(hidden) == 1 else 's'}, {time} together",
                style="dim",
            )


def _dearest(rows: Sequence[FoldedOperator], limit: int | None) -> tuple[list[FoldedOperator], list[FoldedOperator]]:
    if limit is None:
        return list(rows), []
    least = NEGLIGIBLE * sum(row.seconds for row in rows)
    order = sorted(range(len(rows)), key=lambda i: (-rows[i].seconds, i))
    kept = {i for i in order[:limit] if rows[i].seconds >= least}
    return [row for i, row in enumerate(rows) if i in kept], [row for i, row in enumerate(rows) if i not in kept]


def _cells(row: FoldedOperator, layouts: bool) -> list[str | Text]:
    operator = row.first
    nothing = Text("–", style="dim")
    cells: list[str | Text] = [
        row.module or nothing,
        short_target(operator.target),
        str(len(row.operators)),
        Text("no rule", style="yellow") if operator.replicated else operator.scheme,
        Text.assemble(
            _strategy(operator.strategy) or nothing,
            f", {operator.panels} panels" if operator.panels > 1 else "",
            ", recomputed" if operator.recomputed else "",
        ),
    ]
    if layouts:
        cells.append(", ".join(operator.layouts))
    moved = bytes_of(row.bytes_moved) if row.bytes_moved else nothing
    ratio = f"{row.bytes_moved / row.bound_bytes:.2f}" if row.bound_bytes else nothing
    return [*cells, moved, *([ratio] if layouts else []), time_of(row.seconds)]


def _prediction(plan: Plan) -> Table:
    predicted = plan.predicted
    grid = _grid()
    grid.add_row(
        "predicted step",
        Text.assemble(
            (time_of(predicted.step_seconds), "bold"),
            f" = compute {time_of(predicted.compute_seconds)} + ",
            f"exposed communication {time_of(predicted.exposed_seconds)} ",
            (f"(of {time_of(predicted.communication_seconds)} in all)", "dim"),
            f" + waiting for the host {time_of(predicted.host_seconds)}" if predicted.host_seconds else "",
        ),
    )
    # The bound is what the user allowed, and may be above or below what the device has.
    allowed = plan.memory_bound if math.isfinite(plan.memory_bound) else plan.topology.device.memory
    used = predicted.memory_bytes / allowed if allowed else math.inf
    colour = "red" if used > 1 else "yellow" if used > 0.9 else "green"
    grid.add_row(
        "memory a device",
        Text.assemble(f"{bytes_of(predicted.memory_bytes)} of {bytes_of(allowed)} ", (f"({used:.1%})", colour)),
    )
    if plan.bound_ratio is not None:
        least = sum(operator.bound_bytes for operator in plan.operators)
        everything = sum(operator.bytes_moved for operator in plan.operators)
        grid.add_row(
            "communication",
            _noted(
                f"products with weights move {plan.bound_ratio:.2f} × their lower bound of {bytes_of(least)}, "
                f"the whole model {everything / least:.2f} ×",
                " (below 1: tensors rest in copies)",
            ),
        )
    made = plan.planning.get("repriced")
    if made is not None:
        where = f": the plan was made for {made['topology']}"
        step = f", where its step takes {time_of(made['step_seconds'])}"
        said = Text.assemble(("not sought", "yellow"), where, (step, "dim"))
    elif plan.optimal:
        said = Text.assemble(("proven optimal", "green"), (" (for this cost model and search space)", "dim"))
    else:
        gap = f": within {plan.gap:.2%} of the bound" if math.isfinite(plan.gap) else ": no bound was found"
        said = Text.assemble(("not proven", "yellow"), gap)
    grid.add_row("optimality", said)
    return grid


def _whole(plan: Plan) -> Text:
    """The operators that are not divided into chunks, and why."""
    by_name = {operator.name: operator for operator in plan.operators}
    counts = Counter(
        (unnumbered(by_name[name].module), short_target(by_name[name].target), why) for name, why in plan.whole.items()
    )
    lines = [
        f"  {f'{module}: ' if module else ''}{target}{f' × {count}' if count > 1 else ''}  ({why})"
        for (module, target, why), count in counts.items()
    ]
    more = [f"  and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return Text("\n".join(["not in chunks:", *lines[:_LISTED], *more]), style="yellow")


def _replicated(names: Sequence[str]) -> Text:
    shown = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    return Text(f"replicated, having no rule ({len(names)}): {shown}", style="yellow")


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def short_target(target: object) -> str:
    """An operator's name without its library and overload."""
    text = str(target).removeprefix("torch.ops.").removesuffix(".default")
    return text.split(".")[1] if text.startswith("aten.") else text.rpartition(".")[2]


def _strategy(strategy: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{factor}→{'·'.join(axes)}" for factor, axes in strategy.items() if axes)


def _levels(topology: Topology) -> str:
    sizes = " × ".join(f"{level.size} {level.name}" for level in reversed(topology.levels))
    device = f"{topology.device.name}, {bytes_of(topology.device.memory)}"
    return f"{topology.devices} devices ({sizes}) of {device}"


def time_of(seconds: float) -> str:
    """Seconds with a unit."""
    return format_quantity(seconds, "time")


def bytes_of(count: float) -> str:
    """Bytes with a unit."""
    return format_quantity(count, "memory")


def _bandwidth(rate: float) -> str:
    return format_quantity(rate, "bandwidth")


def topology_table(topology: Topology) -> RenderableType:
    """One topology as tables: the rates of its device, and its levels, the innermost (fastest) first."""
    device = topology.device
    grid = _grid()
    grid.add_row("topology", topology.name)
    grid.add_row("devices", str(topology.devices))
    grid.add_row("device", device.name)
    for dtype, flops in device.flops.items():
        grid.add_row(f"  {dtype}", format_quantity(flops, "rate"))
    grid.add_row(
        "  memory",
        f"{bytes_of(device.memory)} at {_bandwidth(device.memory_bandwidth)}",
    )
    grid.add_row("  launch", f"{time_of(device.launch)} a kernel")

    table = Table(header_style="bold")
    table.add_column("level")
    for title in ("size", "bandwidth", "latency"):
        table.add_column(title, justify="right")
    for level in topology.levels:
        table.add_row(
            level.name,
            str(level.size),
            _bandwidth(level.bandwidth),
            time_of(level.latency),
        )
    return Group(grid, table)


def presets_table(topologies: Iterable[Topology]) -> Table:
    """A table with a row for each of several topologies."""
    table = Table(header_style="bold")
    table.add_column("preset", no_wrap=True)
    table.add_column("devices", justify="right")
    table.add_column("device")
    table.add_column("memory", justify="right")
    table.add_column("levels, innermost first")
    for topology in topologies:
        levels = ", ".join(f"{level.size} {level.name} at {_bandwidth(level.bandwidth)}" for level in topology.levels)
        device = topology.device
        table.add_row(
            topology.name,
            str(topology.devices),
            device.name,
            bytes_of(device.memory),
            levels,
        )
    return table
