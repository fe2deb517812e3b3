"""Functions that a sharded graph calls besides torch's operators: reshards, and operators that depend on the device.

A function marked ``hosted`` accepts either one tensor (this process's part) or, under ``simulate``, ``Parts``: the parts of
all devices of the mesh. Other functions are local and run once per device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from passes.graph import differentiable
from passes.layouts.reshard import Step
from passes.torch_internals import tree_leaves, view_base
from passes.world.chunked import ChunkedWorld
from passes.world.draws import Draw
from passes.world.world import World

__all__ = [
    "Parts",
    "all_max",
    "all_reduce",
    "all_sum",
    "chunked",
    "ending",
    "gather",
    "hosted",
    "in_one_format",
    "is_hosted",
    "mirror",
    "next_seed",
    "offset",
    "part_of",
    "reshard",
    "reshard_chunks",
    "seeded",
    "within",
]


_Dtypes = tuple[torch.dtype, torch.dtype]
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Parts(list):
    """One value per device of the mesh, in the order of ``World.hosted``."""


def part_of(value: Any, index: int) -> Any:
    """One device's arguments: ``value`` with ``Parts``, at any depth, replaced by their values at ``index``."""
    if isinstance(value, Parts):
        return value[index]
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(part_of(v, index) for v in value)
    if isinstance(value, dict):
        return {k: part_of(v, index) for k, v in value.items()}
    return value


def hosted(function: _Function) -> _Function:
    """Marks a function that is called once for all devices that a process hosts, and accepts ``Parts``."""
    function.hosted = True  # type: ignore[attr-defined]
    return function


def is_hosted(target: Any) -> bool:
    """Whether a node's target is marked by ``hosted``."""
    return getattr(target, "hosted", False) is True


def _apart(result: Tensor, others: Sequence[Tensor]) -> Tensor:
    """``result`` as an output of an autograd function: none of ``others``, and a tensor that can be modified in place.

    Views that such a function makes cannot be modified in place outside it. The result of a collective shares memory with
    no other tensor, so it can be detached from its base.
    """
    if any(result is other for other in others):
        return result.view_as(result)
    base = view_base(result)
    if base is None or any(base is other or base is view_base(other) for other in others):
        return result
    return result.detach()


@hosted
def reshard(
    world: World, value: Any, forward: Sequence[Step], backward: Sequence[Step], cast: _Dtypes | None = None, at: str = ""
) -> Any:
    """Converts ``value`` to another layout by ``forward`` steps, and its gradient back by ``backward`` steps.

    Args:
        world: the mesh.
        value: a tensor, or ``Parts``.
        forward, backward: reshard steps.
        cast: the dtypes in which the value and its gradient are communicated. The result has the former; the returned
            gradient has the value's own dtype.
        at: the operator for which the reshard runs, as messages name it; likewise in the functions below.
    """
    return reshard_chunks(world, [value], forward, backward, (0,), (0,), cast=cast, at=at)[0]


