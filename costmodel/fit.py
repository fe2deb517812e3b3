"""Fits measured times to the cost model: latency and bandwidth of a link, rate and half size of matrix products.

All errors are relative: a plan adds small and large times of many operators, and a fit of absolute errors would only
consider the largest sizes. All functions are deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .collectives import ALGORITHMS, LIBRARIES, OF_LINK, figures
from .formula import compile_formula
from .machine.links import Link

__all__ = [
    "LinkFit",
    "ProductFit",
    "Sample",
    "fit_link",
    "fit_parts",
    "fit_products",
    "robust",
    "split_copying",
    "split_overhead",
]

_TO_SIGMA = 1.4826
"""The standard deviation of normal noise over its median absolute deviation."""

_OUTLYING = 3.0
_FASTEST = 0.01
_ROUNDS = 20
_NOISE, _FACTOR, _BOUNDS = 0.05, 0.5, (0.25, 4.0)  # of `fit_parts`
_HALF_SIZES = np.concatenate([[0.0], np.geomspace(0.25, 1024.0, 193)])


@dataclass(frozen=True, slots=True)
class Sample:
    """A summary of repeated measurements.

    Attributes:
        seconds: the median without outliers.
        spread: the median absolute deviation over the median, in standard deviations of normal noise.
        outliers: the number of measurements that were dropped.
        repetitions: the number of measurements, including the dropped ones.
    """

    seconds: float
    spread: float
    outliers: int
    repetitions: int


@dataclass(frozen=True, slots=True)
class LinkFit:
    """The fit of one collective's times in groups of equal size.

    Attributes:
        kind: one of `costmodel.COLLECTIVES`.
        ranks: devices in a group.
        bandwidth: bytes/s of one ring.
        latency: seconds per message.
        volumes: bytes of the whole tensor as in `costmodel.collectives`, ascending.
        seconds: the measured time for each volume.
        errors: the relative error of the fit for each volume: predicted over measured, minus 1.
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
        """The median absolute error."""
        return float(np.median(np.abs(self.errors)))

    @property
    def largest_error(self) -> float:
        """The largest absolute error."""
        return float(np.max(np.abs(self.errors)))


@dataclass(frozen=True, slots=True)
class ProductFit:
    """The fit of the times of matrix products.

    Attributes:
        rates: dtype -> FLOP/s of large products.
        half_size: the size of a dim that halves the rate, the same for all dtypes.
        errors: dtype -> the relative errors of the fit, predicted over measured minus 1, in the order of the products.
    """

    rates: Mapping[str, float]
    half_size: float
    errors: Mapping[str, tuple[float, ...]]


def robust(durations: Sequence[float]) -> Sample:
    """The median without outliers: values more than three standard deviations from it, estimated from the median deviation.

    Source: Leys et al., "Detecting outliers: do not use standard deviation around the mean, use absolute deviation around
    the median", Journal of Experimental Social Psychology 49(4), 2013.

    Raises:
        ValueError: ``durations`` is empty.
    """
    values = np.asarray(durations, dtype=np.float64)
    if not values.size:
        raise ValueError("no durations to take the median of")
    middle = np.median(values)
    deviation = _TO_SIGMA * np.median(np.abs(values - middle))
    # With a coarse clock most readings may be equal; the next tick is not an outlier.
    kept = values[np.abs(values - middle) <= max(_OUTLYING * deviation, 0.01 * middle)]
    seconds = float(np.median(kept))
    spread = _TO_SIGMA * float(np.median(np.abs(kept - seconds)))
    return Sample(seconds, spread / seconds if seconds else 0.0, len(values) - len(kept), len(values))


