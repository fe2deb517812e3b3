"""The random numbers that a single device would draw: the whole tensor of each operator, of which devices take parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from passes.layouts.layout import Layout, splits, take_block
from passes.rules.shapes import results_of
from passes.world.random_ops import DRAWN

__all__ = ["Draw", "Stream", "drawn", "generator_of", "standing"]

_aten = torch.ops.aten


class Draw(NamedTuple):
    """The tensor of random numbers that an operator draws if a single device runs it.

    Attributes:
        name, target: the name of the operator's node, and its target in torch.
        method: the tensor method that fills the tensor, with the arguments ``by``; None if it is unknown what is drawn.
        shape, stride, dtype: of the drawn tensor.
        cuts: (dim, blocks, ways, mesh axis) of each split that results in a device's part.
    """

    name: str
    target: str
    method: str | None = None
    by: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    cuts: tuple[tuple[int, int, int, int], ...] = ()

    def whole(self, device: torch.device) -> Tensor:
        """Draws the whole tensor, which advances torch's generator of the device as if the operator had run."""
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.target == str(_aten.dropout.default) and device.type == "cuda":  # has a kernel of its own
            return _aten.native_dropout.default(empty.zero_(), 1 - self.by[0], True)[1].to(self.dtype)
        assert self.method is not None, "refused before"
        filled: Tensor = getattr(empty, self.method)(*self.by)
        return filled

    def part(self, tensor: Tensor, coordinates: Sequence[int]) -> Tensor:
        """A copy of a device's part of the whole tensor."""
        for dim, blocks, ways, axis in self.cuts:
            tensor = take_block(tensor, dim, blocks, ways, coordinates[axis])
        return tensor.clone(memory_format=torch.contiguous_format)


def drawn(node: fx.Node, layout: Layout, mesh: tuple[int, ...]) -> Draw | None:
    """The tensor that a captured operator draws; None if it draws nothing.

    Args:
        node: the operator's node.
        layout: of its result.
        mesh: sizes of the mesh axes, then of the virtual axes.
    """
    if node.target not in DRAWN:
        return Draw(node.name, str(node.target))
    found: list[tuple[Tensor, str, tuple[float, ...]]] = []

    def noise(like: Tensor, method: str, *by: float) -> Tensor:
        found.append((like, method, by))
        return torch.empty_like(like)

    def value(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            real = argument.meta["val"]
            return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        return torch.device("meta") if isinstance(argument, torch.device) else argument

    operands = [each.meta["val"] for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
    if node.target is _aten.bernoulli.p and not all(each.is_contiguous() for each in operands):
        # Captured from ``bernoulli_``, which fills memory in a different order than an operator that makes a new tensor.
        return Draw(node.name, str(node.target))

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), value)  # type: ignore[misc, arg-type]
    with torch.device("meta"):
        DRAWN[node.target](noise, *args, **kwargs)
    if not found:
        return None
    ((like, method, by),) = found
    (result,) = results_of(node)
    # Attention draws a tensor of its weights' shape: the last dim is the keys, in the result the values' width; both whole.
    attends = node.target is _aten.scaled_dot_product_attention.default
    stride = like.stride() if attends or like.shape != result.shape else result.stride()
    cuts = [
        (dim, blocks, mesh[axis], axis)
        for dim in range(like.dim() - attends)
        for axis, blocks in splits(layout, dim, mesh)
        if like.shape[dim] == result.shape[dim]
    ]
    return Draw(node.name, str(node.target), method, by, tuple(like.shape), tuple(stride), like.dtype, tuple(cuts))


@dataclass(frozen=True, slots=True)
class Stream:
    """The draws of the operators of one pass, used in place of a seed.

    Attributes:
        draws: what each operator draws, in the model's order.
        states: the state of torch's generator before each operator.
        device: the device on which they draw.
    """

    draws: Sequence[Draw | None]
    states: Sequence[Tensor]
    device: torch.device

    def part(self, number: int, coordinates: Sequence[int]) -> Tensor:
        """A device's part of what operator ``number`` draws; the state of torch's generator is kept."""
        draw = self.draws[number]
        assert draw is not None, "it draws nothing"
        with standing(generator_of(self.device), self.states[number]):
            return draw.part(draw.whole(self.device), coordinates)


def generator_of(device: torch.device) -> torch.Generator:
    """Torch's own generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


@contextmanager
def standing(generator: torch.Generator, state: Tensor) -> Iterator[None]:
    """Context in which ``generator`` has the state ``state``; restores its previous state at the end."""
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)
