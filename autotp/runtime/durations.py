"""Predicted durations of the nodes of a traced graph, for its schedule."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from autotp.costs.prices import Prices
from autotp.plans.plan import Plan, overlapping
from autotp.runtime.compiled import Overlap
from costmodel import compute
from costmodel.memory import state_bytes
from costmodel.overlap import LATENCY_SHARE, messages
from passes.graph import note_of
from passes.overlap.aliasing import viewing
from passes.overlap.launch import launch, wait
from passes.overlap.primitives import COLLECTIVE_OF, axes_of, crop, in_one_format, laid_out, pad, put, within
from passes.overlap.schedule import Task
from passes.overlap.trace import Joint
from passes.rules.table import kind_of
from passes.torch_internals import tree_leaves

__all__ = ["enough", "hiding", "how_to_run", "lane_of", "overlap_of", "task_of"]

_aten = torch.ops.aten
#: The most bytes of a merged collective, as merging and splitting messages are copies.
_MOST = 32 * 2**20
_COPIES = 2
#: If merging takes too much memory, these shares of the plan's predicted memory limit it, in turn.
_SHARES = (2**-3, 2**-6, 2**-9)
#: Operators that torch has no FLOP formula for -> operators with the same FLOP, for which it has one.
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


def how_to_run(plan: Plan, schedule: str, *, compile: bool = False) -> Overlap | None:
    """How a plan's graphs run under a schedule; None: autograd runs the sharded graph, without any recomputation."""
    if overlapping(schedule):
        return replace(overlap_of(plan), compile=compile)
    return Overlap(compile=compile) if plan.recomputed or compile else None


def overlap_of(plan: Plan, *, merge: bool = True) -> Overlap:
    """How communication and computation of a plan's graphs overlap.

    Args:
        plan: gives the mesh, the machine's rates, and the memory that merged messages may take.
        merge: whether small collectives are merged.
    """
    prices = Prices(plan.topology, plan.mesh_shape)
    durations, room = functools.partial(task_of, prices=prices), functools.partial(room_of, plan)
    if not merge:
        return Overlap(durations, faster=prices.faster_staged, room=room)
    ways = [
        (functools.partial(enough, prices=prices, spare=spare), functools.partial(hiding, prices=prices, spare=spare))
        for spare in (share * plan.predicted.memory_bytes for share in (1.0, *_SHARES))
    ]
    (merged, hides), *smaller = ways
    return Overlap(
        durations, merged, faster=prices.faster_staged, hiding=hides, smaller=(*smaller, (None, None)), room=room
    )


def room_of(plan: Plan, joint: Joint) -> float:
    """Bytes that a plan's memory bound leaves for its forward or backward graph, after the tensors at rest.

    Args:
        plan: gives the memory bound of a step; collectives launched early may add to its predicted memory, up to the bound.
        joint: the traced graphs. Their inputs are the tensors at rest; to parameters, the optimizer's state is added.
    """
    rests = 0.0
    for number, node in enumerate(itertools.islice(joint.graph.nodes, len(joint.inputs))):
        value = node.meta["val"]
        rests += float(value.nbytes)
        if number in joint.trained:
            whole = state_bytes(value.numel(), value.element_size(), plan.optimizer)
            gradients = 1 if plan.accumulate > 1 else 0
            rests += float(whole) - (2 - gradients) * value.nbytes
    return max(plan.predicted.memory_bytes, plan.memory_bound) - rests


