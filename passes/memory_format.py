"""Convolutions on channels-last tensors, which is how their fast kernels read and write.

A processor's library and tensor cores lay other tensors out anew, before and after every convolution. Once one of them has
been given its input so, its result is laid out so too, and with it what norms, activations and sums make of it: between two
convolutions nothing is laid out at all. Only the order of the elements in memory changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from passes import primitives

__all__ = ["channels_last", "laid_out", "quicker"]

_aten = torch.ops.aten
#: Convolutions -> the order of the elements of what they read.
_FORMATS: dict[Any, torch.memory_format] = {
    _aten.conv2d.default: torch.channels_last,
    _aten.conv3d.default: torch.channels_last_3d,
}
_PROCESSORS = (torch.float32, torch.bfloat16)
_TENSOR_CORES = (torch.float16, torch.bfloat16)


def channels_last(module: fx.GraphModule, wanted: Callable[[fx.Node], bool]) -> fx.GraphModule:
    """The same graph, the inputs of some convolutions laid out with the channels last; outputs are contiguous.

    Args:
        module: a graph of ATen operators; it stays as it is.
        wanted: whether a convolution's input is to be.
    """
    found = [node for node in module.graph.nodes if node.target in _FORMATS and wanted(node)]
    if not found or any(node.target is _aten.as_strided.default for node in module.graph.nodes):
        return module
    # not `aten.contiguous`, which is traced only where a device's part is not laid out so: one channel alone always is
    result = fx.GraphModule(module, copy.deepcopy(module.graph), class_name=module._get_name())
    graph = result.graph
    for node in graph.nodes:
        if node.target in _FORMATS and wanted(node):
            with graph.inserting_before(node):
                node.update_arg(0, graph.call_function(laid_out, (node.args[0], _FORMATS[node.target])))
        elif node.target is _aten.view.default:  # which asks for elements in order
            node.target = _aten.reshape.default
        elif node.op == "output":
            leaves = zip(node.args[0], node.meta["values"], strict=True)
            with graph.inserting_before(node):
                node.args = (tuple(_in_order(graph, leaf) if isinstance(v, Tensor) else leaf for leaf, v in leaves),)
    result.recompile()
    return result


def quicker(device: torch.device, convolution: fx.Node) -> bool:
    """Whether a convolution is quicker so on a device: by a processor's matrix library, and on tensor cores."""
    value = convolution.meta.get("val")
    if not isinstance(value, Tensor):
        return False
    if device.type == "cuda":
        return value.dtype in _TENSOR_CORES
    # what is on meta is planned for a processor
    return value.dtype in _PROCESSORS and torch.backends.mkldnn.is_available()


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


def _in_order(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.call_function(laid_out, (node, torch.contiguous_format))
