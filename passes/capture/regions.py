"""Inlines regions that ``torch.export`` makes of ``torch.no_grad`` and ``torch.autocast`` blocks.

A region without gradients is replaced by its nodes; between a floating-point result of these and each use of it outside,
an ``aten.detach`` is inserted, so that gradients end exactly where the block ended them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from passes.capture.builder import Builder, CaptureError, is_symbolic
from passes.capture.functional import is_write
from passes.capture.masks import Constants
from passes.graph import annotate, differentiable, note_of, where
from passes.torch_internals import (
    FakeTensorMode,
    HigherOrderOperator,
    dual_numbers,
    tree_leaves,
    tree_map,
)

__all__ = ["inline_regions"]

aten = torch.ops.aten
_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_regions(
    module: fx.GraphModule,
    mode: FakeTensorMode,
    placeholders: Mapping[str, Any],
    names: Mapping[str, Any],
    constants: MutableMapping[str, Tensor],
    inputs: Collection[str],
) -> fx.Graph:
    """Flattens an exported module to one graph of ``call_function`` nodes.

    Args:
        module: an exported graph module, with its regions as submodules.
        mode: the fake mode of its values.
        placeholders: the new graph's placeholders in order, name -> fake value.
        names: each old placeholder's name -> the new one's name, or ``(value,)`` for a constant argument.
        constants: placeholder name -> its tensor; computed constants that determine sizes are added.
        inputs: names of the placeholders that follow the constants.

    Returns:
        The graph; its nodes' notes say whether gradients were enabled where the node ran (``Note.grad``).

    Raises:
        CaptureError: a control-flow operator, or an autocast region that changes dtypes.
    """
    builder = Builder(mode)
    inliner = _Inliner(builder, Constants(builder, constants, inputs))
    new = {name: inliner.builder.placeholder(name, value) for name, value in placeholders.items()}
    environment = {
        node: names[node.name][0] if isinstance(names[node.name], tuple) else new[names[node.name]]
        for node in module.graph.nodes
        if node.op == "placeholder"
    }
    output = inliner.walk(module, environment, True)
    output = inliner.outside(output, True)
    return inliner.builder.finish(output, functional=False)


class _Inliner:
    def __init__(self, builder: Builder, constants: Constants) -> None:
        self.builder, self.constants = builder, constants
        self.detached: dict[fx.Node, fx.Node] = {}

    def outside(self, value: Any, grad: bool) -> Any:
        """``value`` for use where ``grad`` says whether gradients are enabled: results of regions without are detached."""

        def cross(node: fx.Node) -> fx.Node:
            if not grad or note_of(node).grad or is_write(node) or not differentiable(node.meta.get("val")):
                return node
            if node not in self.detached:
                self.detached[node] = self.builder.emit(aten.detach.default, (node,), like=node)
                annotate(self.detached[node], grad=True)
            return self.detached[node]

        return map_arg(value, cross)

    def walk(self, module: fx.GraphModule, environment: dict[fx.Node, Any], grad: bool) -> Any:
        """Copies the nodes of one (sub)module, and returns its output."""

        def new(value: Any) -> Any:
            return tree_map(lambda v: environment[v] if isinstance(v, fx.Node) else v, _plain(value))

        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return new(node.args[0])
            if node.target in dual_numbers:
                raise CaptureError(f"{where(node)}: torch.autograd.forward_ad has no graph; call torch.func.jvp")
            if node.op == "get_attr":
                environment[node] = _attribute(module, node)
                continue
            args, kwargs = new(node.args), new(node.kwargs)
            if node.target is _GRAD:
                environment[node] = self.region(args[1], args[2:], bool(args[0]))
            elif node.target is _AUTOCAST:
                environment[node] = self.region(args[4], args[5:], grad)
                if args[2]:
                    _neutral(args[4], node, self.builder, args[0])
            elif isinstance(node.target, HigherOrderOperator):
                raise CaptureError(
                    f"{where(node)}: control flow ({node.target}) cannot be planned; write the loop or branch in Python"
                )
            elif isinstance(args[0] if args else None, (list, tuple)) and _is_getitem(node):
                environment[node] = args[0][args[1]]
            elif not _has_tensor(node):
                environment[node] = node.meta["val"]
            else:
                call = self.constants.decided if is_symbolic(node.meta.get("val")) else self.builder.copy
                environment[node] = call(node, self.outside(args, grad), self.outside(kwargs, grad))
                if isinstance(environment[node], fx.Node):
                    annotate(environment[node], grad=grad)
        raise CaptureError("the exported graph has no output node")

    def region(self, module: Any, operands: Any, grad: bool) -> Any:
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        return self.walk(module, dict(zip(inputs, operands, strict=True)), grad)


def _plain(value: Any) -> Any:
    """Converts fx's immutable containers to plain ones, which pytree supports."""
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(v) for v in value) if type(value) in (list, tuple) else [_plain(v) for v in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _has_tensor(node: fx.Node) -> bool:
    """Whether a call must stay: it returns tensors or symbolic numbers, or is run only for its side effects."""
    value = node.meta.get("val")
    return value is None or any(isinstance(v, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
                                for v in tree_leaves(value))  # fmt: skip


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if isinstance(value, torch.nn.Module):
        return value
    raise CaptureError(f"{where(node)}: attribute '{node.target}' is not a module; register it as a buffer of the model")


def _neutral(module: fx.GraphModule, region: fx.Node, builder: Builder, device: Any) -> None:
    """Refuses an active autocast region unless all its values have the same dtypes without it."""
    for node in module.graph.nodes:
        if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
            continue
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
        try:
            found = builder.run(node.target, args, kwargs)
        except Exception:
            found = None
        same = [getattr(v, "dtype", None) for v in tree_leaves(found)]
        if same != [getattr(v, "dtype", None) for v in tree_leaves(node.meta.get("val"))]:
            raise CaptureError(
                f"{where(region)}: torch.autocast('{device}') changes the dtypes inside (at '{node.name}', "
                f"{node.target}); cast the model itself, for example model.to(torch.bfloat16)"
            )
