"""Outlining: replaces each run of operators between two launches or waits by one call, which a compiler may fuse.

A region is a run of adjacent nodes that are ATen operators and compute tensors from tensors alone. It takes its operands in
a list, which it empties, so that it holds no operand longer than it reads it. Views that are read outside of their region
are taken outside: no result of a region aliases an operand or another result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.overlap.aliasing import source_of
from passes.rules.table import kind_of
from passes.torch_internals import OpOverload, schema, tree_leaves

__all__ = ["boxed", "key_of", "outline"]


def boxed(*operands: Any) -> list[Any]:
    """The operands of a region as a list, which the region empties."""
    return list(operands)


def outline(graph: fx.Graph, root: nn.Module, module_for: Callable[[fx.Graph], nn.Module]) -> None:
    """Replaces every region of at least two operators, not counting views, by a call of a module, in place.

    Args:
        graph: a scheduled graph whose order is final; see ``passes.overlap.launch.launches``.
        root: the module to which the modules of the regions are added, as ``region_0`` and so on.
        module_for: maps a region's graph (operands -> tuple of results) to the module that runs it, whose argument is a
            list of the operands.
    """
    names: dict[nn.Module, str] = {}

    def name_for(region: fx.Graph) -> str:
        module = module_for(region)
        if module not in names:
            names[module] = f"region_{len(names)}"
            root.add_module(names[module], module)
        return names[module]

    for node in list(graph.nodes):
        if node.target is operator.getitem:
            node.args[0].append(node)
    run: list[fx.Node] = []
    for node in list(graph.nodes):
        if _pure(node):
            run.append(node)
        elif node.op != "get_attr":
            if sum(_computes(each) for each in run) > 1:
                _outline(graph, run, node, name_for)
            run = []


def key_of(region: fx.Graph) -> str:
    """A key that is equal for regions with equal operators, and operands of equal dtypes, shapes, strides and devices."""
    number = {node: f"%{i}" for i, node in enumerate(region.nodes)}
    lines = []
    for node in region.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: number[n])
        value = node.meta.get("val") if node.op == "placeholder" else None
        kind = (value.dtype, tuple(value.shape), value.stride(), value.device) if isinstance(value, Tensor) else ""
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args} {kwargs} {kind}")
    return "\n".join(lines)


def _outline(graph: fx.Graph, run: Sequence[fx.Node], before: fx.Node, name_for: Callable[[fx.Graph], str]) -> None:
    inside = set(run)
    apart: set[fx.Node] = set()  # views that are read outside, and views inside that they are taken from
    for node in reversed(run):
        if not _own(node) and any(user not in inside or user in apart for user in node.users):
            apart.add(node)
    results = [n for n in run if _own(n) and any(user not in inside or user in apart for user in n.users)]
    results = [n for n in results if isinstance(n.meta["val"], Tensor)]
    if not results:
        return
    region, values = fx.Graph(), {}
    needed = _above(results, inside)
    operands = list(dict.fromkeys(n for node in run if node in needed for n in node.all_input_nodes if n not in inside))
    for number, node in enumerate(operands):
        values[node] = region.placeholder(f"operand_{number}")
        values[node].meta = {"val": node.meta["val"]}
    for node in run:
        if node in needed:
            values[node] = region.node_copy(node, lambda n: values[n])
    region.output(tuple(values[node] for node in results))
    name = name_for(region)
    with graph.inserting_before(before):
        call = graph.call_module(name, (graph.call_function(boxed, tuple(operands)),))
        for number, node in enumerate(results):
            given = graph.call_function(operator.getitem, (call, number))
            given.meta = dict(node.meta)
            node.replace_all_uses_with(given, delete_user_cb=lambda user: user not in inside or user in apart)
    for node in run:
        if node in apart:
            before.prepend(node)
    for node in reversed(run):
        if node not in apart:
            graph.erase_node(node)


def _above(results: Sequence[fx.Node], inside: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(results)
    while pending:
        node = pending.pop()
        if node in inside and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _pure(node: fx.Node) -> bool:
    """Whether a node may be in a region: an ATen operator that computes tensors from tensors of known sizes alone."""
    # A node without users runs only for its checks, which a compiler would remove.
    if node.op != "call_function" or not node.users or not _tensors([node, *node.all_input_nodes]):
        return False
    if node.target is operator.getitem:
        return _pure(node.args[0])  # type: ignore[arg-type]
    target: Any = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or schema(target).is_mutable:
        return False
    # Compilers do not fuse the kernels of attention. With regions that end there, equal layers have equal regions.
    return torch.Tag.nondeterministic_seeded not in target.tags and kind_of(node) != "attention"


def _tensors(nodes: Sequence[fx.Node]) -> bool:
    """Whether the values of the nodes are tensors, or tuples of tensors, none of them complex."""
    leaves = [leaf for node in nodes for leaf in tree_leaves(node.meta.get("val"))]
    return bool(leaves) and all(isinstance(leaf, Tensor) and not leaf.is_complex() for leaf in leaves if leaf is not None)


def _own(node: fx.Node) -> bool:
    """Whether a node's result has its own memory, that is, is not a view."""
    source = source_of(node)
    if node.target is operator.getitem and source is not None:
        return _own(source) and not isinstance(source.meta["val"], Tensor)
    return source is None


def _computes(node: fx.Node) -> bool:
    return _own(node) and node.target is not operator.getitem
