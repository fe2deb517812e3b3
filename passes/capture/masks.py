"""Attention masks that the model's own constants decide become what they say: causal, or nothing.

Under ``torch.export``, transformers writes every mask out, since it cannot look at one: an attention with a mask of its own
runs two to three times as long as one that a kernel knows to be causal, and saves the mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from passes.torch_internals import OpOverload, schema

__all__ = ["recognise_masks"]

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
#: Elements beyond which nobody looks, of what has to be computed: about as many bytes and nanoseconds.
_MOST = 2**30
#: Operators on every element that torch does not tag so.
_UNTAGGED = ("aten::__and__", "aten::__or__", "aten::where")


def recognise_masks(graph: fx.Graph) -> None:
    """Replaces masks in place; what computes a mask that nothing reads any more is left out."""
    constant: dict[fx.Node, set[fx.Node]] = {}  # a mask -> all that it is computed of
    said: dict[fx.Node, str] = {}
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        given: Any = (*node.args, *(None, 0.0, False)[len(node.args) - 3 :])
        q, k, v, mask, dropout, causal = given
        if not isinstance(mask, fx.Node) or causal or "is_causal" in node.kwargs:
            continue
        if mask not in said:
            constant[mask] = _constants(mask)
            said[mask] = _meaning(graph, mask, constant[mask]) if constant[mask] else ""
        if said[mask]:
            node.args = (q, k, v, None, dropout, said[mask] == "causal")
    behind = {node for mask, nodes in constant.items() if said[mask] for node in nodes}
    for node in reversed(graph.nodes):
        if node in behind and not node.users:
            graph.erase_node(node)


def _constants(mask: fx.Node) -> set[fx.Node]:
    """What a mask is computed of, itself included; nothing if it depends on an input or is not worth looking at."""
    needed, stack = {mask}, [mask]
    while stack:
        node = stack.pop()
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace != "aten" or schema(target).is_mutable:
            return set()
        if torch.Tag.nondeterministic_seeded in target.tags or not isinstance(node.meta.get("val"), Tensor):
            return set()
        fresh = set(node.all_input_nodes) - needed
        needed |= fresh
        stack += fresh
    return needed


def _meaning(graph: fx.Graph, mask: fx.Node, needed: set[fx.Node]) -> str:
    """``causal``, ``nothing`` where it hides nothing, or empty for any other mask."""
    rows, columns = mask.meta["val"].shape[-2:]
    if rows != columns:
        return ""
    values: dict[fx.Node, Any] = {}
    try:
        with torch.device("cpu"):
            for node in graph.nodes:
                if node in needed:
                    values[node] = _value(node, values)
    except (RuntimeError, _TooLarge):  # there is no such kernel on the CPU
        return ""
    found = _shrunk(values[mask], _repeated(values[mask], values[mask].dim()))
    if found.dtype != torch.bool:
        shown = found == 0
        if not (shown | (found <= torch.finfo(found.dtype).min)).all():
            return ""
        found = shown
    if found.all():
        return "nothing"
    return "causal" if (found == torch.ones(rows, columns, dtype=torch.bool, device="cpu").tril()).all() else ""


class _TooLarge(Exception):
    """A value takes too long to look at."""


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Tensor:
    """What an operator gives on the CPU, with stride 0 along the dims that repeat: sequences of a batch are all alike."""
    target: Any = node.target
    shape = node.meta["val"].shape
    args: Any
    kwargs: Any
    args, kwargs = (map_aggregate(each, lambda leaf: _real(leaf, values)) for each in (node.args, dict(node.kwargs)))
    repeated: set[int] = set()
    if torch.Tag.pointwise in target.tags or schema(target).name in _UNTAGGED:
        given = [values[n] for n in node.all_input_nodes]
        repeated = set.intersection(*(_repeated(value, len(shape)) for value in given)) if given else set()
        args, kwargs = (
            map_aggregate(each, lambda leaf: _shrunk(leaf, repeated) if isinstance(leaf, Tensor) else leaf)
            for each in (args, kwargs)
        )
    if not target.is_view and math.prod(n for d, n in enumerate(shape) if d - len(shape) not in repeated) > _MOST:
        raise _TooLarge
    made: Tensor = target(*args, **kwargs)
    if repeated or target.is_view:
        return made.expand(shape)
    for dim in range(made.dim()):
        first = made.narrow(dim, 0, min(1, made.shape[dim])).expand_as(made)
        if made.stride(dim) and torch.equal(first, made):
            made = first
    return _shrunk(made, _repeated(made, made.dim())).clone().expand(shape)  # what it was made in is as large as a batch


def _repeated(value: Tensor, rank: int) -> set[int]:
    """The dims, counted from the last, along which a value of some rank is the same everywhere."""
    own = range(-value.dim(), 0)
    return {d for d in range(-rank, 0) if d not in own or value.shape[d] == 1 or value.stride(d) == 0}


def _shrunk(value: Tensor, dims: set[int]) -> Tensor:
    """The first element along some dims, as many as there are."""
    for dim in dims.intersection(range(-value.dim(), 0)):
        value = value.narrow(dim, 0, min(1, value.shape[dim]))
    return value


def _real(leaf: Any, values: dict[fx.Node, Any]) -> Any:
    """An argument for a run on the CPU: the model may be on meta."""
    if isinstance(leaf, fx.Node):
        return values[leaf]
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
