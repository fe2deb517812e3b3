"""``autotp validate``: compares predictions with measured training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotp.cli.arguments import output_option
from autotp.cli.render import bytes_of, time_of
from autotp.cli.sweep_output import check_plot, figure_class, label_of, save_figure, write_file
from autotp.cli.terminal import Terminal, show
from autotp.errors import AutotpError
from autotp.validate import (
    Accuracy,
    DeviceFit,
    Prediction,
    Skipped,
    accuracy,
    by_source,
    fit_device,
    predicted_all,
    rankings,
    read_runs,
)
from costmodel.toml_out import topology_toml

__all__ = ["SHIPPED", "drawn", "validate_command"]

#: The runs that come with the repository.
SHIPPED = Path(__file__).resolve().parents[2] / "benchmarks" / "published.toml"


def validate_command(
    file: Annotated[
        Path | None, typer.Argument(help="The runs, TOML or CSV; left out, the published ones of the repository.")
    ] = None,
    only: Annotated[str, typer.Option(help="Only runs whose name, source or device contains this.")] = "",
    runs: Annotated[bool, typer.Option("--runs", help="List every run.")] = False,
    fit: Annotated[
        Path | None,
        output_option("Fit the device's figures to the runs, and write its topology to FILE.toml."),
    ] = None,
    plot: Annotated[Path | None, output_option("Draw predicted over measured seconds: FILE.svg or FILE.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan measured training runs as they were run, and compare predicted with measured steps and memory."""
    if file is None and not SHIPPED.exists():
        raise AutotpError("the published runs are in the repository, not in the package: give a file of runs")
    if plot is not None:
        check_plot(plot)
    found, skipped = read_runs(file or SHIPPED)
    found = [run for run in found if any(only.lower() in text.lower() for text in (run.name, run.source, run.device))]
    skipped = [one for one in skipped if any(only.lower() in text.lower() for text in (one.name, one.source))]
    if not found:
        if not only and skipped:
            raise AutotpError(f"no run to plan, {len(skipped)} skipped; the first: {skipped[0].name}: {skipped[0].why}")
        raise AutotpError(f"no run to plan: {len(skipped)} skipped, none with {only!r} in its name, source or device")
    with Terminal(stderr=True).status("planning") as status:
        done, unplanned = predicted_all(found, lambda name: status.update(Text(f"planning {name}")))
    skipped += unplanned
    if not done:
        raise AutotpError(f"no run could be planned; the first: {skipped[0].name}: {skipped[0].why}")
    fitted = None if fit is None else fit_device(done)
    if fit is not None and fitted is not None:
        machine = replace(done[0].run.topology, device=fitted.device)
        write_file(fit, topology_toml(machine, _header(fitted, done)))
    if plot is not None:
        save_figure(drawn(done), plot)
    show(_record(done, skipped, fitted), _shown(done, skipped, fitted, runs), as_json)


def _shown(done: Sequence[Prediction], skipped: Sequence[Skipped], fitted: DeviceFit | None, runs: bool) -> RenderableType:
    parts: list[RenderableType] = []
    if runs:
        parts.append(_runs(done))
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("source and device", overflow="fold")
    for title in ("runs", "mean error", "median", "largest", "predicted\nover measured", "memory:\nlargest error"):
        table.add_column(title, justify="right")
    groups = {", ".join(filter(None, (source, device))): group for (source, device), group in by_source(done).items()}
    for name, group in (*groups.items(), *([("all", list(done))] if len(groups) > 1 else [])):
        table.add_row(name, *_accuracy(accuracy([one.ratio for one in group])), _memory(group))
    parts.append(table)
    for one in rankings(done):
        same = one.fastest is one.predicted
        winner = "the fastest is the same" if same else f"{one.predicted.name} instead of {one.fastest.name} is fastest"
        first, more = one.predictions[0].run.name, len(one.predictions) - 1
        parts.append(Text(f"degrees of {first} and {more} more: Kendall's tau {one.tau:.2f}, {winner}"))
    if fitted is not None:
        held = "" if fitted.held_out is None else f"; {fitted.held_out.mean:.1%} on {fitted.held_out.runs} held out"
        parts.append(Text(f"fitted: {_figures(fitted)}: mean error {fitted.fitted.mean:.1%} on {fitted.fitted.runs}{held}"))
        if fitted.at_ends:
            undetermined = f"at an end of their range, which the runs do not determine: {', '.join(fitted.at_ends)}"
            parts.append(Text(undetermined, style="yellow"))
    if skipped:
        parts.append(Text(f"{len(skipped)} runs skipped:", style="yellow"))
        parts += [Text(f"  {one.name}: {one.why}") for one in skipped]
    return Group(*parts)


