"""The time and traffic of collectives, with the algorithms of communication libraries; the fastest one determines the time.

Symbols: **n** ranks; **V** bytes of the whole tensor (all_gather: its output; reduce_scatter: its input;
all_reduce and broadcast: the tensor; all_to_all: one rank's local tensor). Properties of the interconnect, in seconds:
**lambda_ring** the latency of all hops of a ring except one; **lambda_tree** the latency from a tree's leaves to its root;
**lambda_levels** the latency of one ring per level, one level after the other; **lambda_pairs** the latency of one message
to every other rank in turn. In bytes/s: **beta** the bandwidth of one ring across all levels. In seconds per byte:
**sigma** for gathering level by level; **chi** for exchanging with all ranks. In addition to the messages, 0 unless
stated: **omega** seconds for starting the collective and waiting for the last rank to enter it, and **kappa** seconds per
byte of the whole tensor for copies, which take as long in a small group as in a large one. `costmodel.Link` has a property
for each. On one level with latency alpha, those of the messages are (n-1) alpha, ceil(log2 n) alpha, (n-1) alpha,
(n-1) alpha, beta, (n-1)/n/beta and (n-1)/n/beta.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
19(1), 2005 (ring, recursive doubling and halving, pairwise all_to_all, binomial and scatter +
all-gather broadcast); the bandwidth terms agree with Tensor3D / AxoNN, arXiv 2305.13525 and 2502.08145, eq.
1-7. The tree all-reduce is the double binary tree of Sanders, Speck, Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009, which NCCL uses: full bandwidth,
logarithmic latency. all_gather and reduce_scatter have linear latency only, which limits the scaling of FSDP
(arXiv 2411.13055). A ring's latency is the sum over its hops, most of which stay inside a node, as in NCCL's own tuning
model, src/graph/tuning.cc. The hierarchical all-reduce (reduce_scatter inside, all_reduce outside, all_gather
inside): Cho et al., "BlueConnect", SysML 2019.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import sympy
from sympy.codegen.cfunctions import log2

from .errors import suggestion
from .formula import Number, compile_formula
from .machine.links import Link

__all__ = [
    "ALGORITHMS",
    "LIBRARIES",
    "MORE",
    "OF_LINK",
    "SYMBOLS",
    "TRAFFIC",
    "V",
    "beta",
    "bytes_moved",
    "expression",
    "figures",
    "n",
    "of_link",
    "omega",
]

n, V, beta = sympy.symbols("n V beta", positive=True)
lambda_ring, lambda_tree, lambda_levels, lambda_pairs = sympy.symbols(
    "lambda_ring lambda_tree lambda_levels lambda_pairs", nonnegative=True
)
sigma, chi, omega, kappa = sympy.symbols("sigma chi omega kappa", nonnegative=True)

SYMBOLS = (n, V, beta, sigma, chi, lambda_ring, lambda_tree, lambda_levels, lambda_pairs, omega, kappa)

#: The symbols in the order of a volume and of `figures`.
OF_LINK = (V, *(symbol for symbol in SYMBOLS if symbol is not V))

MORE = omega + kappa * V
"""Seconds of every collective in addition to its algorithm's."""

_TRAFFIC = (n, V)

_share = (n - 1) / n
# log2 rather than log(n, 2): at some powers of two, the quotient of two logarithms is slightly above the integer,
# and the ceiling would count one step too many.
_depth = sympy.ceiling(log2(n))
_ring = _share * V / beta + lambda_ring
_doubling = _share * V / beta + lambda_tree
_levels = sigma * V + lambda_levels
_pairs = chi * V + lambda_pairs

