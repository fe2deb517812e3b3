"""The memory of a parameter's state: weight, gradient and optimizer state.

Symbols: **E** elements of the parameter on one device; **e** bytes per element. Source: ZeRO, arXiv
1910.02054, section 3.1, whose 16 bytes per parameter (mixed precision, Adam) is ``adamw-master`` with ``e = 2``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import sympy

from .errors import suggestion
from .formula import Number, compile_formula

__all__ = ["OPTIMIZERS", "E", "e", "expression", "state_bytes"]

E = sympy.Symbol("E", nonnegative=True)
e = sympy.Symbol("e", positive=True)

OPTIMIZERS: Mapping[str, int] = MappingProxyType({"adamw": 2, "adamw-master": 2, "sgd": 0, "sgd-momentum": 1})
"""The number of tensors of the parameter's shape in each optimizer's state (without AdamW's 4-byte step counter).
``adamw-master`` also keeps a float32 copy of narrower parameters, which it updates, with float32 state, as Megatron-LM and
DeepSpeed do; a parameter with 4 bytes per element or more is its own master."""

_MASTERS = frozenset({"adamw-master"})
_SINGLE = 4


def _tensors(optimizer: str) -> int:
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"no optimizer is called {optimizer!r}{suggestion(optimizer, OPTIMIZERS)}")
    return OPTIMIZERS[optimizer]


@functools.cache
def update_expression(optimizer: str = "adamw") -> sympy.Expr:
    """Bytes that the optimizer's step reads and writes for one parameter, in the symbols E and e.

    One fused kernel reads the gradient, and reads and writes the parameter and each tensor of the state, as
    ``torch.optim`` does with ``fused=True``. Masters are also read and written.

    Raises:
        ValueError: the optimizer is unknown.
    """
    copy, state = _kept(optimizer)
    return E * (3 * e + 2 * copy + 2 * _tensors(optimizer) * state)


def _kept(optimizer: str) -> tuple[sympy.Expr, sympy.Expr]:
    """Bytes per element of the master (0 if the parameter is its own), and of each tensor of the optimizer state."""
    if optimizer not in _MASTERS:
        return sympy.Integer(0), e
    return sympy.Piecewise((_SINGLE, e < _SINGLE), (0, True)), sympy.Max(e, _SINGLE)


def update_bytes(elements: Number, itemsize: Number, optimizer: str = "adamw") -> Number:
    """Bytes that the optimizer's step moves, for one or many parameters at once; see `update_expression`.

    Args:
        elements: elements on one device.
        itemsize: bytes per element.
        optimizer: a key of `OPTIMIZERS`.

    Returns:
        Bytes, with the broadcast shape of ``elements`` and ``itemsize``.

    Raises:
        ValueError: the optimizer is unknown.
    """
    return compile_formula((E, e), update_expression(optimizer))(elements, itemsize)


@functools.cache
def expression(optimizer: str = "adamw", *, train: bool = True) -> sympy.Expr:
    """Bytes of state of one parameter, in the symbols E and e.

    Args:
        optimizer: a key of `OPTIMIZERS`; ignored unless ``train``.
        train: whether to count the gradient and the optimizer state, instead of the weight alone.

    Raises:
        ValueError: the optimizer is unknown.
    """
    if not train:
        return E * e
    copy, state = _kept(optimizer)
    return E * (2 * e + copy + _tensors(optimizer) * state)


def state_bytes(elements: Number, itemsize: Number, optimizer: str = "adamw", train: bool = True) -> Number:
    """Bytes of state of parameters, for one or many at once; see `expression`.

    Args:
        elements: elements on one device.
        itemsize: bytes per element.
        optimizer: a key of `OPTIMIZERS`.
        train: whether to count the gradient and the optimizer state, instead of the weight alone.

    Returns:
        Bytes, with the broadcast shape of ``elements`` and ``itemsize``.

    Raises:
        ValueError: the optimizer is unknown.
    """
    return compile_formula((E, e), expression(optimizer, train=train))(elements, itemsize)
