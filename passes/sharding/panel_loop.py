"""Panelled products: a loop that gathers one panel of the operands while it multiplies the previous panel.

A product ``C[m,n] = A[m,k] B[k,n]`` of operands that are gathered before use need not hold the whole gathered operands.
Every operand that has the loop's factor (m, n or k) is gathered panel by panel along it, and the panels of the result are
put side by side or, over k, summed. The backward pass gathers the panels again, and reduces each panel of a gradient while
the next one is multiplied. The panels of SUMMA (van de Geijn and Watts, 1997) are of this kind, with k as the loop factor.

A panel is not a contiguous range: it has an equal part of each device's shard, so that all devices send and receive equal
amounts in every round. Blocks of the loop's dim are aligned between the operands by cutting it into as many blocks as the
least common multiple of the numbers of their owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from passes.layouts.reshard import Step
from passes.world.ops import Parts, hosted
from passes.world.pending import Pending
from passes.world.world import World

__all__ = ["Operand", "panelled"]


class Operand(NamedTuple):
    """How a panelled product gets one operand, and returns its gradient.

    Attributes:
        dim: the dim of the loop's factor; -1 if the operand lacks it.
        cuts: the number of blocks of that dim on one device; each gives an equal part to every panel.
        before: gathers along other dims, once, before the loop.
        loop: gathers of each panel.
        scatter: the mirrors of ``loop``, for each panel of the gradient.
        after: further steps for the whole gradient, after the loop.
        cast: the dtypes in which the operand and its gradient are moved; None: both are moved in their own.
    """

    dim: int
    cuts: int
    before: tuple[Step, ...] = ()
    loop: tuple[Step, ...] = ()
    scatter: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    cast: tuple[torch.dtype, torch.dtype] | None = None

    @property
    def stages(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of all stages."""
        return self.before, self.loop, self.scatter, self.after

    @classmethod
    def of(cls, plain: Sequence[Any]) -> Operand:
        """The operand that nested tuples describe, which are its form in a graph; see ``plain``."""
        dim, cuts, *stages, cast = plain
        before, loop, scatter, after = (tuple(Step(*step) for step in stage) for stage in stages)
        return cls(dim, cuts, before, loop, scatter, after, cast)

    @property
    def plain(self) -> tuple[Any, ...]:
        """The operand as nested tuples, its form in a graph."""
        return self.dim, self.cuts, *(tuple(tuple(step) for step in stage) for stage in self.stages), self.cast


@hosted
def panelled(
    world: World,
    data: Any,
    weights: Sequence[Any],
    operands: Sequence[tuple],
    factor: str,
    panels: int,
    cuts: int,
    transposed: Sequence[bool],
    at: str = "",
) -> Any:
    """The products of ``data`` [..., k] with each of ``weights``, computed in ``panels`` panels.

    Args:
        world: the mesh.
        data: this device's part, or ``Parts``; likewise for each weight.
        weights: [n, k] if ``transposed``, else [k, n].
        operands: ``Operand.plain`` of the data, then of each weight.
        factor: the factor of the loop: a dim of the result, as text ("0", "-1"), or "k".
        panels: the number of panels.
        cuts: the number of blocks of the loop's dim of the result.
        transposed: for each weight, whether it is [n, k].
        at: the operator for which the loop runs, as messages name it.

    Returns:
        A list with one product per weight.
    """
    whole = [data, *weights]
    count = len(data) if isinstance(data, Parts) else 1
    flat = [t for value in whole for t in (value if isinstance(value, Parts) else [value])]
    loop = _Loop(world, [Operand.of(o) for o in operands], factor, panels, cuts, tuple(transposed), count)
    world.whereabouts.at = at
    results = _Panelled.apply(loop, at, *flat)
    grouped = [Parts(results[i : i + count]) for i in range(0, len(results), count)]
    return grouped if isinstance(data, Parts) else [g[0] for g in grouped]


class _Loop(NamedTuple):
    world: World
    operands: list[Operand]
    factor: str
    panels: int
    cuts: int
    transposed: tuple[bool, ...]
    hosted: int

    @property
    def result_dim(self) -> int | None:
        """The loop's dim in the results; None if the loop sums over k."""
        return None if self.factor == "k" else int(self.factor)

    def grouped(self, flat: Sequence[Any]) -> list[list[Any]]:
        """Splits a flat list into one list of hosted parts per tensor."""
        return [list(flat[i : i + self.hosted]) for i in range(0, len(flat), self.hosted)]

    def begin(self, values: list[list[Tensor]]) -> list[list[Tensor]]:
        """The operands after the gathers that precede the loop."""
        found = []
        for operand, value in zip(self.operands, values, strict=True):
            value = value if operand.cast is None else [part.to(operand.cast[0]) for part in value]
            found.append(self.world.run(operand.before, value) if operand.before else value)
        return found

    def launch(self, values: list[list[Tensor]], panel: int) -> list[Pending]:
        """Launches the gathers of one panel of all operands; an operand without panels is whole in each."""
        found = []
        for operand, value in zip(self.operands, values, strict=True):
            if operand.dim >= 0:
                value = [self.cut(v, operand.dim, operand.cuts, panel) for v in value]
            found.append(self.world.launch(operand.loop, value))
        return found

    def cut(self, tensor: Tensor, dim: int, cuts: int, panel: int) -> Tensor:
        """The parts of all blocks that belong to one panel, concatenated."""
        dim %= tensor.dim()
        return tensor.unflatten(dim, (cuts, self.panels, -1)).select(dim + 1, panel).flatten(dim, dim + 1).contiguous()


