"""Rules that follow from shapes and arguments: views, reductions, indexing, concatenation.

Each builder takes a node and returns its ``OpRule``, or ``None`` where it has nothing to offer (then the operator is
replicated, and reported).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from passes.rules.notation import Dim, OpRule, Shape, instantiate, pointwise

__all__ = [
    "along",
    "broadcast",
    "cat",
    "chain",
    "einsum",
    "elementwise",
    "expand",
    "gather",
    "index",
    "operands_of",
    "pad",
    "permute",
    "reduction",
    "repeat",
    "reshape",
    "scaled",
    "results_of",
    "roll",
    "select",
    "shape_of",
    "split",
    "squeeze",
    "stack",
    "unsqueeze",
]


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a node, in order, lists flattened."""
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
    """The (fake) tensors that a node returns."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    return [v for v in value if isinstance(v, Tensor)] if isinstance(value, (list, tuple)) else []


def shape_of(node: fx.Node) -> Shape:
    """The whole shape of a node's one result."""
    return tuple(node.meta["val"].shape)


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _shapes(node: fx.Node) -> tuple[list[Shape], list[Shape]]:
    return [shape_of(n) for n in operands_of(node)], [tuple(t.shape) for t in results_of(node)]


def _rule(operands: Sequence[Sequence[Dim]], results: Sequence[Sequence[Dim]], sizes: dict, **options: Any) -> OpRule:
    used = {f for tensor in (*operands, *results) for dim in tensor for f in dim}
    linear = options.pop("linear", ())
    return OpRule(
        operands=tuple(tuple(t) for t in operands),
        results=tuple(tuple(t) for t in results),
        sizes={f: n for f, n in sizes.items() if f in used},
        linear=tuple(frozenset(s) for s in linear),
        **options,
    )


def _named(shape: Shape) -> tuple[list[Dim], dict[str, int]]:
    """One factor per dim."""
    return [(f"d{i}",) if n > 1 else () for i, n in enumerate(shape)], {f"d{i}": n for i, n in enumerate(shape) if n > 1}


def elementwise(*linear: Sequence[int]) -> Any:
    """A builder for element-wise operators that are linear in the given sets of operands."""

    def build(node: fx.Node) -> OpRule | None:
        operands, results = _shapes(node)
        if len(results) != 1 or not operands:
            return None
        fitting = [s for s in linear if all(i < len(operands) for i in s)]
        return pointwise(operands, results[0], fitting)

    return build


def scaled(node: fx.Node) -> OpRule | None:
    """mul, div: linear in the one tensor that a number scales. Products of two tensors take whole operands: passing a
    partial sum through them saves no communication, and every such choice costs planning time."""
    operands, results = _shapes(node)
    return pointwise(operands, results[0], [(0,)] if len(operands) == 1 and node.args[0] in operands_of(node) else ())


def broadcast(node: fx.Node) -> OpRule | None:
    """add, sub: linear in both operands together, but not in one alone (a scalar would be added once per device)."""
    operands, results = _shapes(node)
    return pointwise(operands, results[0], [(0, 1)] if len(operands) == 2 else ())


def chain(boundaries: Sequence[int]) -> bool:
    """Whether each boundary divides the next: then all of them are products of common factors."""
    return all(b % a == 0 for a, b in zip(boundaries, boundaries[1:], strict=False))


