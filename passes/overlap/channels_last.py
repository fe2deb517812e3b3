"""Converts inputs of convolutions to the channels-last memory format, which their fast kernels read and write.

CPU libraries and tensor cores convert tensors of any other format before and after every convolution. If the input of a
convolution is channels-last, so are its result and the results of norms, activations and sums that read it: nothing is
converted between two convolutions. Only the order of the elements in memory changes.

Tensors that are communicated are converted before and after the collective. If most convolutions read or write such
tensors, for example because their channels are sharded, the conversion does not pay off, and the graph is left as it is.
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
#: Memory format -> the number of dims of its tensors, including the batch.
_DIMS = {torch.channels_last: 4, torch.channels_last_3d: 5}
_IMAGES = tuple(_DIMS.values())
_CPU = (torch.float32, torch.bfloat16)
_TENSOR_CORES = (torch.float16, torch.bfloat16)
#: The conversion pays off if there are more than this many convolutions for each image that is communicated.
_EACH = 2


def channels_last(module: fx.GraphModule, wanted: Callable[[fx.Node], bool]) -> fx.GraphModule:
    """A copy of a graph in which the inputs of some convolutions are channels-last; outputs are contiguous.

    Args:
        module: see ``passes.sharding.shard.shard``; it is not changed, and is returned if nothing is converted.
        wanted: whether to convert the input of a convolution.
    """
    found = [node for node in module.graph.nodes if _order(node) is not None and wanted(node)]
    if not found or any(node.target is _aten.as_strided.default for node in module.graph.nodes):
        return module
    # Not `aten.contiguous`: it is traced only if a device's part is not in the format yet, and one channel alone always is.
    result = fx.GraphModule(module, copy.deepcopy(module.graph), class_name=module._get_name())
    graph = result.graph

    def in_order(node: Any, order: torch.memory_format = torch.contiguous_format) -> fx.Node:
        return graph.call_function(laid_out, (node, order))

    for node in graph.nodes:
        order = _order(node)
        if order is not None and wanted(node):
            with graph.inserting_before(node):
                node.update_arg(0, in_order(node.args[0], order))
        elif node.target is _aten.view.default:  # it requires a contiguous order
            node.target = _aten.reshape.default
        elif node.op == "output":
            leaves = zip(node.args[0], note_of(node).values, strict=True)
            with graph.inserting_before(node):
                node.args = (tuple(in_order(leaf) if isinstance(v, Tensor) else leaf for leaf, v in leaves),)
    result.recompile()
    return result


def worthwhile(module: fx.GraphModule) -> bool:
    """Whether a graph has enough convolutions for each image, or gradient of one, that is communicated."""
    resting = {node.name for node in module.graph.nodes if node.op == "placeholder"}
    real = len(module.world.mesh_shape)  # type: ignore[union-attr, arg-type]

    def travels(node: fx.Node) -> bool:
        value = node.meta.get("val")  # reshards inside operators have no value, and no name
        if node.target not in (ops.reshard, ops.reshard_chunks) or value is None or value.dim() not in _IMAGES:
            return False
        moving = (Step(*step) for step in (*node.args[2], *node.args[3]))  # type: ignore[misc]
        return note_of(node).tensor not in resting and any(s.kind in COMMUNICATING and s.axes[0] < real for s in moving)

    convolutions = sum(_order(node) is not None for node in module.graph.nodes)
    return convolutions > _EACH * sum(map(travels, module.graph.nodes))


def quicker(device: torch.device, convolution: fx.Node) -> bool:
    """Whether a convolution is faster channels-last on a device: on tensor cores, and with a CPU's matrix library."""
    value, order = convolution.meta.get("val"), _order(convolution)
    if order is None or not isinstance(value, Tensor) or value.dim() != _DIMS[order]:
        return False
    if device.type == "cuda":
        return value.dtype in _TENSOR_CORES
    # a module on the meta device is planned for a CPU
    return value.dtype in _CPU and torch.backends.mkldnn.is_available()


def _order(node: fx.Node) -> torch.memory_format | None:
    """The memory format in which a convolution reads its input fastest, if there is one; None for other nodes."""
    rule = rule_of(node) if node.op == "call_function" else None
    return rule.channels_last if rule is not None else None


def laid_out(x: Tensor, order: torch.memory_format) -> Tensor:
    """A tensor in a memory format; the tensor itself if it already is in that format."""
    return _LaidOut.apply(x, order)


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: torch.memory_format) -> Tensor:  # type: ignore[override]
        return primitives.laid_out(x, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None
