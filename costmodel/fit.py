"""Fits measured times to the cost model: latency and bandwidth of a link, rate and half size of matrix products.

All errors are relative: a plan adds up small and large times of many operators, and a fit by absolute errors would see the
largest sizes only. Everything here is deterministic and needs numpy alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .collectives import ALGORITHMS, LIBRARIES, SYMBOLS, V, figures
from .formula import Number, compile_formula
from .links import Link

__all__ = ["LinkFit", "ProductFit", "Sample", "fit_link", "fit_products", "robust", "split_overhead"]

_TO_SIGMA = 1.4826
"""The standard deviation of normal noise over its median absolute deviation."""

_OUTLYING = 3.0
_FASTEST = 0.01
_ROUNDS = 20
_HALF_SIZES = np.concatenate([[0.0], np.geomspace(0.25, 1024.0, 193)])


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one thing.

    Attributes:
        seconds: the median of those that are no outliers.
        spread: their median absolute deviation over the median, in standard deviations of normal noise.
        outliers: how many were dropped.
        repetitions: how many there were, dropped ones included.
    """

    seconds: float
    spread: float
    outliers: int
    repetitions: int


@dataclass(frozen=True, slots=True)
class LinkFit:
    """One collective's times among equal groups, fitted.

    Attributes:
        kind: one of `costmodel.COLLECTIVES`.
        ranks: devices in a group.
        bandwidth: bytes/s of one ring.
        latency: seconds per message.
        volumes: bytes of the whole tensor as in `costmodel.collectives`, ascending.
        seconds: what each took.
        errors: the fit's relative error at each, predicted over measured less one.
    """

    kind: str
    ranks: int
    bandwidth: float
    latency: float
    volumes: tuple[float, ...]
    seconds: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """The median of the errors' sizes."""
        return float(np.median(np.abs(self.errors)))

    @property
    def largest_error(self) -> float:
        """The largest of the errors' sizes."""
        return float(np.max(np.abs(self.errors)))


@dataclass(frozen=True, slots=True)
class ProductFit:
    """Times of matrix products, fitted.

    Attributes:
        rates: dtype -> FLOP/s of large products.
        half_size: the size at which one dim alone halves the rate, the same for all dtypes.
        errors: dtype -> the fit's relative errors, predicted over measured less one, in the order given.
    """

    rates: Mapping[str, float]
    half_size: float
    errors: Mapping[str, tuple[float, ...]]


def robust(durations: Sequence[float]) -> Sample:
    """The median without outliers: values further from it than three standard deviations, judged by the median deviation.

    Source: Leys et al., "Detecting outliers: do not use standard deviation around the mean, use absolute deviation around
    the median", Journal of Experimental Social Psychology 49(4), 2013.

    Raises:
        ValueError: there are none.
    """
    values = np.asarray(durations, dtype=np.float64)
    if not values.size:
        raise ValueError("no durations to take the median of")
    middle = np.median(values)
    deviation = _TO_SIGMA * np.median(np.abs(values - middle))
    # Equal readings of a coarse clock must not make an outlier of the next tick.
    kept = values[np.abs(values - middle) <= max(_OUTLYING * deviation, 0.01 * middle)]
    seconds = float(np.median(kept))
    spread = _TO_SIGMA * float(np.median(np.abs(kept - seconds)))
    return Sample(seconds, spread / seconds if seconds else 0.0, len(values) - len(kept), len(values))


def fit_link(kind: str, ranks: int, volumes: Sequence[float], seconds: Sequence[float], library: str = "gloo") -> LinkFit:
    """Latency and bandwidth that explain a collective's times on one level, by least squares of relative errors.

    The time of every algorithm is linear in the latency and in the reciprocal of the bandwidth. Where the library has
    several, each size is held to the one that is the fastest there, until that does not change any more.

    Args:
        kind: one of `costmodel.COLLECTIVES`.
        ranks: devices in a group, at least 2.
        volumes: bytes of the whole tensor as in `costmodel.collectives`, at least two different ones.
        seconds: what each took.
        library: a key of `costmodel.LIBRARIES`.

    Returns:
        A latency of at least 0 (where that of the fit is negative, the bandwidth is that of the larger half of the sizes),
        and a bandwidth of at most a hundred times what the fastest size reached (where the times
        do not tell it from infinite).

    Raises:
        ValueError: there are too few ranks or sizes, or a time is not positive.
    """
    order = np.argsort(np.asarray(volumes, dtype=np.float64), kind="stable")
    sizes, times = np.asarray(volumes, dtype=np.float64)[order], np.asarray(seconds, dtype=np.float64)[order]
    if ranks < 2 or len(np.unique(sizes)) < 2:
        raise ValueError(f"{kind}: a fit takes at least 2 ranks and 2 sizes, not {ranks} and {len(np.unique(sizes))}")
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise ValueError(f"{kind}: every time must be positive")
    rows = _rows(kind, ranks, sizes, library)
    chosen = np.zeros(len(sizes), dtype=int)
    solution, least = np.zeros(2), np.inf
    for _ in range(_ROUNDS):
        found = _solve(rows[chosen, np.arange(len(sizes))], times)
        predicted = rows @ found
        loss = float(np.sum((predicted.min(axis=0) / times - 1) ** 2))
        if loss < least:
            solution, least = found, loss
        fastest = predicted.argmin(axis=0)
        if (fastest == chosen).all():
            break
        chosen = fastest
    if solution[0] == 0:  # small ones are quicker than any line through 0: the rate is that of the large
        large = sizes >= np.median(sizes)
        reciprocals = rows[chosen, np.arange(len(sizes)), 1]
        solution = np.array([0.0, max(solution[1], np.median(times[large] / reciprocals[large]))])
    errors = (rows @ solution).min(axis=0) / times - 1
    return LinkFit(
        kind, ranks, float(1 / solution[1]), float(solution[0]), *(tuple(a.tolist()) for a in (sizes, times, errors))
    )