ALGORITHMS: Mapping[str, Mapping[str, sympy.Expr]] = MappingProxyType(
    {
        "all_reduce": {
            "ring": 2 * _ring,
            "tree": 2 * V / beta + 2 * lambda_tree,
            "halving-doubling": 2 * _doubling,
            "hierarchical": 2 * _levels,
        },
        "all_gather": {"ring": _ring, "doubling": _doubling, "hierarchical": _levels},
        "reduce_scatter": {"reducing ring": _ring, "halving": _doubling, "hierarchical": _levels, "reducing pairs": _pairs},
        "all_to_all": {"pairwise": _pairs},
        "broadcast": {
            "binomial": _depth * V / beta + lambda_tree,
            "scatter and all-gather": 2 * _share * V / beta + lambda_tree + lambda_ring,
        },
    }
)
"""Seconds of each collective with each algorithm, in `SYMBOLS`; 0 at n = 1, except for the tree's bytes."""

_EVERYWHERE = {"ring", "pairwise", "binomial", "scatter and all-gather"}

LIBRARIES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "nccl": frozenset({*_EVERYWHERE, "tree", "reducing ring"}),
        "gloo": frozenset({*_EVERYWHERE, "reducing pairs"}),
        "mpi": frozenset(
            {*_EVERYWHERE, "reducing ring", "reducing pairs", "halving-doubling", "doubling", "halving", "hierarchical"}
        ),
    }
)
"""The algorithms of each library. NCCL: rings, and a tree for all_reduce. Gloo: rings; its reduce_scatter is an all_reduce,
so `passes.world.process` exchanges parts in pairs instead, as it does for small all_reduces and all_gathers, and for
all_gathers between two nodes, which are priced as rings. MPI: rings, pairs, recursive and hierarchical algorithms."""

TRAFFIC: Mapping[str, sympy.Expr] = MappingProxyType(
    {kind: (2 if kind == "all_reduce" else 1) * _share * V for kind in ALGORITHMS}
)
"""Bytes that each device receives (broadcast: on average, since the root receives none), in the symbols n and V."""


def _known(table: Mapping, kind: str) -> Any:
    if kind not in table:
        raise ValueError(f"no collective is called {kind!r}{suggestion(kind, table)}")
    return table[kind]


def expression(kind: str, library: str = "nccl") -> sympy.Expr:
    """Seconds of a collective with the fastest of the library's algorithms, in `SYMBOLS`.

    Raises:
        ValueError: no collective is called ``kind``, or no library ``library``.
    """
    if library not in LIBRARIES:
        raise ValueError(f"no library is called {library!r}{suggestion(library, LIBRARIES)}")
    return MORE + sympy.Min(*(e for name, e in _known(ALGORITHMS, kind).items() if name in LIBRARIES[library]))


def of_link(kind: str, V: Number, link: Link, library: str = "nccl") -> Number:
    """Seconds of a collective among the devices of a link, with the library's fastest algorithm.

    Args:
        kind: a key of `ALGORITHMS`.
        V: bytes of the whole tensor, as defined in the module's docstring.
        link: the devices that take part, and the part of the interconnect that they use.
        library: a key of `LIBRARIES`.

    Returns:
        Seconds, with the shape of ``V``; 0 for one device.

    Raises:
        ValueError: no collective is called ``kind``, or no library ``library``.
    """
    if link.size == 1:
        return 0.0 * V
    return _compiled(kind, library)(V, *figures(link))


@functools.cache
def _compiled(kind: str, library: str) -> Callable[..., Number]:
    return compile_formula(OF_LINK, expression(kind, library))


def figures(link: Link) -> tuple[float, ...]:
    """The values of all `SYMBOLS` except V for a link."""
    return (
        float(link.size),
        link.bandwidth,
        link.staged_rate,
        link.exchange_rate,
        link.ring_latency,
        link.tree_latency,
        link.staged_latency,
        link.exchange_latency,
        link.overhead,
        link.copying,
    )


def bytes_moved(kind: str, n: Number, V: Number) -> Number:
    """Bytes that each device receives: 2(n-1)/n V for all_reduce, (n-1)/n V for the others.

    If V is given in elements, the result is in elements.

    Raises:
        ValueError: no collective is called ``kind``.
    """
    return compile_formula(_TRAFFIC, _known(TRAFFIC, kind))(n, V)
