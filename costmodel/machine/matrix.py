"""Irregular interconnects: a matrix with the bandwidth between any two groups."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from ..errors import TopologyError, require, shown
from ..text.numbers import figure

__all__ = ["Matrix", "check_matrix", "ring_bandwidth"]

Matrix = tuple[tuple[float, ...], ...]

_MOST = 1024  # groups
_SEARCHED = 10  # the best order is searched for rings of up to this many groups; larger ones are in order of their numbers


def check_matrix(matrix: Matrix | None, size: int, where: str) -> None:
    """Checks that a matrix is ``[size, size]``, of at most 1,024 groups, symmetric, finite and connected.

    Raises:
        TopologyError: it is not; the message names the row or the pair.
    """
    if matrix is None:
        return
    for row in (matrix, *(matrix if isinstance(matrix, Sequence) else ())):
        require(row, Sequence, f"{where}: matrix", "rows of bytes/s, such as [[0, 1e9], [1e9, 0]]")
    if len(matrix) != size or any(len(row) != size for row in matrix):
        shape = f"{len(matrix)} rows of {sorted({len(row) for row in matrix})}"
        raise TopologyError(f"{where}: matrix has {shape} entries; size {size} needs {size} rows of {size}")
    if size > _MOST:
        raise TopologyError(f"{where}: matrix joins {size:,} groups; it may join {_MOST:,}")
    for i, j in itertools.product(range(size), repeat=2):
        figure(matrix[i][j], f"{where}: matrix: row {i}, column {j}", error=TopologyError)
    for i, j in itertools.combinations(range(size), 2):
        if matrix[i][j] != matrix[j][i]:
            there, back = shown(matrix[i][j]), shown(matrix[j][i])
            raise TopologyError(
                f"{where}: matrix: row {i}, column {j} is {there} and row {j}, column {i} is {back}; "
                "links must have the same bandwidth in both directions"
            )
    lost = [j for j, reach in enumerate(_widest(matrix)[0]) if j and reach == 0]
    if lost:
        raise TopologyError(f"{where}: matrix: no links connect {lost[0]} to 0, not even through others")


@functools.lru_cache(maxsize=1024)
def ring_bandwidth(matrix: Matrix, members: tuple[int, ...]) -> float:
    """Bytes/s of the best ring through some groups: the one with the fastest bottleneck.

    Args:
        matrix: bytes/s between groups.
        members: the numbers of the groups; two of them need one link. More than ten are connected in the given order.
    """
    reach = _widest(matrix)
    if len(members) < 2:
        return max(map(max, matrix)) if len(matrix) > 1 else math.inf
    if len(members) > _SEARCHED:
        return min(reach[a][b] for a, b in zip(members, (*members[1:], members[0]), strict=True))
    # Bottleneck tour by dynamic programming over subsets: best[subset, last] of paths that start at members[0].
    count = len(members)
    best = {(1, 0): math.inf}
    for subset in range(1, 1 << count, 2):
        for last in range(count):
            reached = best.get((subset, last))
            if reached is None:
                continue
            for new in range(1, count):
                if not subset >> new & 1:
                    key, value = (subset | 1 << new, new), min(reached, reach[members[last]][members[new]])
                    best[key] = max(best.get(key, 0.0), value)
    full = (1 << count) - 1
    return max(min(best[full, last], reach[members[last]][members[0]]) for last in range(1, count))


@functools.lru_cache(maxsize=64)
def _widest(matrix: Matrix) -> Sequence[Sequence[float]]:
    """For any two groups, the bandwidth of the path with the fastest bottleneck."""
    reach = np.array(matrix)
    for k in range(len(matrix)):
        reach = np.maximum(reach, np.minimum(reach[:, k, None], reach[None, k]))
    found: list[list[float]] = reach.tolist()
    return found
