"""Plots the time of each way of running a step relative to the lower bound of all schedules."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

__all__ = ["drawn"]

_MARKS = "osD^vP*"
_ROW = 0.24  # inches


def drawn(rows: Sequence[tuple[str, dict[str, float], float]], wanted: float) -> str:
    """An SVG with a row of marks for each cell.

    Args:
        rows: (label, way -> seconds, bound of both passes in sequence); all times are relative to the floor.
        wanted: The position of a vertical line, relative to the floor.
    """
    with matplotlib.rc_context({"svg.hashsalt": "overlap", "font.size": 8}):
        figure = Figure(figsize=(8, 1.2 + _ROW * len(rows)), layout="constrained")
        axes: Any = figure.add_subplot()
        places = range(len(rows))
        for number, way in enumerate(rows[0][1]):
            axes.plot([times[way] for _, times, _ in rows], places, _MARKS[number % len(_MARKS)], ms=4, label=way)
        axes.plot([reach for _, _, reach in rows], places, "|", ms=10, color="black", label="what passes reach")
        axes.axvline(1, color="black", lw=0.8)
        axes.axvline(wanted, color="grey", lw=0.8, ls="--")
        axes.set_yticks(places, [label for label, _, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", lw=0.3)
        axes.set_xlabel("seconds of a step over the longer of computing alone and communicating alone")
        figure.legend(loc="outside upper center", ncols=4)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
