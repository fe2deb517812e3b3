"""``autotp explain`` for a plan: the strategy of an operator, or the use of memory and what recomputation saves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotp.analysis import memory
from autotp.analysis.explain import Explanation, explain_operator
from autotp.analysis.inspection import Reshard
from autotp.analysis.memory import MemoryUse, Position
from autotp.cli.arguments import load_model, working
from autotp.cli.render import bytes_of, place_of, time_of
from autotp.cli.terminal import show
from autotp.plans.plan import Plan
from costmodel import Topology
from passes.capture import Captured, capture

__all__ = ["captured_for", "explain_memory", "explain_node"]

_SHOWN = 20
_COLUMNS, _ROWS = 64, 6  # size of the chart of memory, in characters
_BLOCKS = " ▁▂▃▄▅▆▇█"
_MOMENTS = 12
#: Columns of the table of the backward pass: heading -> the kinds of memory that are summed.
_KINDS = {
    "kept": ("saved for the backward pass",),
    "recomputed": ("recomputed",),
    "gradients": ("gradient of a parameter", "gradient in use"),
}


def captured_for(plan: Plan, model: str) -> Captured:
    """Captures the model of a plan, with the plan's options."""
    module, args, kwargs = load_model(model, plan.devices)
    return capture(module, args, kwargs, plan.precision, plan.outputs, plan.observe)


def explain_node(name: str, plan: Path, model: str, *, count: int, planned: int, as_json: bool) -> None:
    """Prints the cost of an operator of a plan, and its alternative strategies."""
    loaded = Plan.load(plan)
    with working(f"explaining {name}"):
        found = explain_operator(captured_for(loaded, model), loaded, name, count=count, planned=planned)
    show(asdict(found) | {"seconds": found.seconds}, _shown(found, loaded), as_json)


def _shown(found: Explanation, plan: Plan) -> RenderableType:
    factors = ", ".join(f"{name} = {size:,}" for name, size in found.factors.items()) or "none"
    together = f", decided together with {found.copies - 1} identical operators" if found.copies > 1 else ""
    parts: list[RenderableType] = [
        Text.assemble((found.name, "bold"), f" {found.target} {place_of(found.module, found.source)}{together}"),
        f"factors: {factors}",
        Text.assemble("chosen: ", (found.scheme, "bold"), f"  {found.pin}"),
        f"layouts: {'; '.join(found.layouts)}",
        f"{time_of(found.seconds)} a step = compute {time_of(found.compute_seconds)} + collectives inside "
        f"{time_of(found.inner_seconds)} + reshards {time_of(found.reshard_seconds)}",
        f"compute: {found.expression}",
        "  with " + ", ".join(f"{name} = {value:.4g}" for name, value in found.values.items()),
    ]
    if found.bound_ratio is not None:
        parts.append(f"bytes moved over the communication lower bound: {found.bound_ratio:.2f}")
    if found.reshards:
        table = Table("tensor", "from → to", "step", "axes", "bytes", "seconds", "shared by", header_style="bold")
        for step in found.reshards:
            times = f"{step.times} × " if step.times > 1 else ""
            table.add_row(
                ("gradient of " if step.gradient else "") + step.tensor,
                step.change,
                step.kind,
                ",".join(step.axes),
                bytes_of(step.bytes),
                times + time_of(step.seconds),
                str(step.shared),
            )
        parts.append(table)
        moving = next((step for step in found.reshards if step.seconds), None)
        if moving is not None:
            parts.append(Text(f"the formula of each: {_formula(plan, moving)}", style="dim"))
    parts.append(_alternatives(found))
    return Group(*parts)


def _formula(plan: Plan, step: Reshard) -> str:
    """The command that explains the time of a collective."""
    name = plan.topology.name
    machine = name if name in Topology.preset_names() else f"{name}.toml"
    mesh, axes = ",".join(map(str, plan.mesh_shape)), ",".join(step.axes)
    place = f"--topology {machine} --devices {plan.devices} --mesh {mesh} --axes {axes}"
    return f'autotp explain {step.kind} {place} --bytes "{bytes_of(step.bytes)}"'


def _alternatives(found: Explanation) -> RenderableType:
    if not found.alternatives:
        return "it has no other strategy on this mesh"
    title = f"{found.considered} strategies; the step takes {time_of(found.step_seconds)} with the one chosen"
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("strategy and constraint", "the step", "computing", "activations", "parameters", "planned anew"):
        table.add_column(heading)
    chosen = Text.assemble((found.scheme, "bold"), f"\n{found.pin}")
    table.add_row(chosen, time_of(found.step_seconds), *map(time_of, found.step_terms), "")
    for other in found.alternatives:
        whole = "" if other.planned_seconds is None else _more(other.planned_seconds, found.step_seconds)
        alone = _more(other.in_place_seconds, found.step_seconds)
        table.add_row(f"{other.scheme}\n{other.pin}", alone, *map(time_of, other.terms), whole)
    said = "with this operator alone changed: the step, and of it computing, moving activations, and parameters"
    return Group(table, Text(said, style="dim"))


