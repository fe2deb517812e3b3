"""What a collective costs and moves.

Symbols: **n** ranks; **V** bytes of the whole tensor (all_gather: its output; reduce_scatter: its input;
all_reduce and broadcast: the tensor; all_to_all: one rank's local tensor); **alpha** latency in seconds per
message; **beta** bandwidth in bytes/s of one ring in one direction.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19(1), 2005 (ring and recursive all_gather and reduce_scatter, pairwise all_to_all, binomial and scatter +
all-gather broadcast); the bandwidth terms agree with Tensor3D / AxoNN, arXiv 2305.13525 and 2502.08145, eq.
1-7. The tree all-reduce is the double binary tree of Sanders, Speck, Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009, which NCCL uses: all the bandwidth,
logarithmic latency. That all_gather and reduce_scatter have only linear latency is what ends FSDP's scaling
(arXiv 2411.13055).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import sympy
from sympy.codegen.cfunctions import log2

from .errors import suggestion
from .formula import Number, compile_formula

__all__ = [
    "EXPRESSIONS",
    "TRAFFIC",
    "LinkLike",
    "V",
    "alpha",
    "beta",
    "bytes_moved",
    "evaluate",
    "n",
    "seconds",
]

n, V, alpha, beta = sympy.symbols("n V alpha beta", positive=True)

_share = (n - 1) / n
# log2 rather than log(n, 2): a quotient of two logarithms lands beside the integer at some powers of two,
# and the ceiling would then count a step too many.
_depth = sympy.ceiling(log2(n))
_ring = _share * V / beta + (n - 1) * alpha

EXPRESSIONS: Mapping[str, sympy.Expr] = MappingProxyType(
    {
        "all_reduce": sympy.Min(2 * _ring, 2 * _depth * alpha + 2 * V / beta),
        "all_gather": _ring,
        "reduce_scatter": _ring,
        "all_to_all": _ring,
        "broadcast": sympy.Min(_depth * (alpha + V / beta), (_depth + n - 1) * alpha + 2 * _share * V / beta),
    }
)
"""Seconds of each collective in the symbols n, V, alpha, beta; 0 at n = 1."""

TRAFFIC: Mapping[str, sympy.Expr] = MappingProxyType(
    {kind: (2 if kind == "all_reduce" else 1) * _share * V for kind in EXPRESSIONS}
)
"""Bytes that each device receives (broadcast: on average, the root receiving none), in the symbols n and
V."""


class LinkLike(Protocol):
    """Anything with a bandwidth in bytes/s and a latency in seconds, such as `costmodel.topology.Link`."""

    @property
    def bandwidth(self) -> float:
        """Bytes/s of one ring in one direction."""

    @property
    def latency(self) -> float:
        """Seconds per message."""


def evaluate(kind: str, n: Number, V: Number, alpha: Number, beta: Number) -> Number:
    """Seconds of a collective, for one or many rows at once.

    Args:
        kind: a key of `EXPRESSIONS`.
        n: ranks.
        V: bytes of the whole tensor, as the module's docstring says.
        alpha: seconds per message.
        beta: bytes/s.

    Returns:
        Seconds, of the arguments' broadcast shape.

    Raises:
        ValueError: no collective is called ``kind``.
    """
    return _compiled_seconds(kind)(n, V, alpha, beta)


def seconds(kind: str, n: Number, V: Number, link: LinkLike) -> Number:
    """Seconds of a collective over one link; see `evaluate`.

    Args:
        kind: a key of `EXPRESSIONS`.
        n: ranks.
        V: bytes of the whole tensor, as the module's docstring says.
        link: where alpha and beta come from.

    Raises:
        ValueError: no collective is called ``kind``.
    """
    return _compiled_seconds(kind)(n, V, link.latency, link.bandwidth)


def bytes_moved(kind: str, n: Number, V: Number) -> Number:
    """Bytes that each device receives: 2(n-1)/n V for all_reduce, (n-1)/n V for the others.

    Given elements in place of bytes it counts elements.

    Raises:
        ValueError: no collective is called ``kind``.
    """
    return _compiled_traffic(kind)(n, V)


@functools.cache
def _compiled_seconds(kind: str) -> Callable[..., Number]:
    return compile_formula((n, V, alpha, beta), _known(EXPRESSIONS, kind))


@functools.cache
def _compiled_traffic(kind: str) -> Callable[..., Number]:
    return compile_formula((n, V), _known(TRAFFIC, kind))


def _known(table: Mapping[str, sympy.Expr], kind: str) -> sympy.Expr:
    if kind not in table:
        raise ValueError(f"no collective is called {kind!r}{suggestion(kind, table)}")
    return table[kind]
