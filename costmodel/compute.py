"""The time of computation on one device: the roofline.

Symbols: **F** FLOP; **Q** bytes read and written in the device's memory; **P** peak rate in FLOP/s; **B**
memory bandwidth in bytes/s; **L** seconds per kernel launch. Source: Williams, Waterman, Patterson,
"Roofline", CACM 52(4), 2009, with the launch added.

Only large matrix products reach the full rate. Symbols: **m, k, n** dims of the local product; **h** the size
of a dim that halves the rate; **eta** the share of the peak rate that large products reach; **s** the measured
slowdown of a kind of operator relative to this formula. There is one term per dim, because kernels divide each dim into
tiles: the form is fitted, not derived, and `autotp calibrate` reports how well it fits. The backward products have the same
three dims in a different order, so they run at the same rate.

The launch is the same for every strategy of an operator, so it does not affect the choice between them. It is added
instead of entering the maximum, because a maximum would hide the differences between strategies of small
operators. The memory term is kept for the same reason: splitting a memory-bound operator shortens it,
however few FLOP it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import sympy

from .formula import Number, compile_formula
from .machine.device import Device

__all__ = ["KERNEL", "ROOFLINE", "SMALL", "B", "F", "L", "P", "Q", "Work", "eta", "h", "k", "m", "n", "s", "seconds"]

F, Q, L, h = sympy.symbols("F Q L h", nonnegative=True)
P, B, eta, s, m, k, n = sympy.symbols("P B eta s m k n", positive=True)

ROOFLINE: sympy.Expr = sympy.Max(F / P, Q / B) + L
"""Seconds of one kernel in the symbols F, Q, P, B, L."""

SMALL: sympy.Expr = (1 + h / m) * (1 + h / k) * (1 + h / n)
"""The factor by which a small matrix product is slower, in the symbols m, k, n, h."""

KERNEL: sympy.Expr = s * sympy.Max(F * SMALL / (eta * P), Q / B) + L
"""Seconds of one kernel with the efficiency of its size and kind; equal to ``ROOFLINE`` if h = 0 and eta = s = 1."""


def seconds(
    flop: Number,
    bytes: Number,
    device: Device,
    dtype: str,
    *,
    dims: tuple[Number, Number, Number] | None = None,
    kind: str = "",
    launches: Number = 1.0,
) -> Number:
    """Seconds of one operator.

    Args:
        flop: floating-point operations on one device.
        bytes: bytes that one device reads and writes in its memory.
        device: provides the rates and the launch time.
        dtype: the dtype of the computation, with or without the prefix ``torch.``.
        dims: m, k, n of the local product; None if the operator is not a product. A dim of size 0 counts as 1.
        kind: one of ``costmodel.KINDS``, whose measured slowdown applies.
        launches: the number of kernels that share the work.

    Returns:
        Seconds, with the broadcast shape of the arguments.
    """
    return Work(flop, bytes, dtype, kind, dims, launches).seconds(device)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one device for an operator: the arguments of `seconds`."""

    flop: Number
    bytes: Number
    dtype: str
    kind: str
    dims: tuple[Number, Number, Number] | None
    launches: Number

    def seconds(self, device: Device) -> Number:
        """Seconds on a device."""
        values = self.values(device)
        return compile_formula(tuple(values), KERNEL)(*values.values())

    def values(self, device: Device) -> dict[sympy.Symbol, Number]:
        """The values of the symbols of ``KERNEL``."""
        half, (rows, reduced, columns) = _product(self.dims, device)
        return {
            F: self.flop,
            Q: self.bytes,
            P: device.peak(self.dtype),
            B: device.memory_bandwidth,
            L: device.launch * self.launches,
            eta: device.efficiency,
            h: half,
            s: device.slowdown.get(self.kind, 1.0),
            m: rows,
            k: reduced,
            n: columns,
        }


def _product(dims: tuple[Number, Number, Number] | None, device: Device) -> tuple[float, tuple[Number, Number, Number]]:
    """``h`` and m, k, n of ``KERNEL``; values without an effect if nothing is multiplied."""
    if dims is None:
        return 0.0, (1.0, 1.0, 1.0)
    rows, reduced, columns = (np.maximum(size, 1.0) for size in dims)
    return device.half_size, (rows, reduced, columns)