@hosted
def chunked(world: World, chunks: tuple[int, ...], places: tuple[tuple[int, ...], ...]) -> World:
    """The world whose devices are chunks of the hosted devices; see `passes.world.chunked`."""
    return ChunkedWorld(world, chunks, places)


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        world: World,
        forward: Sequence[Step],
        backward: Sequence[Step],
        spread: Sequence[int],
        kept: Sequence[int],
        casts: tuple[_Dtypes, _Dtypes] | None,
        at: str,
        *flat: Tensor,
    ) -> tuple[Tensor, ...]:
        count = world.count
        ctx.casts, ctx.at = casts, at
        ctx.world, ctx.forward_steps, ctx.steps = world, forward, backward
        ctx.spread, ctx.kept, ctx.given = spread, kept, len(flat) // count
        moved = [part.to(casts[0][0]) for part in flat] if casts is not None else flat
        results = world.run(forward, [moved[i * count + d] for i in spread for d in range(count)], spread)
        if casts is not None:
            results = [part.to(casts[0][1]) for part in results]
        found: list[Tensor] = []
        for i in kept:
            for part in results[i * count : (i + 1) * count]:
                found.append(_apart(part, [*flat, *found]))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        world, count = ctx.world, ctx.world.count
        places = world.places
        # A place that is not kept had the same result as a kept one: results are equal along axes with one kept coordinate.
        source = [_represented_by(place, [places[i] for i in ctx.kept]) for place in places]
        first = [ctx.spread.index(i) for i in range(ctx.given)]
        if torch.is_grad_enabled():
            casts = None if ctx.casts is None else ctx.casts[::-1]
            resharded = _Reshard.apply(world, ctx.steps, ctx.forward_steps, source, first, casts, ctx.at, *gradients)
            return None, None, None, None, None, None, None, *resharded
        if ctx.casts is not None:
            gradients = tuple(gradient.to(ctx.casts[1][0]) for gradient in gradients)
        world.whereabouts.going_back(_gradient_of(ctx.at))
        results = world.run(ctx.steps, [gradients[i * count + d] for i in source for d in range(count)], source)
        if ctx.casts is not None:
            results = [part.to(ctx.casts[1][1]) for part in results]
        return None, None, None, None, None, None, None, *(results[i * count + d] for i in first for d in range(count))


def _gradient_of(at: str) -> str:
    return f"the gradient of {at}" if at else ""


def _represented_by(place: tuple[int, ...], kept: Sequence[tuple[int, ...]]) -> int:
    differs = [any(other[a] for other in kept) for a in range(len(place))]
    return kept.index(tuple(c if apart else 0 for c, apart in zip(place, differs, strict=True)))


@hosted
def reshard_chunks(
    world: World,
    values: Sequence[Any],
    forward: Sequence[Step],
    backward: Sequence[Step],
    spread: Sequence[int],
    kept: Sequence[int],
    op: str = "sum",
    cast: _Dtypes | None = None,
    at: str = "",
) -> list[Any]:
    """``reshard`` of the values of several chunks, along virtual axes too.

    Args:
        world: the world of the chunks that differ before or after the reshard; with one chunk, that of the devices.
        values: the values that differ before the reshard, each a tensor or ``Parts``.
        forward, backward: reshard steps.
        spread: for each chunk of the world, the index of its value.
        kept: the indices of the chunks whose results differ, and are returned.
        op: the reduction of the all-reduce; ``max`` has no gradient.
        cast, at: see ``reshard``.
    """
    world.whereabouts.at = at
    forward, backward = [Step(*s) for s in forward], [Step(*s) for s in backward]
    count = world.count
    flat = [part for value in values for part in (value if isinstance(value, Parts) else [value])]
    if op == "max":
        (step,) = forward
        parts = [flat[i * count + d].detach() for i in spread for d in range(count)]
        every = world.all_reduce(parts, step.axes, op).wait()
        results: Sequence[Tensor] = [every[i * count + d] for i in kept for d in range(count)]
    elif not differentiable(flat[0]):
        every = world.run(forward, [flat[i * count + d] for i in spread for d in range(count)], spread)
        results = [every[i * count + d] for i in kept for d in range(count)]
    else:
        casts = None if cast is None else ((cast[0], cast[0]), (cast[1], flat[0].dtype))
        results = _Reshard.apply(world, forward, backward, spread, kept, casts, at, *flat)
    if isinstance(values[0], Parts):
        return [Parts(results[i : i + count]) for i in range(0, len(results), count)]
    return list(results)


@hosted
def all_sum(world: World, value: Any, axes: tuple[int, ...], at: str = "") -> Any:
    """The sum over ``axes`` of partial sums, which each device then uses for its own shard.

    Each device's gradient of the sum is therefore partial too, and the backward pass runs the same all-reduce.
    """
    step = (Step("all_reduce", axes),)
    return reshard(world, value, step, step, at=at)


@hosted
def all_reduce(world: World, value: Any, axes: tuple[int, ...], at: str = "") -> Any:
    """The sum over ``axes`` of partial sums, which all devices use alike: its gradient is passed on unchanged."""
    return reshard(world, value, (Step("all_reduce", axes),), (), at=at)


