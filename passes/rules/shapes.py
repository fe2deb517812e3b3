"""Rules that follow from shapes and arguments: element-wise operators, reductions, concatenation.

Each builder takes a node and returns its ``OpRule``, or ``None`` if there is none (then the operator is replicated, and
reported).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from passes.graph import arguments_of
from passes.rules.notation import Dim, OpRule, Shape, instantiate, pointwise

__all__ = [
    "along",
    "argument",
    "broadcast",
    "cat",
    "einsum",
    "elementwise",
    "dims_of",
    "named",
    "named_dims",
    "operands_of",
    "pad",
    "reduction",
    "repeat",
    "results_of",
    "op_rule",
    "scaled",
    "shape_of",
    "shapes_of",
    "stack",
]


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a node, in order, with lists flattened."""
    found: list[fx.Node] = []

    def visit(arg: Any) -> None:
        if isinstance(arg, fx.Node):
            if isinstance(arg.meta.get("val"), Tensor):
                found.append(arg)
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                visit(item)

    visit(node.args)
    visit(list(node.kwargs.values()))
    return found


def results_of(node: fx.Node) -> list[Tensor]:
    """The fake tensors that a node returns, without other results."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    return [v for v in value if isinstance(v, Tensor)] if isinstance(value, (list, tuple)) else []


def shape_of(node: fx.Node) -> Shape:
    """The whole shape of the result of a node that has only one."""
    return tuple(node.meta["val"].shape)


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def named(node: fx.Node) -> dict[str, Any]:
    """All arguments by their names in the operator's schema, defaults filled in."""
    return arguments_of(node, node.args, node.kwargs)


def named_dims(node: fx.Node, name: str, rank: int) -> set[int]:
    """The dims that an argument names, for a tensor of this rank; all dims if it names none."""
    where = named(node).get(name)
    chosen = range(rank) if where is None or where == [] else [where] if isinstance(where, int) else where
    return {d % rank for d in chosen} if rank else set()


def shapes_of(node: fx.Node) -> tuple[list[Shape], list[Shape]]:
    """The whole shapes of a node's operands, and of its results."""
    return [shape_of(n) for n in operands_of(node)], [tuple(t.shape) for t in results_of(node)]


def op_rule(operands: Sequence[Sequence[Dim]], results: Sequence[Sequence[Dim]], sizes: dict, **options: Any) -> OpRule:
    """A rule from the factors of its tensors' dims, per operand and per result; ``sizes`` may have further factors."""
    used = {f for tensor in (*operands, *results) for dim in tensor for f in dim}
    linear = options.pop("linear", ())
    return OpRule(
        operands=tuple(tuple(t) for t in operands),
        results=tuple(tuple(t) for t in results),
        sizes={f: n for f, n in sizes.items() if f in used},
        linear=tuple(frozenset(s) for s in linear),
        **options,
    )


def dims_of(shape: Shape) -> tuple[list[Dim], dict[str, int]]:
    """One factor for each dim of size greater than 1: the dims, and the sizes of the factors."""
    return [(f"d{i}",) if n > 1 else () for i, n in enumerate(shape)], {f"d{i}": n for i, n in enumerate(shape) if n > 1}


def elementwise(*linear: Sequence[int]) -> Any:
    """A builder for element-wise operators that are linear in the given sets of operands."""

    def build(node: fx.Node) -> OpRule | None:
        operands, results = shapes_of(node)
        if len(results) != 1 or not operands:
            return None
        fitting = [s for s in linear if all(i < len(operands) for i in s)]
        return pointwise(operands, results[0], fitting)

    return build


def scaled(node: fx.Node) -> OpRule | None:
    """mul, div: linear in the tensor if there is only one, scaled by a number other than 0. Products of two tensors require
    whole operands: passing a partial sum through them saves no communication, and each such choice costs planning time."""
    operands, results = shapes_of(node)
    scales = len(operands) == 1 and node.args[0] in operands_of(node) and node.args[1] != 0
    return pointwise(operands, results[0], [(0,)] if scales else ())


def broadcast(node: fx.Node) -> OpRule | None:
    """add, sub: linear in both operands together, but not in one alone (a scalar would be added once per device)."""
    operands, results = shapes_of(node)
    return pointwise(operands, results[0], [(0, 1)] if len(operands) == 2 else ())