def split_overhead(intercepts: Sequence[float], hops: Sequence[int], steps: Sequence[int], measured: float) -> float:
    """How much of what collectives of no bytes cost comes once, and not with every hop of a ring.

    Args:
        intercepts: per level, seconds of a collective of no bytes among its groups.
        hops: per level, the hops of such a ring but one.
        steps: per level, those of a ring through other groups.
        measured: seconds of a collective of no bytes among the other groups.

    Returns:
        Seconds: at least 0, at most the least intercept. With overhead o the other ring takes
        o + sum of steps (intercept - o) / hops, which is linear in o.
    """
    whole = sum(s * i / h for s, i, h in zip(steps, intercepts, hops, strict=True))
    slope = 1 - sum(s / h for s, h in zip(steps, hops, strict=True))
    if slope == 0:
        return 0.0
    return float(min(max((measured - whole) / slope, 0.0), min(intercepts)))


def fit_products(
    dims: Mapping[str, Sequence[tuple[int, int, int]]],
    seconds: Mapping[str, Sequence[float]],
    launch: float = 0.0,
    decisive: Sequence[str] = (),
) -> ProductFit:
    """Rate of each dtype and one half size: seconds = 2 m k n (1 + h/m)(1 + h/k)(1 + h/n) / P + launch.

    For one h the best P is a median, which a few bad points do not move, and h is searched for on a grid and then between
    its neighbours. Errors are factors, whose logarithms' sizes are summed: a rate's size is not known beforehand, and with
    differences over the measured times the fit would rather be much too fast than a little too slow.

    Args:
        dims: dtype -> m, k, n of each product.
        seconds: dtype -> what each took.
        launch: seconds that starting a kernel takes.
        decisive: the dtypes that decide about h, which others' units may be far from; left out, all.

    Raises:
        ValueError: a dtype has no products, or a time is not positive.
    """
    sides = {dtype: np.asarray(found, dtype=np.float64).reshape(-1, 3) for dtype, found in dims.items()}
    times = {dtype: np.asarray(seconds[dtype], dtype=np.float64) for dtype in sides}
    for dtype in sides:
        if not len(sides[dtype]) or len(sides[dtype]) != len(times[dtype]) or not (times[dtype] > 0).all():
            raise ValueError(f"{dtype}: a positive time for each of one product or more is needed")

    def loss(half: float) -> float:
        errors = [_product_errors(sides[d], times[d], half, launch)[1] for d in decisive or sides]
        return float(np.abs(np.log1p(np.concatenate(errors))).sum())

    grid = _HALF_SIZES
    for _ in range(3):
        best = int(np.argmin([loss(half) for half in grid]))
        half = float(grid[best])
        grid = np.linspace(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)], 33)
    fitted = {dtype: _product_errors(sides[dtype], times[dtype], half, launch) for dtype in sides}
    return ProductFit(
        {dtype: rate for dtype, (rate, _) in fitted.items()},
        half,
        {dtype: tuple(errors.tolist()) for dtype, (_, errors) in fitted.items()},
    )


def _product_errors(sides: np.ndarray, times: np.ndarray, half: float, launch: float) -> tuple[float, np.ndarray]:
    work = 2 * sides.prod(axis=1) * (1 + half / sides).prod(axis=1)
    pace = float(np.median(np.maximum(times - launch, 0.01 * times) / work))
    return 1 / pace, (work * pace + launch) / times - 1


def _rows(kind: str, ranks: int, volumes: np.ndarray, library: str) -> np.ndarray:
    """``[algorithms, sizes, 2]``: what latency and reciprocal bandwidth are multiplied by."""
    found = []
    for name in sorted(ALGORITHMS[kind]):
        if name in LIBRARIES[library]:
            formula = _compiled(kind, name)
            latency = formula(0.0 * volumes, *figures(Link(ranks, 1.0, 1.0)))
            found.append(np.stack([latency, formula(volumes, *figures(Link(ranks, 1.0, 0.0)))], axis=-1))
    return np.stack(found)


@functools.cache
def _compiled(kind: str, name: str) -> Callable[..., Number]:
    return compile_formula((V, *(s for s in SYMBOLS if s != V)), ALGORITHMS[kind][name])


def _solve(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """(latency, reciprocal bandwidth) with the least squares of relative errors, within their bounds."""
    bounds = np.array([0.0, _FASTEST * float(np.min(times / rows[:, 1]))])
    scaled = rows / times[:, None]
    # Around the bounds the only limit is zero, and with two unknowns every set of those at it can be tried.
    wanted = 1 - scaled @ bounds
    candidates = [np.zeros(2)]
    for column in range(2):
        only = np.zeros(2)
        only[column] = max(0.0, float(scaled[:, column] @ wanted / (scaled[:, column] @ scaled[:, column])))
        candidates.append(only)
    scale = np.sqrt((scaled**2).sum(axis=0))
    both = np.linalg.lstsq(scaled / scale, wanted, rcond=None)[0] / scale
    if (both >= 0).all():
        candidates.append(both)
    return bounds + min(candidates, key=lambda x: float(np.sum((scaled @ x - wanted) ** 2)))
