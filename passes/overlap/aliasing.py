"""Whose memory a node's result lies in."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph import note_of
from passes.overlap import primitives
from passes.overlap.launch import local
from passes.torch_internals import OpOverload, schema

__all__ = ["held", "source_of", "viewing"]

_aten = torch.ops.aten
#: Operators whose results may share their operand's memory, though their schemas do not say so.
_SHARING = frozenset(
    {
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.contiguous.default,
        _aten.unsafe_split.Tensor,
        _aten.unsafe_split_with_sizes.default,
        _aten.unsafe_chunk.default,
    }
)
#: Primitives that give what they are given, where nothing is to be done.
_PRIMITIVES = frozenset(
    {primitives.crop, primitives.pad, primitives.mask, primitives.laid_out, primitives.in_one_format, primitives.within}
)


@functools.cache
def viewing(target: Any) -> bool:
    """Whether an operator's schema says that a result lies in an operand's memory."""
    return isinstance(target, OpOverload) and any(r.alias_info is not None for r in schema(target).returns)


def source_of(node: fx.Node) -> fx.Node | None:
    """The operand in whose memory a node's result may lie; of an input of a backward graph, the input."""
    if node.op == "placeholder" and (name := note_of(node).within):
        return next((each for each in node.graph.find_nodes(op="placeholder") if each.name == name), None)
    if node.op != "call_function":
        return None
    if node.target is local:
        return node.args[2]  # type: ignore[return-value]
    if node.target is _aten.copy.default:
        return node.args[1]  # type: ignore[return-value]
    if node.target in _PRIMITIVES:
        return node.args[0]  # type: ignore[return-value]
    # those in _SHARING copy only where they must, or share by contract
    if node.target is operator.getitem and node.args[0].op == "call_module":  # type: ignore[union-attr]
        return None  # see `passes.overlap.outline`
    if node.target is operator.getitem or viewing(node.target) or node.target in _SHARING:
        return next(iter(node.all_input_nodes), None)  # a view of a constant has none
    return None


def held(nodes: list[fx.Node]) -> dict[fx.Node, tuple[float, fx.Node | None]]:
    """Bytes of memory that values hold which are kept together; of those in one memory, the first holds all, and the others
    lie within it.
    """
    seen: dict[fx.Node, fx.Node] = {}
    found: dict[fx.Node, tuple[float, fx.Node | None]] = {}
    for node in nodes:
        root = node
        while (source := source_of(root)) is not None:
            if not isinstance(source.meta.get("val"), Tensor) and source_of(source) is None:
                break  # of several results that are no views, each has a memory of its own
            root = source
        value: Any = root.meta.get("val")
        own = isinstance(value, Tensor) and root.op != "placeholder" and root not in seen
        found[node] = float(value.nbytes) if own else 0.0, seen.get(root)
        seen.setdefault(root, node)
    return found
