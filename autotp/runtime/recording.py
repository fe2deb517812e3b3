"""Measured events: when each node of the scheduled graphs begins and ends on this rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import fx

from autotp.runtime.compiled import Compiled, Runner
from autotp.runtime.durations import lane_of
from autotp.runtime.interpreter import Hook, Interpreter
from autotp.runtime.strides import Arranged, as_traced
from passes.graph import note_of
from passes.overlap.launch import called, launch, wait
from passes.overlap.primitives import axes_of

__all__ = ["Event", "event_of", "recorded"]


class Event(dict[str, Any]):
    """The event of a node: name, operator, part (``forward`` or ``backward``), lane, begin, and seconds that it takes."""


def event_of(node: fx.Node, part: str, lane: str, begin: float, seconds: float) -> Event:
    """The event of a node, which begins at ``begin``, in seconds, and takes ``seconds``."""
    return Event(name=node.name, operator=called(node), part=part, lane=lane, begin=begin, seconds=seconds)


@contextmanager
def recorded(compiled: Compiled, events: list[Event]) -> Iterator[Compiled]:
    """Yields the graphs with recording: each node that runs on this rank adds an event to ``events``.

    Computation is timed by the host's call, which on a CPU is its execution. A collective lasts from its launch until its
    last message has arrived.
    """

    def without(missing: frozenset[int]) -> Runner:
        return _timed(compiled.without(missing), "backward", events)

    forward, backward = _timed(compiled.forward, "forward", events), _timed(compiled.backward, "backward", events)
    yield replace(compiled, forward=forward, backward=backward, without=without)


def _timed(runner: Runner, part: str, events: list[Event]) -> Runner:
    """Returns a runner that executes a scheduled graph node by node, and records their times."""
    assert isinstance(runner, Arranged)
    module = runner.module

    def run(inputs: list[Any]) -> Sequence[Any]:
        return Interpreter(module, _noting(part, events)).boxed_run(inputs)

    return run


def _noting(part: str, events: list[Event]) -> Hook:
    def note(node: fx.Node, run: Callable[[], Any]) -> Any:
        begin = time.time()
        result = as_traced(node, run())
        end = time.time()
        if node.op in ("call_function", "call_module"):
            if node.target is launch:
                _watch(node, part, result, begin, events)
            event = event_of(node, part, "compute", begin, end - begin)
            events.append(Event(event, waiting=node.target is wait))
        return result

    return note


def _watch(node: fx.Node, part: str, launched: Any, begin: float, events: list[Event]) -> None:
    """Adds the event of a collective, and sets its duration when the collective is done."""
    traced: Any = note_of(node).collective
    event = event_of(node, part, lane_of(axes_of(traced.target, traced.args)), begin, 0.0)
    events.append(event)

    def done(_: Any = None) -> None:
        event["seconds"] = time.time() - begin

    launched.pending.whenever_done(done)
