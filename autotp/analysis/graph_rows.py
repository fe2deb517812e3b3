"""The forward and the backward graph that a device runs, node by node: what each computes or moves, and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from autotp.analysis.inspection import named
from passes.graph import note_of
from passes.overlap.launch import called, wait
from passes.overlap.primitives import axes_of
from passes.overlap.schedule import Slot
from passes.torch_internals import tree_leaves

__all__ = ["GraphRow", "filtered", "graph_rows"]


@dataclass(frozen=True, slots=True)
class GraphRow:
    """A node of a scheduled graph.

    Attributes:
        name: of the node.
        target: the operator, or the kind of a collective.
        axes: of a collective, by name; none: it computes.
        shapes: of its results on this device.
        bytes: of its results on this device.
        begin, seconds: when it is predicted to start, counted from the graph's start, and how long it takes.
        exposed: seconds for which nothing is computed while its result is waited for; 0 for what computes.
    """

    name: str
    target: str
    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes: float
    begin: float
    seconds: float
    exposed: float


def graph_rows(slots: Sequence[Slot], axes: Sequence[str]) -> list[GraphRow]:
    """A scheduled graph's nodes, in the order in which they run; waiting for a collective is listed with its launch.

    Args:
        slots: of the graph, as `autotp.analysis.trace.scheduled` gives them.
        axes: names of the mesh axes.
    """
    waited = _waited(slots)
    rows = []
    for slot in slots:
        node = slot.node
        if node.op != "call_function" or node.target is wait:
            continue
        traced = note_of(node).collective
        value = traced.meta["val"] if traced is not None else node.meta.get("val")
        results = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        rows.append(
            GraphRow(
                name=node.name,
                target=called(node),
                axes=() if traced is None else tuple(axes[a] for a in axes_of(traced.target, traced.args)),
                shapes=tuple(tuple(result.shape) for result in results),
                bytes=float(sum(result.nbytes for result in results)),
                begin=slot.begin,
                seconds=slot.end - slot.begin,
                exposed=waited.get(node, 0.0),
            )
        )
    return rows


def _waited(slots: Sequence[Slot]) -> dict[fx.Node, float]:
    """Launch -> seconds between the end of what was computed before its wait and the beginning of what comes after."""
    found: dict[fx.Node, float] = {}
    free = 0.0
    for slot in slots:
        if slot.node.target is wait:
            source = slot.node.all_input_nodes[0]
            found[source] = found.get(source, 0.0) + max(0.0, slot.end - free)
            free = max(free, slot.end)
        elif slot.lane == "compute":
            free = max(free, slot.end)
    return found


def filtered(rows: Iterable[GraphRow], op: str | None, collectives: bool, top: int | None) -> list[GraphRow]:
    """Those of a name or kind, those that communicate, so many of the longest.

    Raises:
        AutotpError: no operator has this name or kind.
    """
    found = [row for row in named(op, [*rows]) if row.axes or not collectives]
    return found if top is None else sorted(found, key=lambda row: -row.seconds)[:top]
