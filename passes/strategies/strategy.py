"""Strategies: every way to lay an operator's factors on the axes of a mesh, and the layouts that follow.

The layouts of gradients are a function of the forward ones. A shard's gradient is the same shard; a partial sum's
gradient is whole on every device; an operand that is whole along an axis which the operator uses for a factor that the
operand lacks gets a partial gradient; along an axis that the operator does not use, a whole one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from passes.layouts.layout import Layout, even_chunk, fits, is_shard, place
from passes.rules.factors import Factor, Operator
from passes.rules.notation import Dim, OpRule
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import rule_of

__all__ = [
    "LINEAR_PREFIX",
    "Allow",
    "Effect",
    "Strategy",
    "Want",
    "effect",
    "gradient_of",
    "replicated",
    "strategies",
    "strategy_of",
    "uneven_matters",
    "whole_layout",
]

#: Prefix of the pseudo-factors of an axis along which an operator takes partial sums and leaves them: ``+i`` takes the
#: operands of ``OpRule.linear[i]`` partial.
LINEAR_PREFIX = "+"

Allow = Callable[[int, Factor | None], bool]


@dataclass(frozen=True, slots=True)
class Want:
    """What a strategy asks of one operand: its layout, and the layout in which it returns the operand's gradient."""

    layout: Layout
    gradient: Layout


@dataclass(frozen=True, slots=True)
class Strategy:
    """One assignment of axes to factors, with everything that follows from it.

    Attributes:
        assignment: per mesh axis the factor that it shards, ``"+i"`` (partial sums passed through), or None.
        wants: per operand.
        results: layouts of the results.
    """

    assignment: tuple[str | None, ...]
    wants: tuple[Want, ...]
    results: tuple[Layout, ...]

    def axes(self, *factors: str) -> tuple[int, ...]:
        """The axes that shard any of the factors (given by their cut names)."""
        return tuple(axis for axis, f in enumerate(self.assignment) if f in factors)

    def ways(self, mesh: tuple[int, ...]) -> int:
        """The number of devices among which the operator's work is divided."""
        return math.prod(
            n for n, f in zip(mesh, self.assignment, strict=True) if f is not None and not f.startswith(LINEAR_PREFIX)
        )


def whole_layout(axes: int) -> Layout:
    """Replicated on every axis."""
    return (Replicate(),) * axes


def gradient_of(layout: Layout) -> Layout:
    """The layout in which the gradient of a tensor in ``layout`` is given to its producer."""
    return tuple(p if is_shard(p) else Replicate() for p in layout)


def replicated(operator: Operator, axes: int) -> Strategy:
    """Every device computes the whole operator: always right."""
    whole = whole_layout(axes)
    want = Want(whole, whole)
    operands, results = operands_of(operator.node), results_of(operator.node)
    return Strategy((None,) * axes, (want,) * len(operands), (whole,) * len(results))


def strategies(operator: Operator, mesh: tuple[int, ...], allow: Allow | None = None) -> Iterator[Strategy]:
    """All strategies of an operator on a mesh, the replicated one first.

    Args:
        operator: with its cut rule.
        mesh: sizes of the mesh axes.
        allow: says whether an axis may serve a factor (None as a factor stands for partial sums passed through).
    """
    yield replicated(operator, len(mesh))
    if operator.rule is None:
        return
    rule = operator.rule
    choices: list[list[str | None]] = []
    for axis, size in enumerate(mesh):
        found: list[str | None] = [None]
        if size > 1:
            found += [f.name for f in operator.factors.values() if f.offered and (allow is None or allow(axis, f))]
            if rule.linear and operator.sums and (allow is None or allow(axis, None)):
                found += [LINEAR_PREFIX + str(i) for i in range(len(rule.linear))]
        choices.append(found)
    for assignment in itertools.product(*choices):
        if any(assignment) and _divides(operator, assignment, mesh):
            strategy = strategy_of(operator, assignment)
            if _exists(operator, strategy, mesh):
                yield strategy


