"""Makes the scheduled forward and backward graphs of a sharded graph, in agreement between all processes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autotp.errors import AutotpError
from autotp.runtime.agreement import Agreement
from autotp.runtime.compiled import Compiled, Overlap, Plain, Runner, Variant
from autotp.runtime.inductor import Regions
from autotp.runtime.interpreter import Lockstep, execute
from autotp.runtime.strides import Arranged, as_traced
from passes.overlap import Halves, Overlapped, halves
from passes.overlap.launch import launch
from passes.overlap.trace import Untraceable
from passes.sharding.shard import draws_of
from passes.world.ops import Parts, part_of
from passes.world.world import World

__all__ = ["NoOrder", "Schedules", "overlapped"]

_log = logging.getLogger("autotp.schedule")

#: A device's coordinates in the mesh -> its traced graphs, refined and unrefined (see `passes.overlap.Halves.choices`).
Traced = Mapping[tuple[int, ...], Sequence[Halves]]


class NoOrder(AutotpError):
    """Raised in every process if graphs cannot be traced, differ between devices, or have no schedule."""


def overlapped(make: Callable[[], Traced], how: Overlap, agreement: Agreement) -> Mapping[tuple[int, ...], Overlapped]:
    """Makes the forward and backward graphs of this process's devices, with the same nodes on all devices of all processes.

    Args:
        make: traces the graphs of this process's devices.
        how: decides, on the first device of the first process and for all, which collectives are merged or go in stages.
        agreement: the agreement of the processes.

    Raises:
        NoOrder: a graph cannot be traced, or the devices' graphs differ.
    """
    traced, which, same_sizes = _agreed(make, agreement)
    mine = {at: choices[which] for at, choices in traced.items()}
    first = next(iter(mine.values()))
    decided = _decided(agreement, lambda: how.decided(first))
    return {at: each.overlapped(*decided, same_sizes=same_sizes) for at, each in mine.items()}


def _decided(agreement: Agreement, decide: Callable[[], Any]) -> Any:
    try:
        return agreement.decided(decide)
    except Exception as error:
        raise NoOrder(f"rank 0 found no schedule ({type(error).__name__}: {error})") from error


def _agreed(make: Callable[[], Traced], agreement: Agreement) -> tuple[Traced, int, bool]:
    """This process's graphs, the index of the first choice that all devices share, and whether its sizes are equal, too."""
    traced: Traced = {}
    failure: Exception | None = None
    try:
        traced = make()
    except Exception as error:  # noqa: BLE001 - the other processes wait for a report
        failure = error
    mine = [[(choice.signature, choice.sizes) for choice in choices] for choices in traced.values()]
    reports = agreement.gathered((mine, "" if failure is None else _why(failure)))
    if reason := next((why for _, why in reports if why), ""):
        raise NoOrder(reason) from failure
    devices = [device for each, _ in reports for device in each]
    for which, choices in enumerate(zip(*devices, strict=True)):
        if len({signature for signature, _ in choices}) == 1:
            return traced, which, len({sizes for _, sizes in choices}) == 1
    raise NoOrder("dims are split unevenly, so devices have different graphs")


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, Untraceable) else f"tracing it failed ({type(error).__name__}: {error})"


def _scheduled(
    make: Callable[[], Traced], world: World, how: Overlap, agreement: Agreement, plain: Plain, *, lockstep: bool
) -> Compiled:
    make = functools.cache(make)
    graphs = overlapped(make, how, agreement)
    first = next(iter(graphs.values()))
    orders = first.first_orders if how.durations is None else _decided(agreement, lambda: first.orders(how.slots(first)))
    _log.info("%d and %d nodes scheduled, forward and backward", *map(len, orders))
    regions = Regions() if how.compile and not lockstep else None
    each_module = [each.modules(orders, world, regions) for each in graphs.values()]
    if regions is not None and not regions.compile(_device_of(first), agreement):
        each_module = [each.modules(orders, world) for each in graphs.values()]
    halves_of = zip(*each_module, strict=True)
    forward, backward = (_in_lockstep(half, world) if lockstep else Arranged(*half) for half in halves_of)

    @functools.cache
    def without(missing: frozenset[int]) -> Runner:
        def some() -> Traced:
            return {at: choices[-1].without(missing).choices() for at, choices in make().items()}

        return _scheduled(some, world, how, agreement, plain, lockstep=lockstep).backward

    return Compiled(first, forward, backward, without, plain, world.whereabouts)


def _device_of(made: Overlapped) -> torch.device:
    """The device on which graphs run."""
    return next(node.meta["val"].device for node in made.joint.graph.nodes if isinstance(node.meta.get("val"), Tensor))


