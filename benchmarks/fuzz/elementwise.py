"""Arguments of element-wise operators, from torch's schemas."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.fuzz.draws import Draw, Operand, mask, real, unit

__all__ = ["elementwise", "target_of"]

#: Operators that are undefined or too steep outside (0, 1), in some operand.
_UNIT = frozenset(
    ("acos", "asin", "atanh", "log", "log10", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "erfinv", "logit", "lgamma")
    + ("digamma", "tan", "pow", "xlogy", "div", "fmod", "remainder", "floor_divide", "addcdiv")
)
_LOGICAL = ("bitwise", "logical", "__")
_NUMBERS = (0.5, 2.0, 1.5)


def target_of(name: str) -> Any:
    """The torch operator of a rule, by its name such as ``aten.add.Tensor``."""
    _, op, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, op), overload)


def elementwise(name: str, draw: Draw) -> tuple[list[Any], dict[str, Any]]:
    """Random arguments of an element-wise operator: operands whose shapes broadcast, and scalars."""
    _, op, overload = name.split(".")
    logical = op.startswith(_LOGICAL)
    shape = tuple(draw.size() for _ in range(draw.pick([1, 2, 2, 3, 4])))
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in target_of(name)._schema.arguments:
        kind = str(argument.type)
        tensors = sum(isinstance(a, Operand) for a in args)
        if kind == "Tensor" or (kind == "Optional[Tensor]" and not tensors):
            args.append(_operand(op, logical, shape if not tensors else _broadcast(shape, draw)))
        elif argument.name == "dtype" and op in ("to", "_to_copy"):
            wide = draw.pick([torch.float64, torch.float32])
            (kwargs.__setitem__("dtype", wide) if argument.kwarg_only else args.append(wide))
        elif argument.has_default_value() or argument.kwarg_only:
            continue
        elif argument.name == "device":
            args += [torch.device("cpu"), torch.float64]
            break
        elif kind in ("number", "float"):
            args.append(draw.pick([True, False]) if logical else draw.pick(_NUMBERS))
        elif kind == "int":
            args.append(1)
        elif kind != "Optional[Tensor]":
            raise NotImplementedError(f"{name}: argument {argument.name} of type {kind}")
    return [*args, *_rest(op, overload, shape, draw)], kwargs | _named(op, draw)


def _operand(op: str, logical: bool, shape: tuple[int, ...]) -> Operand:
    if logical:
        return mask(*shape)
    return unit(*shape) if op in _UNIT else Operand(shape, "above") if op == "acosh" else real(*shape)


def _broadcast(shape: tuple[int, ...], draw: Draw) -> tuple[int, ...]:
    """A shape that broadcasts with ``shape``: the same, without first dims, with dims of 1, or with another first dim."""
    kind = draw.pick(["same", "same", "fewer", "ones", "outer"])
    if kind == "fewer":
        return shape[draw.pick(range(len(shape) + 1)) :]
    if kind == "ones":
        return tuple(draw.pick([n, 1]) for n in shape)
    return (draw.pick([1, 2]), *shape) if kind == "outer" and len(shape) < 4 else shape


def _rest(op: str, overload: str, shape: tuple[int, ...], draw: Draw) -> list[Any]:
    if op == "clamp":
        return [0.3] if overload == "default" else [real(*shape)]
    return []


def _named(op: str, draw: Draw) -> dict[str, Any]:
    if op in ("add", "sub", "rsub"):
        return draw.pick([{}, {}, {"alpha": 2}])
    if op == "gelu":
        return draw.pick([{}, {"approximate": "tanh"}])
    return {}
