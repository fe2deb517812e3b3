"""Overlap: turns a sharded graph into a forward and a backward graph whose collectives overlap with compute.

`passes` lists the passes that run here, in order. A backward pass from only some of the outputs has its own graph
(`passes.overlap.prune`), and values have the strides with which they were traced (`autotp.runtime.strides`).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from passes.graph import dump
from passes.overlap.bucket import Buckets, Enough, Hiding, buckets, merge
from passes.overlap.channels_last import channels_last, quicker, worthwhile
from passes.overlap.inplace import inplace
from passes.overlap.join_products import join_products
from passes.overlap.launch import launches
from passes.overlap.outline import outline
from passes.overlap.partition import Cut, cut
from passes.overlap.primitives import COLLECTIVE_OF
from passes.overlap.prune import drop_zeros, pruned
from passes.overlap.schedule import Durations, Limits, Slot, reordered, schedule
from passes.overlap.stage import Faster, Stages, stage, stages
from passes.overlap.tidy import tidy
from passes.overlap.trace import Joint, trace
from passes.torch_internals import BoxedCodeGen
from passes.world.world import World

__all__ = ["BACKWARD_PASSES", "PASSES", "Halves", "Orders", "Overlapped", "halves"]

#: In-place passes over the two traced graphs, in order: first those over the backward graph, then those over both. They
#: depend on sizes; see `Halves.refined`.
BACKWARD_PASSES: tuple[Callable[[fx.Graph], None], ...] = (drop_zeros, join_products)
PASSES: tuple[Callable[[fx.Graph], None], ...] = (tidy,)

#: An order of the nodes of the forward graph, and one of those of the backward graph, as indices into the graphs' nodes.
Orders = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Overlapped:
    """The two graphs of one device, in the order in which autograd would have run them.

    Attributes:
        forward: inputs of the sharded graph, a seed -> its outputs, then the saved tensors.
        backward: saved tensors, gradients of the outputs that have one -> gradients of the inputs that have one.
        constants: name of an attribute that the graphs read -> its tensor.
        joint: the joint graph that they come from, which describes their inputs and outputs.
    """

    forward: fx.Graph
    backward: fx.Graph
    constants: Mapping[str, Tensor]
    joint: Joint

    def slots(self, durations: Durations, limits: Limits) -> tuple[list[Slot], list[Slot]]:
        """The predicted slots of the nodes of either graph, in the order in which they are to run."""
        return schedule(self.forward, durations, limits), schedule(self.backward, durations, limits)

    @property
    def first_orders(self) -> Orders:
        """The orders in which autograd would have run the graphs, with a wait directly after every launch."""
        every = [list(graph.nodes) for graph in (self.forward, self.backward)]
        forward, backward = (
            tuple(i for i, node in enumerate(nodes) if node.op not in ("placeholder", "output")) for nodes in every
        )
        return forward, backward

    def orders(self, slots: tuple[Sequence[Slot], Sequence[Slot]]) -> Orders:
        """The orders of slots, as indices that are also valid on other devices whose graphs have the same signature."""
        found = []
        for graph, half in zip((self.forward, self.backward), slots, strict=True):
            number = {node: i for i, node in enumerate(graph.nodes)}
            found.append(tuple(number[slot.node] for slot in half))
        return found[0], found[1]

    def modules(
        self, orders: Orders, world: World, regions: Callable[[fx.Graph], nn.Module] | None = None
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Modules of the graphs in the given orders, to run in ``world``; each takes a list of its inputs and empties it.

        Args:
            orders: see ``orders``.
            world: see `passes.overlap.launch.launches`.
            regions: maps a region's graph to the module that runs it (see `passes.overlap.outline`); None: no regions.
        """
        found = []
        for graph, order in zip((self.forward, self.backward), orders, strict=True):
            nodes = list(graph.nodes)
            arranged = reordered(graph, [nodes[i] for i in order])
            root = nn.Module()
            root.world = world
            if regions is not None:
                outline(arranged, root, regions)
            inplace(arranged)
            dump("scheduled", arranged)
            arranged.set_codegen(BoxedCodeGen())
            for name, constant in self.constants.items():
                root.register_buffer(name, constant, False)
            found.append(fx.GraphModule(root, arranged, class_name="Overlapped"))
        return found[0], found[1]


