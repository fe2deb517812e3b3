"""``autotp explain``: explains an operator or the memory of a plan, or the time of a collective with every algorithm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from autotp.analysis.collective import explain_collective
from autotp.cli.arguments import AsJson, mesh_of
from autotp.cli.explain_plan import explain_memory, explain_node
from autotp.cli.terminal import show
from autotp.errors import AutotpError
from autotp.plans.plan import AXIS_NAMES
from costmodel import COLLECTIVES, Topology, format_quantity, parse_quantity

__all__ = ["explain_command"]

_OF_PLANS = {"model", "memory", "alternatives", "planned"}
_OF_COLLECTIVES = {"topology", "size", "devices", "mesh", "axes"}
_UNITS = {"V": "memory", "beta": "bandwidth"}


def explain_command(
    context: typer.Context,
    what: Annotated[
        str | None, typer.Argument(help=f"An operator of a plan, or a collective: {', '.join(COLLECTIVES)}.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan that `autotp plan --save` wrote.")] = None,
    model: Annotated[str | None, typer.Option(help="FILE.py:FACTORY or package.module:factory, as it was planned.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Explain what takes the plan's memory.")] = False,
    alternatives: Annotated[int, typer.Option(min=0, help="How many other strategies to show.")] = 5,
    planned: Annotated[int, typer.Option(min=0, help="For how many of them to replan everything else.")] = 1,
    topology: Annotated[str | None, typer.Option(help="Of a collective: a preset's name or a TOML file.")] = None,
    size: Annotated[str | None, typer.Option("--bytes", help='Of a collective\'s whole tensor, such as "32 MB".')] = None,
    devices: Annotated[int | None, typer.Option(help="How many devices; left out, as many as the topology has.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Sizes of the mesh axes, outermost first; left out, one axis.")] = None,
    axes: Annotated[str | None, typer.Option(help="Axes that communicate, such as y or x,y; left out, all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain an operator of a plan, its memory, or what a collective costs.

    autotp explain linear_3 --plan plan.json --model model.py:build

    autotp explain --memory --plan plan.json --model model.py:build

    autotp explain all_reduce --topology dgx-h100 --bytes "32 MB"
    """
    sources = {each: context.get_parameter_source(each) for each in context.params}
    given = {each for each, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if foreign := sorted(given & (_OF_COLLECTIVES if plan is not None else _OF_PLANS)):
        options = ", ".join(f"--{'bytes' if each == 'size' else each}" for each in foreign)
        raise AutotpError(f"{options}: for {'a collective' if plan is not None else 'a plan (--plan)'} alone; leave it out")
    if plan is not None:
        if model is None or (what is None) != memory:
            raise AutotpError("give the model (--model FILE.py:FACTORY), and either the name of an operator or --memory")
        if memory:
            if alone := sorted(given & {"alternatives", "planned"}):
                raise AutotpError(f"--{', --'.join(alone)}: for an operator alone; leave it out with --memory")
            explain_memory(plan, model, as_json=as_json)
        else:
            explain_node(str(what), plan, model, count=alternatives, planned=planned, as_json=as_json)
        return
    if what is None or topology is None or size is None:
        raise AutotpError("give an operator and its plan (--plan), or a collective with --topology and --bytes")
    machine = Topology.load(topology)
    machine = machine if devices is None else machine.resized(devices)
    shape = (machine.devices,) if mesh is None else mesh_of(mesh)
    found = explain_collective(what, machine, shape, _axes(axes, len(shape)), parse_quantity(size, "memory"))
    show(found, _shown(found), as_json)


def _axes(text: str | None, count: int) -> tuple[int, ...]:
    names = AXIS_NAMES[:count]
    if text is None:
        return tuple(range(count))
    wanted = [name.strip() for name in text.split(",")]
    if any(name not in names for name in wanted) or len(set(wanted)) < len(wanted):
        raise AutotpError(f"--axes {text!r}: the mesh has the axes {', '.join(names)}; name each at most once")
    return tuple(sorted(names.index(name) for name in wanted))


def _shown(found: dict[str, Any]) -> Group:
    ways = math.prod(found["mesh"][a] for a in found["axes"])
    where = " x ".join(map(str, found["mesh"]))
    crossed = ", ".join(f"{e['ways']} over {e['level']}" for e in found["levels"]) or "nothing to cross"
    head = Text.assemble(
        (found["collective"], "bold"),
        f" among {ways} of the {math.prod(found['mesh'])} devices of {found['topology']} (mesh {where}): {crossed}",
    )
    symbols = Table("symbol", "value", title="symbols", title_justify="left")
    for name, value in found["values"].items():
        unit = _UNITS.get(name, "time" if name.startswith("lambda") or name == "omega" else "")
        rate = f"{value:.4g} s/B" if name in ("sigma", "chi", "kappa") else f"{value:g}"
        symbols.add_row(name, format_quantity(value, unit) if unit else rate)  # type: ignore[arg-type]
    table = Table("algorithm", "seconds =", "", title=f"algorithms ({found['library']})", title_justify="left")
    for entry in found["algorithms"]:
        mark = Text("chosen" if entry["algorithm"] == found["chosen"] else "", style="green")
        mark = mark if entry["available"] else Text(f"not in {found['library']}", style="dim")
        table.add_row(entry["algorithm"], f"{entry['formula']} = {format_quantity(entry['seconds'], 'time')}", mark)
    return Group(head, symbols, table)