def along(name: str = "dim", *, linear: Sequence[int] = ()) -> Any:
    """A builder for operators that work along some dims and leave all others independent (cumsum, sort, scatter).

    If the argument is missing or an empty list, the operator works along all dims. Other tensors of the first operand's
    rank are sharded with it in dims of equal size; those of another rank are whole.

    Args:
        name: the name of the argument that names the dims.
        linear: the set of operands in which the operator is linear.
    """

    def build(node: fx.Node) -> OpRule | None:
        operands, results = shapes_of(node)
        source = operands[0]
        alike = [s for s in (*operands, *results) if len(s) == len(source)]
        if any(len(r) != len(source) for r in results):
            return None
        busy = named_dims(node, name, len(source))
        dims, sizes = dims_of(source)
        dims = [() if i in busy or any(s[i] != source[i] for s in alike) else d for i, d in enumerate(dims)]
        given = [dims if len(s) == len(source) else [()] * len(s) for s in operands]
        return op_rule(given, [dims] * len(results), sizes, linear=[linear] if linear else ())

    return build


def cat(node: fx.Node) -> OpRule | None:
    """cat: the concatenated dim is whole; linear in all operands together."""
    operands, (result,) = shapes_of(node)
    where = argument(node, 1, "dim", 0) % len(result)
    if any(len(s) != len(result) for s in operands):
        return None
    dims, sizes = dims_of(result)
    dims[where] = ()
    return op_rule([dims] * len(operands), [dims], sizes, linear=[tuple(range(len(operands)))])


def stack(node: fx.Node) -> OpRule:
    """stack: the new dim is whole; linear in all operands together."""
    operands, (result,) = shapes_of(node)
    where = argument(node, 1, "dim", 0) % len(result)
    dims, sizes = dims_of(operands[0])
    out = [*dims[:where], (), *dims[where:]]
    return op_rule([dims] * len(operands), [out], sizes, linear=[tuple(range(len(operands)))])


def reduction(*, linear: bool) -> Any:
    """A builder for reductions: the reduced dims are reduced factors if the reduction is linear (a sum), else whole.

    A reduction over all dims that is not linear has no rule.
    """

    def build(node: fx.Node) -> OpRule | None:
        source = shape_of(operands_of(node)[0])
        keep = bool(named(node).get("keepdim", False))
        gone = named_dims(node, "dim", len(source))
        if not linear and named(node).get("dim") in (None, []):
            return None
        dims, sizes = dims_of(source)
        operand = [() if i in gone and not linear else d for i, d in enumerate(dims)]
        kept = [() if i in gone else d for i, d in enumerate(dims) if keep or i not in gone]
        return op_rule([operand], [kept] * len(results_of(node)), sizes, linear=[(0,)] if linear else ())

    return build


def pad(node: fx.Node) -> OpRule:
    """constant_pad_nd: padded dims are whole."""
    source = shape_of(operands_of(node)[0])
    amounts = argument(node, 1, "pad")
    dims, sizes = dims_of(source)
    for k in range(len(amounts) // 2):
        if amounts[2 * k] or amounts[2 * k + 1]:
            dims[len(source) - 1 - k] = ()
    return op_rule([dims], [dims], sizes)


def repeat(node: fx.Node) -> OpRule:
    """repeat: dims that are repeated are whole."""
    source, target = shape_of(operands_of(node)[0]), shape_of(node)
    shift = len(target) - len(source)
    dims, sizes = dims_of(source)
    dims = [d if n == target[shift + i] else () for i, (d, n) in enumerate(zip(dims, source, strict=True))]
    return op_rule([dims], [[*([()] * shift), *dims]], sizes, linear=[(0,)])


def einsum(node: fx.Node) -> OpRule | None:
    """einsum: its equation is the rule."""
    equation = str(node.args[0]).replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    left, right = equation.split("->")
    terms = left.split(",")
    if any(len(set(t)) != len(t) for t in terms):
        return None
    operands, results = shapes_of(node)
    text = ", ".join(" ".join(t) for t in terms) + " -> " + " ".join(right)
    return instantiate(text, operands, results)
