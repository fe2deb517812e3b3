"""Runs a sharded graph's scheduled forward and backward graphs under autograd."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autotp.errors import AutotpError
from autotp.lockstep import execute
from passes import ops
from passes.arranged import Arranged, as_traced
from passes.bucket import Enough
from passes.launches import HOSTED, launch, local
from passes.ops import Parts, part_of
from passes.overlap import Halves, Overlapped, halves
from passes.schedule import Durations, Limits
from passes.traced import Untraceable
from passes.world import World

__all__ = ["Compiled", "Overlap", "Schedules", "compiled", "in_lockstep"]

_log = logging.getLogger("autotp.schedule")

DIFFERENT = "dims are split unevenly, so devices have different graphs"

#: Runs one of the two graphs: a list of its inputs, which it empties -> its outputs.
Runner = Callable[[list[Any]], Sequence[Any]]
Plain = Callable[[int, Sequence[Parts]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How graphs are overlapped.

    Attributes:
        durations: of the nodes, predicted.
        enough: see `passes.bucket.buckets`; None: collectives are not merged.
        limits: of the schedule.
    """

    durations: Durations
    enough: Enough | None = None
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A scheduled pair of graphs, ready to run.

    Attributes:
        graphs: what was scheduled, of this process's device or of the first.
        forward, backward: run them.
        without: the backward graph for when some outputs, by their places among those that may have a gradient, have none.
        plain: the sharded graph as it is, for gradients of gradients: a seed and ``Parts`` of its inputs -> its outputs.
        again: schedules them otherwise, without tracing them anew.
    """

    graphs: Overlapped
    forward: Runner
    backward: Runner
    without: Callable[[frozenset[int]], Runner]
    plain: Plain
    again: Callable[[Overlap], Compiled]

    def __call__(self, seed: int, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of the sharded graph; gradients flow to the trained inputs.

        Args:
            seed: for random operators.
            inputs: of the sharded graph; each a tensor, or ``Parts``.
        """
        hosted = next((len(value) for value in inputs if isinstance(value, Parts)), 0)
        flat = [part for value in inputs for part in value] if hosted else inputs
        results = _Pass.apply(self, seed, hosted, *flat)
        return _grouped(results, hosted)


def compiled(
    sharded: fx.GraphModule, world: World, inputs: Mapping[str, Tensor], trained: frozenset[str], how: Overlap
) -> Compiled | None:
    """Schedules a sharded graph for this process's device; every process of the job must call it alike.

    Rank 0 decides about the order, and every process checks that its graphs have the same nodes.

    Args:
        sharded: see ``passes.shard.shard``.
        world: this process's.
        inputs: placeholder -> this device's part of it.
        trained: placeholders whose gradients are wanted.
        how: durations and limits.

    Returns:
        None, on every process, where one of them cannot be traced or they differ: the sharded graph then runs as it is.
    """
    mine: Halves | None = None
    reason = ""
    try:
        mine = halves(sharded, world.mesh_shape, world.hosted[0], inputs, trained)
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it, and the graph runs as it is
        reason = _why(error)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (mine.signature if mine is not None else "", reason))
    if len(set(found)) > 1 or mine is None:
        _log.warning("no overlap of computing and communicating: %s", next((why for _, why in found if why), DIFFERENT))
        return None
    return _scheduled(mine, world, how, functools.partial(_plain, sharded, world))


def _plain(sharded: fx.GraphModule, world: World, seed: int, inputs: Sequence[Parts]) -> Sequence[Any]:
    names = (str(node.target) for node in sharded.graph.nodes if node.op == "placeholder")
    with world.repeating(seed):
        return execute(sharded.graph, world, dict(zip(names, inputs, strict=True)))


def _scheduled(mine: Halves, world: World, how: Overlap, plain: Plain) -> Compiled:
    graphs = mine.overlapped(_from_first(lambda: mine.buckets(how.enough)))
    orders = _from_first(lambda: graphs.orders(graphs.slots(how.durations, how.limits)))
    forward, backward = map(Arranged, graphs.modules(orders, world))
    _log.info("%d and %d nodes scheduled, forward and backward", *map(len, orders))

    @functools.cache
    def without(missing: frozenset[int]) -> Runner:
        return _scheduled(mine.without(missing), world, how, plain).backward

    return Compiled(graphs, forward, backward, without, plain, lambda other: _scheduled(mine, world, other, plain))


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, Untraceable) else f"tracing it failed ({type(error).__name__}: {error})"


def _from_first(decide: Callable[[], Any]) -> Any:
    """Rank 0's decision, on every rank; where it fails to decide, its error."""
    agreed: list[Any] = [None, ""]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            agreed[0] = decide()
        except Exception as error:  # noqa: BLE001 - the others wait to hear of it
            agreed[1], failure = f"rank 0 found no schedule ({type(error).__name__}: {error})", error
    dist.broadcast_object_list(agreed, src=0)
    if agreed[1]:
        raise AutotpError(agreed[1]) from failure
    return agreed[0]


