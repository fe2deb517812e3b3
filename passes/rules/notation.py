"""The notation of sharding rules, and its binding to the shapes of a node.

``"… k, n k, n -> … n"`` names the factors of every tensor operand and result, dim by dim:

- a name is a factor; one that no result has is *reduced* (sharding it leaves partial sums);
- ``[h]`` is *whole*: it may not be sharded, unless the rule has a lowering for it;
- ``(a b)`` is a dim that is a product of factors, the major one first;
- ``…`` stands for any number of leading dims, aligned from the right;
- ``*`` stands for any number of dims that are never sharded (spatial dims), ``1`` for one such dim, ``_`` for a whole
  tensor of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Dim", "OpRule", "RuleError", "instantiate", "pointwise"]

Dim = tuple[str, ...]
Shape = tuple[int, ...]

_TOKEN = re.compile(r"\[(\w+)\]|\(([\w\s]+)\)|(\w+)|(…|\.\.\.)|(\*)")


class RuleError(ValueError):
    """A rule does not fit the shapes of its operator's operands and results; the message names the rule and the shapes."""


@dataclass(frozen=True, slots=True)
class OpRule:
    """A rule bound to one node: per operand and result, the factors of every dim.

    Attributes:
        operands: per tensor operand, per dim, its factors (major first; empty if the dim has none).
        results: the same, per tensor result.
        sizes: factor -> size.
        whole: factors that may not be sharded.
        inner: whole factors that a lowering can shard, with collectives inside the operator.
        additive: operands that are added once (a bias): required as partial sums along axes that shard a reduced factor.
        linear: sets of operands; the operator is linear in each set, so it may take its operands as partial sums.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    inner: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()

    @property
    def reduced(self) -> frozenset[str]:
        """Factors that only operands have, and that are not ``inner``: sharding one leaves partial sums."""
        kept = {f for dims in self.results for dim in dims for f in dim}
        return frozenset(f for f in self.sizes if f not in kept and f not in self.inner)


def _parse_side(text: str) -> list[list[tuple[str, Dim]]]:
    tensors = []
    for part in text.split(","):
        dims: list[tuple[str, Dim]] = []
        for bracket, compound, name, ellipsis, star in _TOKEN.findall(part):
            if bracket:
                dims.append(("whole", (bracket,)))
            elif compound:
                dims.append(("factors", tuple(compound.split())))
            elif name == "_":
                dims.append(("opaque", ()))
            elif name == "1":
                dims.append(("factors", ()))
            elif name:
                dims.append(("factors", (name,)))
            else:
                assert ellipsis or star
                dims.append(("ellipsis" if ellipsis else "star", ()))
        tensors.append(dims)
    return tensors


def instantiate(
    expression: str,
    operands: Sequence[Shape],
    results: Sequence[Shape],
    *,
    inner: Sequence[str] = (),
    additive: Sequence[int] = (),
    linear: Sequence[Sequence[int]] = (),
    sizes: Mapping[str, int] | None = None,
) -> OpRule:
    """Binds ``expression`` to the shapes of one node's tensor operands and results.

    Args:
        expression: the rule, e.g. ``"… k, n k, n -> … n"``; trailing operands that the node lacks are ignored.
        operands, results: shapes, in the order of the node's tensor arguments.
        inner, additive, linear: see ``OpRule``.
        sizes: sizes of factors inside compound dims that the shapes alone do not give.

    Raises:
        RuleError: if the expression cannot describe these shapes.
    """
    left, _, right = expression.partition("->")
    known: dict[str, int] = dict(sizes or {})
    whole: set[str] = set()
    parsed = [*_parse_side(left)[: len(operands)], *_parse_side(right)]
    shapes = [*operands, *results]
    if len(parsed) != len(shapes):
        raise RuleError(f"rule {expression!r} names {len(parsed)} tensors, the operator has {len(shapes)}: {shapes}")
    bound: list[list[Dim]] = []
    for dims, shape in zip(parsed, shapes, strict=True):
        bound.append(_bind(expression, dims, shape, whole))
    for tensor, shape in zip(bound, shapes, strict=True):
        for dim, size in zip(tensor, shape, strict=True):
            if len(dim) == 1 and size > 1:
                known.setdefault(dim[0], size)
    for position, (tensor, shape) in enumerate(zip(bound, shapes, strict=True)):
        for index, (dim, size) in enumerate(zip(tensor, shape, strict=True)):
            tensor[index] = _bind_sizes(expression, dim, size, known, shapes, position)
    used = {f for tensor in bound for dim in tensor for f in dim}
    split = len(operands)
    return OpRule(
        operands=tuple(tuple(t) for t in bound[:split]),
        results=tuple(tuple(t) for t in bound[split:]),
        sizes={f: known[f] for f in sorted(used)},
        whole=frozenset(whole & used - set(inner)),
        inner=frozenset(set(inner) & used),
        additive=frozenset(additive),
        linear=tuple(frozenset(s) for s in linear),
    )


def _bind(expression: str, dims: list[tuple[str, Dim]], shape: Shape, whole: set[str]) -> list[Dim]:
    spread = [i for i, (kind, _) in enumerate(dims) if kind in ("ellipsis", "star", "opaque")]
    if len(spread) > 1:
        raise RuleError(f"rule {expression!r} has more than one ellipsis in one tensor")
    free = len(shape) - (len(dims) - len(spread))
    if free < 0 or (free > 0 and not spread):
        raise RuleError(f"rule {expression!r} does not fit a tensor of shape {shape}")
    result: list[Dim] = []
    for kind, factors in dims:
        if kind in ("opaque", "star"):
            result.extend(() for _ in range(free))
        elif kind == "ellipsis":
            result.extend((f"m{free - i}",) for i in range(free))
        else:
            if kind == "whole":
                whole.update(factors)
            result.append(factors)
    return result


def _bind_sizes(expression: str, dim: Dim, size: int, known: dict[str, int], shapes: list, position: int) -> Dim:
    if not dim or size == 1:
        return ()
    unknown = [f for f in dim if f not in known]
    product = math.prod(known.get(f, 1) for f in dim)
    if len(unknown) == 1 and size % product == 0:
        known[unknown[0]] = size // product
    elif unknown or product != size:
        raise RuleError(
            f"rule {expression!r}: tensor {position} of {shapes} has a dim of {size}, but {dim} means "
            f"{[known.get(f, '?') for f in dim]}"
        )
    return tuple(f for f in dim if known[f] > 1)


def pointwise(operands: Sequence[Shape], result: Shape, linear: Sequence[Sequence[int]] = ()) -> OpRule:
    """The rule of an element-wise operator with broadcasting."""
    rank = len(result)
    names = [f"d{i}" for i in range(rank)]
    sizes = {name: size for name, size in zip(names, result, strict=True) if size > 1}

    def dims(shape: Shape) -> tuple[Dim, ...]:
        shifted = names[rank - len(shape) :]
        return tuple((name,) if size > 1 else () for name, size in zip(shifted, shape, strict=True))

    return OpRule(
        operands=tuple(dims(shape) for shape in operands),
        results=(dims(result),),
        sizes=sizes,
        linear=tuple(frozenset(s) for s in linear),
    )
