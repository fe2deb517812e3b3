"""Convolutions on channels-last tensors, which is how their fast kernels read and write.

CPU libraries and tensor cores convert tensors of any other format before and after every convolution. Once a convolution is
given its input channels-last, its result is so too, and with it what norms, activations and sums make of it: between two
convolutions nothing is converted at all. Only the order of the elements in memory changes.

What travels between devices is converted before and again when it has arrived. Where most convolutions have to do with such
a tensor, as where their channels are sharded, nothing would be won, and all stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph import note_of
from passes.layouts.reshard import COMMUNICATING, Step
from passes.overlap import primitives
from passes.rules.table import rule_of
from passes.world import ops

__all__ = ["channels_last", "laid_out", "quicker", "worthwhile"]

_aten = torch.ops.aten
#: Orders of elements -> how many dims they are for, the batch among them.
_DIMS = {torch.channels_last: 4, torch.channels_last_3d: 5}
_IMAGES = tuple(_DIMS.values())
_CPU = (torch.float32, torch.bfloat16)
_TENSOR_CORES = (torch.float16, torch.bfloat16)
#: So many convolutions are worth it for every image that travels.
_EACH = 2


def channels_last(module: fx.GraphModule, wanted: Callable[[fx.Node], bool]) -> fx.GraphModule:
    """The same graph, the inputs of some convolutions laid out with the channels last; outputs are contiguous.

    Args:
        module: see ``passes.sharding.shard.shard``; it stays as it is.
        wanted: whether a convolution's input is to be.
    """
    found = [node for node in module.graph.nodes if _order(node) is not None and wanted(node)]
    if not found or any(node.target is _aten.as_strided.default for node in module.graph.nodes):
        return module
    # not `aten.contiguous`, which is traced only where a device's part is not laid out so: one channel alone always is
    result = fx.GraphModule(module, copy.deepcopy(module.graph), class_name=module._get_name())
    graph = result.graph

    def in_order(node: Any, order: torch.memory_format = torch.contiguous_format) -> fx.Node:
        return graph.call_function(laid_out, (node, order))

    for node in graph.nodes:
        order = _order(node)
        if order is not None and wanted(node):
            with graph.inserting_before(node):
                node.update_arg(0, in_order(node.args[0], order))
        elif node.target is _aten.view.default:  # which asks for elements in order
            node.target = _aten.reshape.default
        elif node.op == "output":
            leaves = zip(node.args[0], note_of(node).values, strict=True)
            with graph.inserting_before(node):
                node.args = (tuple(in_order(leaf) if isinstance(v, Tensor) else leaf for leaf, v in leaves),)
    result.recompile()
    return result


def worthwhile(module: fx.GraphModule) -> bool:
    """Whether a graph has so many convolutions for each image, or its gradient, that goes from device to device."""
    resting = {node.name for node in module.graph.nodes if node.op == "placeholder"}
    real = len(module.world.mesh_shape)  # type: ignore[union-attr, arg-type]

    def travels(node: fx.Node) -> bool:
        value = node.meta.get("val")  # what operators send inside themselves has none, nor a name
        if node.target not in (ops.reshard, ops.reshard_chunks) or value is None or value.dim() not in _IMAGES:
            return False
        moving = (Step(*step) for step in (*node.args[2], *node.args[3]))  # type: ignore[misc]
        return note_of(node).tensor not in resting and any(s.kind in COMMUNICATING and s.axes[0] < real for s in moving)

    convolutions = sum(_order(node) is not None for node in module.graph.nodes)
    return convolutions > _EACH * sum(map(travels, module.graph.nodes))


def quicker(device: torch.device, convolution: fx.Node) -> bool:
    """Whether a convolution is quicker so on a device: by a CPU's matrix library, and on tensor cores."""
    value, order = convolution.meta.get("val"), _order(convolution)
    if order is None or not isinstance(value, Tensor) or value.dim() != _DIMS[order]:
        return False
    if device.type == "cuda":
        return value.dtype in _TENSOR_CORES
    # what is on meta is planned for a CPU
    return value.dtype in _CPU and torch.backends.mkldnn.is_available()


def _order(node: fx.Node) -> torch.memory_format | None:
    """The order of the elements of what a convolution reads; None for other nodes."""
    rule = rule_of(node) if node.op == "call_function" else None
    return rule.channels_last if rule is not None else None


def laid_out(x: Tensor, order: torch.memory_format) -> Tensor:
    """A tensor with its elements in some order in memory: itself, if they are."""
    return _LaidOut.apply(x, order)


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: torch.memory_format) -> Tensor:  # type: ignore[override]
        return primitives.laid_out(x, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None
