"""What a sharded graph calls besides torch's own operators: reshards, and the few operators that need their place.

A function marked ``hosted`` accepts either one tensor (this process's part) or, under ``simulate``, ``Parts``: the parts of
all devices of the mesh. Others are local and run once per device.
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
    """One device's view of arguments that hold ``Parts``, however deep."""
    if isinstance(value, Parts):
        return value[index]
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(part_of(v, index) for v in value)
    if isinstance(value, dict):
        return {k: part_of(v, index) for k, v in value.items()}
    return value


def hosted(function: _Function) -> _Function:
    """Marks a function that is called once for all devices that a process hosts, and takes ``Parts`` itself."""
    function.hosted = True  # type: ignore[attr-defined]
    return function


def is_hosted(target: Any) -> bool:
    """Whether what a node calls is marked by ``hosted``."""
    return getattr(target, "hosted", False) is True


def _apart(result: Tensor, others: Sequence[Tensor]) -> Tensor:
    """What a function of autograd may give: no tensor that it was given or gives already, and one to change in place.

    A view that is made in such a function cannot be changed in place outside; what arrived belongs to nobody else.
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
    """Takes ``value`` to another layout by ``forward`` steps; its gradient comes back by ``backward`` steps.

    Args:
        world: the mesh.
        value: a tensor, or ``Parts``.
        forward, backward: steps.
        cast: dtypes in which the value moves, and its gradient; the gradient comes back in the value's own.
        at: for which operator, as messages have it; so in all that follows.
    """
    return reshard_chunks(world, [value], forward, backward, (0,), (0,), cast=cast, at=at)[0]


@hosted
def chunked(world: World, chunks: tuple[int, ...], places: tuple[tuple[int, ...], ...]) -> World:
    """The world of some chunks of the hosted devices; see `passes.world.chunked`."""
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
        # A place whose result is not kept had the same result as one that is: chunks are equal along what is not kept.
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
    """``reshard`` along virtual axes too.

    Args:
        world: of the chunks that differ before or after; of the devices, where there is one chunk.
        values: what differs before, a tensor or ``Parts`` each.
        forward, backward: steps.
        spread: per chunk of the world, which of the values it has.
        kept: the chunks whose results differ.
        op: of the all-reduce; ``max`` has no gradient.
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
    """The sum over ``axes`` of partial sums that each device goes on to use for its own shard.

    Each device's gradient of the sum is therefore partial too: the mirror is the same all-reduce.
    """
    step = (Step("all_reduce", axes),)
    return reshard(world, value, step, step, at=at)


@hosted
def all_reduce(world: World, value: Any, axes: tuple[int, ...], at: str = "") -> Any:
    """The sum over ``axes`` of partial sums, for a use that is the same on every device: its gradient passes unchanged."""
    return reshard(world, value, (Step("all_reduce", axes),), (), at=at)


@hosted
def gather(
    world: World, value: Any, forward: Sequence[Step], backward: Sequence[Step], cast: _Dtypes | None = None, at: str = ""
) -> Any:
    """``reshard`` of a parameter that is cast or gathered before use; the backward pass may do so again (``Regather``)."""
    result = reshard(world, value, forward, backward, cast, at)
    if world.regather is not None and isinstance(result, Tensor):
        world.regather.register(result, value, tuple(Step(*s) for s in forward), at)
    return result


@hosted
def all_max(world: World, value: Any, axes: tuple[int, ...], at: str = "") -> Any:
    """The maximum over ``axes``; no gradient (its users subtract it again)."""
    return reshard_chunks(world, [value], (Step("all_reduce", axes),), (), (0,), (0,), "max", at=at)[0]


class _Ending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, sink: Tensor) -> Tensor:  # type: ignore[override]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, gradient


def ending(value: Tensor, sink: Tensor) -> Tensor:
    """``value``, whose gradient is that of ``sink`` and goes no further; see `passes.sharding.deferral`."""
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
    """A reshard's way of the gradient alone: what it gives is shaped as ``like``, and has no numbers of ``value``'s."""
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
    """``x`` and its gradient as a kernel cannot misread them; see `passes.layouts.layout.in_one_format`."""
    return _InOneFormat.apply(world, x)


def within(world: World, ids: Tensor, outside: Tensor, message: str) -> Tensor:
    """``ids``, if none of them is ``outside``.

    Raises:
        IndexError: on every device where ``outside`` is not 0; the first of the two tensors is what others then read, so
            that the check is not left out.
    """
    return world.local("within", ids, outside, message)


@hosted
def offset(world: World, size: int, axes: tuple[int, ...], like: Any) -> Any:
    """Where this device's contiguous part of a dim of ``size``, split by ``axes``, begins. ``like`` gives the form."""
    starts = world.offset(size, axes, like)
    return Parts(starts) if isinstance(like, Parts) else starts[0]


@hosted
def next_seed(world: World, draws: tuple[Draw | None, ...]) -> Any:
    """A fresh seed for the random operators of one forward pass, the same on every device; they draw ``draws``."""
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
