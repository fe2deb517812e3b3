"""What a node depends on, and what depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from torch import fx

__all__ = ["above", "below"]


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