def uneven_matters(operator: Operator) -> frozenset[str]:
    """Base names of factors whose local size an argument of the operator tells, so that it must divide."""
    table = rule_of(operator.node)
    assert table is not None
    divided = set((table.divide or {}).values())
    if table.shape is not None and operator.rule is not None:
        given = {f for dims in operator.rule.operands for dim in dims for f in dim}
        divided |= {f.base for f in operator.factors.values() if f.name not in given}
    return frozenset(divided)


def _divides(operator: Operator, assignment: tuple[str | None, ...], mesh: tuple[int, ...]) -> bool:
    divided = uneven_matters(operator)
    for name in {a for a in assignment if a and not a.startswith(LINEAR_PREFIX)}:
        factor = operator.factors[name]
        ways = math.prod(n for n, a in zip(mesh, assignment, strict=True) if a == name)
        if factor.size % ways and (not factor.sole or factor.base in divided or ways > factor.size):
            return False
    return True


@dataclass(frozen=True, slots=True)
class Effect:
    """What one axis's use asks of every operand (and of its gradient) along that axis, and leaves in every result."""

    wants: tuple[Placement, ...]
    gradients: tuple[Placement, ...]
    results: tuple[Placement, ...]


def effect(rule: OpRule, chosen: str | None) -> Effect:
    """The effect of an axis that serves ``chosen``: a factor, ``"+i"`` or None; the same on every axis of every mesh."""
    whole, partial = Replicate(), Partial()
    wants: list[Placement] = []
    gradients: list[Placement] = []
    for index, dims in enumerate(rule.operands):
        shard = _shard_of(dims, rule.sizes, chosen)
        if shard is not None or chosen is None:
            wants.append(shard or whole)
            gradients.append(shard or whole)
        elif (chosen.startswith(LINEAR_PREFIX) and index in rule.linear[int(chosen[1:])]) or (
            chosen in rule.reduced and index in rule.additive
        ):
            wants.append(partial)
            gradients.append(whole)
        else:
            wants.append(whole)
            gradients.append(partial)
    summed = chosen is not None and (chosen.startswith(LINEAR_PREFIX) or chosen in rule.reduced)
    results = [_shard_of(dims, rule.sizes, chosen) or (partial if summed else whole) for dims in rule.results]
    return Effect(tuple(wants), tuple(gradients), tuple(results))


def _shard_of(dims: tuple[Dim, ...], sizes: Mapping[str, int], chosen: str | None) -> Placement | None:
    """The placement along an axis that serves ``chosen``, where the tensor has that factor."""
    found = None
    for d, dim in enumerate(dims):
        blocks = 1
        for factor in dim:
            if factor == chosen:
                found = place(d, blocks)
            blocks *= sizes[factor]
    return found


def strategy_of(operator: Operator, assignment: tuple[str | None, ...]) -> Strategy:
    """The strategy of an assignment, whether or not it exists on a mesh."""
    if operator.rule is None or not any(assignment):
        return replicated(operator, len(assignment))
    made = {chosen: effect(operator.rule, chosen) for chosen in set(assignment)}
    effects = [made[chosen] for chosen in assignment]
    wants = tuple(
        Want(tuple(e.wants[i] for e in effects), tuple(e.gradients[i] for e in effects))
        for i in range(len(operator.rule.operands))
    )
    results = tuple(tuple(e.results[i] for e in effects) for i in range(len(operator.rule.results)))
    return Strategy(assignment, wants, results)


def _exists(operator: Operator, strategy: Strategy, mesh: tuple[int, ...]) -> bool:
    operands = [tuple(n.meta["val"].shape) for n in operands_of(operator.node)]
    outputs = [tuple(t.shape) for t in results_of(operator.node)]
    shaped = [
        *zip(operands, (w.layout for w in strategy.wants), strict=True),
        *zip(outputs, strategy.results, strict=True),
    ]
    if not all(fits(shape, layout, mesh) for shape, layout in shaped):
        return False
    table = rule_of(operator.node)
    return table is None or table.shape is None or _uneven_dims(outputs[0], strategy.results[0], mesh) <= 1


def _uneven_dims(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...]) -> int:
    count = 0
    for d, size in enumerate(shape):
        here = [mesh[a] for a, p in enumerate(layout) if is_shard(p) and p.dim == d]  # type: ignore[attr-defined]
        ways: int = math.prod(here)
        count += even_chunk(size, ways) * ways != size
    return count
