"""Schedules as traces: predicted, and measured on every rank, in one file for Perfetto or chrome://tracing.

A process of the trace is a rank, or the prediction; its first track is computing, and each group of devices that
communicates has a track of its own. The format is Chrome's trace event format, which Perfetto reads.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx

from autotp.overlapped import Compiled
from passes.launches import launch, wait
from passes.primitives import axes_of
from passes.schedule import Slot

__all__ = ["Event", "events_of", "lanes", "predicted_events", "recorded", "save_trace"]

_MICRO = 1e6


class Event(dict[str, Any]):
    """One complete event: name, category, lane, begin and seconds."""


def predicted_events(slots: tuple[Sequence[Slot], Sequence[Slot]]) -> list[Event]:
    """Events of a schedule: the backward pass begins where the forward pass ends."""
    found, start = [], 0.0
    for half, part in zip(slots, ("forward", "backward"), strict=True):
        for slot in half:
            if slot.end > slot.begin or slot.node.target is launch:
                found.append(_event(slot.node, part, slot.lane, start + slot.begin, slot.end - slot.begin))
        start += max((slot.end for slot in half), default=0.0)
    return found


def _event(node: fx.Node, part: str, lane: str, begin: float, seconds: float) -> Event:
    return Event(name=node.name, operator=str(node.target), part=part, lane=lane, begin=begin, seconds=seconds)


def _lane(node: fx.Node) -> str:
    traced = node.meta["collective"]
    return "axes " + ",".join(map(str, axes_of(traced.target, traced.args)))


@contextmanager
def recorded(compiled: Compiled) -> Iterator[tuple[Compiled, list[Event]]]:
    """Graphs that note when each node begins and ends on this rank, and the list that they write to.

    Computing is timed where it is called, which on a processor is where it runs. A collective lasts from its launch to the
    moment at which its last message has arrived.
    """
    events: list[Event] = []
    forward, backward = compiled.forward, compiled.backward
    assert isinstance(forward, fx.GraphModule)
    assert isinstance(backward, fx.GraphModule)
    yield (
        replace(compiled, forward=_Timed(forward, "forward", events), backward=_Timed(backward, "backward", events)),
        events,
    )


class _Timed:
    """Runs a scheduled graph node by node, noting times."""

    def __init__(self, module: fx.GraphModule, part: str, events: list[Event]) -> None:
        self.module, self.part, self.events = module, part, events

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        given = list(inputs)
        inputs.clear()
        return _Interpreter(self).run(*given, enable_io_processing=False)


class _Interpreter(fx.Interpreter):
    def __init__(self, timed: _Timed) -> None:
        super().__init__(timed.module)
        self.timed = timed

    def run_node(self, n: fx.Node) -> Any:
        """One node, with a note of when."""
        begin = time.time()
        result = super().run_node(n)
        end = time.time()
        if n.op == "call_function":
            if n.target is launch:
                self._watch(n, result, begin)
            name = "waiting" if n.target is wait else "compute"
            event = _event(n, self.timed.part, "compute", begin, end - begin)
            self.timed.events.append(Event(event, waiting=name == "waiting"))
        return result

    def _watch(self, node: fx.Node, launched: Any, begin: float) -> None:
        event = _event(node, self.timed.part, _lane(node), begin, 0.0)
        self.timed.events.append(event)

        def done(_: Any = None) -> None:
            event["seconds"] = time.time() - begin

        launched.pending.whenever_done(done)


def lanes(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tracks of events, computing first."""
    return ["compute", *sorted({str(e["lane"]) for e in events} - {"compute"})]


def events_of(label: str, number: int, events: Sequence[Mapping[str, Any]], origin: float) -> list[dict[str, Any]]:
    """Chrome's trace events of one process of the trace.

    Args:
        label: its name.
        number: its place among the processes.
        events: with ``begin`` and ``seconds``.
        origin: what ``begin`` is counted from.
    """
    tracks = lanes(events)
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": label}},
        {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}},
    ]
    found += [
        {"ph": "M", "name": "thread_name", "pid": number, "tid": i, "args": {"name": track}}
        for i, track in enumerate(tracks)
    ]
    found += [
        {
            "ph": "X",
            "name": "wait" if e.get("waiting") else e["name"],
            "cat": e["part"],
            "pid": number,
            "tid": tracks.index(e["lane"]),
            "ts": (e["begin"] - origin) * _MICRO,
            "dur": e["seconds"] * _MICRO,
            "args": {"operator": e["operator"], "node": e["name"]},
        }
        for e in events
    ]
    return found


def save_trace(path: str | os.PathLike, events: Sequence[Mapping[str, Any]]) -> None:
    """Writes trace events as JSON; the file appears whole or not at all."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent or None, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": list(events)}, file)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