def fit_link(kind: str, ranks: int, volumes: Sequence[float], seconds: Sequence[float], library: str = "gloo") -> LinkFit:
    """Fits latency and bandwidth to a collective's times on one level, by least squares of relative errors.

    The time of every algorithm is linear in the latency and in the reciprocal of the bandwidth. If the library has
    several algorithms, each size is fitted to the fastest one for it, and the fit is repeated until these do not change.

    Args:
        kind: one of `costmodel.COLLECTIVES`.
        ranks: devices in a group, at least 2.
        volumes: bytes of the whole tensor as in `costmodel.collectives`, at least two different ones.
        seconds: the measured time for each volume.
        library: a key of `costmodel.LIBRARIES`.

    Returns:
        A fit with a latency of at least 0 (if the unconstrained latency is negative, the bandwidth is fitted to the larger
        half of the sizes) and a bandwidth of at most 100 times that of the fastest size (which applies if the times are
        consistent with an infinite bandwidth).

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
        unknowns = _solve(rows[chosen, np.arange(len(sizes))], times)
        predicted = rows @ unknowns
        loss = float(np.sum((predicted.min(axis=0) / times - 1) ** 2))
        if loss < least:
            solution, least = unknowns, loss
        fastest = predicted.argmin(axis=0)
        if (fastest == chosen).all():
            break
        chosen = fastest
    if solution[0] == 0:  # small sizes are faster than any line through 0 allows: only the large ones determine the rate
        large = sizes >= np.median(sizes)
        reciprocals = rows[chosen, np.arange(len(sizes)), 1]
        solution = np.array([0.0, max(solution[1], np.median(times[large] / reciprocals[large]))])
    errors = (rows @ solution).min(axis=0) / times - 1
    return LinkFit(
        kind, ranks, float(1 / solution[1]), float(solution[0]), *(tuple(a.tolist()) for a in (sizes, times, errors))
    )


def split_overhead(intercepts: Sequence[float], hops: Sequence[int], steps: Sequence[int], measured: float) -> float:
    """The part of an empty collective's time that occurs once, instead of at every hop of a ring.

    Args:
        intercepts: for each level, seconds of an empty collective in groups of that level alone.
        hops: for each level, the number of hops of such a ring, minus 1.
        steps: for each level, the number of hops on it of a ring through groups across levels.
        measured: seconds of an empty collective in the groups across levels.

    Returns:
        Seconds, at least 0 and at most the smallest intercept. With overhead o, the ring across levels takes
        o + sum of steps (intercept - o) / hops, which is linear in o.
    """
    whole = sum(s * i / h for s, i, h in zip(steps, intercepts, hops, strict=True))
    slope = 1 - sum(s / h for s, h in zip(steps, hops, strict=True))
    if slope == 0:
        return 0.0
    return float(min(max((measured - whole) / slope, 0.0), min(intercepts)))


def split_copying(kind: str, ranks: int, bandwidth: float, of_pairs: float) -> tuple[float, float | None]:
    """Separates the time of a collective's bytes into moving, of which pairs need less, and copying, of which they do not.

    Args:
        kind: one of `costmodel.COLLECTIVES`.
        ranks: devices in a group, at least 3.
        bandwidth: bytes/s fitted to groups of this size, as if nothing was copied.
        of_pairs: the same, fitted to groups of two.

    Returns:
        The bandwidth, and the bytes/s of the whole tensor that are copied, with which the formulas give the same time for
        groups of both sizes; None if groups of two do not take longer than without copying. At most nine tenths of the
        time are copying.
    """
    turns, share = (2 if kind == "all_reduce" else 1), 1 - 1 / ranks
    seconds, seconds_of_pairs = share / bandwidth, 0.5 / of_pairs
    moving = max(0.1 * seconds, share * (seconds - seconds_of_pairs) / (share - 0.5))
    if moving >= seconds:
        return bandwidth, None
    return share / moving, 1 / (turns * (seconds - moving))


def fit_products(
    dims: Mapping[str, Sequence[tuple[int, int, int]]],
    seconds: Mapping[str, Sequence[float]],
    launch: float = 0.0,
    decisive: Sequence[str] = (),
) -> ProductFit:
    """Fits the rate P of each dtype and one half size h: seconds = 2 m k n (1 + h/m)(1 + h/k)(1 + h/n) / P + launch.

    For a given h, the best P is a median, which is robust against outliers; h is searched on a grid that is refined twice
    around its best point. The loss is the sum of the absolute logarithms of predicted over measured times: relative errors
    without the logarithm would favour rates that are far too high over rates that are slightly too low.

    Args:
        dims: dtype -> m, k, n of each product.
        seconds: dtype -> the measured time of each product.
        launch: seconds to start a kernel.
        decisive: the dtypes that h is fitted to, since others may run on different hardware units; by default all.

    Raises:
        ValueError: a dtype has no products, or a time is not positive.
    """
    sides = {dtype: np.asarray(products, dtype=np.float64).reshape(-1, 3) for dtype, products in dims.items()}
    times = {dtype: np.asarray(seconds[dtype], dtype=np.float64) for dtype in sides}
    for dtype in sides:
        if not len(sides[dtype]) or len(sides[dtype]) != len(times[dtype]) or not (times[dtype] > 0).all():
            raise ValueError(f"{dtype}: at least one product is needed, and a positive time for each")

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


def fit_parts(parts: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Fits a factor to each part of several sums, so that the sums have measured values.

    Factors that the sums do not determine stay near 1: this is the most likely solution if factors deviate from 1 by
    `_FACTOR`, and sums from what was measured by `_NOISE` of it (ridge regression; Hoerl and Kennard, "Ridge regression:
    biased estimation for nonorthogonal problems", Technometrics 12(1), 1970).

    Args:
        parts: for each sum, seconds of its parts; the same parts in every sum.
        seconds: for each sum, the measured time.

    Returns:
        The factors, between `_BOUNDS`, and for each sum its relative error with them.

    Raises:
        ValueError: there is no sum, or a time is not positive.
    """
    times = np.asarray(seconds, dtype=np.float64)
    if not len(times) or not (times > 0).all():
        raise ValueError("at least one sum is needed, and a positive time for each")
    shares = np.asarray(parts, dtype=np.float64) / times[:, None]
    prior = (_NOISE / _FACTOR) ** 2 * np.eye(shares.shape[1])
    factors = 1 + np.linalg.solve(shares.T @ shares + prior, shares.T @ (1 - shares.sum(axis=1)))
    factors = np.clip(factors, *_BOUNDS)
    return factors.tolist(), (shares @ factors - 1).tolist()


