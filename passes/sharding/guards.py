"""Guards around operators that would otherwise be wrong silently: checks of indices, and unambiguous memory formats.

A device that holds a shard of a vocabulary looks up only the indices in its shard, so all devices would skip an index that
is out of range. Some kernels mistake the memory format of a tensor; see `passes.layouts.layout.in_one_format`.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.graph import annotate, arguments_of, place_of, where
from passes.rules.factors import Operator, Value, value_of
from passes.rules.shapes import operands_of
from passes.rules.table import rule_of
from passes.sharding.emitter import Emitter, pack
from passes.strategies.strategy import Strategy
from passes.torch_internals import OpOverload
from passes.world import ops

__all__ = ["Bound", "bounds", "cleared", "in_one_format", "relies_on_copies", "within"]


@dataclass(frozen=True, slots=True)
class Bound:
    """An operator that looks up indices in a sharded factor; the factor's size, and the index that it ignores, if any."""

    reader: fx.Node
    size: int
    ignored: int | None


def bounds(operators: Mapping[fx.Node, Operator], strategies: Mapping[str, Strategy]) -> Mapping[Value, Sequence[Bound]]:
    """Tensor of indices -> the operators that look them up in a sharded factor."""
    found: dict[Value, list[Bound]] = defaultdict(list)
    for node, one in operators.items():
        rule = rule_of(node)
        for position, base in (rule.bounded or {}).items() if rule is not None else ():
            parts = [factor for factor in one.factors.values() if factor.base == base]
            if strategies[node.name].axes(*(factor.name for factor in parts)):
                ignored = arguments_of(node, node.args, node.kwargs).get("ignore_index")
                size = math.prod(factor.size for factor in parts)
                found[value_of(operands_of(node)[position])].append(Bound(node, size, ignored))
    return found


def within(emitter: Emitter, node: fx.Node, indices: fx.Node, limits: Sequence[Bound], sharded: tuple[int, ...]) -> fx.Node:
    """Emits a check of the indices that a node produces, for all operators that look them up; returns the checked indices.

    The indices of a batch that every device is given are whole, so all devices reach the same result without communication.

    Args:
        emitter: emits the nodes of the sharded graph.
        node: the captured node.
        indices: the node with its local part.
        limits: the bounds of the indices.
        sharded: the axes that shard the indices.
    """
    outside = emitter.call(_outside, indices, [(limit.size, limit.ignored) for limit in limits])
    if sharded:
        outside = emitter.call(ops.all_max, emitter.world, outside, sharded, at=place_of(node))
    readers = "; ".join(f"{where(limit.reader)} takes 0 to {limit.size - 1}" for limit in limits)
    checked = emitter.call(ops.within, emitter.world, indices, outside, f"index out of range: {readers}")
    checked.meta = {"val": node.meta["val"]}
    annotate(checked, tensor=node.name)
    return checked


def _outside(ids: torch.Tensor, limits: list[tuple[int, int | None]]) -> torch.Tensor:
    """1 if, for some limit (size, ignored index), some of ``ids`` are neither in [0, size) nor ignored; else 0."""
    found = ids.new_zeros(ids.shape, dtype=torch.bool)
    for size, ignored in limits:
        outside = (ids < 0) | (ids >= size)
        found = found | (outside if ignored is None else outside & (ids != ignored))
    return found.any().to(torch.int64)


def _clear(emitter: Emitter, argument: Any, value: Any) -> Any:
    tensor = isinstance(value, torch.Tensor)
    return emitter.call(ops.in_one_format, emitter.world, argument) if tensor else argument


def relies_on_copies(node: fx.Node) -> bool:
    """Whether a kernel may rely on a copy that capture has removed: any without a rule may, except ``as_strided``."""
    target = node.target
    return isinstance(target, OpOverload) and rule_of(node) is None and not str(target).startswith("aten.as_strided")


def cleared(emitter: Emitter, node: fx.Node, args: Sequence[Any]) -> list[Any]:
    """The arguments, with all tensors among them in an unambiguous memory format, which a kernel cannot misread."""
    values = (n.meta.get("val") if isinstance(n, fx.Node) else None for n in node.args)
    return [_clear(emitter, new, value) for new, value in zip(args, values)]  # noqa: B905


def in_one_format(emitter: Emitter, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
    """Emits an operator whose operands, and the gradient of its first result, are in an unambiguous memory format."""
    result, value = emitter.call(node.target, *cleared(emitter, node, args), **kwargs), node.meta["val"]
    result.meta = {"val": value}
    if isinstance(value, torch.Tensor):
        return _clear(emitter, result, value)
    items = [emitter.call(operator.getitem, result, i) for i in range(len(value))]
    return emitter.call(pack, _clear(emitter, items[0], value[0]), *items[1:])
