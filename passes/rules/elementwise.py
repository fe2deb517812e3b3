"""Rules of element-wise operators, for every overload that torch has of a name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from passes.rules import shapes as by
from passes.rules.rule import Rule
from passes.torch_internals import schema

__all__ = ["ELEMENTWISE"]


def _words(text: str) -> list[str]:
    return text.split()


_UNARY = _words(
    """
abs acos acosh asin asinh atan atanh bitwise_not ceil celu clamp clamp_min clamp_max cos cosh elu erf erfc exp
exp2 expm1 floor frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu log log10 log1p log2 log_sigmoid
logical_not mish nan_to_num reciprocal relu relu6 round rsqrt sgn sigmoid sign silu sin sinh softplus sqrt square tan tanh
threshold trunc pow selu tanhshrink softsign hardshrink softshrink logit erfinv lgamma digamma angle deg2rad rad2deg
"""
)
_CAST = _words("_to_copy to type_as")
_BINARY = _words(
    """
atan2 bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ eq ne lt le gt ge fmod remainder floor_divide
maximum minimum fmax fmin logaddexp float_power logical_and logical_or logical_xor hypot xlogy pow copysign prelu_ rsub
"""
)
_OVERLOADS = _words("default Tensor Scalar Tensor_Scalar Scalar_Tensor Tensor_Tensor Tensor_mode Scalar_mode")
_CASTS = ("dtype", "dtype_layout", "device", "other")


def _elementwise() -> Mapping[str, Rule]:
    plain, cheap = Rule(by.elementwise()), Rule(by.elementwise(), saves="result")
    table = {f"aten.{op}.{overload}": plain for op in (*_UNARY, *_BINARY) for overload in (*_OVERLOADS, *_CASTS)}
    nothing = Rule(by.elementwise(), saves="")
    table |= {f"aten.{op}.{overload}": nothing for op in _CAST for overload in (*_OVERLOADS, *_CASTS)}
    for op in ("tanh", "sigmoid", "exp", "relu", "sqrt", "rsqrt", "reciprocal"):
        table[f"aten.{op}.default"] = cheap
    for overload in ("Tensor", "Scalar", "default"):
        table[f"aten.add.{overload}"] = table[f"aten.sub.{overload}"] = Rule(by.broadcast, saves="", hands_on=True)
        table[f"aten.mul.{overload}"] = Rule(by.scaled, saves="others")
        table[f"aten.div.{overload}"] = Rule(by.scaled, saves="others")
    return {name: rule for name, rule in table.items() if _exists(name)}


def _exists(name: str) -> bool:
    _, op, overload = name.split(".")
    if not hasattr(torch.ops.aten, op) or overload not in getattr(torch.ops.aten, op).overloads():
        return False
    signature = schema(getattr(getattr(torch.ops.aten, op), overload))
    takes = [str(a.type) for a in signature.arguments]
    return "Tensor" in takes and [str(r.type) for r in signature.returns] == ["Tensor"] and "Device" not in takes[:1]


ELEMENTWISE = _elementwise()
"""Name of an operator -> its rule."""