def _product_errors(sides: np.ndarray, times: np.ndarray, half: float, launch: float) -> tuple[float, np.ndarray]:
    work = 2 * sides.prod(axis=1) * (1 + half / sides).prod(axis=1)
    pace = float(np.median(np.maximum(times - launch, 0.01 * times) / work))
    return 1 / pace, (work * pace + launch) / times - 1


def _rows(kind: str, ranks: int, volumes: np.ndarray, library: str) -> np.ndarray:
    """``[algorithms, sizes, 2]``: the coefficients of latency and reciprocal bandwidth."""
    rows = []
    for name in sorted(ALGORITHMS[kind]):
        if name in LIBRARIES[library]:
            formula = compile_formula(OF_LINK, ALGORITHMS[kind][name])
            latency = formula(0.0 * volumes, *figures(Link(ranks, 1.0, 1.0)))
            rows.append(np.stack([latency, formula(volumes, *figures(Link(ranks, 1.0, 0.0)))], axis=-1))
    return np.stack(rows)


def _solve(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """(latency, reciprocal bandwidth) with the least squares of relative errors, within their bounds."""
    bounds = np.array([0.0, _FASTEST * float(np.min(times / rows[:, 1]))])
    scaled = rows / times[:, None]
    # Relative to the bounds, the constraint is x >= 0: with two unknowns, every active set can be tried.
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
