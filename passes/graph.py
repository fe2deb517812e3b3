"""What every pass uses of ``torch.fx``: new nodes with fake values, what depends on what, and graphs as logs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["above", "arguments_of", "below", "differentiable", "dump", "emit", "where"]


def emit(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A node that calls an operator, where the graph's insertion point is; its ``val`` is found from its operands'.

    Raises:
        ValueError: no operand has a fake tensor.
    """
    node = graph.call_function(target, args)
    value = fx.node.map_aggregate(args, lambda a: a.meta["val"] if isinstance(a, fx.Node) else a)
    with _mode_of(value):
        node.meta["val"] = target(*value)  # type: ignore[misc]
    return node


def _mode_of(values: Any) -> Any:
    for value in torch.utils._pytree.tree_leaves(values):
        if isinstance(value, Tensor) and hasattr(value, "fake_mode"):
            return value.fake_mode
    raise ValueError("no operand has a fake tensor")


def above(leaves: Iterable[Any], without: Set[Any] = frozenset()) -> set[fx.Node]:
    """The leaves that are nodes, and the nodes that they depend on.

    Args:
        leaves: of a graph.
        without: targets of nodes that are left out, with what only they depend on.
    """
    found: set[fx.Node] = set()
    pending = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in found and node.target not in without:
            found.add(node)
            pending += node.all_input_nodes
    return found


def below(nodes: Iterable[fx.Node], sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The sources and, of the nodes, which are in the graph's order, those that depend on one; not the graph's output."""
    found = set(sources)
    for node in nodes:
        if node.op != "output" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def differentiable(value: Any) -> bool:
    """Whether a value is a tensor of floating-point or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def where(node: fx.Node) -> str:
    """A node's place for messages: its name, its module and the line of the model that made it."""
    place = f"node '{node.name}'"
    if node.meta.get("module"):
        place += f" in module '{node.meta['module']}'"
    if node.meta.get("source"):
        place += f" ({node.meta['source']})"
    return place


def arguments_of(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``node.target`` by their names in its schema, defaults filled in."""
    named: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(args):
            named[argument.name] = args[position]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value if argument.has_default_value() else None
    return named


_log = logging.getLogger("autotp.passes")


def dump(stage: str, graph: fx.Graph) -> None:
    """Logs a graph as Python code, with what was done last; costs nothing while nobody listens."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s: %d nodes\n%s", stage, len(graph.nodes), graph.python_code("self").src)