def _in_lockstep(modules: Sequence[fx.GraphModule], world: World) -> Runner:
    """Returns a runner of one of the graphs for all hosted devices, which keeps values in their traced strides.

    Args:
        modules: one graph per hosted device, or one for all.
        world: hosts the devices.
    """
    first, several = modules[0], len(modules) > 1
    each = dict(zip(first.graph.nodes, zip(*(module.graph.nodes for module in modules), strict=True), strict=True))
    for node, own in each.items():
        if node.target is launch and len({str(other.args[3:]) for other in own}) > 1:
            raise AutotpError(f"node {node}: devices disagree about a collective; this is a defect of autotp")
        if node.target is launch:  # per device, strides decide whether it works in place; all devices must do the same
            kind = min(str(other.args[1]) for other in own)
            for other in own:
                other.update_arg(1, kind)

    def look(node: fx.Node, run: Callable[[], Any]) -> Any:
        value = run()
        if not isinstance(value, Parts) or node.op != "call_function":
            return value
        return Parts(map(as_traced, each[node] if several else each[node] * len(value), value))

    return lambda inputs: Lockstep(first, world, look, each if several else None).boxed_run(inputs)


class Schedules:
    """The scheduled graphs of a sharded graph, made when they are first needed.

    Args:
        sharded: see ``passes.sharding.shard.shard``.
        world: the world in which the graphs run.
        how: durations and limits.
        agreement: the agreement of the processes that run the graph together.
        even: whether all devices share one pair of graphs, because their parts have the same shapes.
    """

    def __init__(
        self, sharded: fx.GraphModule, world: World, how: Overlap, agreement: Agreement, *, even: bool = False
    ) -> None:
        self.sharded, self.world, self.how, self.agreement, self.even = sharded, world, how, agreement, even
        self.draws = draws_of(sharded)
        self.known: dict[Hashable, Compiled | None] = {}
        self.cast = False  # whether the warning about autocast was given

    def run(self, values: Mapping[str, Any], variant: Variant | None = None) -> Sequence[Any] | None:
        """Runs the scheduled graphs and returns the sharded graph's outputs; None if that must run unscheduled.

        Args:
            values: placeholder -> its value.
            variant: the variant to run in place of the sharded graph, if any; it may have inputs of its own.
        """
        firsts = [_first(value) for value in values.values()]
        if any(torch.is_autocast_enabled(device) for device in {tensor.device.type for tensor in firsts}):
            if not self.cast:
                _log.warning("no overlap of computing and communicating under torch.autocast; cast the model itself")
            self.cast = True
            return None  # which values are cast depends on the context of each call
        trained = _trained_among(values)
        graph = self.sharded if variant is None else variant.graph
        key = graph, trained, tuple((tensor.dtype, tensor.stride()) for tensor in firsts)
        if key not in self.known:
            self.known[key] = self._compiled(variant, values, trained)
        found = self.known[key]
        if found is None:
            return None
        seed = self.world.next_seed(self.draws) if self.draws else 0
        return found(seed, [values[name] for name in found.graphs.joint.inputs], variant)

    def _compiled(self, variant: Variant | None, values: Mapping[str, Any], trained: frozenset[str]) -> Compiled | None:
        """Makes the scheduled graphs for such values; None, in every process, if the graph must run unscheduled."""
        devices = self.world.hosted[:1] if self.even else self.world.hosted
        lockstep = any(isinstance(value, Parts) for value in values.values())
        sharded = self.sharded if variant is None else variant.graph
        waiting = {} if variant is None else dict(variant.waiting)

        def make() -> Traced:
            mesh, given = self.world.mesh_shape, dict(values)
            return {
                at: halves(sharded, mesh, at, part_of(given, index), trained, part_of(waiting, index)).choices()
                for index, at in enumerate(devices)
            }

        try:
            plain = functools.partial(self._plain, sharded)
            return _scheduled(make, self.world, self.how, self.agreement, plain, lockstep=lockstep)
        except NoOrder as error:
            _log.warning("no overlap of computing and communicating, and nothing is recomputed: %s", error)
            return None

    def _plain(self, sharded: fx.GraphModule, seed: Any, inputs: Sequence[Parts]) -> Sequence[Any]:
        names = (str(node.target) for node in sharded.graph.nodes if node.op == "placeholder")
        with self.world.seeds.repeating(seed):
            return execute(sharded, self.world, dict(zip(names, inputs, strict=True)))


def _trained_among(inputs: Mapping[str, Any]) -> frozenset[str]:
    """The names of the inputs that require gradients; none if grad mode is off."""
    if not torch.is_grad_enabled():
        return frozenset()
    return frozenset(name for name, value in inputs.items() if _first(value).requires_grad)


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, Parts) else value
