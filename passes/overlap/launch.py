"""Turns a traced graph into one that can run: collectives become launches and waits, other primitives calls of the world.

Functions that take a ``world`` accept one tensor (this process's part) or ``Parts`` (those of all devices of the mesh).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.graph import annotate, note_of
from passes.layouts.reshard import Step
from passes.overlap import primitives
from passes.overlap.primitives import COLLECTIVE_OF
from passes.rules.table import name_of
from passes.world.ops import Parts, hosted, part_of
from passes.world.pending import Pending
from passes.world.world import LOCAL, Salt, World

__all__ = ["called", "draw", "launch", "launches", "local", "offset", "wait"]


class _Launched:
    """A collective in progress, and whether its results are ``Parts``."""

    def __init__(self, pending: Pending, several: bool) -> None:
        self.pending, self.several = pending, several


@hosted
def launch(world: World, kind: str, value: Any, *args: Any, at: str = "") -> _Launched:
    """Launches a collective, and returns without waiting for it; see `wait`.

    Args:
        world: whose primitive is called.
        kind: the name of one of ``World``'s primitives.
        value: the primitive's tensor, or ``Parts``.
        args: the primitive's further arguments.
        at: the operator for which the collective runs, as messages name it.
    """
    world.whereabouts.at = at
    several = isinstance(value, Parts)
    given = [tuple(a) if isinstance(a, list) else a for a in args]
    return _Launched(getattr(world, kind)(list(value) if several else [value], *given), several)


@hosted
def wait(launched: _Launched) -> Any:
    """Waits for a collective, and returns its result."""
    results = launched.pending.wait()
    return Parts(results) if launched.several else results[0]


@hosted
def local(world: World, name: str, value: Any, *args: Any) -> Any:
    """Runs the primitive called ``name`` (see `passes.overlap.primitives`) on each device, without communication."""
    function = _LOCAL[name]
    if isinstance(value, Parts):
        return Parts(function(world, part, i, *part_of(args, i)) for i, part in enumerate(value))
    return function(world, value, 0, *args)


def _value_only(function: Callable[..., Any], world: World, value: Any, index: int, *args: Any) -> Any:
    return function(value, *args)


_LOCAL: Mapping[str, Any] = {
    "own": lambda world, x, i, dim, blocks, axis, *_: world.own(x, Step("slice", (axis,), dim=dim, blocks=blocks), i),
    "mask": lambda world, x, i, axes: world.masked(x, axes, i).contiguous(),
    "laid_out": lambda world, x, i, order: x.contiguous(memory_format=order),
    **{name: functools.partial(_value_only, function) for name, function in LOCAL.items()},
    "pad": lambda world, x, i, dim, length: LOCAL["pad"](x, dim, length).contiguous(),
}


@hosted
def offset(world: World, size: int, axes: tuple[int, ...], like: Any) -> Any:
    """Implements `passes.overlap.primitives.offset`; returns a tensor without dims."""
    near = like[0] if isinstance(like, Parts) else like
    starts = [torch.full((), start, dtype=torch.int64, device=near.device) for start in world.offset(size, axes)]
    return Parts(starts) if isinstance(like, Parts) else starts[0]


@hosted
def draw(world: World, seed: Any, salt: Salt, axes: tuple[int, ...], like: Any, method: str, by: Sequence[float]) -> Any:
    """Implements `passes.overlap.primitives.draw`, with the same generators as ``passes.world.ops.seeded``."""
    parts = like if isinstance(like, Parts) else [like]
    results = [world.draw(seed, salt, axes, i, part, method, *by) for i, part in enumerate(parts)]
    return Parts(results) if isinstance(like, Parts) else results[0]


_NAMES = {getattr(primitives, name): name for name in _LOCAL}


def launches(graph: fx.Graph) -> fx.Graph:
    """A copy of a traced graph with a launch and a wait for every collective; it reads the attribute ``world``."""
    result = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    world: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = result.placeholder(str(node.target))
            values[node].meta = dict(node.meta)
            continue
        if world is None and node.op != "output":
            world = result.get_attr("world")
        args: Any = fx.node.map_arg(node.args, lambda n: values[n])
        target: Any = node.target
        if target in COLLECTIVE_OF:
            rest = args[1:2] if target is primitives.all_gather else args[1:]
            begun = result.call_function(launch, (world, COLLECTIVE_OF[target], args[0], *rest), {"at": note_of(node).at})
            annotate(begun, collective=node)
            values[node] = result.call_function(wait, (begun,))
        elif target in _NAMES:
            values[node] = result.call_function(local, (world, _NAMES[target], *args))
        elif target is primitives.offset:
            values[node] = result.call_function(offset, (world, *args))
        elif target is primitives.draw:
            values[node] = result.call_function(draw, (world, *args))
        else:
            values[node] = result.node_copy(node, lambda n: values[n])
        values[node].meta = dict(node.meta)
        annotate(values[node], traced=node)
    return result


def called(node: fx.Node) -> str:
    """The name of what a node of a scheduled graph runs: an operator, collective, primitive or function of this module."""
    if node.target is launch:
        return COLLECTIVE_OF[note_of(node).collective.target]  # type: ignore[union-attr]
    return str(node.args[1]) if node.target is local else name_of(node).removeprefix(f"{__name__}.")
