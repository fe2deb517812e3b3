"""Lockstep execution: a sharded graph run for all devices of a world in one process, node by node."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autotp.errors import AutotpError
from passes.graph import differentiable
from passes.layouts.layout import Layout, is_shard, take
from passes.sharding.panel_loop import panelled
from passes.world import ops
from passes.world.ops import Parts, part_of
from passes.world.world import World

__all__ = ["assemble", "collect", "distribute", "execute", "run_node"]

_HOSTED = frozenset(
    {
        ops.reshard,
        ops.reshard_chunks,
        ops.chunked,
        ops.gather,
        ops.all_sum,
        ops.all_reduce,
        ops.all_max,
        ops.offset,
        ops.in_one_format,
        ops.within,
        ops.seeded,
        ops.next_seed,
        panelled,
    }
)


def execute(graph: fx.Graph, world: World, inputs: Mapping[str, Parts]) -> list[Any]:
    """Runs a sharded graph for every device.

    Args:
        graph: the sharded graph.
        world: hosts all devices of the mesh.
        inputs: placeholder name -> every device's part.

    Returns:
        The output tuple's leaves, ``Parts`` where they are tensors.
    """
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = inputs[str(node.target)]
        elif node.op == "get_attr":
            values[node] = world
        elif node.op == "output":
            return [values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in node.args[0]]
        else:
            values[node] = run_node(node, values, world)
    raise ValueError("the graph has no output node")


def distribute(name: str, tensor: Tensor, layout: Layout, world: World) -> Parts:
    """Every device's part of a whole tensor; gradients of the parts become the whole gradient."""
    if differentiable(tensor):
        return Parts(_Distribute.apply(tensor, layout, world, name))
    return Parts(take(tensor, layout, world.mesh_shape, at) for at in world.hosted)


def collect(parts: Parts) -> Tensor:
    """The one value of a tensor that is whole on every device; every device gets the whole gradient."""
    return _Collect.apply(*parts)


def run_node(node: fx.Node, values: Mapping[fx.Node, Any], world: World) -> Any:
    """What a node of a sharded graph gives, for every device, from the values of the nodes before it."""
    args: Any
    kwargs: Any
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
    target: Any = node.target
    if target in _HOSTED:
        return target(*args, **kwargs)
    if target is operator.getitem and not isinstance(args[0], Parts):
        return args[0][args[1]]
    if node.op == "call_method":
        name = str(target)
        return Parts(getattr(part_of(args[0], i), name)(*part_of(args[1:], i), **part_of(kwargs, i)) for i in _range(world))
    return Parts(target(*part_of(args, i), **part_of(kwargs, i)) for i in _range(world))


def _range(world: World) -> range:
    return range(len(world.hosted))


def assemble(parts: Sequence[Tensor], shape: torch.Size, layout: Layout, world: World) -> Tensor:
    """The whole tensor from every device's part."""
    result = parts[0].new_zeros(shape)
    for part, at in zip(parts, world.hosted, strict=True):
        target = torch.arange(result.numel()).view(shape)
        target = take(target, layout, world.mesh_shape, at)
        result.view(-1)[target.reshape(-1)] = part.reshape(-1)
    return result


class _Distribute(torch.autograd.Function):
    """A whole tensor -> every device's part; gradients of parts -> the whole gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: Layout, world: World, name: str) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.shape, ctx.layout, ctx.world, ctx.name = tensor.shape, layout, world, name
        ctx.set_materialize_grads(False)
        parts = tuple(take(tensor, layout, world.mesh_shape, at).clone() for at in world.hosted)
        ctx.shapes = [part.shape for part in parts]
        return parts

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        some = next((gradient for gradient in given if gradient is not None), None)
        if some is None:
            return None, None, None, None
        gradients = [some.new_zeros(shape) if g is None else g for g, shape in zip(given, ctx.shapes, strict=True)]
        _check_replicas(ctx.name, [gradient.detach() for gradient in gradients], ctx.layout, ctx.world)
        return _Assemble.apply(ctx.name, ctx.shape, ctx.layout, ctx.world, *gradients), None, None, None


class _Assemble(torch.autograd.Function):
    """What ``_Distribute`` does to gradients, and to the gradients of gradients, which are whole on every replica."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, name: str, shape: torch.Size, layout: Layout, world: World, *parts: Tensor
    ) -> Tensor:
        ctx.layout, ctx.world, ctx.name = layout, world, name
        return assemble(parts, shape, layout, world)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return None, None, None, None, *_Distribute.apply(gradient, ctx.layout, ctx.world, ctx.name)


def _check_replicas(name: str, gradients: Sequence[Tensor], layout: Layout, world: World) -> None:
    first: dict[tuple[int, ...], Tensor] = {}
    sharded = [axis for axis, p in enumerate(layout) if is_shard(p)]
    for gradient, at in zip(gradients, world.hosted, strict=True):
        reference = first.setdefault(tuple(at[a] for a in sharded), gradient)
        sizes = reference.abs()[reference.isfinite()]
        near = 1e-6 + 1e-4 * float(sizes.max() if sizes.numel() else 0)
        if not torch.allclose(reference, gradient, rtol=1e-4, atol=near, equal_nan=True):
            raise AutotpError(
                f"gradient of {name}: the device at {at} disagrees with its replica by "
                f"{float((reference - gradient).abs().max()):.3g}; this is a defect of autotp, please report the plan"
            )


class _Collect(torch.autograd.Function):
    """A replicated output: the first device's value; every device gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:  # type: ignore[override]
        ctx.count = len(parts)
        result = parts[0].clone()  # a view made in here could not be changed in place outside
        if not differentiable(result):
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return _Spread.apply(gradient, ctx.count)


class _Spread(torch.autograd.Function):
    """A gradient for every device, and the other way."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, count: int) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(gradient.view_as(gradient) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Collect.apply(*gradients), None