def reshape(node: fx.Node) -> OpRule | None:
    """Dims that are merged or split, as products of common factors; groups that share no factors stay whole."""
    (source,), (target,) = _shapes(node)
    operand: list[Dim] = [() for _ in source]
    result: list[Dim] = [() for _ in target]
    sizes: dict[str, int] = {}
    if 0 in source:  # of nothing, any shape with a 0 can be made
        return _rule([operand], [result], sizes, linear=[(0,)])
    i = j = 0
    while i < len(source) and j < len(target):
        first, second = [i], [j]
        a, b = source[i], target[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a *= source[i]
                first.append(i)
                i += 1
            else:
                b *= target[j]
                second.append(j)
                j += 1
        _join(source, first, operand, target, second, result, sizes)
    return _rule([operand], [result], sizes, linear=[(0,)])


def _join(
    source: Shape,
    first: list[int],
    operand: list,
    target: Shape,
    second: list[int],
    result: list,
    sizes: dict,
) -> None:
    total = math.prod(source[i] for i in first)
    marks = {1, total}
    for shape, dims in ((source, first), (target, second)):
        product = 1
        for d in dims:
            product *= shape[d]
            marks.add(product)
    boundaries = sorted(marks)
    if total == 0 or not chain(boundaries):
        return
    for shape, dims, out in ((source, first, operand), (target, second, result)):
        low = 1
        for d in dims:
            high = low * shape[d]
            inside = [b for b in boundaries if low <= b <= high]
            names = []
            for x, y in zip(inside, inside[1:], strict=False):
                name = f"g{first[0]}_{x}"
                sizes[name] = y // x
                names.append(name)
            out[d] = tuple(names)
            low = high


def permute(node: fx.Node) -> OpRule:
    """permute: the same factors in another order."""
    shape = shape_of(operands_of(node)[0])
    dims, sizes = _named(shape)
    order = [d % len(shape) for d in argument(node, 1, "dims")]
    return _rule([dims], [[dims[d] for d in order]], sizes, linear=[(0,)])


def unsqueeze(node: fx.Node) -> OpRule:
    """unsqueeze: a new dim without factors."""
    shape = shape_of(operands_of(node)[0])
    dims, sizes = _named(shape)
    where = argument(node, 1, "dim") % (len(shape) + 1)
    return _rule([dims], [[*dims[:where], (), *dims[where:]]], sizes, linear=[(0,)])


def squeeze(node: fx.Node) -> OpRule:
    """squeeze in all its forms. A named dim that is larger than 1 stays, and stays whole: its part might be 1."""
    shape = shape_of(operands_of(node)[0])
    dims, sizes = _named(shape)
    where = argument(node, 1, "dim")
    chosen = range(len(shape)) if where is None else [where] if isinstance(where, int) else where
    named = {d % len(shape) for d in chosen}
    gone = {d for d in named if shape[d] == 1}
    dims = [() if d in named else dim for d, dim in enumerate(dims)]
    return _rule([dims], [[d for i, d in enumerate(dims) if i not in gone]], sizes, linear=[(0,)])


def expand(node: fx.Node) -> OpRule:
    """expand: dims that only the result has are factors too; the operand's gradient is a partial sum over them."""
    source, target = shape_of(operands_of(node)[0]), shape_of(node)
    dims, sizes = _named(target)
    shift = len(target) - len(source)
    operand = [dims[shift + i] if n == target[shift + i] else () for i, n in enumerate(source)]
    return _rule([operand], [dims], sizes, linear=[(0,)])


def along(position: int | None = 1, name: str = "dim", *, linear: bool = False) -> Any:
    """A builder for operators that work along some dims and treat all others alike (cumsum, flip, slice, sort)."""

    def build(node: fx.Node) -> OpRule | None:
        operands, results = _shapes(node)
        source = operands[0]
        where = argument(node, position, name, -1) if position is not None else range(len(source))
        if where is None:
            return None
        busy = {d % len(source) for d in ([where] if isinstance(where, int) else where)} if source else set()
        dims, sizes = _named(source)
        dims = [() if i in busy else d for i, d in enumerate(dims)]
        others = [dims if len(s) == len(source) else None for s in operands[1:]]
        if any(o is None for o in others) or any(len(r) != len(source) for r in results):
            return None
        fits = all(
            s[i] == source[i] or i in busy or (s[i] == 1 and not dims[i])
            for s in (*operands[1:], *results)
            for i in range(len(source))
        )
        if not fits:
            return None
        sets = [tuple(range(len(operands)))] if linear else ()
        return _rule([dims] * len(operands), [dims] * len(results), sizes, linear=sets)

    return build


def roll(node: fx.Node) -> OpRule | None:
    """roll: along its dims; without any, elements move from one row to the next."""
    return along(2 if argument(node, 2, "dims", ()) else None, "dims", linear=True)(node)


def select(node: fx.Node) -> OpRule:
    """select.int: the chosen dim disappears."""
    shape = shape_of(operands_of(node)[0])
    dims, sizes = _named(shape)
    where = argument(node, 1, "dim") % len(shape)
    dims[where] = ()
    return _rule([dims], [[d for i, d in enumerate(dims) if i != where]], sizes, linear=[(0,)])


def split(node: fx.Node) -> OpRule:
    """split_with_sizes: equal parts make the dim a product ``(parts rest)`` of which ``rest`` can be sharded."""
    shape = shape_of(operands_of(node)[0])
    parts = argument(node, 1, "split_sizes")
    where = argument(node, 2, "dim", 0) % len(shape)
    dims, sizes = _named(shape)
    inner = [*dims]
    whole: frozenset[str] = frozenset()
    dims[where] = inner[where] = ()
    if len(set(parts)) == 1:
        sizes |= {"parts": len(parts), "rest": parts[0]}
        dims[where] = tuple(f for f in ("parts", "rest") if sizes[f] > 1)
        inner[where] = ("rest",) if parts[0] > 1 else ()
        whole = frozenset({"parts"})
    return _rule([dims], [inner] * len(parts), sizes, whole=whole, linear=[(0,)])


def cat(node: fx.Node) -> OpRule | None:
    """cat: along the joined dim everything is whole; linear in all operands together."""
    operands, (result,) = _shapes(node)
    where = argument(node, 1, "dim", 0) % len(result)
    if any(len(s) != len(result) for s in operands):
        return None
    dims, sizes = _named(result)
    dims[where] = ()
    return _rule([dims] * len(operands), [dims], sizes, linear=[tuple(range(len(operands)))])


def stack(node: fx.Node) -> OpRule:
    """stack: a new whole dim."""
    operands, (result,) = _shapes(node)
    where = argument(node, 1, "dim", 0) % len(result)
    dims, sizes = _named(operands[0])
    out = [*dims[:where], (), *dims[where:]]
    return _rule([dims] * len(operands), [out], sizes, linear=[tuple(range(len(operands)))])


def reduction(*, linear: bool) -> Any:
    """A builder for reductions: the reduced dims are reduced factors if the reduction is a sum, else whole."""

    def build(node: fx.Node) -> OpRule | None:
        source = shape_of(operands_of(node)[0])
        results = [tuple(t.shape) for t in results_of(node)]
        where = argument(node, 1, "dim")
        keep = bool(argument(node, 2, "keepdim", False))
        chosen = range(len(source)) if where is None or where == [] else [where] if isinstance(where, int) else where
        gone = {d % len(source) for d in chosen} if source else set()
        dims, sizes = _named(source)
        operand = [() if i in gone and not linear else d for i, d in enumerate(dims)]
        kept = [() if i in gone else d for i, d in enumerate(dims) if keep or i not in gone]
        return _rule([operand], [kept] * len(results), sizes, linear=[(0,)] if linear else ())

    return build


def gather(node: fx.Node) -> OpRule | None:
    """gather: other dims go along where input and index have the same size."""
    (source, chosen), (result,) = _shapes(node)
    where = argument(node, 1, "dim") % max(1, len(source))
    dims, sizes = _named(result)
    dims = [() if i == where or source[i] != result[i] else d for i, d in enumerate(dims)]
    return _rule([dims, dims], [dims], sizes)


def index(node: fx.Node) -> OpRule | None:
    """index.Tensor: whole along indexed dims; the indices' own dims and the remaining dims go along."""
    indices = argument(node, 1, "indices")
    if any(i is None for i in indices) or any(i.meta["val"].dtype.is_floating_point for i in indices):
        return None
    if any(str(i.meta["val"].dtype) in ("torch.bool", "torch.uint8") for i in indices):
        return None
    operands, (result,) = _shapes(node)
    source, chosen = operands[0], operands[1:]
    dims, sizes = _named(result)
    rank = len(result) - (len(source) - len(chosen))
    operand = [() for _ in chosen] + dims[rank:]
    others = [[() if n == 1 else dims[rank - len(s) + i] for i, n in enumerate(s)] for s in chosen]
    return _rule([operand, *others], [dims], sizes, linear=[(0,)])


def pad(node: fx.Node) -> OpRule:
    """constant_pad_nd: padded dims are whole."""
    source = shape_of(operands_of(node)[0])
    amounts = argument(node, 1, "pad")
    dims, sizes = _named(source)
    for k in range(len(amounts) // 2):
        if amounts[2 * k] or amounts[2 * k + 1]:
            dims[len(source) - 1 - k] = ()
    return _rule([dims], [dims], sizes)


def repeat(node: fx.Node) -> OpRule:
    """repeat: dims that are repeated are whole."""
    source, target = shape_of(operands_of(node)[0]), shape_of(node)
    shift = len(target) - len(source)
    dims, sizes = _named(source)
    dims = [d if n == target[shift + i] else () for i, (d, n) in enumerate(zip(dims, source, strict=True))]
    return _rule([dims], [[*([()] * shift), *dims]], sizes, linear=[(0,)])


def einsum(node: fx.Node) -> OpRule | None:
    """einsum: its equation is the rule."""
    equation = str(node.args[0]).replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    left, right = equation.split("->")
    terms = left.split(",")
    if any(len(set(t)) != len(t) for t in terms):
        return None
    operands, results = _shapes(node)
    text = ", ".join(" ".join(t) for t in terms) + " -> " + " ".join(right)
    return instantiate(text, operands, results)
