"""Traces of schedules: predicted, and measured on every rank, in one file for Perfetto or chrome://tracing.

Each process of the trace is a rank, or the prediction. Its first track shows computation, and each group of devices that
communicates has a track of its own. The format is Chrome's trace event format, which Perfetto reads and in which a track
shows one event at a time. So a measured collective is drawn, like a predicted one, from its launch or, if that is later,
from the end of the group's previous collective.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autotp.errors import AutotpError
from autotp.plans.plan import Plan
from autotp.runtime.durations import overlap_of
from autotp.runtime.recording import Event, event_of
from autotp.runtime.rewrite import Rewritten, apply
from autotp.runtime.schedules import Agreement, NoOrder, overlapped
from costmodel.text.files import write_atomically
from passes.capture import Captured, capture
from passes.graph import cast_of
from passes.layouts.layout import local_shape
from passes.overlap import halves
from passes.overlap.launch import launch
from passes.overlap.schedule import Slot
from passes.sharding.shard import place_constants

__all__ = ["events_of", "lanes", "predicted", "predicted_events", "save_trace", "scheduled", "trainable"]

_MICRO = 1e6
#: Decimal places of microseconds: Perfetto counts whole nanoseconds.
_DIGITS = 3


def predicted_events(slots: tuple[Sequence[Slot], Sequence[Slot]]) -> list[Event]:
    """The events of a schedule's forward and backward slots; the backward pass begins where the forward pass ends."""
    found, start = [], 0.0
    for half, part in zip(slots, ("forward", "backward"), strict=True):
        for slot in half:
            if slot.end > slot.begin or slot.node.target is launch:
                found.append(event_of(slot.node, part, slot.lane, start + slot.begin, slot.end - slot.begin))
        start += max((slot.end for slot in half), default=0.0)
    return found


def predicted(
    model: nn.Module, plan: Plan, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[Event]:
    """The predicted events of a plan's schedule on its first device. Needs no devices, and the model may be on meta.

    Raises:
        PlanMismatchError: the plan is for another model or other inputs.
        AutotpError: the graph cannot be scheduled.
    """
    captured = capture(model, args, kwargs, plan.precision, plan.outputs, plan.observe)
    return predicted_events(scheduled(captured, plan, trainable(model)))


def trainable(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that require gradients."""
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def scheduled(captured: Captured, plan: Plan, parameters: Collection[str]) -> tuple[Sequence[Slot], Sequence[Slot]]:
    """The slots of the forward and of the backward graph of a plan's first device, with predicted times.

    Args:
        captured: the model that was planned, captured for the same inputs.
        plan: the plan.
        parameters: names of the parameters that require gradients.

    Raises:
        PlanMismatchError: the plan is for another model or other inputs.
        AutotpError: the graph cannot be scheduled.
    """
    rewritten = apply(captured, plan)
    place_constants(rewritten.graph_module.graph, torch.device("cpu"))
    trained = frozenset(n for n, fqn in captured.parameters.items() if fqn in parameters and plan.mode == "train")
    how = overlap_of(plan)
    # All shards of a dim are as long as the first one, except for the last ones.
    corners = itertools.product(*({0, ways - 1} for ways in plan.mesh_shape))
    places = [(0,) * len(plan.mesh_shape)] if rewritten.even else sorted(corners)
    graph = rewritten.graph_module
    try:
        found = overlapped(
            lambda: {at: halves(graph, plan.mesh_shape, at, _parts(rewritten, at), trained).choices() for at in places},
            how,
            Agreement(),
        )
    except NoOrder as error:
        raise AutotpError(f"the graph has no schedule: {error}") from error
    assert how.durations is not None
    return how.slots(found[places[0]])


def _parts(rewritten: Rewritten, at: tuple[int, ...]) -> dict[str, Tensor]:
    """The inputs of a device's graph by placeholder name, as tensors on ``meta``."""
    found = {}
    nodes = rewritten.captured.graph_module.graph.find_nodes(op="placeholder")
    for name, cast in ((node.name, cast_of(node)) for node in nodes):
        shape = tuple(rewritten.captured.placeholders[name].shape)
        local = local_shape(shape, rewritten.resting(name), rewritten.sharding.mesh, at)
        found[name] = torch.empty(local, dtype=cast.rests, device="meta")
    return found


def lanes(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the tracks of events, computation first."""
    return ["compute", *sorted({str(e["lane"]) for e in events} - {"compute"})]


def events_of(label: str, number: int, events: Sequence[Mapping[str, Any]], origin: float) -> list[dict[str, Any]]:
    """Chrome's trace events of one process of the trace.

    Args:
        label: the name of the process.
        number: its position among the processes.
        events: with ``begin`` and ``seconds``. Those of one track may overlap: a collective then begins when the previous
            one ends, and its ``queued_us`` states how long it waited.
        origin: the ``begin`` at which the trace starts, in seconds.
    """
    tracks = lanes(events)
    free = _free_from(events)
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": label}},
        {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}},
    ]
    found += [
        {"ph": "M", "name": "thread_name", "pid": number, "tid": i, "args": {"name": track}}
        for i, track in enumerate(tracks)
    ]
    for e, free_from in zip(events, free, strict=True):
        launched, begin, end = (
            round((moment - origin) * _MICRO, _DIGITS)
            for moment in (e["begin"], max(e["begin"], free_from), e["begin"] + e["seconds"])
        )
        queued = {} if e["lane"] == "compute" else {"queued_us": round(begin - launched, _DIGITS)}
        found.append(
            {
                "ph": "X",
                "name": "wait" if e.get("waiting") else e["name"],
                "cat": e["part"],
                "pid": number,
                "tid": tracks.index(e["lane"]),
                "ts": begin,
                "dur": round(end - begin, _DIGITS),
                "args": {"operator": e["operator"], "node": e["name"], **queued},
            }
        )
    return found


def _free_from(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """For each event, the end of the event of its track that ended before it; 0 if there is none."""
    ends: dict[str, float] = {}
    found = [0.0] * len(events)
    for place in sorted(range(len(events)), key=lambda i: events[i]["begin"] + events[i]["seconds"]):
        lane, end = str(events[place]["lane"]), events[place]["begin"] + events[place]["seconds"]
        found[place] = ends.get(lane, 0.0)
        ends[lane] = end
    return found


def save_trace(path: str | os.PathLike, events: Sequence[Mapping[str, Any]]) -> None:
    """Writes trace events as a JSON file, atomically."""
    write_atomically(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)}))
