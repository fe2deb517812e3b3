"""Partitions a joint graph into a forward graph, which also returns the saved tensors, and a backward graph.

The backward graph has the nodes that depend on the gradients of the outputs. The other values that it reads are saved, with
two exceptions. Gathered parameters are gathered again, from the shards that stay in memory anyway. Nodes that are marked
for recomputation are recomputed just before they are first read, from values that are saved or recomputed themselves.
Gradients are gathered just before they are first read: until then, they take less memory. A tensor of which operators read
slices alone is sliced, and freed, at once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.graph import RECOMPUTE, above, annotate, below
from passes.layouts.reshard import GATHERING
from passes.overlap.aliasing import held, source_of
from passes.overlap.primitives import COLLECTIVE_OF, crop, in_one_format, own, pad
from passes.overlap.trace import Joint

__all__ = ["Cut", "cut"]

_aten = torch.ops.aten
#: The operators of which a reshard consists besides collectives: they move elements and compute none.
_MOVES = frozenset(
    getattr(_aten, name)
    for name in [
        "_unsafe_view",
        "alias",
        "cat",
        "clone",
        "constant_pad_nd",
        "detach",
        "expand",
        "flatten",
        "narrow",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "stack",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
    ]
)

_PLACED = frozenset({own, pad, crop, in_one_format})


@dataclass(frozen=True, slots=True)
class Cut:
    """The forward and the backward graph of a joint graph.

    Attributes:
        forward: inputs, seed -> outputs, then the saved tensors.
        backward: saved tensors, gradients of the outputs that have one -> gradients of the inputs that have one.
    """

    forward: fx.Graph
    backward: fx.Graph


def cut(joint: Joint) -> Cut:
    """Partitions a joint graph whose placeholders are the inputs, the seed and the gradients of the outputs."""
    nodes = _slices_first(joint.graph)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    count = len(joint.inputs) + 1
    inputs, tangents = placeholders[:count], placeholders[count:]
    leaves: Any = nodes[-1].args[0]
    outputs, gradients = list(leaves[: joint.outputs]), list(leaves[joint.outputs :])
    later = below(nodes, tangents)
    rematerialized = _gathered(nodes, {inputs[i] for i in joint.regathered}, later)
    for node in nodes:  # views of rematerialized values too: a saved view would keep their memory alive
        if node not in later and (node.meta.get(RECOMPUTE) or source_of(node) in rematerialized):
            rematerialized.add(node)
    needed, saved = _needed(gradients, later, rematerialized, above(outputs))
    kept = [n for n in nodes if n in saved]
    forward, values = fx.Graph(), {}
    for node in inputs:
        values[node] = _placeholder(forward, node)
    checks = [
        n for n in nodes if n.op == "call_function" and n not in later and n.is_impure()
    ]  # they run although no node reads their results
    wanted = above([*outputs, *kept, *checks])
    for node in nodes:
        if node in wanted and node not in values and node not in later:
            values[node] = forward.node_copy(node, lambda n: values[n])
    forward.output(tuple(values[o] if isinstance(o, fx.Node) else o for o in (*outputs, *kept)))
    backward, values = fx.Graph(), {}
    sizes = held(kept)
    for node in (*kept, *tangents):
        values[node] = _placeholder(backward, node)
        size, first = sizes.get(node, (0.0, None))
        annotate(values[node], held=size, within="" if first is None else values[first].name)
    for node in _when_needed(
        [n for n in nodes if n in needed and n not in values], later, _spread(nodes, later, gradients)
    ):
        values[node] = backward.node_copy(node, lambda n: values[n])
    backward.output(tuple(values[g] if isinstance(g, fx.Node) else g for g in gradients))
    return Cut(forward, backward)


def _slices_first(graph: fx.Graph) -> list[fx.Node]:
    """The nodes in their order, except that a result that is only sliced (`own`) is sliced as soon as it is there."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        pending = [] if node in found else [node]
        while pending:
            last = pending.pop()
            found[last] = None
            if last.op == "call_function" and last.users and all(user.target is own for user in last.users):
                pending += last.users
    return list(found)


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.placeholder(node.name)
    made.meta = dict(node.meta)
    return made


def _gathered(nodes: Sequence[fx.Node], parameters: set[fx.Node], later: set[fx.Node]) -> set[fx.Node]:
    """Values that are parameters after a cast, or after moves of their elements that include a gathering collective."""
    moved, gathered = set(parameters), set()
    for node in nodes:
        if node.op != "call_function" or node in later:
            continue
        gathers = COLLECTIVE_OF.get(node.target) in GATHERING
        cast = node.target is _aten._to_copy.default and node.all_input_nodes[0] in parameters
        if not (gathers or cast or _moves(node)):
            continue
        sources = node.all_input_nodes
        if sources and all(n in moved for n in sources):
            moved.add(node)
            if gathers or cast or any(n in gathered for n in sources):
                gathered.add(node)
    return gathered


def _spread(nodes: Sequence[fx.Node], later: set[fx.Node], returned: Sequence[Any]) -> set[fx.Node]:
    """Gradients that operators read after they are gathered, with the moves of their elements that follow."""
    found: set[fx.Node] = set()
    for node in nodes:
        moved = _moves(node) and bool(node.all_input_nodes) and found.issuperset(node.all_input_nodes)
        if node in later and (COLLECTIVE_OF.get(node.target) == "all_gather" or moved):
            found.add(node)
    return found.difference(returned)


def _moves(node: fx.Node) -> bool:
    """Whether an operator of a reshard moves elements, and computes none."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return packet in _MOVES or node.target in _PLACED or node.target is operator.getitem


def _needed(
    gradients: Sequence[Any], later: set[fx.Node], rematerialized: set[fx.Node], forward: set[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that the backward pass runs, and the values that it takes as inputs.

    It runs nodes that depend on a gradient, rematerialized nodes, nodes that the outputs do not need, and constants.
    """
    runs: set[fx.Node] = set()
    given: set[fx.Node] = set()
    pending = [g for g in gradients if isinstance(g, fx.Node)]
    while pending:
        node = pending.pop()
        if node in runs or node in given:
            continue
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        spared = node.op != "placeholder" and source not in forward
        if node in later or node in rematerialized or spared or (node.op != "placeholder" and not node.all_input_nodes):
            runs.add(node)
            pending += node.all_input_nodes
        else:
            given.add(node)
    return runs, given


def _when_needed(nodes: Sequence[fx.Node], later: set[fx.Node], spread: set[fx.Node]) -> list[fx.Node]:
    """The nodes in their order, except that nodes that the backward pass recomputes come just before they are first read.

    So do those of ``spread``, before what is recomputed for the same reader: on the way, they may take more memory. The
    results of an operator with several ones are taken out of their tuple at once: it holds all of them until then.
    """
    among, found, seen = set(nodes), [], set()
    for node in nodes:
        pending = [node] if node in later and node not in spread else []
        while pending:
            last = pending[-1]
            missing = [n for n in last.all_input_nodes if n in among and n not in seen]
            if missing:
                pending += sorted(missing, key=spread.__contains__)
                continue
            pending.pop()
            for made in (last, *(user for user in last.users if user.target is operator.getitem and user in among)):
                if made not in seen:
                    seen.add(made)
                    found.append(made)
    return found + [node for node in nodes if node not in seen]
