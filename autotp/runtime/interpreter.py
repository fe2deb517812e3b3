"""Runs graphs node by node, with a hook around each node: for one device, or for all devices of a world in lockstep."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from passes.graph import note_of
from passes.world.ops import Parts, is_hosted, part_of
from passes.world.world import World

__all__ = ["Hook", "Interpreter", "Lockstep", "execute", "named"]

#: Wraps the execution of a node: (node, a function that runs it) -> its value.
Hook = Callable[[fx.Node, Callable[[], Any]], Any]


def named(node: fx.Node, run: Callable[[], Any]) -> Any:
    """A ``Hook`` that labels nodes for ``torch.profiler``: with their modules, collectives also with their operators."""
    note = note_of(node)
    place = note.at or str(node.kwargs.get("at", "")) or note.module
    with torch.profiler.record_function(place) if place else nullcontext():
        return run()


class Interpreter(fx.Interpreter):
    """Runs a graph once, and holds no value longer than the graph's own code does.

    Args:
        module: the graph module, with the tensors that the graph reads by name.
        hook: called for every node, except for placeholders in ``boxed_run``; None: nodes run directly.
    """

    def __init__(self, module: fx.GraphModule, hook: Hook | None = None) -> None:
        super().__init__(module)
        self.extra_traceback = False  # raise operators' errors unchanged, as the graph's own code does
        self.hook = hook

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node, through the hook if there is one, and returns its value."""
        run = super().run_node
        return run(n) if self.hook is None else self.hook(n, functools.partial(run, n))


class Lockstep(Interpreter):
    """Runs a graph once for all devices of a world: a value is ``Parts``, or one value for all devices.

    Args:
        module: see ``Interpreter``.
        world: hosts the devices.
        hook: see ``Interpreter``.
        each: if devices have different graphs: node of this graph -> the corresponding node of every device. These may
            differ only in arguments that are not nodes.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        world: World,
        hook: Hook | None = None,
        each: Mapping[fx.Node, Sequence[fx.Node]] | None = None,
    ) -> None:
        super().__init__(module, hook)
        self.world, self.each = world, each

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        """A node's arguments; ``Parts`` where they differ between devices."""
        if self.each is None:
            return super().fetch_args_kwargs_from_env(n)
        nodes = self.each[n]
        kwargs = {key: self._together([node.kwargs[key] for node in nodes]) for key in n.kwargs}
        return self._together([node.args for node in nodes]), kwargs

    def _together(self, each: Sequence[Any]) -> Any:
        first = each[0]
        if isinstance(first, fx.Node):
            return self.env[first]
        if isinstance(first, (list, tuple)) and len({len(own) for own in each}) == 1:
            return (list if isinstance(first, list) else tuple)(map(self._together, zip(*each, strict=True)))
        return first if all(own == first for own in each) else Parts(each)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The world, or a tensor that the graph reads by name, for each device."""
        if target == "world":
            return self.world
        return Parts([super().get_attr(target, args, kwargs)] * len(self.world.hosted))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function once for all devices if it takes ``Parts``, else once per device."""
        if is_hosted(target):
            return target(*args, **kwargs)
        if target is operator.getitem and not isinstance(args[0], Parts):
            return args[0][args[1]]
        return self._of_each(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls a method once per device."""
        return self._of_each(lambda own, *rest, **named: getattr(own, target)(*rest, **named), args, kwargs)

    def _of_each(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Parts:
        devices = range(len(self.world.hosted))
        return Parts(function(*part_of(args, i), **(part_of(kwargs, i) if kwargs else {})) for i in devices)


def execute(module: fx.GraphModule, world: World, inputs: Mapping[str, Parts], hook: Hook | None = None) -> Sequence[Any]:
    """Runs a sharded graph for every device.

    Args:
        module: the sharded graph.
        world: hosts all devices of the mesh.
        inputs: placeholder name -> every device's part.
        hook: see ``Interpreter``.

    Returns:
        The output tuple's leaves, ``Parts`` where they are tensors.
    """
    names = [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    return Lockstep(module, world, hook).run(*(inputs[name] for name in names))
