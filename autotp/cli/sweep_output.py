"""The output of a sweep: a table, CSV, JSON, and a plot. Files are written completely or not at all."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotp.analysis.sweep import Point
from autotp.errors import AutotpError
from costmodel import format_quantity
from costmodel.text.files import write_atomically

__all__ = [
    "PLOTS",
    "check_plot",
    "figure_class",
    "label_of",
    "save_figure",
    "sweep_csv",
    "sweep_table",
    "write_file",
    "write_plot",
]

#: File name endings of plots.
PLOTS = (".svg", ".png")


def sweep_table(points: Sequence[Point]) -> RenderableType:
    """A table with a row for each point, and without columns of figures that are unknown for all points.

    The strategy has a column only if it differs between points. Why points have no plan is listed below the table.
    """
    unit = next((point.unit for point in points if point.planned), "tokens")
    strategies = {point.strategy for point in points if point.planned}
    columns: dict[str, Callable[[Point], str | Text | None]] = {
        "mesh": lambda p: "×".join(map(str, p.mesh)) if p.mesh else None,
        "strategy": lambda p: p.strategy if len(strategies) > 1 else None,
        "best family": _family,
        "step": lambda p: _quantity(p.step_seconds, "time"),
        f"{unit}/s\na device": lambda p: _plain(p.tokens_per_second),
        "MFU": lambda p: _percent(p.mfu),
        "exposed": lambda p: _percent(p.exposed_share),
        "memory\na device": lambda p: _quantity(p.memory_bytes, "memory"),
        "energy\na step": lambda p: _quantity(p.energy_per_step, "energy"),
        f"energy\na {unit[:-1]}": lambda p: _quantity(p.energy_per_token, "energy"),
        f"price of\n10⁶ {unit}": lambda p: None if p.money_per_token is None else _plain(1e6 * p.money_per_token),
    }
    shown = {title: cell for title, cell in columns.items() if any(cell(p) for p in points)}
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("topology", overflow="fold")
    table.add_column("devices", justify="right", no_wrap=True)
    for title in shown:
        text = title in ("mesh", "strategy", "best family")
        table.add_column(title, justify="left" if text else "right", overflow="fold", no_wrap=title != "best family")
    for point in points:
        nothing = Text("–", style="dim")
        table.add_row(point.topology, str(point.devices), *(cell(point) or nothing for cell in shown.values()))
    return Group(table, *(note for point in points for note in _notes(point)))


def sweep_csv(points: Sequence[Point]) -> str:
    """The points as CSV with a header, in base units; a mesh is written ``2x4``, and unknown values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, Point.names(), lineterminator="\n")
    writer.writeheader()
    for point in points:
        row = point.to_dict()
        writer.writerow(row | {"mesh": None if point.mesh is None else "x".join(map(str, point.mesh))})
    return text.getvalue()


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file completely or not at all.

    Raises:
        AutotpError: when it cannot be written.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        raise AutotpError(f"{path}: cannot write the file ({error.strerror})") from error


def check_plot(path: str | os.PathLike[str]) -> None:
    """Checks, before the sweep, that `write_plot` could write a file.

    Raises:
        AutotpError: when the name has another ending than `PLOTS`, or matplotlib is not installed.
    """
    if Path(path).suffix not in PLOTS:
        raise AutotpError(f"--plot {path}: a plot's name ends in {' or '.join(PLOTS)}")
    figure_class()


def write_plot(points: Sequence[Point], path: str | os.PathLike[str]) -> None:
    """Draws tokens per second and device, MFU and the share of exposed communication over the number of devices.

    Args:
        points: one line is drawn for each topology; points without a plan are left out.
        path: the file; its ending, one of `PLOTS`, selects the format.

    Raises:
        AutotpError: when the name has another ending, matplotlib is not installed, or the file cannot be written.
    """
    check_plot(path)
    unit = next((point.unit for point in points if point.planned), "tokens")
    figure = figure_class()(figsize=(12, 4), layout="constrained")
    panels: Sequence[tuple[str, Callable[[Point], float | None]]] = (
        (f"{unit} per second and device", lambda p: p.tokens_per_second),
        ("model FLOP utilisation (%)", lambda p: _scaled(p.mfu)),
        ("exposed communication (% of the step)", lambda p: _scaled(p.exposed_share)),
    )
    lines: dict[str, list[Point]] = {}
    for point in points:
        if point.planned:
            lines.setdefault(point.topology, []).append(point)
    counts = sorted({point.devices for line in lines.values() for point in line})
    for axes, (title, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name, line in lines.items():
            line = sorted(line, key=lambda point: point.devices)
            axes.plot([p.devices for p in line], [value(p) or 0.0 for p in line], marker="o", label=label_of(name))
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts or [1], [str(count) for count in counts or [1]])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(xlabel="devices", title=title)
        axes.grid(alpha=0.3)
        if lines:
            axes.legend()
    save_figure(figure, path)


def label_of(name: str) -> str:
    """A name escaped for matplotlib's labels, in which ``$`` begins a formula, and a leading ``_`` hides the label."""
    return f"{' ' * name.startswith('_')}{name}".replace("$", r"\$")


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a matplotlib figure to a file; equal figures give equal files."""
    suffix = Path(path).suffix[1:]
    # With a date, equal figures would give different files.
    metadata: Mapping[str, Any] = {"Date": None} if suffix == "svg" else {}
    drawn = io.BytesIO()
    figure.savefig(drawn, format=suffix, dpi=150, metadata=metadata)
    write_file(path, drawn.getvalue())


def figure_class() -> Any:
    """matplotlib's ``Figure``.

    Raises:
        AutotpError: matplotlib is not installed.
    """
    # Not pyplot's figure, which may need a window system.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AutotpError(f"plots need matplotlib ({error}); install it: pip install autotp[plot]") from error
    return Figure


def _family(point: Point) -> str | Text | None:
    if point.family is None or point.family == point.strategy or not point.step_seconds or point.family_seconds is None:
        return point.family
    return Text.assemble(point.family, (f" (× {point.family_seconds / point.step_seconds:.2f})", "dim"))


def _notes(point: Point) -> list[Text]:
    where = f"{point.topology}, {point.devices} devices: "
    if point.reason is not None:
        return [Text(f"{where}no plan: {point.reason}", style="yellow")]
    return [] if point.optimal else [Text(f"{where}not proven optimal, within {point.gap:.2%} of the bound", style="dim")]


def _quantity(value: float | None, quantity: Any) -> str | None:
    return None if value is None else format_quantity(value, quantity)


def _plain(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{float(f'{value:.3g}'):,.10g}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _scaled(share: float | None) -> float | None:
    return None if share is None else 100 * share