@dataclass(frozen=True, slots=True)
class Halves:
    """The traced forward and backward graph of one device, in autograd's order; collectives are operators.

    Attributes:
        joint: the joint graph.
        mesh: sizes of the mesh axes.
        cut: its forward and its backward graph.
        constants: name of an attribute that the graphs read -> its tensor.
    """

    joint: Joint
    mesh: tuple[int, ...]
    cut: Cut
    constants: Mapping[str, Tensor]

    def choices(self) -> tuple[Halves, Halves]:
        """``refined()`` and ``self``: where dims are split unevenly, devices that refine may join different products."""
        return self.refined(), self

    def refined(self) -> Halves:
        """A copy with sums with zeros removed, sums of products joined, and redundant views removed, by their sizes."""
        forward, backward = copy.deepcopy(self.cut.forward), copy.deepcopy(self.cut.backward)
        for of_backward in BACKWARD_PASSES:
            of_backward(backward)
        dump("sums of products joined, backward", backward)
        for graph, of_either in itertools.product((forward, backward), PASSES):
            of_either(graph)
        return replace(self, cut=replace(self.cut, forward=forward, backward=backward))

    @property
    def signature(self) -> str:
        """A hash of the nodes and edges of the graphs, independent of sizes; all ranks must have the same."""
        digest = hashlib.sha256()
        for graph in (self.cut.forward, self.cut.backward):
            number = {node: i for i, node in enumerate(graph.nodes)}
            for node in graph.nodes:
                rest = node.args[1:] if node.target in COLLECTIVE_OF else ()
                digest.update(f"{node.op} {node.target} {rest} {[number[n] for n in node.all_input_nodes]}\n".encode())
        return digest.hexdigest()[:16]

    @property
    def sizes(self) -> str:
        """A hash of the shapes of all tensors, by which graphs with the same signature are compared."""
        nodes = (node for graph in (self.cut.forward, self.cut.backward) for node in graph.nodes)
        shapes = [tuple(node.meta["val"].shape) for node in nodes if isinstance(node.meta.get("val"), Tensor)]
        return hashlib.sha256(str(shapes).encode()).hexdigest()[:16]

    def without(self, missing: frozenset[int]) -> Halves:
        """A backward graph for calls in which some outputs that may have a gradient have none; the forward graph is empty.

        ``self`` must not be refined: nothing can be pruned from joined products.

        Args:
            missing: the numbers of these outputs among ``joint.tangents``, then ``joint.waiting``.
        """
        forward = fx.Graph()
        forward.output(())
        backward = pruned(self.cut.backward, len(self.joint.tangents) + len(self.joint.waiting), missing)
        return replace(self, cut=replace(self.cut, forward=forward, backward=backward))

    def buckets(self, enough: Enough | None, hiding: Hiding | None = None) -> tuple[Buckets, Buckets]:
        """The small collectives to merge in either graph; no collectives if ``enough`` is None."""
        if enough is None:
            return (), ()
        return buckets(self.cut.forward, enough, hiding), buckets(self.cut.backward, enough, hiding)

    def stages(self, chosen: tuple[Buckets, Buckets], faster: Faster | None) -> tuple[Stages, Stages]:
        """The all_reduces to split into stages in either graph after merging; none if ``faster`` is None."""
        if faster is None:
            return (), ()
        forward, backward = self._merged(chosen)
        return stages(forward, self.mesh, faster), stages(backward, self.mesh, faster)

    def overlapped(
        self, chosen: tuple[Buckets, Buckets], staged: tuple[Stages, Stages] = ((), ()), *, same_sizes: bool = True
    ) -> Overlapped:
        """The graphs with merged collectives, all_reduces in stages, and a launch and a wait for every collective.

        Args:
            chosen: see ``buckets``.
            staged: see ``stages``.
            same_sizes: whether all devices' graphs have the same ``sizes``.
        """
        halves = self._merged(chosen)
        for graph, places in zip(halves, staged, strict=True):
            stage(graph, self.mesh, places, same_sizes=same_sizes)
        forward, backward = map(launches, halves)
        return Overlapped(forward, backward, self.constants, self.joint)

    def _merged(self, chosen: tuple[Buckets, Buckets]) -> tuple[fx.Graph, fx.Graph]:
        forward, backward = copy.deepcopy(self.cut.forward), copy.deepcopy(self.cut.backward)
        for graph, sets in zip((forward, backward), chosen, strict=True):
            merge(graph, sets)
        return forward, backward


def halves(
    sharded: fx.GraphModule,
    mesh: tuple[int, ...],
    at: tuple[int, ...],
    inputs: Mapping[str, Tensor],
    trained: frozenset[str],
    waiting: Mapping[str, Tensor] | None = None,
) -> Halves:
    """Traces the forward and the backward graph of the device at ``at``.

    Args:
        sharded: see ``passes.sharding.shard.shard``.
        mesh: sizes of the mesh axes.
        at: the device's coordinates.
        inputs: placeholder -> a tensor like this device's part of it.
        trained: placeholders whose gradients are wanted; if there are none, the backward graph is empty.
        waiting: see ``passes.overlap.trace.trace``.

    Raises:
        Untraceable: see ``passes.overlap.trace.trace``.
    """
    device = next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
    if worthwhile(sharded):
        sharded = channels_last(sharded, functools.partial(quicker, device))
    joint = trace(sharded, mesh, at, inputs, trained, waiting)
    dump("traced, forward and backward", joint.graph)
    parts = cut(joint)
    dump("cut, forward", parts.forward)
    dump("cut, backward", parts.backward)
    return Halves(joint, mesh, parts, {name: value.to(device) for name, value in joint.constants.items()})
