"""Rules of views: the same elements under other dims. See `passes.rules.shapes` for what builders return."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from passes.rules.notation import Dim, OpRule, Shape
from passes.rules.shapes import argument, dims_of, named, op_rule, operands_of, shape_of, shapes_of

__all__ = [
    "expand",
    "glu",
    "permute",
    "pixel_shuffle",
    "repeat_interleave",
    "reshape",
    "select",
    "split",
    "squeeze",
    "unfold",
    "unsqueeze",
]


def _chain(boundaries: Sequence[int]) -> bool:
    """Whether each boundary divides the next: then all of them are products of common factors."""
    return all(b % a == 0 for a, b in zip(boundaries, boundaries[1:], strict=False))


def reshape(node: fx.Node) -> OpRule | None:
    """reshape: dims that are merged or split become products of common factors; without common factors, they are whole."""
    (source,), (target,) = shapes_of(node)
    operand: list[Dim] = [() for _ in source]
    result: list[Dim] = [() for _ in target]
    sizes: dict[str, int] = {}
    if 0 in source:  # an empty tensor can have any shape with a 0
        return op_rule([operand], [result], sizes, linear=[(0,)])
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
    return op_rule([operand], [result], sizes, linear=[(0,)])


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
    if total == 0 or not _chain(boundaries):
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
    dims, sizes = dims_of(shape)
    order = [d % len(shape) for d in argument(node, 1, "dims")]
    return op_rule([dims], [[dims[d] for d in order]], sizes, linear=[(0,)])


def unsqueeze(node: fx.Node) -> OpRule:
    """unsqueeze: a new dim without factors."""
    shape = shape_of(operands_of(node)[0])
    dims, sizes = dims_of(shape)
    where = argument(node, 1, "dim") % (len(shape) + 1)
    return op_rule([dims], [[*dims[:where], (), *dims[where:]]], sizes, linear=[(0,)])


def squeeze(node: fx.Node) -> OpRule:
    """squeeze in all its forms. A named dim of size greater than 1 remains, and is whole: its local size might be 1."""
    shape = shape_of(operands_of(node)[0])
    dims, sizes = dims_of(shape)
    where = argument(node, 1, "dim")
    chosen = range(len(shape)) if where is None else [where] if isinstance(where, int) else where
    named = {d % len(shape) for d in chosen}
    gone = {d for d in named if shape[d] == 1}
    dims = [() if d in named else dim for d, dim in enumerate(dims)]
    return op_rule([dims], [[d for i, d in enumerate(dims) if i not in gone]], sizes, linear=[(0,)])


def expand(node: fx.Node) -> OpRule:
    """expand: dims that only the result has are factors too; the operand's gradient is a partial sum over them."""
    source, target = shape_of(operands_of(node)[0]), shape_of(node)
    dims, sizes = dims_of(target)
    shift = len(target) - len(source)
    operand = [dims[shift + i] if n == target[shift + i] else () for i, n in enumerate(source)]
    return op_rule([operand], [dims], sizes, linear=[(0,)])


def select(node: fx.Node) -> OpRule:
    """select.int: the chosen dim disappears."""
    shape = shape_of(operands_of(node)[0])
    dims, sizes = dims_of(shape)
    where = argument(node, 1, "dim") % len(shape)
    dims[where] = ()
    return op_rule([dims], [[d for i, d in enumerate(dims) if i != where]], sizes, linear=[(0,)])


def split(node: fx.Node) -> OpRule:
    """split_with_sizes: if parts are equal, the dim is a product ``(parts rest)``, of which ``rest`` can be sharded."""
    shape = shape_of(operands_of(node)[0])
    parts = argument(node, 1, "split_sizes")
    where = argument(node, 2, "dim", 0) % len(shape)
    dims, sizes = dims_of(shape)
    inner = [*dims]
    whole: frozenset[str] = frozenset()
    dims[where] = inner[where] = ()
    if len(set(parts)) == 1:
        sizes |= {"parts": len(parts), "rest": parts[0]}
        dims[where] = tuple(f for f in ("parts", "rest") if sizes[f] > 1)
        inner[where] = ("rest",) if parts[0] > 1 else ()
        whole = frozenset({"parts"})
    return op_rule([dims], [inner] * len(parts), sizes, whole=whole, linear=[(0,)])


def glu(node: fx.Node) -> OpRule:
    """glu: its dim is a product ``(parts rest)``, as in `split`, of which ``rest`` can be sharded."""
    shape = shape_of(operands_of(node)[0])
    where = named(node)["dim"] % len(shape)
    dims, sizes = dims_of(shape)
    sizes |= {"parts": 2, "rest": shape[where] // 2}
    rest: Dim = ("rest",) if sizes["rest"] > 1 else ()
    before, after = dims[:where], dims[where + 1 :]
    whole = frozenset({"parts"})
    return op_rule([[*before, ("parts", *rest), *after]], [[*before, rest, *after]], sizes, whole=whole)


def pixel_shuffle(node: fx.Node) -> OpRule:
    """pixel_shuffle, pixel_unshuffle: channels are ``(c r)``, with ``c`` the channels of the larger image, ``r`` whole."""
    (source,), (target,) = shapes_of(node)
    dims, sizes = dims_of(source)
    groups = min(source[-3], target[-3])
    sizes |= {"c": groups, "r": max(source[-3], target[-3]) // groups if groups else 1}

    def channels(count: int) -> Dim:
        return tuple(f for f in ("c", "r") if sizes[f] != 1 and (f == "c" or count > groups))

    left, right = ([*dims[:-3], channels(shape[-3]), (), ()] for shape in (source, target))
    return op_rule([left], [right], sizes, whole=frozenset({"r"} if sizes["r"] > 1 else ()), linear=[(0,)])


def unfold(node: fx.Node) -> OpRule:
    """unfold: its dim is whole, and so is the new dim within windows."""
    shape = shape_of(operands_of(node)[0])
    dims, sizes = dims_of(shape)
    if shape:
        dims[named(node)["dimension"] % len(shape)] = ()
    return op_rule([dims], [[*dims, ()]], sizes, linear=[(0,)])


def repeat_interleave(node: fx.Node) -> OpRule:
    """repeat_interleave: the dim of the result is a product ``(d copies)``, unless each element has a count of its own."""
    given, operands = named(node), operands_of(node)
    shape, target = shape_of(operands[0]), shape_of(node)
    dims, sizes = dims_of(shape)
    counts: list[Sequence[Dim]] = [[()] * len(shape_of(n)) for n in operands[1:]]
    if given["dim"] is None and len(shape) != 1:
        return op_rule([[()] * len(shape), *counts], [[()]], {}, linear=[(0,)])
    where = (given["dim"] or 0) % len(shape)
    copied, whole = list(dims), frozenset[str]()
    if counts or given["output_size"] is not None or not shape[where] or not target[where]:
        dims[where] = copied[where] = ()
    elif target[where] > shape[where]:
        sizes["copies"], whole = target[where] // shape[where], frozenset({"copies"})
        copied[where] = (*dims[where], "copies")
    return op_rule([dims, *counts], [copied], sizes, whole=whole, linear=[(0,)])