def explain_memory(plan: Path, model: str, *, as_json: bool) -> None:
    """Prints what a device holds in memory at the peak and over a step, and what recomputation saves and costs."""
    loaded = Plan.load(plan)
    with working("walking through a step"):
        found = memory.explain_memory(captured_for(loaded, model), loaded)
    held = [{"kind": kind, "name": name, "bytes": size} for kind, name, size in found.held]
    show(asdict(found) | {"held": held}, _memory(found), as_json)


def _memory(found: MemoryUse) -> RenderableType:
    worst = found.curve[found.worst]
    table = Table("held at the worst moment", "bytes", "share", header_style="bold")
    for kind, size in sorted(worst.kinds.items(), key=lambda entry: -entry[1]):
        table.add_row(kind, bytes_of(size), f"{size / found.peak_bytes:.1%}")
    table.add_row(Text("all", style="bold"), bytes_of(found.peak_bytes), "")
    largest = Table("largest", "what", "bytes", header_style="bold")
    for kind, name, size in found.held[:_SHOWN]:
        largest.add_row(name, kind, bytes_of(size))
    head = f"allowed: {bytes_of(found.allowed)}; worst at the {_pass(worst)} pass of {worst.operator}"
    parts: list[RenderableType] = [head, table, largest, _curve(found), _along(found)]
    if found.recomputed:
        parts.append(_recomputed(found))
    return Group(*parts)


def _pass(position: Position) -> str:
    return "backward" if position.backward else "forward"


def _curve(found: MemoryUse) -> RenderableType:
    """A chart of the bytes held over a step; its height spans their minimum to their maximum."""
    step = -(-len(found.curve) // _COLUMNS)
    columns = [found.curve[begin : begin + step] for begin in range(0, len(found.curve), step)]
    tops = [max(one.bytes for one in column) for column in columns]
    least, most = min(tops), max(tops)
    heights = [round((top - least) / ((most - least) or 1.0) * (8 * _ROWS - 1)) + 1 for top in tops]
    rows = ["".join(_BLOCKS[max(0, min(8, height - 8 * row))] for height in heights) for row in reversed(range(_ROWS))]
    ahead = sum(not column[-1].backward for column in columns)
    labels = ["" for _ in rows]
    labels[0], labels[-1] = bytes_of(most), bytes_of(least)
    lines = [f"{label:>9} {row}" for label, row in zip(labels, rows, strict=True)]
    axis = f"{'':>9} {'forward'.ljust(ahead)[:ahead]}{'backward' if ahead < len(columns) else ''}"
    return Text.assemble("\n", ("held along a step", "bold"), "\n", "\n".join([*lines, axis, ""]))


def _along(found: MemoryUse) -> RenderableType:
    """A table of the bytes held at some positions of the backward pass, by kind."""
    behind = [place for place, one in enumerate(found.curve) if one.backward]
    some = {behind[len(behind) * row // _MOMENTS] for row in range(_MOMENTS)} if behind else set()
    table = Table("at the backward pass of", header_style="bold")
    for heading in ("all", *_KINDS, "other"):
        table.add_column(heading)
    for place in sorted(some | ({found.worst} & set(behind))):
        one = found.curve[place]
        sizes = [sum(one.kinds.get(kind, 0.0) for kind in kinds) for kinds in _KINDS.values()]
        style = "bold" if place == found.worst else None
        table.add_row(one.operator, *map(bytes_of, (one.bytes, *sizes, one.bytes - sum(sizes))), style=style)
    return table


def _recomputed(found: MemoryUse) -> RenderableType:
    table = Table("recomputed", "operator", "saved", "at the worst moment", "work", "step", header_style="bold")
    for one in found.recomputed[:_SHOWN]:
        name = one.name + (f" and {one.copies - 1} like it" if one.copies > 1 else "")
        what = f"{one.target} {place_of(one.module, one.source)}"
        figures = bytes_of(one.saved_bytes), bytes_of(one.peak_bytes), time_of(one.seconds), time_of(one.step_seconds)
        table.add_row(name, what, *figures)
    left = len(found.recomputed) - _SHOWN
    more = f"; {left} more with --json" if left > 0 else ""
    said = f"each compared with the plan that keeps it: bytes held less, and seconds more{more}"
    return Group(table, Text(said, style="dim"))


def _more(seconds: float, step: float) -> str:
    return f"{time_of(seconds)} ({seconds / step - 1:+.2%})" if step else time_of(seconds)
