"""Measured events: when each node of the scheduled graphs begins and ends on this rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import fx

from autotp.runtime.compiled import Compiled
from autotp.runtime.durations import lane_of
from autotp.runtime.strides import Arranged, Boxed, as_traced
from passes.graph import note_of
from passes.overlap.launch import called, launch, wait
from passes.overlap.primitives import axes_of

__all__ = ["Event", "event_of", "recorded"]


class Event(dict[str, Any]):
    """One complete event: name, category, lane, begin and seconds."""


def event_of(node: fx.Node, part: str, lane: str, begin: float, seconds: float) -> Event:
    """The event of a node."""
    return Event(name=node.name, operator=called(node), part=part, lane=lane, begin=begin, seconds=seconds)


@contextmanager
def recorded(compiled: Compiled, events: list[Event]) -> Iterator[Compiled]:
    """Graphs that note when each node begins and ends on this rank.

    Computing is timed where it is called, which on a processor is where it runs. A collective lasts from its launch to the
    moment at which its last message has arrived.
    """
    forward, backward = compiled.forward, compiled.backward
    assert isinstance(forward, Arranged)
    assert isinstance(backward, Arranged)

    def without(missing: frozenset[int]) -> _Timed:
        some = compiled.without(missing)
        assert isinstance(some, Arranged)
        return _Timed(some.module, "backward", events)

    both = _Timed(forward.module, "forward", events), _Timed(backward.module, "backward", events)
    yield replace(compiled, forward=both[0], backward=both[1], without=without)


class _Timed:
    """Runs a scheduled graph node by node, noting times."""

    def __init__(self, module: fx.GraphModule, part: str, events: list[Event]) -> None:
        self.module, self.part, self.events = module, part, events

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return _Interpreter(self).run_boxed(inputs)


class _Interpreter(Boxed):
    def __init__(self, timed: _Timed) -> None:
        super().__init__(timed.module)
        self.timed = timed

    def run_node(self, n: fx.Node) -> Any:
        """One node, with a note of when."""
        begin = time.time()
        result = as_traced(n, super().run_node(n))
        end = time.time()
        if n.op == "call_function":
            if n.target is launch:
                self._watch(n, result, begin)
            name = "waiting" if n.target is wait else "compute"
            event = event_of(n, self.timed.part, "compute", begin, end - begin)
            self.timed.events.append(Event(event, waiting=name == "waiting"))
        return result

    def _watch(self, node: fx.Node, launched: Any, begin: float) -> None:
        traced: Any = note_of(node).collective
        event = event_of(node, self.timed.part, lane_of(axes_of(traced.target, traced.args)), begin, 0.0)
        self.timed.events.append(event)

        def done(_: Any = None) -> None:
            event["seconds"] = time.time() - begin

        launched.pending.whenever_done(done)
