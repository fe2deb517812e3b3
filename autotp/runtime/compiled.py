"""Runs a pair of scheduled graphs as one autograd function: the forward pass, its backward pass, and disjoint gradients."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from autotp.errors import AutotpError
from passes.overlap import Halves, Overlapped
from passes.overlap.bucket import Buckets, Enough, Hiding
from passes.overlap.inplace import inplace
from passes.overlap.memory import peak, peak_in
from passes.overlap.schedule import Durations, Limits, Slot, schedule
from passes.overlap.stage import Faster, Stages
from passes.overlap.trace import Joint
from passes.torch_internals import storage_id, version
from passes.world.ops import Parts
from passes.world.whereabouts import Whereabouts

__all__ = ["Compiled", "Disjoint", "Overlap", "Plain", "Runner", "Variant"]

#: Runs one of the two graphs: a list of its inputs, which it clears -> its outputs.
Runner = Callable[[list[Any]], Sequence[Any]]

#: Runs a sharded graph unscheduled: a seed, and ``Parts`` of its inputs -> its outputs.
Plain = Callable[[Any, Sequence[Parts]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a sharded graph, for gradient accumulation.

    Attributes:
        graph: the variant.
        waiting: name -> an example (a tensor or ``Parts``), for each value that the graph returns after its outputs, and
            that also has a gradient from outside of the graph.
        take: returns that gradient of a value, one tensor per device of this process, when a backward pass begins; empty
            if there is none.
    """

    graph: fx.GraphModule
    waiting: Mapping[str, Any]
    take: Callable[[str], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How communication and computation of a pair of graphs overlap.

    Attributes:
        durations: predicts the durations of nodes; None: nothing is hidden, and nodes run in autograd's order.
        enough: see `passes.overlap.bucket.buckets`; None: collectives are not merged.
        limits: the limits of the schedule.
        faster: see `passes.overlap.stage.stages`; None: every all_reduce is one collective.
        hiding: see `passes.overlap.bucket.buckets`.
        smaller: pairs that replace ``enough`` and ``hiding``, in turn, while merged messages exceed the memory limit.
        room: the memory limit: the bytes that either graph of a traced pair may hold at once; None: no limit.
        compile: whether the regions between collectives are compiled; devices in lockstep run them uncompiled.
    """

    durations: Durations | None = None
    enough: Enough | None = None
    limits: Limits = Limits()
    faster: Faster | None = None
    hiding: Hiding | None = None
    smaller: Sequence[tuple[Enough | None, Hiding | None]] = ()
    room: Callable[[Joint], float] | None = None
    compile: bool = False

    def decided(self, found: Halves) -> tuple[tuple[Buckets, Buckets], tuple[Stages, Stages]]:
        """Decides which collectives of the traced graphs are merged, and which all_reduces then go in stages.

        Each graph gets the largest messages with which its peak memory, in autograd's order, is within the limit.
        """
        chosen: list[Buckets] = [(), ()]
        tight = [0, 1]
        for enough, hiding in ((self.enough, self.hiding), *self.smaller):
            merged = found.buckets(enough, hiding)
            for half in tight:
                chosen[half] = merged[half]
            if self.room is None or not any(chosen[half] for half in tight):
                break
            made = found.overlapped(merged, found.stages(merged, self.faster))
            room, graphs = self.room(made.joint), (made.forward, made.backward)
            for half in tight:
                inplace(graphs[half])
            tight = [half for half in tight if peak(graphs[half]) > room]
        pair = chosen[0], chosen[1]
        return pair, found.stages(pair, self.faster)

    def slots(self, made: Overlapped) -> tuple[list[Slot], list[Slot]]:
        """Schedules both graphs. A graph keeps autograd's order if any other would exceed the memory limit."""
        assert self.durations is not None, "nothing to schedule by"
        room = math.inf if self.room is None else self.room(made.joint)
        return self._slots(made.forward, self.durations, room), self._slots(made.backward, self.durations, room)

    def _slots(self, graph: fx.Graph, durations: Durations, room: float) -> list[Slot]:
        found = schedule(graph, durations, self.limits)
        if math.isinf(room) or peak_in(graph, [slot.node for slot in found]) <= room:
            return found
        given = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        least = peak_in(graph, given)
        slack = min(self.limits.slack, max(0.0, room / least - 1)) if least else 0.0
        found = schedule(graph, durations, replace(self.limits, slack=slack))
        if peak_in(graph, [slot.node for slot in found]) <= max(room, least):
            return found
        return schedule(graph, durations, replace(self.limits, collectives=0))


@dataclass(frozen=True, slots=True)
class Compiled:
    """A scheduled pair of graphs, ready to run.

    Attributes:
        graphs: the scheduled graphs of this process's first device.
        forward, backward: run these graphs.
        without: returns the runner of a backward graph for when some gradients are missing, which are given by their
            places among those of ``Joint.tangents`` and ``Joint.waiting``.
        plain: runs the sharded graph unscheduled, for gradients of gradients: a seed and ``Parts`` of inputs -> outputs.
        whereabouts: the whereabouts of this process.
    """

    graphs: Overlapped
    forward: Runner
    backward: Runner
    without: Callable[[frozenset[int]], Runner]
    plain: Plain
    whereabouts: Whereabouts

    def __call__(self, seed: Any, inputs: Sequence[Any], variant: Variant | None = None) -> list[Any]:
        """Runs the forward graph and returns the sharded graph's outputs; gradients flow to the trained inputs.

        Args:
            seed: the seed of random operators.
            inputs: the inputs of the sharded graph, each a tensor or ``Parts``.
            variant: the variant that the graphs were made from, if any.
        """
        hosted = next((len(value) for value in inputs if isinstance(value, Parts)), 0)
        flat = [part for value in inputs for part in value] if hosted else inputs
        return _grouped(_Pass.apply(self, seed, hosted, variant, *flat), hosted)


def _grouped(flat: Sequence[Any], hosted: int) -> list[Any]:
    if not hosted:
        return list(flat)
    groups = [flat[i : i + hosted] for i in range(0, len(flat), hosted)]
    return [Parts(group) if isinstance(group[0], Tensor) else group[0] for group in groups]


class _Pass(torch.autograd.Function):
    """One forward pass, and its backward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, compiled: Compiled, seed: Any, hosted: int, variant: Variant | None, *inputs: Tensor
    ) -> tuple[Any, ...]:
        joint = compiled.graphs.joint
        results = list(compiled.forward([*_grouped(inputs, hosted), seed]))
        ctx.compiled, ctx.seed, ctx.hosted, ctx.variant = compiled, seed, hosted, variant
        ctx.inputs, ctx.versions = inputs, [version(tensor) for tensor in inputs]
        outputs, saved = results[: joint.outputs], results[joint.outputs :]
        given = {id(tensor) for tensor in inputs}
        flat: list[Any] = []
        fixed: list[Tensor] = []
        for i, output in enumerate(outputs):
            for part in output if isinstance(output, Parts) else [output] * max(hosted, 1):
                if isinstance(part, Tensor):
                    if i in joint.tangents:
                        # a view made in an autograd function cannot be changed in place outside
                        part = part.clone() if part._is_view() or id(part) in given else part
                    else:
                        # a view of a tensor that requires a gradient would too, even if marked as non-differentiable
                        part = part.detach() if part._is_view() or id(part) in given else part
                        fixed.append(part)
                    given.add(id(part))
                flat.append(part)
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        ctx.seeds = {place: value for place, value in enumerate(saved) if not isinstance(value, (Tensor, Parts))}
        kept = [value for place, value in enumerate(saved) if place not in ctx.seeds]
        ctx.save_for_backward(*(part for value in kept for part in (value if isinstance(value, Parts) else [value])))
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        joint, hosted = ctx.compiled.graphs.joint, ctx.hosted
        count = max(hosted, 1)
        if torch.is_grad_enabled():
            return None, None, None, None, *_differentiable(ctx, gradients)
        mine = [gradients[i * count + d] for i in joint.tangents for d in range(count)]
        for name in joint.waiting:
            mine += ctx.variant.take(name) or [None] * count
        missing = frozenset(i for i in range(len(mine) // count) if mine[i * count] is None)
        run = ctx.compiled.without(missing) if missing else ctx.compiled.backward
        flat = [None if gradient is None else gradient.resolve_conj().resolve_neg().contiguous() for gradient in mine]
        disjoint = Disjoint(gradient for gradient in flat if gradient is not None)
        try:
            values = _grouped(ctx.saved_tensors, hosted)
        except RuntimeError as error:
            if "_LocalParts" not in str(error):
                raise
            raise AutotpError(
                "this rank's part of a parameter was changed in place between the forward pass and its backward pass, "
                "which needs it as it was"
            ) from error
        for place, again in ctx.seeds.items():
            values.insert(place, again)
        values += _grouped(flat, hosted)
        ctx.maybe_clear_saved_tensors()
        if _freed(ctx):
            ctx.inputs = ()
        del mine, flat
        found: list[Any] = [None] * (len(joint.inputs) * count)
        ctx.compiled.whereabouts.going_back("")
        with ctx.compiled.whereabouts.passing():
            results = run(values)
        for i, gradient, reached in zip(joint.trained, results, joint.reached, strict=True):
            if gradient is None or reached <= missing:
                continue
            for d, part in enumerate(gradient if isinstance(gradient, Parts) else [gradient]):
                found[i * count + d] = disjoint.own(part)
        return None, None, None, None, *found


def _freed(ctx: Any) -> bool:
    """Whether the tensors saved for the backward pass were freed."""
    try:
        return ctx.saved_tensors is None
    except RuntimeError:
        return True


def _differentiable(ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Differentiable gradients of the inputs; runs the sharded graph again, unscheduled, to record them."""
    joint, count = ctx.compiled.graphs.joint, max(ctx.hosted, 1)
    assert ctx.saved_tensors is not None, "torch's own error, where they were let go"
    changed = [i for i, (tensor, was) in enumerate(zip(ctx.inputs, ctx.versions, strict=True)) if version(tensor) != was]
    if changed:
        names = ", ".join(dict.fromkeys(joint.inputs[i // count] for i in changed))
        raise AutotpError(f"a gradient of a gradient needs {names} as in the forward pass; it was changed in place since")
    outputs = ctx.compiled.plain(ctx.seed, [Parts(ctx.inputs[i : i + count]) for i in range(0, len(ctx.inputs), count)])
    places = [(i, d) for i in joint.tangents for d in range(count)]
    ends = [(outputs[i][d], g) for i, d in places if (g := gradients[i * count + d]) is not None]
    wanted = [i * count + d for i in joint.trained for d in range(count)]
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


class Disjoint:
    """Keeps track of the memory of tensors, so that an in-place change of one leaves the others unchanged.

    Tensors may share a storage without overlap, as results of a merged collective do. A tensor counts as occupying all
    memory between its first and last element.

    Args:
        taken: tensors whose memory is occupied from the start.
    """

    def __init__(self, taken: Iterable[Tensor] = ()) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}
        # These tensors may be freed meanwhile; a weak reference keeps their storage's id from being reused.
        self._kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in taken if self._take(tensor)]

    def own(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, and counts its memory as occupied; returns a copy if some of it is occupied already.

        The caller must keep the result alive while it calls this for other tensors.
        """
        return tensor if self._take(tensor) else tensor.clone()

    def _take(self, tensor: Tensor) -> bool:
        """Counts a tensor's memory as occupied; False if some of it is occupied already."""
        count, size = tensor.numel(), tensor.element_size()  # views may be of other dtypes
        if count == 0:
            return True
        first = tensor.storage_offset()
        if not tensor.is_contiguous():
            count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = int(first) * size, int(first + count) * size
        spans = self._spans.setdefault(storage_id(tensor), [])
        place = bisect.bisect_left(spans, span)
        if (place and spans[place - 1][1] > span[0]) or (place < len(spans) and spans[place][0] < span[1]):
            return False
        spans.insert(place, span)
        return True
