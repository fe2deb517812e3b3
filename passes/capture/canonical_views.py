"""Replaces views by a few canonical operators, with concrete sizes and non-negative dims."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from passes.capture.builder import Builder, CaptureError, operator_name, outer_order
from passes.capture.view_writes import PERMUTES, RESHAPES, SPLITS, laid_as_inputs
from passes.graph import where

__all__ = ["VIEWS", "Arguments", "Handler", "reads_memory", "source_of"]

aten = torch.ops.aten

Arguments = dict[str, Any]
"""New arguments by their names in the operator's schema, in its order, with defaults filled in."""

Handler = Callable[[Builder, fx.Node, Arguments], Any]
"""Returns the new value of an old node, given its new arguments: a node, a list of nodes, or None to copy the node."""


def source_of(given: Arguments) -> Any:
    """An operator's first argument."""
    return next(iter(given.values()))


def _shape(node: Any) -> list[int]:
    return list(node.meta["val"].shape)


def _reshape(build: Builder, node: fx.Node, given: Arguments) -> Any:
    if node.target is aten.view.dtype:
        return None
    source, shape = source_of(given), _shape(node)
    if _shape(source) == shape:
        return source
    # Merge consecutive reshapes: the planner has fewer operators, and the rule sees the whole change.
    if source.target is aten.reshape.default:
        source = source.args[0]
        if _shape(source) == shape:
            return source
    return build.emit(aten.reshape.default, (source, shape), like=node)


def _permute(build: Builder, node: fx.Node, given: Arguments) -> Any:
    source = source_of(given)
    if node.meta["val"].is_complex() and operator_name(node.target) in ("aten::adjoint", "aten::mH", "aten::matrix_H"):
        return None
    rank = len(_shape(source))
    order = outer_order(node.target, rank, dict(list(given.items())[1:]))
    if order == list(range(rank)):
        return source
    return build.emit(aten.permute.default, (source, order), like=node)


def _expand(build: Builder, node: fx.Node, given: Arguments) -> Any:
    return _expanded(build, node, source_of(given), _shape(node))


def _expanded(build: Builder, node: fx.Node, source: Any, shape: list[int]) -> Any:
    return source if _shape(source) == shape else build.emit(aten.expand.default, (source, shape), like=node)


def _broadcast_tensors(build: Builder, node: fx.Node, given: Arguments) -> Any:
    return [_expanded(build, node, s, list(v.shape)) for s, v in zip(given["tensors"], node.meta["val"], strict=True)]


def _unsqueeze(build: Builder, node: fx.Node, given: Arguments) -> Any:
    return build.emit(aten.unsqueeze.default, (given["self"], given["dim"] % len(_shape(node))), like=node)


def _squeeze(build: Builder, node: fx.Node, given: Arguments) -> Any:
    shape = _shape(given["self"])
    dims = given.get("dim")
    chosen = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = sorted({d % len(shape) for d in chosen if shape[d] == 1}) if shape else []
    return build.emit(aten.squeeze.dims, (given["self"], gone), like=node) if gone else given["self"]


def _slice(build: Builder, node: fx.Node, given: Arguments) -> Any:
    source = given["self"]
    shape = _shape(source)
    if shape == _shape(node):
        return source
    dim = given["dim"] % len(shape)
    if operator_name(node.target) == "aten::narrow":
        start = given["start"]
        if isinstance(start, fx.Node):
            return None
        start %= shape[dim]
        return build.emit(aten.slice.Tensor, (source, dim, start, start + given["length"]), like=node)
    start, end, step = slice(given["start"], given["end"]).indices(shape[dim])[:2] + (given["step"],)
    return build.emit(aten.slice.Tensor, (source, dim, start, max(start, end), step), like=node)


def _select(build: Builder, node: fx.Node, given: Arguments) -> Any:
    shape = _shape(given["self"])
    dim = given["dim"] % len(shape)
    return build.emit(aten.select.int, (given["self"], dim, given["index"] % shape[dim]), like=node)


def _split(build: Builder, node: fx.Node, given: Arguments) -> Any:
    source = given["self"]
    if any(isinstance(v, fx.Node) for v in list(given.values())[1:]):
        return None
    dim = given["dim"] % len(_shape(source))
    sizes = [v.shape[dim] for v in node.meta["val"]]
    return [source] if len(sizes) == 1 else build.emit(aten.split_with_sizes.default, (source, sizes, dim), like=node)


def _unbind(build: Builder, node: fx.Node, given: Arguments) -> Any:
    shape = _shape(given["self"])
    dim = given["dim"] % len(shape)
    return [build.emit(aten.select.int, (given["self"], dim, i), like=node) for i in range(shape[dim])]


def _strided(build: Builder, node: fx.Node, given: Arguments) -> Any:
    # as_strided reads memory, not dims: its operand needs the strides that it had in the model.
    source, *rest = list(given.values())[: len(node.args)]
    read = node.all_input_nodes[0]
    old, new = read.meta["val"], source.meta["val"]
    dropped = operator_name(read.target) == "aten::contiguous"  # which copies if the strides are others
    if dropped or (old.stride() != new.stride() and old.is_contiguous()):
        source = build.emit(aten.clone.default, (source,), {"memory_format": torch.contiguous_format}, like=node)
    return build.emit(node.target, (source, *rest), {name: given[name] for name in node.kwargs}, like=node)


def reads_memory(graph: fx.Graph, inputs: Collection[str]) -> bool:
    """Whether an ``as_strided`` reads the memory of an input, or of a value whose strides may follow an input's.

    Raises:
        CaptureError: it may read memory beyond the input itself, which no rank receives.
    """
    found = False
    for node in graph.nodes:
        if operator_name(node.target) != "aten::as_strided":
            continue
        shown = read = node.all_input_nodes[0]
        while getattr(shown.target, "is_view", False) and operator_name(shown.target) != "aten::contiguous":
            shown = shown.all_input_nodes[0]
        plain = shown.meta["val"].is_contiguous() and len(node.args) + len(node.kwargs) == 3  # no storage_offset
        if shown.name in inputs and not plain:
            raise CaptureError(
                f"{where(node)}: as_strided reads the memory of input '{shown.name}', which is not contiguous, or from a "
                "storage_offset of its own: it may read what is not the input's; use contiguous() first"
            )
        found |= laid_as_inputs(read, inputs)
    return found


def _complex(build: Builder, node: fx.Node, given: Arguments) -> Any:
    # Built from both parts, with any strides: the view requires strides that a resharded tensor may not have.
    source = given["self"]
    last = len(_shape(source)) - 1
    parts = tuple(build.emit(aten.select.int, (source, last, i), like=node) for i in (0, 1))
    return build.emit(aten.complex.default, parts, like=node)


VIEWS: dict[str, Handler] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(PERMUTES, _permute),
    **dict.fromkeys(SPLITS, _split),
    **dict.fromkeys(("aten::expand", "aten::expand_as", "aten::broadcast_to"), _expand),
    **dict.fromkeys(("aten::slice", "aten::narrow"), _slice),
    "aten::as_strided": _strided,
    "aten::view_as_complex": _complex,
    "aten::broadcast_tensors": _broadcast_tensors,
    "aten::unsqueeze": _unsqueeze,
    "aten::squeeze": _squeeze,
    "aten::select": _select,
    "aten::unbind": _unbind,
}
"""Schema name of a view -> its handler."""
