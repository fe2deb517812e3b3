"""``autotp verify``: checks that a plan computes the same values and gradients as the model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotp.analysis.verify import Verification, verify
from autotp.cli.arguments import AsJson, ModelSpecError, PlannedModel, SavedPlan, described, load_model, working
from autotp.cli.render import place_of
from autotp.cli.terminal import show
from autotp.errors import AutotpError
from autotp.plans.plan import Plan
from costmodel.errors import shown

__all__ = ["verify_command"]

_SHOWN = 8


def verify_command(
    plan: SavedPlan,
    model: PlannedModel,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative error that counts as rounding; left out, by the model's dtype.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a plan for all of its devices in this process, and compare every value and gradient with the model's.

    Exits with 1 if they differ, and names the operator at which the difference begins. Values and gradients that rounding
    alone changes as much are listed, and do not count as differences.
    """
    loaded = Plan.load(plan)
    with working("comparing"):
        module, args, kwargs = load_model(model, loaded.devices)
        try:
            found = verify(module, loaded, args, kwargs, tolerance=tolerance)
        except AutotpError:
            raise
        except Exception as error:
            raise ModelSpecError(f"--model {shown(model)}: running it raised {described(error)}") from error
    show(asdict(found) | {"right": found.right}, _shown(found), as_json)
    if not found.right:
        raise typer.Exit(1)


def _shown(found: Verification) -> RenderableType:
    table = Table("largest relative errors", "", header_style="bold")
    worst = sorted(found.gradients.items(), key=lambda entry: -entry[1])[:_SHOWN]
    errors = [(f"output {name}", error) for name, error in found.outputs.items()]
    errors += [(f"gradient of {name}", error) for name, error in worst]
    for name, error in errors:
        colour = "green" if error <= found.tolerance else "yellow" if name in found.ill_conditioned else "red"
        table.add_row(name, Text(f"{error:.2e}", style=colour))
    if found.departure is None:
        compared = "values and gradients" if found.gradients else "values (there are no gradients)"
        agree = f": {found.compared} {compared} agree to {found.tolerance:.0e}"
        said = Text.assemble(("correct", "green"), agree)
    else:
        at = found.departure
        place = f" {place_of(at.module, at.source)} {at.where} (error {at.error:.2e})"
        said = Text.assemble(("wrong", "red"), ": at ", (at.operator, "bold"), place)
    return Group(table, *_ill_conditioned(found), said)


def _ill_conditioned(found: Verification) -> list[Text]:
    if not found.ill_conditioned:
        return []
    worst = sorted(found.ill_conditioned.items(), key=lambda entry: -entry[1])
    named = [f"{name} ({move:.1e})" for name, move in worst[:_SHOWN]]
    more = [f"and {len(worst) - _SHOWN} more"] if len(worst) > _SHOWN else []
    return [
        Text.assemble(
            ("ill-conditioned", "yellow"),
            ": moving weights and inputs by one unit in the last place moves these in the model itself as far as the plan "
            f"does: {', '.join(named + more)}",
        )
    ]