def _runs(done: Sequence[Prediction]) -> Table:
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    for title in ("measured", "predicted", "ratio", "memory", "predicted"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in done:
        memory = bytes_of(one.run.memory) if one.run.memory else "–"
        told = one.plan.predicted
        table.add_row(
            one.run.name, time_of(one.run.seconds), time_of(told.step_seconds), f"{one.ratio:.3f}",
            memory, bytes_of(told.memory_bytes),
        )  # fmt: skip
    return table


def _accuracy(found: Accuracy) -> list[str]:
    return [str(found.runs), *(f"{error:.1%}" for error in (found.mean, found.median, found.largest)), f"{found.bias:.3f}"]


def _memory(group: Sequence[Prediction]) -> str:
    ratios = [one.memory_ratio for one in group if one.memory_ratio is not None]
    return f"{max(abs(ratio - 1) for ratio in ratios):.1%} of {len(ratios)}" if ratios else "–"


def _figures(fitted: DeviceFit) -> str:
    device = fitted.device
    slow = ", ".join(f"{kind} × {factor:g}" for kind, factor in device.slowdown.items() if factor != 1)
    return f"efficiency {device.efficiency:g}, half_size {device.half_size:g}, {slow}"


def _header(fitted: DeviceFit, done: Sequence[Prediction]) -> list[str]:
    held = "" if fitted.held_out is None else f", {fitted.held_out.mean:.1%} on {fitted.held_out.runs} that were held out"
    return [
        f"Fitted by `autotp validate --fit` to {fitted.fitted.runs} measured runs of {len(by_source(done))} sources.",
        f"Mean error of a step: {fitted.fitted.mean:.1%}{held}. Everything else is as in the preset.",
    ]


def _record(done: Sequence[Prediction], skipped: Sequence[Skipped], fitted: DeviceFit | None) -> dict[str, Any]:
    runs = [
        {
            "name": one.run.name,
            "source": one.run.source,
            "measured_seconds": one.run.seconds,
            "predicted_seconds": one.seconds,
            "ratio": one.ratio,
            "measured_bytes": one.run.memory or None,
            "predicted_bytes": one.plan.predicted.memory_bytes,
            "mesh": one.plan.mesh_shape,
        }
        for one in done
    ]
    found = accuracy([one.ratio for one in done])
    return {
        "runs": runs,
        "mean_error": found.mean,
        "largest_error": found.largest,
        "skipped": {one.name: one.why for one in skipped},
        "fitted": None if fitted is None else {"mean_error": fitted.fitted.mean, "figures": _figures(fitted)},
    }


def drawn(done: Sequence[Prediction]) -> Any:
    """A matplotlib figure of predicted over measured step times, in seconds.

    Raises:
        AutotpError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    for (source, device), group in by_source(done).items():
        measured, told = [one.run.seconds for one in group], [one.seconds for one in group]
        axes.plot(measured, told, ".", label=label_of(f"{source[:40]}, {device}"))
    every = [seconds for one in done for seconds in (one.run.seconds, one.seconds)]
    ends = min(every), max(every)
    axes.plot(ends, ends, color="black", linewidth=0.5)
    axes.set(xscale="log", yscale="log", xlabel="measured seconds of a step", ylabel="predicted")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)
    return figure
