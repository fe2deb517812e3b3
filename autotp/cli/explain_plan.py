"""``autotp explain`` for a plan: one operator's strategy, or what takes the memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from autotp.analysis.explain import Explanation, explain_operator, priced_plan
from autotp.analysis.inspection import Reshard
from autotp.cli.arguments import load_model, working
from autotp.cli.render import bytes_of, place_of, show, time_of
from autotp.costs.footprint import Footprint
from autotp.plans.plan import Plan
from costmodel import Topology
from passes.capture import Captured, capture

__all__ = ["captured_for", "explain_memory", "explain_node"]

_SHOWN = 20


def captured_for(plan: Plan, model: str) -> Captured:
    """The plan's model, captured again."""
    module, args, kwargs = load_model(model, plan.devices)
    return capture(module, tuple(args), kwargs, plan.precision)


def explain_node(name: str, plan: Path, model: str, *, count: int, planned: int, as_json: bool) -> None:
    """Prints the cost of an operator of a plan, and the alternatives."""
    loaded = Plan.load(plan)
    with working(f"explaining {name}"):
        found = explain_operator(captured_for(loaded, model), loaded, name, count=count, planned=planned)
    show(asdict(found) | {"seconds": found.seconds}, _shown(found, loaded), as_json)


def _shown(found: Explanation, plan: Plan) -> RenderableType:
    factors = ", ".join(f"{name} = {size:,}" for name, size in found.factors.items()) or "none"
    head = [
        f"[bold]{escape(found.name)}[/] {escape(found.target)} {place_of(found.module, found.source)}"
        + (f", decided together with {found.copies - 1} identical operators" if found.copies > 1 else ""),
        f"factors: {factors}",
        f"chosen: [bold]{escape(found.scheme)}[/]  {escape(found.pin)}",
        f"layouts: {escape('; '.join(found.layouts))}",
        f"{time_of(found.seconds)} a step = compute {time_of(found.compute_seconds)} + collectives inside "
        f"{time_of(found.inner_seconds)} + reshards {time_of(found.reshard_seconds)}",
        f"compute: {escape(found.expression)}",
        "  with " + escape(", ".join(f"{name} = {value:.4g}" for name, value in found.values.items())),
    ]
    if found.bound_ratio is not None:
        head.append(f"bytes moved over the communication lower bound: {found.bound_ratio:.2f}")
    parts: list[RenderableType] = ["\n".join(head)]
    if found.reshards:
        table = Table("tensor", "from → to", "step", "axes", "bytes", "seconds", "shared by", header_style="bold")
        for step in found.reshards:
            times = f"{step.times} × " if step.times > 1 else ""
            table.add_row(
                escape(("gradient of " if step.gradient else "") + step.tensor),
                escape(step.change),
                step.kind,
                ",".join(step.axes),
                bytes_of(step.bytes),
                times + time_of(step.seconds),
                str(step.shared),
            )
        parts.append(table)
        moving = next((step for step in found.reshards if step.seconds), None)
        if moving is not None:
            parts.append(f"[dim]the formula of each: {escape(_formula(plan, moving))}[/]")
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
    for heading in ("strategy, and what asks for it", "the step", "computing", "activations", "parameters", "planned anew"):
        table.add_column(heading)
    chosen = f"[bold]{escape(found.scheme)}[/]\n{escape(found.pin)}"
    table.add_row(chosen, time_of(found.step_seconds), *map(time_of, found.step_terms), "")
    for other in found.alternatives:
        whole = "" if other.planned_seconds is None else _more(other.planned_seconds, found.step_seconds)
        alone = _more(other.in_place_seconds, found.step_seconds)
        table.add_row(f"{escape(other.scheme)}\n{escape(other.pin)}", alone, *map(time_of, other.terms), whole)
    said = "with this operator alone changed: the step, and of it computing, moving activations, and parameters"
    return Group(table, f"[dim]{said}[/]")


def explain_memory(plan: Path, model: str, *, as_json: bool) -> None:
    """Prints the contents of a device's memory at the peak of a step."""
    loaded = Plan.load(plan)
    with working("walking through a step"):
        entries = Footprint(priced_plan(captured_for(loaded, model), loaded)).explain()
    said: list[dict[str, Any]] = [{"kind": kind, "name": name, "bytes": size} for kind, name, size in entries]
    kinds: dict[str, float] = defaultdict(float)
    for kind, _, size in entries:
        kinds[kind] += size
    total = sum(kinds.values())
    table = Table("held at the worst moment", "bytes", "share", header_style="bold")
    for kind, size in sorted(kinds.items(), key=lambda entry: -entry[1]):
        table.add_row(kind, bytes_of(size), f"{size / total:.1%}")
    table.add_row("[bold]all[/]", bytes_of(total), "")
    largest = Table("largest", "what", "bytes", header_style="bold")
    for kind, name, size in entries[:_SHOWN]:
        largest.add_row(escape(name), kind, bytes_of(size))
    shown = Group(f"allowed: {bytes_of(loaded.memory_bound)}", table, largest)
    show({"peak_bytes": sum(size for *_, size in entries), "held": said}, shown, as_json)


def _more(seconds: float, step: float) -> str:
    return f"{time_of(seconds)} ({seconds / step - 1:+.2%})" if step else time_of(seconds)
