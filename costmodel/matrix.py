"""Machines whose devices are joined irregularly: a matrix of bandwidths between any two of them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from .errors import TopologyError

__all__ = ["Matrix", "check_matrix", "ring_bandwidth"]

Matrix = tuple[tuple[float, ...], ...]

_SEARCHED = 10  # rings of so many groups are ordered best; larger ones go in order of their numbers


def check_matrix(matrix: Matrix | None, size: int, where: str) -> None:
    """Refuses a matrix that is not ``[size, size]``, symmetric, finite and connected.

    Raises:
        TopologyError: saying which row or pair is wrong.
    """
    if matrix is None:
        return
    if len(matrix) != size or any(len(row) != size for row in matrix):
        shape = f"{len(matrix)} rows of {sorted({len(row) for row in matrix})}"
        raise TopologyError(f"{where}: matrix has {shape} entries; size {size} needs {size} rows of {size}")
    for i, j in itertools.combinations(range(size), 2):
        if not (math.isfinite(matrix[i][j]) and matrix[i][j] >= 0):
            raise TopologyError(
                f"{where}: matrix: row {i}, column {j} is {matrix[i][j]!r}; it must be finite, and 0 or more"
            )
        if matrix[i][j] != matrix[j][i]:
            raise TopologyError(
                f"{where}: matrix: row {i}, column {j} is {matrix[i][j]!r} and row {j}, column {i} is {matrix[j][i]!r}; "
                "links are alike in both directions"
            )
    lost = [j for j in range(1, size) if _widest(matrix)[0][j] == 0]
    if lost:
        raise TopologyError(f"{where}: matrix: no links join {lost[0]} to 0, not even through others")


@functools.lru_cache(maxsize=1024)
def ring_bandwidth(matrix: Matrix, members: tuple[int, ...]) -> float:
    """Bytes/s of the best ring through some of the groups: the slowest link of the ring whose slowest link is fastest.

    Args:
        matrix: bytes/s between groups.
        members: numbers of the groups; two of them need one link. More than ten go in the order given.
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
    """Between any two groups, the slowest link of the path whose slowest link is fastest."""
    reach = [list(row) for row in matrix]
    for k, i, j in itertools.product(range(len(matrix)), repeat=3):
        reach[i][j] = max(reach[i][j], min(reach[i][k], reach[k][j]))
    return reach
