"""``autotp reprice``: what a plan costs on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotp.analysis.reprice import repriced
from autotp.cli.arguments import working
from autotp.cli.explain_plan import captured_for
from autotp.cli.render import make_console, plan_table
from autotp.errors import AutotpError
from autotp.plans.plan import Plan
from costmodel import Topology

__all__ = ["reprice_command"]


def reprice_command(
    plan: Annotated[Path, typer.Argument(help="A plan that `autotp plan --save` wrote.")],
    model: Annotated[str, typer.Option(help="FILE.py:FACTORY or package.module:factory, as it was planned.")],
    topology: Annotated[
        str, typer.Option(help="The other machine: a preset's name or a TOML file; resized to the plan's devices.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan with these prices, as JSON, to this file too.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show the cheap operators too.")] = False,
) -> None:
    """Price a plan on another machine, all of its decisions kept.

    What is saved is a plan like any other: inspect, explain and diff tell of it what they tell of one that was made there.
    """
    loaded = Plan.load(plan)
    machine = Topology.load(topology).resized(loaded.devices)
    with working("pricing the plan"):
        found = repriced(captured_for(loaded, model), loaded, machine)
    if save is not None:
        try:
            found.save(save)
        except OSError as error:
            raise AutotpError(f"--save {save}: cannot write the plan ({error.strerror})") from error
    if as_json:
        print(found.to_json())
    else:
        make_console().print(plan_table(found, limit=None if everything else 40))
