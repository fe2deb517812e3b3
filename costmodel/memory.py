"""What the state of a parameter occupies: weight, gradient and the optimizer's own tensors.

Symbols: **E** elements of the parameter on one device; **e** bytes per element. Source: ZeRO, arXiv
1910.02054, section 3.1, whose 16 bytes per parameter (mixed precision, Adam) is ``adamw`` with ``e = 2`` and
``master=True``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import sympy

from .errors import suggestion
from .formula import Number, compile_formula

__all__ = ["OPTIMIZERS", "E", "e", "expression", "state_bytes"]

E = sympy.Symbol("E", nonnegative=True)
e = sympy.Symbol("e", positive=True)

OPTIMIZERS: Mapping[str, int] = MappingProxyType({"adamw": 2, "sgd": 0, "sgd-momentum": 1})
"""How many tensors of the parameter's shape each optimizer keeps (AdamW's 4-byte step counter left out)."""

_SINGLE = 4


def expression(optimizer: str = "adamw", *, train: bool = True, master: bool = False) -> sympy.Expr:
    """Bytes of state of one parameter, in the symbols E and e.

    Args:
        optimizer: a key of `OPTIMIZERS`; not looked at unless ``train``.
        train: count gradient and optimizer; otherwise the weight only.
        master: a parameter narrower than float32 also has a float32 copy, which the optimizer steps, and its
            states are float32 like that copy. A parameter of 4 bytes or more is its own master.

    Raises:
        ValueError: no optimizer has that name.
    """
    if not train:
        return E * e
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"no optimizer is called {optimizer!r}{suggestion(optimizer, OPTIMIZERS)}")
    copy, state = sympy.Integer(0), e
    if master:
        copy, state = sympy.Piecewise((_SINGLE, e < _SINGLE), (0, True)), sympy.Max(e, _SINGLE)
    return E * (2 * e + copy + OPTIMIZERS[optimizer] * state)


def state_bytes(
    elements: Number, itemsize: Number, optimizer: str = "adamw", train: bool = True, *, master: bool = False
) -> Number:
    """Bytes of state of parameters, for one or many at once; see `expression`.

    Args:
        elements: elements on one device.
        itemsize: bytes per element.
        optimizer: a key of `OPTIMIZERS`.
        train: count gradient and optimizer; otherwise the weight only.
        master: keep float32 copies of narrower parameters.

    Returns:
        Bytes, of the broadcast shape of ``elements`` and ``itemsize``.

    Raises:
        ValueError: no optimizer has that name.
    """
    return _compiled(optimizer, train, master)(elements, itemsize)


@functools.cache
def _compiled(optimizer: str, train: bool, master: bool) -> Callable[..., Number]:
    return compile_formula((E, e), expression(optimizer, train=train, master=master))
