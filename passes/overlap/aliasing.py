"""Alias analysis: in which other node's memory a node's result lies."""

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
#: Operators whose results may alias their operand although their schemas do not say so.
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
#: Primitives that return their operand itself, most of them if there is nothing to do.
_PRIMITIVES = frozenset(
    getattr(primitives, name) for name in ("crop", "pad", "mask", "laid_out", "in_one_format", "within", "put")
)


@functools.cache
def viewing(target: Any) -> bool:
    """Whether an operator's schema says that a result aliases an operand."""
    return isinstance(target, OpOverload) and any(r.alias_info is not None for r in schema(target).returns)


def source_of(node: fx.Node) -> fx.Node | None:
    """The operand that a node's result may alias; for an input of a backward graph, the input in whose memory it lies.

    None if the result has its own memory.
    """
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
    if node.target is operator.getitem and node.args[0].op == "call_module":  # type: ignore[union-attr]
        return None  # results of regions are not views; see `passes.overlap.outline`
    # operators in _SHARING copy only if they must, or alias by contract
    if node.target is operator.getitem or viewing(node.target) or node.target in _SHARING:
        return next(iter(node.all_input_nodes), None)  # a view of a constant has no operand
    return None


def held(nodes: list[fx.Node]) -> dict[fx.Node, tuple[float, fx.Node | None]]:
    """The bytes that each of the nodes' values holds if all are kept, and the earlier node in whose memory it lies, if any.

    Of several values in one memory, only the first holds bytes; a value in the memory of a placeholder holds none.
    """
    seen: dict[fx.Node, fx.Node] = {}
    found: dict[fx.Node, tuple[float, fx.Node | None]] = {}
    for node in nodes:
        root = node
        while (source := source_of(root)) is not None:
            if not isinstance(source.meta.get("val"), Tensor) and source_of(source) is None:
                break  # each of several results that are not views has its own memory
            root = source
        value: Any = root.meta.get("val")
        own = isinstance(value, Tensor) and root.op != "placeholder" and root not in seen
        found[node] = float(value.nbytes) if own else 0.0, seen.get(root)
        seen.setdefault(root, node)
    return found
