"""What computing costs on one device: the roofline.

Symbols: **F** FLOP; **Q** bytes read and written in the device's memory; **P** peak rate in FLOP/s; **B**
memory bandwidth in bytes/s; **L** seconds per kernel launch. Source: Williams, Waterman, Patterson,
"Roofline", CACM 52(4), 2009, with the launch added.

The launch is the same for every strategy of an operator, so it decides nothing between them; it is a term
added, never a maximum taken with it, because a maximum would hide the differences between strategies of small
operators. For the same reason the memory term stays in: splitting a memory-bound operator shortens it,
however few its FLOP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import sympy

from .device import Device
from .formula import Number, compile_formula

__all__ = ["ROOFLINE", "B", "F", "L", "P", "Q", "seconds"]

F, Q, L = sympy.symbols("F Q L", nonnegative=True)
P, B = sympy.symbols("P B", positive=True)

ROOFLINE: sympy.Expr = sympy.Max(F / P, Q / B) + L
"""Seconds of one kernel in the symbols F, Q, P, B, L."""


def seconds(flop: Number, bytes: Number, device: Device, dtype: str) -> Number:
    """Seconds of one kernel.

    Args:
        flop: floating-point operations on one device.
        bytes: bytes that one device reads and writes in its memory.
        device: gives the rates and the launch.
        dtype: the dtype that is computed in, with or without ``torch.`` before it.

    Returns:
        Seconds, of the broadcast shape of ``flop`` and ``bytes``.
    """
    return _compiled()(flop, bytes, device.peak(dtype), device.memory_bandwidth, device.launch)


@functools.cache
def _compiled() -> Callable[..., Number]:
    return compile_formula((F, Q, P, B, L), ROOFLINE)