@hosted
def gather(
    world: World, value: Any, forward: Sequence[Step], backward: Sequence[Step], cast: _Dtypes | None = None, at: str = ""
) -> Any:
    """``reshard`` of a parameter that is cast or gathered before use; the backward pass may repeat it (``Regather``)."""
    result = reshard(world, value, forward, backward, cast, at)
    if world.regather is not None and isinstance(result, Tensor):
        world.regather.register(result, value, tuple(Step(*s) for s in forward), at)
    return result


@hosted
def all_max(world: World, value: Any, axes: tuple[int, ...], at: str = "") -> Any:
    """The maximum over ``axes``, without a gradient, since its consumers subtract it again."""
    return reshard_chunks(world, [value], (Step("all_reduce", axes),), (), (0,), (0,), "max", at=at)[0]


class _Ending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, sink: Tensor) -> Tensor:  # type: ignore[override]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, gradient


def ending(value: Tensor, sink: Tensor) -> Tensor:
    """``value``, whose gradient goes to ``sink`` instead of to what produced ``value``; see `passes.sharding.deferral`."""
    return _Ending.apply(value, sink)


class _Mirror(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, world: World, steps: Sequence[Step], likes: Sequence[Tensor], at: str, *parts: Tensor
    ) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.world, ctx.steps, ctx.at = world, steps, at
        return tuple(like.detach() for like in likes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.world.whereabouts.going_back(_gradient_of(ctx.at))
        return None, None, None, None, *ctx.world.run(ctx.steps, gradients)


@hosted
def mirror(world: World, value: Any, like: Any, backward: Sequence[Step], at: str = "") -> Any:
    """Only the backward half of a reshard: returns ``like``, whose gradient ``backward`` converts to that of ``value``."""
    several = isinstance(value, Parts)
    steps = tuple(Step(*s) for s in backward)
    made = _Mirror.apply(world, steps, list(like) if several else [like], at, *(value if several else [value]))
    return Parts(made) if several else made[0]


class _InOneFormat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, world: World, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.world = world
        return _apart(world.local("in_one_format", x), [x])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, _InOneFormat.apply(ctx.world, gradient)


def in_one_format(world: World, x: Tensor) -> Tensor:
    """``x``, with an unambiguous memory format for it and its gradient; see `passes.layouts.layout.in_one_format`."""
    return _InOneFormat.apply(world, x)


def within(world: World, ids: Tensor, outside: Tensor, message: str) -> Tensor:
    """Returns ``ids`` if ``outside`` is 0; consumers read the result, so that the check is not removed as dead code.

    Raises:
        IndexError: ``outside`` is not 0 on this device. On a GPU, a device-side assertion fails instead.
    """
    return world.local("within", ids, outside, message)


@hosted
def offset(world: World, size: int, axes: tuple[int, ...], like: Any) -> Any:
    """The first index of this device's part of a dim of ``size`` that ``axes`` split; ``Parts`` if ``like`` is."""
    starts = world.offset(size, axes, like)
    return Parts(starts) if isinstance(like, Parts) else starts[0]


@hosted
def next_seed(world: World, draws: tuple[Draw | None, ...]) -> Any:
    """The seed for the random operators of a forward pass, the same on every device; they draw ``draws``."""
    return world.next_seed(draws)


@hosted
def seeded(world: World, seed: int, salt: int, axes: tuple[int, ...], function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Runs a random operator so that replicas agree and shards differ.

    The generator is seeded by ``seed``, ``salt`` (the operator's number) and the device's coordinates on ``axes``, the
    axes that shard the operator, so devices that compute the same part draw the same numbers.
    """
    results = [
        world.seeded(seed, (salt,), axes, index, function, part_of(args, index), part_of(kwargs, index))
        for index in range(len(world.hosted))
    ]
    hosted = any(isinstance(a, Parts) for a in tree_leaves((args, kwargs), is_leaf=lambda a: isinstance(a, Parts)))
    return Parts(results) if hosted or len(results) > 1 else results[0]
