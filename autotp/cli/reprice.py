"""``autotp reprice``: what a plan costs on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotp.analysis.reprice import repriced
from autotp.cli.arguments import Everything, PlannedModel, SavedPlan, save_plan, working
from autotp.cli.explain_plan import captured_for
from autotp.cli.render import show_plan
from autotp.plans.plan import Plan
from costmodel import Topology

__all__ = ["reprice_command"]


def reprice_command(
    plan: SavedPlan,
    model: PlannedModel,
    topology: Annotated[
        str, typer.Option(help="The other machine: a preset's name or a TOML file; resized to the plan's devices.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    save: Annotated[Path | None, typer.Option(help="Also write the plan with these prices to this JSON file.")] = None,
    everything: Everything = False,
) -> None:
    """Price a plan on another machine, all of its decisions kept.

    What is saved is a plan like any other: inspect, explain and diff work as for a plan that was made for that machine.
    """
    loaded = Plan.load(plan)
    machine = Topology.load(topology).resized(loaded.devices)
    with working("pricing the plan"):
        found = repriced(captured_for(loaded, model), loaded, machine)
    save_plan(found, save)
    show_plan(found, as_json, everything)
