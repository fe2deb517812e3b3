"""The seconds of a collective by every algorithm, as formulas and as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from autotp.costs.prices import Prices
from autotp.errors import AutotpError
from autotp.plans.plan import AXIS_NAMES
from costmodel import COLLECTIVES, Topology, collectives

__all__ = ["explain_collective"]


def explain_collective(
    kind: str, topology: Topology, mesh: tuple[int, ...], axes: tuple[int, ...], volume: float
) -> dict[str, Any]:
    """The seconds of a collective among the devices along some mesh axes, by every algorithm.

    Args:
        kind: one of ``costmodel.COLLECTIVES``.
        topology: the machine.
        mesh: sizes of the mesh axes, outermost first.
        axes: the axes whose devices communicate.
        volume: bytes of the whole tensor, as ``costmodel.collectives`` counts them.

    Returns:
        The levels of the link, the values of the symbols (bytes, seconds, bytes/s), and for each algorithm its formula, its
        seconds, and whether the topology's library has it. The planner uses the fastest algorithm that the library has. An
        all_reduce over several axes runs in stages if the schedule hides communication and stages are some per cent faster.

    Raises:
        AutotpError: no collective is called ``kind``.
        TopologyError: the mesh does not fit the machine.
    """
    if kind not in COLLECTIVES:
        raise AutotpError(f"no collective is called {kind!r}; choose {', '.join(COLLECTIVES)}")
    link = topology.link(mesh, axes, kind)
    values = dict(zip(collectives.OF_LINK, (volume, *collectives.figures(link)), strict=True))
    known = collectives.LIBRARIES[topology.library]
    found: list[dict[str, Any]] = []
    for name, formula in collectives.ALGORITHMS[kind].items():
        whole = formula + collectives.MORE if link.overhead or link.copying else formula
        seconds = float(whole.subs(values, simultaneous=True)) if link.size > 1 else 0.0
        found.append({"algorithm": name, "formula": str(whole), "seconds": seconds, "available": name in known})
    chosen = min((e for e in found if e["available"]), key=lambda e: e["seconds"])
    if kind == "all_reduce" and len(axes) > 1:
        prices = Prices(topology, mesh)
        seconds = float(prices.in_stages(axes, np.array([volume]))[0, 0])
        found.append({"algorithm": "in stages", "formula": _stages(axes), "seconds": seconds, "available": True})
        chosen = found[-1] if prices.faster_staged(axes, volume) else chosen
    return {
        "collective": kind,
        "topology": topology.name,
        "library": topology.library,
        "mesh": list(mesh),
        "axes": list(axes),
        "levels": [{"level": s.level, "ways": s.ways, "bandwidth": s.bandwidth, "latency": s.latency} for s in link.stages],
        "values": {str(symbol): value for symbol, value in values.items()},
        "algorithms": found,
        "chosen": chosen["algorithm"],
        "seconds": chosen["seconds"],
    }


def _stages(axes: tuple[int, ...]) -> str:
    """The stages in which an all_reduce over several axes is scheduled if that is faster; see `passes.overlap.stage`."""
    *outer, inner = (AXIS_NAMES[axis] for axis in axes)
    return f"reduce_scatter@{inner} + all_reduce@{','.join(outer)} + all_gather@{inner}"
