"""A plan's graph as a drawing: operators by module, coloured by scheme, with the collectives on the edges."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import graphviz
from torch import fx

from autotp.analysis.inspection import Row
from autotp.costs.model import Model
from autotp.errors import AutotpError
from costmodel.text.files import write_atomically
from passes.rules.factors import value_of
from passes.rules.shapes import operands_of

__all__ = ["colour_of", "draw", "drawing"]

_FORMATS = ("svg", "pdf", "png")


def colour_of(scheme: str) -> str:
    """A light colour that depends on the scheme alone; grey for replicated operators."""
    if scheme == "replicated":
        return "#e8e8e8"
    hue = int(hashlib.sha256(scheme.encode()).hexdigest()[:4], 16) / 0xFFFF
    return f"{hue:.3f} 0.25 0.98"


def drawing(rows: Sequence[Row], model: Model) -> graphviz.Digraph:
    """The graph of rows and the tensors between them. Operators that are decided together are one node."""
    graph = graphviz.Digraph("plan", graph_attr={"rankdir": "TB", "fontname": "Helvetica"})
    graph.attr("node", shape="box", style="filled,rounded", fontname="Helvetica", fontsize="10")
    graph.attr("edge", fontname="Helvetica", fontsize="9")
    shown = {row.name: row for row in rows}
    modules: dict[str, list[Row]] = {}
    for row in rows:
        modules.setdefault(row.module, []).append(row)
    for number, (module, members) in enumerate(modules.items()):
        with graph.subgraph(name=f"cluster_{number}") as cluster:
            cluster.attr(label=graphviz.escape(module or "(the model itself)"), color="#bbbbbb", fontsize="10")
            for row in members:
                times = f" × {row.count}" if row.count > 1 else ""
                label = f"{row.name}{times}\n{row.scheme}\n{', '.join(row.results)}"
                cluster.node(
                    row.name, graphviz.escape(label), fillcolor=colour_of(row.scheme), tooltip=graphviz.escape(row.target)
                )
    for node in model.operators:
        stand = model.stands[node].name
        for operand in operands_of(node):
            _edge(graph, shown, model, stand, value_of(operand)[0])
    return graph


def _edge(graph: graphviz.Digraph, shown: dict[str, Row], model: Model, reader: str, producer: fx.Node) -> None:
    if producer not in model.operators:
        return
    stand = model.stands[producer].name
    if reader not in shown or stand not in shown:
        return
    steps = [s for row in (shown[reader], shown[stand]) for s in row.reshards if s.tensor == producer.name and s.seconds]
    label = "\n".join(dict.fromkeys(f"{s.kind}@{','.join(s.axes)}" for s in steps if not s.gradient))
    line = f"\t{graphviz.quoting.quote(stand)} -> {graphviz.quoting.quote(reader)}"
    if not any(line in written for written in graph.body):
        graph.edge(stand, reader, label or None, color="#cc4444" if label else "#666666")


def draw(path: Path, rows: Sequence[Row], model: Model) -> None:
    """Draws the rows to a file, atomically.

    Args:
        path: of a .dot, .svg, .pdf or .png file.
        rows: of the plan.
        model: of the plan.

    Raises:
        AutotpError: the extension is unknown, the file cannot be written, or graphviz's ``dot`` is not installed.
    """
    kind = path.suffix[1:]
    graph = drawing(rows, model)
    try:
        if kind not in ("dot", *_FORMATS):
            raise AutotpError(f"{path}: a drawing ends with .dot, {', '.join('.' + known for known in _FORMATS)}")
        write_atomically(path, graph.source if kind == "dot" else graph.pipe(format=kind))
    except graphviz.ExecutableNotFound as error:
        raise AutotpError(f"{path}: drawing {kind} needs graphviz's dot, which is not installed; write a .dot") from error
    except OSError as error:
        raise AutotpError(f"{path}: cannot be written ({error.strerror})") from error
