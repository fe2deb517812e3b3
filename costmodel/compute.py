"""What computing costs on one device: the roofline.

Symbols: **F** FLOP; **Q** bytes read and written in the device's memory; **P** peak rate in FLOP/s; **B**
memory bandwidth in bytes/s; **L** seconds per kernel launch. Source: Williams, Waterman, Patterson,
"Roofline", CACM 52(4), 2009, with the launch added.

Matrix products reach their rate only when they are large. Symbols: **m, k, n** dims of the local product; **h** the size
at which one dim alone halves the rate; **eta** the share of the peak rate that large ones reach; **s** the measured
slowdown of a kind of operator against this formula. One term a dim, because work is cut into tiles in each: the form is
fitted, not derived, and `autotp calibrate` reports how well it fits. The backward products have the same three dims in
another order, so they run at the same rate.

The launch is the same for every strategy of an operator, so it decides nothing between them; it is a term
added, never a maximum taken with it, because a maximum would hide the differences between strategies of small
operators. For the same reason the memory term stays in: splitting a memory-bound operator shortens it,
however few its FLOP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import sympy

from .device import Device
from .formula import Number, compile_formula

__all__ = ["KERNEL", "ROOFLINE", "SMALL", "B", "F", "L", "P", "Q", "Work", "eta", "h", "k", "m", "n", "s", "seconds"]

F, Q, L, h = sympy.symbols("F Q L h", nonnegative=True)
P, B, eta, s, m, k, n = sympy.symbols("P B eta s m k n", positive=True)

ROOFLINE: sympy.Expr = sympy.Max(F / P, Q / B) + L
"""Seconds of one kernel in the symbols F, Q, P, B, L."""

SMALL: sympy.Expr = (1 + h / m) * (1 + h / k) * (1 + h / n)
"""How many times longer a matrix product takes for being small, in the symbols m, k, n, h."""

KERNEL: sympy.Expr = s * sympy.Max(F * SMALL / (eta * P), Q / B) + L
"""Seconds of one kernel with the efficiency of its size and kind; ``ROOFLINE`` where h = 0 and eta = s = 1."""


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
        device: gives the rates and the launch.
        dtype: the dtype that is computed in, with or without ``torch.`` before it.
        dims: m, k, n of the product that one device multiplies; None where the operator is none. A dim without elements
            counts as one.
        kind: one of ``costmodel.device.KINDS``, whose measured slowdown counts.
        launches: how many kernels share the work.

    Returns:
        Seconds, of the broadcast shape of the arguments.
    """
    half, sizes = _product(dims, device)
    slowdown = device.slowdown.get(kind, 1.0)
    launch = device.launch * launches
    return _compiled()(
        flop, bytes, device.peak(dtype), device.memory_bandwidth, launch, device.efficiency, half, slowdown, *sizes
    )


@dataclass(frozen=True, slots=True)
class Work:
    """What one device does for an operator: the arguments of `seconds`."""

    flop: float
    bytes: float
    dtype: str
    kind: str
    dims: tuple[float, float, float] | None
    launches: float

    def seconds(self, device: Device) -> Number:
        """Seconds on a device."""
        return seconds(self.flop, self.bytes, device, self.dtype, dims=self.dims, kind=self.kind, launches=self.launches)

    def values(self, device: Device) -> dict[sympy.Symbol, float]:
        """The numbers of the symbols of ``KERNEL``."""
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
            m: float(rows),
            k: float(reduced),
            n: float(columns),
        }


def _product(dims: tuple[Number, Number, Number] | None, device: Device) -> tuple[float, tuple[Number, Number, Number]]:
    """``h`` and m, k, n of ``KERNEL``; where nothing is multiplied, they change nothing."""
    if dims is None:
        return 0.0, (1.0, 1.0, 1.0)
    rows, reduced, columns = (np.maximum(size, 1.0) for size in dims)
    return device.half_size, (rows, reduced, columns)


@functools.cache
def _compiled() -> Callable[..., Number]:
    return compile_formula((F, Q, P, B, L, eta, h, s, m, k, n), KERNEL)
