"""Runs a sharded graph's scheduled forward and backward graphs under autograd."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autotp.errors import AutotpError
from autotp.runtime.compiled import Compiled, Overlap, Plain, Runner
from autotp.runtime.lockstep import execute
from autotp.runtime.strides import Arranged, as_traced
from passes.overlap import Halves, halves
from passes.overlap.launch import HOSTED, launch, local
from passes.overlap.pipeline import agreed, first_agreed
from passes.overlap.trace import Untraceable
from passes.world import ops
from passes.world.ops import Parts, part_of
from passes.world.world import World

__all__ = ["Schedules", "compiled", "in_lockstep"]

_log = logging.getLogger("autotp.schedule")

DIFFERENT = "dims are split unevenly, so devices have different graphs"


def compiled(
    sharded: fx.GraphModule, world: World, inputs: Mapping[str, Tensor], trained: frozenset[str], how: Overlap
) -> Compiled | None:
    """Schedules a sharded graph for this process's device; every process of the job must call it alike.

    Rank 0 decides about the order, and every process checks that its graphs have the same nodes.

    Args:
        sharded: see ``passes.sharding.shard.shard``.
        world: this process's.
        inputs: placeholder -> this device's part of it.
        trained: placeholders whose gradients are wanted.
        how: durations and limits.

    Returns:
        None, on every process, where one of them cannot be traced, they differ or there is no order: the sharded graph
        then runs as it is.
    """

    def choices() -> Sequence[Halves]:
        return halves(sharded, world.mesh_shape, world.hosted[0], inputs, trained).choices()

    try:
        return _scheduled(choices, world, how, functools.partial(_plain, sharded, world))
    except NoOrder as error:
        _log.warning("no overlap of computing and communicating: %s", error)
        return None


def _plain(sharded: fx.GraphModule, world: World, seed: int, inputs: Sequence[Parts]) -> Sequence[Any]:
    names = (str(node.target) for node in sharded.graph.nodes if node.op == "placeholder")
    with world.repeating(seed):
        return execute(sharded.graph, world, dict(zip(names, inputs, strict=True)))


def _scheduled(make: Callable[[], Sequence[Halves]], world: World, how: Overlap, plain: Plain) -> Compiled:
    choices, which, same_sizes = _agreed_everywhere(make)
    mine = choices[which]
    graphs = mine.overlapped(*_from_first(lambda: how.decided(mine)), same_sizes=same_sizes)
    orders = _from_first(lambda: graphs.orders(graphs.slots(how.durations, how.limits)))
    forward, backward = map(Arranged, graphs.modules(orders, world))
    _log.info("%d and %d nodes scheduled, forward and backward", *map(len, orders))

    @functools.cache
    def without(missing: frozenset[int]) -> Runner:
        return _scheduled(lambda: choices[-1].without(missing).choices(), world, how, plain).backward

    def again(other: Overlap) -> Compiled:
        return _scheduled(lambda: choices, world, other, plain)

    return Compiled(graphs, forward, backward, without, plain, again)


def _agreed_everywhere(make: Callable[[], Sequence[Halves]]) -> tuple[Sequence[Halves], int, bool]:
    """This process's choices, the place of the first that is alike on all, and whether its sizes are.

    Raises:
        NoOrder: on every process, where one cannot make its choices, or none is alike.
    """
    choices: Sequence[Halves] = ()
    reason = ""
    try:
        choices = make()
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
        reason = _why(error)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, ([each.signature for each in choices], [each.sizes for each in choices], reason))
    which = first_agreed(signatures for signatures, _, _ in found)
    if which is None:
        raise NoOrder(next((why for *_, why in found if why), DIFFERENT))
    return choices, which, len({sizes[which] for _, sizes, _ in found}) == 1


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, Untraceable) else f"tracing it failed ({type(error).__name__}: {error})"


def _from_first(decide: Callable[[], Any]) -> Any:
    """Rank 0's decision, on every rank; where it fails to decide, its error."""
    decided: list[Any] = [None, ""]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            decided[0] = decide()
        except Exception as error:  # noqa: BLE001 - the others wait to hear of it
            decided[1], failure = f"rank 0 found no schedule ({type(error).__name__}: {error})", error
    dist.broadcast_object_list(decided, src=0)
    if decided[1]:
        raise NoOrder(decided[1]) from failure
    return decided[0]


class NoOrder(AutotpError):
    """Graphs that are not alike on all devices, or that rank 0 found no schedule for; raised on every rank."""


class Schedules:
    """The scheduled graphs of a sharded graph, made when they are first needed.

    Args:
        sharded: see ``passes.sharding.shard.shard``.
        world: that the graphs run in.
        how: durations and limits.
        make: ``compiled``, or ``in_lockstep`` with what it takes besides.
    """

    def __init__(self, sharded: fx.GraphModule, world: World, how: Overlap, make: Callable[..., Compiled | None]) -> None:
        self.sharded, self.world, self.how, self.make = sharded, world, how, make
        self.draws = any(node.target is ops.next_seed for node in sharded.graph.nodes)
        self.known: dict[Hashable, Compiled | None] = {}
        self.cast = False  # said already

    def rescheduled(self, how: Overlap) -> Schedules:
        """The same graphs, those that were made already not traced anew, by other durations or within other limits.

        Every process of the job must call it alike.
        """
        found = Schedules(self.sharded, self.world, how, self.make)
        found.known |= {key: made and made.again(how) for key, made in self.known.items()}
        return found

    def run(self, values: Mapping[str, Any]) -> list[Any] | None:
        """The sharded graph's outputs for these values of its placeholders; None if it is to run as it is."""
        firsts = [_first(value) for value in values.values()]
        if any(torch.is_autocast_enabled(device) for device in {tensor.device.type for tensor in firsts}):
            if not self.cast:
                _log.warning("no overlap of computing and communicating under torch.autocast; cast the model itself")
            self.cast = True
            return None  # what is cast where depends on the context of each call
        trained = _trained_among(values)
        key = trained, tuple((tensor.dtype, tensor.stride()) for tensor in firsts)
        if key not in self.known:
            self.known[key] = self.make(self.sharded, self.world, values, trained, self.how)
        found = self.known[key]
        if found is None:
            return None
        seed = self.world.next_seed() if self.draws else 0
        return found(seed, [values[name] for name in found.graphs.inputs])