def _product(data: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return torch.matmul(data, weight.t() if transposed else weight)


def _weight_gradient(data: Tensor, gradient: Tensor, transposed: bool) -> Tensor:
    rows, columns = data.reshape(-1, data.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    return columns.t() @ rows if transposed else rows.t() @ columns


class _Sum:
    """Assembles a result from panels: sums them if ``dim`` is None, else puts them in their places."""

    def __init__(self, loop: _Loop, dim: int | None, cuts: int) -> None:
        self.loop, self.dim, self.cuts = loop, dim, cuts
        self.value: Tensor | None = None
        self.dtype = torch.float32

    def add(self, panel: int, part: Tensor) -> None:
        if self.value is None:
            self.dtype = part.dtype
            if self.dim is None:  # a sum of many low-precision terms is less accurate than one product
                self.value = part.float() if part.dtype.itemsize < 4 else part
                return
            shape = list(part.shape)
            shape[self.dim] *= self.loop.panels
            self.value = part.new_empty(shape)
        if self.dim is None:
            self.value += part
        else:
            self.value = self.loop.world.local("put", self.value, part, self.dim, self.cuts, self.loop.panels, panel)

    def get(self) -> Tensor:
        assert self.value is not None
        return self.value.to(self.dtype)


class _Panelled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loop: _Loop, at: str, *flat: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.loop, ctx.at = loop, at
        ctx.save_for_backward(*flat)
        values = loop.begin(loop.grouped(flat))
        results = [[_Sum(loop, loop.result_dim, loop.cuts) for _ in range(loop.hosted)] for _ in values[1:]]
        for panel, (data, *weights) in _rounds(loop, values):
            for i, weight in enumerate(weights):
                for device in range(loop.hosted):
                    results[i][device].add(panel, _product(data[device], weight[device], loop.transposed[i]))
        return tuple(one.get() for result in results for one in result)

    @staticmethod
    def backward(ctx: Any, *flat: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of gradients do not pass products in panels; plan it again with panels=1")
        loop: _Loop = ctx.loop
        loop.world.whereabouts.going_back(f"the gradient of {ctx.at}")
        gradients, values = loop.grouped(flat), loop.begin(loop.grouped(ctx.saved_tensors))
        needed = loop.grouped(ctx.needs_input_grad[2:])
        found = [_Gradient(loop, operand) if any(n) else None for operand, n in zip(loop.operands, needed, strict=True)]
        dim = loop.result_dim
        for panel, (data, *weights) in _rounds(loop, values):
            parts = gradients
            if dim is not None:
                parts = [[loop.cut(g, dim, loop.cuts, panel) for g in gradient] for gradient in gradients]
            if found[0] is not None:
                found[0].add(panel, _data_gradients(loop, parts, weights, data))
            for i, gradient in enumerate(found[1:]):
                if gradient is not None:
                    terms = zip(data, parts[i], strict=True)
                    gradient.add(panel, [_weight_gradient(d.to(g.dtype), g, loop.transposed[i]) for d, g in terms])
        results: list[Any] = [None, None]
        for gradient in found:
            results += [None] * loop.hosted if gradient is None else gradient.get()
        return tuple(results)


def _data_gradients(
    loop: _Loop, gradients: list[list[Tensor]], weights: list[list[Tensor]], data: list[Tensor]
) -> list[Tensor]:
    found = []
    for at in range(loop.hosted):
        terms = [
            _product(g[at], w[at].to(g[at].dtype), not t)
            for g, w, t in zip(gradients, weights, loop.transposed, strict=True)
        ]
        found.append(sum(terms[1:], terms[0]).to(data[at].dtype))
    return found


def _rounds(loop: _Loop, values: list[list[Tensor]]) -> Any:
    """Yields (panel, operands) for each round; the gathers of the next panel are in progress meanwhile."""
    pending = loop.launch(values, 0)
    for panel in range(loop.panels):
        current = [p.wait() for p in pending]
        if panel + 1 < loop.panels:
            pending = loop.launch(values, panel + 1)
        yield panel, current


class _Gradient:
    """One operand's gradient, reduced panel by panel if the operand has panels; one reduction is in progress at a time."""

    def __init__(self, loop: _Loop, operand: Operand) -> None:
        self.loop, self.operand = loop, operand
        dim = operand.dim if operand.dim >= 0 else None
        self.sums = [_Sum(loop, dim, operand.cuts) for _ in range(loop.hosted)]
        self.pending: tuple[int, Pending] | None = None

    def add(self, panel: int, parts: list[Tensor]) -> None:
        self._collect()
        if self.operand.cast is not None:
            parts = [part.to(self.operand.cast[1]) for part in parts]
        self.pending = panel, self.loop.world.launch(self.operand.scatter, parts)
        if not self.operand.scatter:  # there is nothing to wait for, and it is as large as the next one
            self._collect()

    def _collect(self) -> None:
        if self.pending is not None:
            panel, pending = self.pending
            for one, part in zip(self.sums, pending.wait(), strict=True):
                one.add(panel, part)
            self.pending = None

    def get(self) -> list[Tensor]:
        self._collect()
        return self.loop.world.run(self.operand.after, [one.get() for one in self.sums])
