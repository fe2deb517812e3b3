"""Inlines regions that ``torch.export`` makes: of ``torch.no_grad`` and ``torch.autocast`` blocks, and of ``torch.vmap``.

A region without gradients becomes its plain nodes; wherever a node outside uses one of their floating-point results, an
``aten.detach`` stands between, so that gradients end exactly where the block ended them. Of a vmap, export records where it
begins and ends, and operators on single elements in between. A planner needs them as they run, so each such stretch is
traced with the vmap carried out. Of derivatives that a model takes forward, only their ends would be in the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from passes.capture.builder import Builder, CaptureError, is_symbolic
from passes.capture.functional import is_write
from passes.capture.masks import Constants
from passes.graph import annotate, differentiable, note_of, where
from passes.torch_internals import (
    FakeTensorMode,
    HigherOrderOperator,
    batch_levels,
    dual_numbers,
    predispatch,
    tree_leaves,
    tree_map,
)

__all__ = ["inline_regions", "without_vmaps"]

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
    """One flat graph of ``call_function`` nodes.

    Args:
        module: an exported graph module, with its regions as submodules.
        mode: the fake mode of its values.
        placeholders: the new graph's placeholders in order, name -> fake value.
        names: each old placeholder's name -> the new one's name, or ``(value,)`` for a constant argument.
        constants: placeholder name -> its tensor; those that decide sizes are added.
        inputs: names of the placeholders that follow these.

    Returns:
        The graph; notes say whether gradients were on where the node ran.

    Raises:
        CaptureError: a control-flow operator or an active autocast region.
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
        """``value`` as nodes with or without gradients may use it."""

        def cross(node: fx.Node) -> fx.Node:
            if not grad or note_of(node).grad or is_write(node) or not differentiable(node.meta.get("val")):
                return node
            if node not in self.detached:
                self.detached[node] = self.builder.emit(aten.detach.default, (node,), like=node)
                annotate(self.detached[node], grad=True)
            return self.detached[node]

        return map_arg(value, cross)

    def walk(self, module: fx.GraphModule, environment: dict[fx.Node, Any], grad: bool) -> Any:
        """Copies one (sub)module's nodes; gives its output."""

        def new(value: Any) -> Any:
            return tree_map(lambda v: environment[v] if isinstance(v, fx.Node) else v, _plain(value))

        for node in module.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return new(node.args[0])
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
    """fx's immutable containers as plain ones, which pytree knows."""
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(v) for v in value) if type(value) in (list, tuple) else [_plain(v) for v in value]
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _has_tensor(node: fx.Node) -> bool:
    """Whether a call must stay: it gives tensors, or is run for its effect alone."""
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
    """Refuses an active autocast region unless all its values have the dtypes that they have without it."""
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


_BEGIN, _END = batch_levels


def without_vmaps(graph: fx.Graph, mode: FakeTensorMode) -> fx.Graph:
    """The same graph with its vmaps done; itself where it has none.

    Args:
        graph: as export makes it; nodes have fake values of ``mode``.
        mode: of these values.

    Raises:
        CaptureError: the model takes derivatives forward.
    """
    for node in graph.nodes:
        if node.target in dual_numbers:
            raise CaptureError(
                f"{where(node)}: torch.func.jvp inside forward has no graph; compute the derivative yourself"
            )
    if not any(node.target is _BEGIN for node in graph.nodes):
        return graph
    result = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    stretch: list[fx.Node] = []
    depth = 0
    for node in graph.nodes:
        depth += node.target is _BEGIN
        if depth:
            stretch.append(node)
        elif node.target is not predispatch.lazy_load_decompositions:
            values[node] = result.node_copy(node, lambda n: values[n])
        depth -= node.target is _END
        if stretch and not depth:
            _done(result, stretch, values, mode)
            stretch = []
    return result


def _done(result: fx.Graph, stretch: Sequence[fx.Node], values: dict[fx.Node, fx.Node], mode: FakeTensorMode) -> None:
    """Puts a stretch into the graph, done for all elements."""
    inside = set(stretch)
    given = list(dict.fromkeys(n for node in stretch for n in node.all_input_nodes if n not in inside))
    taken = [node for node in stretch if any(user not in inside for user in node.users)]
    if not taken:
        return
    part, own = fx.Graph(), {}
    for node in given:
        own[node] = part.placeholder(node.name)
    for node in stretch:
        own[node] = part.node_copy(node, lambda n: own[n])
    part.output([own[node] for node in taken])
    with mode:
        shown = [node.meta["val"] for node in given]
        traced = make_fx(torch.func.functionalize(make_fx(fx.GraphModule(nn.Module(), part))(*shown)))(*shown)
    known = dict(zip((n for n in traced.graph.nodes if n.op == "placeholder"), (values[n] for n in given), strict=True))
    origin = taken[0].meta
    for node in traced.graph.nodes:
        if node.op == "output":
            for old, new in zip(taken, node.args[0], strict=True):
                values[old] = known[new]
        elif node.op != "placeholder":
            known[node] = result.node_copy(node, lambda n: known[n])
            known[node].meta = {key: value for key, value in origin.items() if key != "val"} | {"val": node.meta["val"]}