def _trained_among(inputs: Mapping[str, Any]) -> frozenset[str]:
    """The names of the inputs whose gradients are wanted: none where gradients are switched off."""
    if not torch.is_grad_enabled():
        return frozenset()
    return frozenset(name for name, value in inputs.items() if _first(value).requires_grad)


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, Parts) else value


def in_lockstep(
    sharded: fx.GraphModule,
    world: World,
    inputs: Mapping[str, Parts],
    trained: frozenset[str],
    how: Overlap,
    *,
    even: bool,
) -> Compiled | None:
    """``compiled`` for all devices of a mesh in one process; with ``even`` parts, all have one pair of graphs."""
    choices: dict[Any, Sequence[Halves]] = {}
    try:
        for index, at in enumerate(world.hosted):
            if (None if even else at) not in choices:
                mine = {name: parts[index] for name, parts in inputs.items()}
                choices[None if even else at] = halves(sharded, world.mesh_shape, at, mine, trained).choices()
    except Exception as error:  # noqa: BLE001 - as in ``compiled``
        _log.warning("no overlap of computing and communicating: %s", _why(error))
        return None
    try:
        return _all_scheduled(choices, world, how, functools.partial(_plain, sharded, world), even=even)
    except NoOrder as error:
        _log.warning("no overlap of computing and communicating: %s", error)
        return None


def _all_scheduled(
    choices: Mapping[Any, Sequence[Halves]], world: World, how: Overlap, plain: Plain, *, even: bool
) -> Compiled:
    chosen = agreed(choices.values())
    if chosen is None:
        raise NoOrder(DIFFERENT)
    known = dict(zip(choices, chosen, strict=True))
    decided = how.decided(next(iter(known.values())))
    same_sizes = len({each.sizes for each in known.values()}) == 1
    made = {at: each.overlapped(*decided, same_sizes=same_sizes) for at, each in known.items()}
    first = made[None if even else world.hosted[0]]
    orders = first.orders(first.slots(how.durations, how.limits))
    modules = {at: each.modules(orders, world) for at, each in made.items()}
    graphs = [modules[None if even else at] for at in world.hosted]
    forward, backward = (_Lockstep([both[half] for both in graphs]) for half in (0, 1))

    @functools.cache
    def without(missing: frozenset[int]) -> Runner:
        some = {at: each[-1].without(missing).choices() for at, each in choices.items()}
        return _all_scheduled(some, world, how, plain, even=even).backward

    def again(other: Overlap) -> Compiled:
        return _all_scheduled(choices, world, other, plain, even=even)

    return Compiled(first, forward, backward, without, plain, again)


class _Lockstep:
    """Runs one of the graphs for all hosted devices, node by node."""

    def __init__(self, modules: Sequence[fx.GraphModule]) -> None:
        self.modules = modules

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Inputs are ``Parts`` or, alike for all devices, anything else."""
        given = iter(inputs)
        values: dict[fx.Node, Any] = {}
        for nodes in zip(*(module.graph.nodes for module in self.modules), strict=True):
            first = nodes[0]
            if first.op == "placeholder":
                values[first] = next(given)
            elif first.op == "get_attr":
                values[first] = getattr(self.modules[0], str(first.target))
            elif first.op == "output":
                return [values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in first.args[0]]
            else:
                values[first] = self._run(nodes, values)
        raise AssertionError("the graph has no output")

    def _run(self, nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> Any:
        first: Any = nodes[0]
        if first.target in HOSTED:
            args, kwargs = self._arguments(first, first, values)
            if first.target is launch and any(str(node.args[3:]) != str(first.args[3:]) for node in nodes):
                raise AutotpError(f"node {first}: devices disagree about a collective; this is a defect of autotp")
            return first.target(*args, **kwargs)
        arguments = [self._arguments(node, first, values) for node in nodes]
        if first.target is local:
            return Parts(local(*part_of(args, i), index=i) for i, (args, _) in enumerate(arguments))
        if first.target is operator.getitem and not isinstance(arguments[0][0][0], Parts):
            return arguments[0][0][0][arguments[0][0][1]]
        return Parts(
            as_traced(node, first.target(*part_of(args, i), **part_of(kwargs, i)))
            for i, (node, (args, kwargs)) in enumerate(zip(nodes, arguments, strict=True))
        )

    @staticmethod
    def _arguments(node: fx.Node, first: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
        """A device's own arguments of a node, whose operands are known by the first device's nodes."""
        known = dict(zip(node.all_input_nodes, first.all_input_nodes, strict=True))
        found: Any = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[known[n]])
        return found
