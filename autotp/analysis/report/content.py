"""The contents of a report, as JSON: every operator and the reasons for its sharding, costs, machine and schedule."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import fx

from autotp.analysis.explain import Explainer, Explanation
from autotp.analysis.inspection import reshard_steps
from autotp.analysis.memory import MemoryUse, memory_use
from autotp.analysis.trace import lanes
from autotp.costs.priced import Priced
from autotp.plans.plan import Plan
from costmodel import Topology
from passes.capture import Captured
from passes.rules.factors import value_of
from passes.rules.shapes import operands_of

__all__ = ["content"]

#: The number of alternative strategies that are shown for each operator.
ALTERNATIVES = 3
#: The number of tensors that are listed for the memory peak, largest first.
_LARGEST = 50


def content(
    captured: Captured,
    plan: Plan,
    *,
    events: Sequence[Mapping[str, Any]] = (),
    title: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The data of a report, as JSON values.

    Args:
        captured: the model that was planned, captured for the same inputs.
        plan: the plan.
        events: of the plan's schedule, as `autotp.analysis.trace.predicted` returns them; without any, the report has no
            timeline.
        title: of the report.
        progress: called with the number of operators explained so far, and the number of all that are to be explained.

    Raises:
        PlanMismatchError: the plan is for another model or other inputs.
    """
    explainer = Explainer(captured, plan)
    model = explainer.model
    stands = [node for node in model.operators if model.stands[node] is node]
    rows = []
    for i, node in enumerate(stands):
        rows.append(_row(explainer, node, explainer.explain(node.name, ALTERNATIVES, 0)))
        if progress is not None:
            progress(i + 1, len(stands))
    modules: dict[str, int] = {}
    operators = _operators(explainer, {node: i for i, node in enumerate(stands)}, modules)
    return {
        "title": title,
        "plan": _plan(plan, explainer.whole),
        "machine": _machine(plan.topology),
        "rows": rows,
        "modules": list(modules),
        "operators": operators,
        "parameters": [[name, layout] for name, layout in plan.parameters.items()],
        "costs": _costs(plan, explainer.priced),
        "memory": _memory(memory_use(explainer.priced, plan)),
        "timeline": _timeline(events),
    }


def _plan(plan: Plan, step: float) -> dict[str, Any]:
    return {
        "hash": plan.hash,
        "strategy": plan.strategy,
        "mesh": list(plan.mesh_shape),
        "axes": list(plan.mesh_axes[: len(plan.mesh_shape)]),
        "mode": plan.mode,
        "optimizer": plan.optimizer,
        "accumulate": plan.accumulate,
        "schedule": plan.schedule,
        "chunks": dict(plan.chunks),
        "constraints": list(plan.constraints),
        "optimal": plan.optimal,
        "gap": plan.gap,
        "allowed": None if plan.memory_bound == float("inf") else plan.memory_bound,
        "predicted": asdict(plan.predicted),
        "unchunked": step,
        "bound": plan.bound_ratio,
        "replicated": plan.replicated,
    }


def _machine(topology: Topology) -> dict[str, Any]:
    device, shown = topology.device, ("name", "size", "bandwidth", "latency")
    levels = [{name: getattr(level, name) for name in shown} for level in topology.levels]
    return {"name": topology.name, "device": device.name, "memory": device.memory, "levels": levels}


def _row(explainer: Explainer, node: fx.Node, found: Explanation) -> dict[str, Any]:
    """All details of one operator; operators that are decided together share one row."""
    parameters = explainer.captured.parameters
    reads = [parameters.get(n.name, value_of(n)[0].name) for n in operands_of(node)]
    return asdict(found) | {"seconds": found.seconds, "reads": reads}


def _operators(explainer: Explainer, rows: Mapping[fx.Node, int], modules: dict[str, int]) -> list[list[Any]]:
    """For each operator: its name, the indices of its module and row, seconds, seconds of communication, and the indices of
    the operators that it reads. Fills ``modules``.
    """
    model, entries = explainer.model, explainer.entries
    place = {node: i for i, node in enumerate(model.operators)}
    found: list[list[Any]] = []
    for node in model.operators:
        entry = entries[node.name]
        reads = sorted({place[value_of(n)[0]] for n in operands_of(node) if value_of(n)[0] in place})
        module = modules.setdefault(entry.module, len(modules))
        row = rows[model.stands[node]]
        found.append([node.name, module, row, entry.seconds, entry.communication_seconds, reads])
    return found


def _costs(plan: Plan, priced: Priced) -> list[dict[str, Any]]:
    """The terms of the step time, without chunks: computation by kind of operator, collectives by kind and axes."""
    sums: dict[tuple[str, str, str, bool], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def add(key: tuple[str, str, str, bool], times: float, seconds: float, size: float) -> None:
        for i, figure in enumerate((times, seconds, size)):
            sums[key][i] += figure

    entries = {op.name: op for op in plan.operators}
    for node, price in priced.own.items():
        add(("computing", entries[node.name].target, "", False), 1, price.compute, 0.0)
        if price.communication:
            add(("inside operators", "all_reduce", "", False), 1, price.communication, price.received)
    for moved in priced.reshards:
        for step in reshard_steps(plan, priced, moved, 1):
            if step.seconds:
                what = ("parameters" if moved.parameter else "activations") + (", gradients" if step.gradient else "")
                key = (what, step.kind, ",".join(step.axes), step.hidden)
                add(key, step.times, step.times * step.seconds, step.times * step.bytes)
    keys = ("what", "kind", "axes", "hidden", "times", "seconds", "bytes")
    found = [dict(zip(keys, (*key, *figures), strict=True)) for key, figures in sums.items()]
    return sorted((one for one in found if one["seconds"]), key=lambda one: -one["seconds"])


def _memory(use: MemoryUse) -> dict[str, Any]:
    """The curve as ``[operator, backward, bytes, bytes of each kind]``; kinds with the largest minimum come first."""
    least = {kind: min(one.kinds.get(kind, 0.0) for one in use.curve) for one in use.curve for kind in one.kinds}
    kinds = sorted(least, key=lambda kind: -least[kind])
    curve = [
        [one.operator, int(one.backward), one.bytes, [one.kinds.get(kind, 0.0) for kind in kinds]] for one in use.curve
    ]
    return {
        "peak": use.peak_bytes,
        "worst": use.worst,
        "kinds": kinds,
        "curve": curve,
        "held": use.held[:_LARGEST],
        "recomputed": [asdict(one) for one in use.recomputed],
    }


def _timeline(events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Events as ``[track, begin, seconds, name, operator, backward]``, the tracks and names as indices."""
    if not events:
        return None
    tracks = lanes(events)
    names: dict[str, int] = {}
    rows = [
        [
            tracks.index(e["lane"]),
            e["begin"],
            e["seconds"],
            names.setdefault(e["name"], len(names)),
            names.setdefault(str(e["operator"]), len(names)),
            int(e["part"] == "backward"),
        ]
        for e in events
        if e["seconds"] > 0
    ]
    return {"tracks": tracks, "names": list(names), "events": rows}


def encode(contents: Mapping[str, Any]) -> str:
    """JSON that is safe in a page: no text in it can end the script element."""
    return json.dumps(contents, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
