"""Overlap: a sharded graph becomes a forward and a backward graph whose collectives run while something is computed.

Traced (`passes.traced`), cut in two (`passes.partition`), small collectives merged (`passes.bucket`), every collective a
launch and a wait (`passes.launches`), and put in an order that hides them (`passes.schedule`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _BoxedCodeGen

from passes.bucket import Enough, bucket
from passes.launches import launches
from passes.partition import cut
from passes.schedule import Durations, Limits, Slot, reordered, schedule
from passes.traced import trace
from passes.world import World

__all__ = ["Orders", "Overlapped", "overlap"]

#: The places, in a graph's first order, of its nodes: those of the forward graph, then those of the backward graph.
Orders = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Overlapped:
    """The two graphs of one device, in the order in which autograd would have run them.

    Attributes:
        forward: inputs of the sharded graph, a seed -> its outputs, then what is saved.
        backward: what is saved, gradients of the outputs that have one -> gradients of the inputs that have one.
        constants: tensors that the graphs read by name.
        inputs: names of the sharded graph's placeholders.
        trained: positions of the inputs whose gradients ``backward`` gives.
        outputs: how many outputs come before what is saved.
        tangents: positions of the outputs that have a gradient.
        saved_inputs: per saved value, the position of the input that it is, or None.
        merged: how many collectives bucketing spared.
    """

    forward: fx.Graph
    backward: fx.Graph
    constants: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    trained: tuple[int, ...]
    outputs: int
    tangents: tuple[int, ...]
    saved_inputs: tuple[int | None, ...]
    merged: int

    @property
    def signature(self) -> str:
        """The same for graphs with the same nodes and edges, whatever their sizes: ranks must agree on it."""
        digest = hashlib.sha256()
        for graph in (self.forward, self.backward):
            number = {node: i for i, node in enumerate(graph.nodes)}
            for node in graph.nodes:
                sources = [number[n] for n in node.all_input_nodes]
                kind = node.args[1] if "collective" in node.meta else ""
                digest.update(f"{node.op} {node.target} {kind} {sources}\n".encode())
        return digest.hexdigest()[:16]

    def slots(self, durations: Durations, limits: Limits) -> tuple[list[Slot], list[Slot]]:
        """When each node of either graph is to run, by prediction; in the order in which it is to."""
        return schedule(self.forward, durations, limits), schedule(self.backward, durations, limits)

    def orders(self, slots: tuple[Sequence[Slot], Sequence[Slot]]) -> Orders:
        """Slots as numbers, which another device with graphs of the same signature understands."""
        found = []
        for graph, half in zip((self.forward, self.backward), slots, strict=True):
            number = {node: i for i, node in enumerate(graph.nodes)}
            found.append(tuple(number[slot.node] for slot in half))
        return found[0], found[1]

    def modules(self, orders: Orders, world: World) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The graphs in the given orders, to run in ``world``; each takes a list of its inputs, which it empties."""
        found = []
        for graph, order in zip((self.forward, self.backward), orders, strict=True):
            nodes = list(graph.nodes)
            arranged = reordered(graph, [nodes[i] for i in order])
            arranged.set_codegen(_BoxedCodeGen())
            root = nn.Module()
            root.world = world
            for name, constant in self.constants.items():
                root.register_buffer(name, constant, False)
            found.append(fx.GraphModule(root, arranged, class_name="Overlapped"))
        return found[0], found[1]


def overlap(
    sharded: fx.GraphModule,
    mesh: tuple[int, ...],
    at: tuple[int, ...],
    inputs: Mapping[str, Tensor],
    trained: frozenset[str],
    enough: Enough | None = None,
) -> Overlapped:
    """The forward and backward graph of the device at ``at``, not yet in a good order.

    Args:
        sharded: see ``passes.shard.shard``.
        mesh: sizes of the mesh axes.
        at: the device's coordinates.
        inputs: placeholder -> a tensor like this device's part of it.
        trained: placeholders whose gradients are wanted; none: the backward graph is empty.
        enough: from how many bytes on a collective is not merged with others; None: none is.

    Raises:
        Untraceable: see ``passes.traced.trace``.
    """
    joint = trace(sharded, mesh, at, inputs, trained)
    halves = cut(joint)
    merged = 0
    if enough is not None:
        merged = bucket(halves.forward, enough) + bucket(halves.backward, enough)
    return Overlapped(
        launches(halves.forward),
        launches(halves.backward),
        {name: value.to(_device(inputs)) for name, value in joint.constants.items()},
        joint.inputs,
        joint.trained,
        halves.outputs,
        joint.tangents,
        halves.inputs_saved,
        merged,
    )


def _device(inputs: Mapping[str, Tensor]) -> torch.device:
    return next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