class Schedules:
    """The scheduled graphs of a sharded graph, made when they are first needed.

    Args:
        sharded: see ``passes.shard.shard``.
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
    known: dict[Any, Halves] = {}
    try:
        for index, at in enumerate(world.hosted):
            if (None if even else at) not in known:
                mine = {name: parts[index] for name, parts in inputs.items()}
                known[None if even else at] = halves(sharded, world.mesh_shape, at, mine, trained)
    except Exception as error:  # noqa: BLE001 - as in ``compiled``
        _log.warning("no overlap of computing and communicating: %s", _why(error))
        return None
    if len({each.signature for each in known.values()}) > 1:
        _log.warning("no overlap of computing and communicating: %s", DIFFERENT)
        return None
    return _all_scheduled(known, world, how, functools.partial(_plain, sharded, world), even=even)


def _all_scheduled(known: Mapping[Any, Halves], world: World, how: Overlap, plain: Plain, *, even: bool) -> Compiled:
    chosen = next(iter(known.values())).buckets(how.enough)
    made = {at: each.overlapped(chosen) for at, each in known.items()}
    first = made[None if even else world.hosted[0]]
    orders = first.orders(first.slots(how.durations, how.limits))
    modules = {at: each.modules(orders, world) for at, each in made.items()}
    graphs = [modules[None if even else at] for at in world.hosted]
    forward, backward = (_Lockstep([both[half] for both in graphs]) for half in (0, 1))

    @functools.cache
    def without(missing: frozenset[int]) -> Runner:
        some = {at: each.without(missing) for at, each in known.items()}
        return _all_scheduled(some, world, how, plain, even=even).backward

    def again(other: Overlap) -> Compiled:
        return _all_scheduled(known, world, other, plain, even=even)

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


def _grouped(flat: Sequence[Any], hosted: int) -> list[Any]:
    if not hosted:
        return list(flat)
    groups = [flat[i : i + hosted] for i in range(0, len(flat), hosted)]
    return [Parts(group) if isinstance(group[0], Tensor) else group[0] for group in groups]


class _Pass(torch.autograd.Function):
    """One forward pass, and its backward pass."""

    @staticmethod
    def forward(ctx: Any, compiled: Compiled, seed: int, hosted: int, *inputs: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        graphs = compiled.graphs
        results = list(compiled.forward([*_grouped(inputs, hosted), seed]))
        ctx.compiled, ctx.seed, ctx.hosted = compiled, seed, hosted
        ctx.inputs, ctx.versions = inputs, [_version(tensor) for tensor in inputs]
        outputs, saved = results[: graphs.outputs], results[graphs.outputs :]
        given = {id(tensor) for tensor in inputs}
        flat: list[Any] = []
        fixed: list[Tensor] = []
        for i, output in enumerate(outputs):
            for part in output if isinstance(output, Parts) else [output] * max(hosted, 1):
                if isinstance(part, Tensor):
                    if i in graphs.tangents:
                        # a view made in here could not be changed in place outside
                        part = part.clone() if part._is_view() or id(part) in given else part
                    else:
                        part = part.view_as(part) if id(part) in given else part
                        fixed.append(part)
                    given.add(id(part))
                flat.append(part)
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(part for value in saved for part in (value if isinstance(value, Parts) else [value])))
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        graphs, hosted = ctx.compiled.graphs, ctx.hosted
        count = max(hosted, 1)
        if torch.is_grad_enabled():
            return None, None, None, *_differentiable(ctx, gradients)
        mine = [gradients[i * count + d] for i in graphs.tangents for d in range(count)]
        missing = frozenset(i for i in range(len(graphs.tangents)) if mine[i * count] is None)
        run = ctx.compiled.without(missing) if missing else ctx.compiled.backward
        flat = [None if gradient is None else gradient.resolve_conj().resolve_neg().contiguous() for gradient in mine]
        seen = {id(gradient) for gradient in flat}
        values = [*_grouped(ctx.saved_tensors, hosted), *_grouped(flat, hosted)]
        ctx.maybe_clear_saved_tensors()
        if _freed(ctx):
            ctx.inputs = ()
        del mine, flat
        found: list[Any] = [None] * (len(graphs.inputs) * count)
        for i, gradient, reached in zip(graphs.trained, run(values), graphs.reached, strict=True):
            if gradient is None or reached <= missing:
                continue
            for d, part in enumerate(gradient if isinstance(gradient, Parts) else [gradient]):
                found[i * count + d] = part.clone() if id(part) in seen else part
                seen.add(id(part))
        return None, None, None, *found


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _freed(ctx: Any) -> bool:
    """Whether what was saved for the backward pass was let go."""
    try:
        return ctx.saved_tensors is None
    except RuntimeError:
        return True


def _differentiable(ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the inputs, with a graph of their own: of the sharded graph as it is, which is run again."""
    graphs, count = ctx.compiled.graphs, max(ctx.hosted, 1)
    assert ctx.saved_tensors is not None, "torch's own error, where they were let go"
    changed = [i for i, (tensor, was) in enumerate(zip(ctx.inputs, ctx.versions, strict=True)) if _version(tensor) != was]
    if changed:
        names = ", ".join(dict.fromkeys(graphs.inputs[i // count] for i in changed))
        raise AutotpError(f"a gradient of a gradient needs {names} as in the forward pass; it was changed in place since")
    outputs = ctx.compiled.plain(ctx.seed, [Parts(ctx.inputs[i : i + count]) for i in range(0, len(ctx.inputs), count)])
    places = [(i, d) for i in graphs.tangents for d in range(count)]
    ends = [(outputs[i][d], g) for i, d in places if (g := gradients[i * count + d]) is not None]
    wanted = [i * count + d for i in graphs.trained for d in range(count)]
    made = torch.autograd.grad(
        [end for end, _ in ends],
        [ctx.inputs[i] for i in wanted],
        [gradient for _, gradient in ends],
        create_graph=True,
        allow_unused=True,
    )
    found: list[Tensor | None] = [None] * len(ctx.inputs)
    for i, gradient in zip(wanted, made, strict=True):
        found[i] = gradient
    return found
