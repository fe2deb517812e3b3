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
        axes: names of a collective's mesh axes; empty for computation.
        shapes: of its results on this device.
        bytes: of its results on this device.
        begin, seconds: its predicted start, in seconds from the graph's start, and its predicted duration.
        exposed: seconds during which nothing is computed because its result is waited for; 0 for computation.
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
    """The nodes of a scheduled graph in execution order; the wait for a collective is part of the row of its launch.

    Args:
        slots: of the graph, as `autotp.analysis.trace.scheduled` returns them.
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
    """Launch -> exposed seconds: from the end of the computation before its wait to the end of the wait."""
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
    """Selects rows.

    Args:
        rows: to select from.
        op: a pattern of the name or kind; None for all.
        collectives: whether to return only collectives.
        top: the number of rows to return, the longest first; None for all.

    Raises:
        AutotpError: no operator matches ``op``.
    """
    found = [row for row in named(op, [*rows]) if row.axes or not collectives]
    return found if top is None else sorted(found, key=lambda row: -row.seconds)[:top]
