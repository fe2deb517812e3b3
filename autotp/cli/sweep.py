"""``autotp sweep``: one model over many device counts and topologies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from autotp.analysis.sweep import sweep, takes_devices
from autotp.cli.arguments import (
    Accumulate,
    Memory,
    Mode,
    Optimizer,
    Panels,
    PrecisionName,
    call_factory,
    find_factory,
    memory_of,
    native_output_on_stderr,
    output_option,
)
from autotp.cli.sweep_output import check_plot, sweep_csv, sweep_table, write_file, write_plot
from autotp.cli.terminal import Terminal, show
from autotp.errors import AutotpError
from autotp.plans.families import FAMILIES
from autotp.plans.options import Options
from costmodel.errors import shown
from costmodel.text.numbers import MOST_DEVICES, whole_of

__all__ = ["sweep_command"]


def sweep_command(
    model: Annotated[
        str,
        typer.Option(
            help="FILE.py:FACTORY or package.module:factory, as for `plan`. A factory with an argument `devices` is called "
            "for every count, and may make its batch by it (weak scaling)."
        ),
    ],
    topology: Annotated[str, typer.Option(help="Presets' names or TOML files, such as dgx-a100,dgx-h100.")],
    devices: Annotated[str, typer.Option(help="How many devices, such as 8,16,32.")],
    strategy: Annotated[str, typer.Option(help=f"What to search; the fastest counts: {', '.join(FAMILIES)}.")] = "auto",
    families: Annotated[
        bool, typer.Option("--families", help="Plan every family too, and say which is the fastest.")
    ] = False,
    weak: Annotated[
        bool, typer.Option("--weak", help="Require weak scaling: the factory must have an argument `devices`.")
    ] = False,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per step; left out, the elements of the first integer input, else samples."),
    ] = None,
    memory: Memory = None,
    mode: Mode = Options.mode,
    optimizer: Optimizer = Options.optimizer,
    accumulate: Accumulate = Options.accumulate,
    panels: Panels = Options.panels,
    precision: PrecisionName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the points as JSON.")] = False,
    csv: Annotated[Path | None, output_option("Also write the points to this CSV file.")] = None,
    plot: Annotated[
        Path | None,
        output_option("Plot tokens per second, MFU and exposed communication: FILE.svg or FILE.png."),
    ] = None,
) -> None:
    """Plan a model for many device counts and topologies. Exit code 1: none of them has a plan."""
    counts = [_count(word) for word in _words(devices)]
    bound = None if memory is None else memory_of(memory)
    if plot is not None:
        check_plot(plot)
    factory = find_factory(model)
    if weak and not takes_devices(factory):
        raise AutotpError(f"--weak: the factory of --model {model!r} has no argument `devices` to choose its batch by")
    # On stderr, and only if stderr is a terminal, so that stdout has nothing but the result when piped.
    with Terminal(stderr=True).status(f"building {model} …") as status, native_output_on_stderr():
        points = sweep(
            _loader(factory, model),
            _words(topology),
            counts,
            strategies=_words(strategy),
            families=families,
            tokens=tokens,
            mode=mode,
            memory=bound,
            optimizer=optimizer,
            accumulate=accumulate,
            panels=panels,
            precision=precision,
            progress=lambda what: status.update(Text(f"{what} …")),
        )
    if csv is not None:
        write_file(csv, sweep_csv(points))
    if plot is not None:
        write_plot(points, plot)
    show([point.to_dict() for point in points], sweep_table(points), as_json)
    if not any(point.planned for point in points):
        raise typer.Exit(1)


def _loader(factory: Callable[..., Any], spec: str) -> Callable[..., Any]:
    """A factory whose errors name ``--model``; it has an argument ``devices`` if the given one has, as `sweep` checks."""

    def grown(devices: int) -> Any:
        return call_factory(factory, spec, devices)

    def fixed() -> Any:
        return call_factory(factory, spec)

    return grown if takes_devices(factory) else fixed


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")] if text.strip() else []


def _count(word: str) -> int:
    return whole_of(word, f"--devices {shown(word)} (expected how many devices, such as 8,16,32)", most=MOST_DEVICES)