def task_of(node: fx.Node, prices: Prices) -> Task:
    """The predicted seconds, lane and bytes of a node of a graph that ``passes.overlap.launch.launches`` made."""
    if node.target is launch:
        collective: Any = note_of(node).collective
        return Task(*_collective(collective, prices), float(collective.meta["val"].nbytes))
    traced = note_of(node).traced or node
    if node.target is wait or node.op != "call_function" or node.target is operator.getitem or _is_view(traced):
        return Task()
    value = node.meta.get("val")
    operands = [n.meta["val"] for n in traced.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    results = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if not results:
        return Task()
    in_place = traced.target is put
    moved = 2.0 * operands[1].nbytes if in_place else float(sum(tensor.nbytes for tensor in (*operands, *results)))
    flop, dims = _flop(traced)
    seconds = float(
        compute.seconds(flop, moved, prices.topology.device, str(results[0].dtype), dims=dims, kind=kind_of(node))  # type: ignore[arg-type]
    )
    return Task(seconds, "compute", 0.0 if in_place else float(sum(tensor.nbytes for tensor in results)))


def enough(kind: str, axes: tuple[int, ...], total: float, prices: Prices, spare: float = math.inf) -> float:
    """The size, in bytes of one device's part, from which a collective is not merged with others.

    Args:
        kind, axes: the kind of collective, and its mesh axes.
        total: bytes of one device's parts in all such collectives, sent in the number of messages that is worth their
            latencies (`costmodel.overlap.MESSAGES`); infinite if unknown: latency must then be a small share of the time.
        prices: the prices of collectives on the mesh.
        spare: bytes of memory that merging may take.
    """
    factor, most = _factor(kind, axes, prices), _most(kind, axes, prices, spare)
    nothing = float(prices.collective(kind, axes, 1.0)[0])
    if nothing and not math.isinf(total):
        alone = float(prices.collective(kind, axes, factor * total)[0])
        return min(most, total / float(messages(max(alone, nothing), nothing, prices.contention(kind, axes))))
    size = min(2.0**10, most)
    while size < most and nothing > LATENCY_SHARE * float(prices.collective(kind, axes, factor * size)[0]):
        size *= 2
    return size


def hiding(
    kind: str, axes: tuple[int, ...], total: float, prices: Prices, spare: float = math.inf
) -> tuple[float, float, float]:
    """Seconds of sending ``total`` bytes that computation can hide, seconds of latency, and the most bytes of a message.

    Bytes are those of one device's parts. See `passes.overlap.bucket.Hiding`, and `enough` for the arguments.
    """
    nothing = float(prices.collective(kind, axes, 1.0)[0])
    alone = float(prices.collective(kind, axes, _factor(kind, axes, prices) * total)[0])
    hidden = (1 - prices.contention(kind, axes)) * max(0.0, alone - nothing)
    return hidden, nothing, _most(kind, axes, prices, spare)


def _most(kind: str, axes: tuple[int, ...], prices: Prices, spare: float) -> float:
    """The most bytes of one device's part in one message."""
    return min(_MOST, spare / _factor(kind, axes, prices) / _COPIES)


def _factor(kind: str, axes: tuple[int, ...], prices: Prices) -> int:
    """The bytes of a collective's larger tensor (operand or result), as a multiple of one device's part."""
    return math.prod(prices.mesh[a] for a in axes) if kind == "all_gather" else 1


def _collective(traced: fx.Node, prices: Prices) -> tuple[float, str]:
    kind, axes = COLLECTIVE_OF[traced.target], axes_of(traced.target, traced.args)
    operand: Any = traced.args[0]
    larger = float(max(operand.meta["val"].nbytes, traced.meta["val"].nbytes))
    return float(prices.collective(kind, axes, larger)[0]), lane_of(axes)


def lane_of(axes: tuple[int, ...]) -> str:
    """The name of the lane of the collectives over some mesh axes."""
    return "axes " + ",".join(map(str, axes))


def _is_view(node: fx.Node) -> bool:
    # these operators have nothing to do if they change neither shape nor strides
    if node.target in (laid_out, in_one_format, within, crop, pad):
        old, new = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        return bool(new.shape == old.shape and new.stride() == old.stride())
    return viewing(node.target)


def _flop(node: fx.Node) -> tuple[float, tuple[float, float, float] | None]:
    """The FLOP of a node, and (m, k, n) if it is a matrix product."""
    packet = getattr(node.target, "overloadpacket", None)
    count: Callable[..., int] | None = flop_registry.get(_COUNTED_AS.get(packet, packet))  # type: ignore[arg-type]
    if count is None:
        return 0.0, None
    args = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    kwargs = fx.node.map_arg(dict(node.kwargs), lambda n: n.meta["val"])
    flop = float(count(*args, **kwargs, out_val=node.meta["val"]))  # type: ignore[misc]
    if node.target in (_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default):
        left, right = [a for a in args if isinstance(a, Tensor)][-2:]  # type: ignore[union-attr]
        return flop, (float(left.shape[-2]), float(left.shape[-1]), float(right.shape[-1]))
    return flop, None
