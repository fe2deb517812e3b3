"""Strategies: assignments of an operator's factors to the axes of a mesh, and the layouts that follow.

The layouts of gradients are a function of the forward layouts. The gradient of a shard is the same shard; that of a
partial sum is replicated. A replicated operand has a partial gradient along an axis that the operator uses for a factor
that the operand lacks, and a replicated gradient along an axis that the operator does not use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from passes.layouts.layout import Layout, Placements, is_shard, place
from passes.rules.factors import Factor, Operator
from passes.rules.notation import Dim
from passes.rules.shapes import operands_of, results_of

__all__ = [
    "LINEAR_PREFIX",
    "Allow",
    "Effect",
    "Strategy",
    "Want",
    "effect",
    "gradient_of",
    "replicated",
    "whole_layout",
]

#: Prefix of the linear pseudo-factors, for axes along which an operator takes and returns partial sums: with ``+i``, the
#: operands in ``OpRule.linear[i]`` are partial.
LINEAR_PREFIX = "+"

Allow = Callable[[int, Factor | None], bool]


@dataclass(frozen=True, slots=True)
class Want:
    """A strategy's requirement for one operand: its layout, and the layout in which its gradient is returned."""

    layout: Layout
    gradient: Layout

    @classmethod
    def of(cls, layout: Layout) -> Want:
        """The requirement of a consumer that leaves a tensor in its layout."""
        return cls(layout, gradient_of(layout))


@dataclass(frozen=True, slots=True)
class Effect:
    """The placements along one axis of all operands, of their gradients and of all results, for one use of the axis."""

    wants: tuple[Placement, ...]
    gradients: tuple[Placement, ...]
    results: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One assignment of axes to factors, and the layouts that follow from it.

    Attributes:
        assignment: per mesh axis, the factor that it shards, a linear pseudo-factor ``"+i"``, or None.
        wants: the requirement per operand.
        results: the layout per result.
    """

    assignment: tuple[str | None, ...]
    wants: tuple[Want, ...]
    results: tuple[Layout, ...]

    @classmethod
    def of(cls, assignment: tuple[str | None, ...], effects: Sequence[Effect]) -> Strategy:
        """The strategy with the given effect of each axis."""
        wants, gradients, results = (
            map(Placements, zip(*each, strict=True))
            for each in zip(*((e.wants, e.gradients, e.results) for e in effects), strict=True)
        )
        return cls(assignment, tuple(map(Want, wants, gradients)), tuple(results))

    def axes(self, *factors: str) -> tuple[int, ...]:
        """The axes that shard any of the factors (given by their cut names)."""
        return tuple(axis for axis, f in enumerate(self.assignment) if f in factors)

    @property
    def sharded(self) -> tuple[int, ...]:
        """The axes that shard a factor."""
        return tuple(a for a, f in enumerate(self.assignment) if f is not None and not f.startswith(LINEAR_PREFIX))

    def ways(self, mesh: tuple[int, ...]) -> int:
        """The number of devices among which the operator's work is divided."""
        return math.prod(mesh[axis] for axis in self.sharded)


def whole_layout(axes: int) -> Layout:
    """The layout that is replicated on every axis."""
    return Placements((Replicate(),) * axes)


@lru_cache(maxsize=100_000)
def gradient_of(layout: Layout) -> Layout:
    """The layout in which the gradient of a tensor in ``layout`` is passed to its producer."""
    return Placements(p if is_shard(p) else Replicate() for p in layout)


def effect(operator: Operator, chosen: str | None) -> Effect:
    """The effect of an axis that serves ``chosen``: a factor, ``"+i"`` or None; the same on every axis of every mesh."""
    whole, partial, rule = Replicate(), Partial(), operator.rule
    if rule is None or chosen is None:
        operands = (whole,) * len(operands_of(operator.node))
        return Effect(operands, operands, (whole,) * len(results_of(operator.node)))
    wants: list[Placement] = []
    gradients: list[Placement] = []
    for index, dims in enumerate(rule.operands):
        shard = _shard_of(dims, rule.sizes, chosen)
        if shard is not None:
            wants.append(shard)
            gradients.append(shard)
        elif (chosen.startswith(LINEAR_PREFIX) and index in rule.linear[int(chosen[1:])]) or (
            chosen in rule.reduced and index in rule.additive
        ):
            wants.append(partial)
            gradients.append(whole)
        else:
            wants.append(whole)
            gradients.append(partial)
    left = partial if chosen.startswith(LINEAR_PREFIX) or chosen in rule.reduced else whole
    results = [_shard_of(dims, rule.sizes, chosen) or left for dims in rule.results]
    return Effect(tuple(wants), tuple(gradients), tuple(results))


def _shard_of(dims: tuple[Dim, ...], sizes: Mapping[str, int], chosen: str) -> Placement | None:
    """The placement along an axis that serves ``chosen``; None if the tensor does not have that factor."""
    found = None
    for d, dim in enumerate(dims):
        blocks = 1
        for factor in dim:
            if factor == chosen:
                found = place(d, blocks)
            blocks *= sizes[factor]
    return found


def replicated(operator: Operator, axes: int) -> Strategy:
    """The strategy in which every device computes the whole operator; valid on every mesh."""
    return Strategy.of((None,) * axes, [effect(operator, None)] * axes)
