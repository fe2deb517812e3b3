"""The lower bound on communication, compared with the optimisation problem behind it and with every grid of devices."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autotp
from benchmarks.models import Chain
from costmodel import bounds, pipeline

sizes = st.integers(1, 4096)


def grids(devices):
    for p in range(1, devices + 1):
        if devices % p == 0:
            for q in range(1, devices // p + 1):
                if devices // p % q == 0:
                    yield p, q, devices // p // q


def accessed(m, k, n, grid):
    """Elements of the three matrices that one device of a p x q x r grid over (m, k, n) needs."""
    p, q, r = grid
    return m * k / (p * q) + k * n / (q * r) + m * n / (p * r)


def least_by_search(m, k, n, devices):
    """Elements that each device must receive, by the optimisation problem behind the bound.

    min x + y + z with x y z >= (mkn/P)^2, each at least a P-th of its matrix, less these parts. The minimum is where the
    gradients or the limits meet, so every set of active limits is tried.
    """
    product = (m * k * n / devices) ** 2
    lows = [m * k / devices, k * n / devices, m * n / devices]
    best = math.inf
    for fixed in itertools.chain.from_iterable(itertools.combinations(range(3), count) for count in range(3)):
        rest = product / math.prod(lows[i] for i in fixed)
        free = 3 - len(fixed)
        each = rest ** (1 / free)
        values = [lows[i] if i in fixed else each for i in range(3)]
        if all(v >= low * (1 - 1e-9) for v, low in zip(values, lows, strict=True)):
            best = min(best, sum(values))
    return best - sum(lows)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(sizes, sizes, sizes, st.integers(1, 512))
def test_the_closed_form_solves_the_problem_behind_it(m, k, n, devices):
    expected = max(0.0, least_by_search(m, k, n, devices))
    assert bounds.matmul_elements(m, k, n, devices) == pytest.approx(expected, rel=1e-9, abs=1e-6 * (m * k + k * n + m * n))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes, sizes, sizes, st.sampled_from([2, 4, 6, 8, 12, 16, 27, 64]))
def test_no_grid_of_devices_needs_less(m, k, n, devices):
    owned = (m * k + k * n + m * n) / devices
    best = min(accessed(m, k, n, grid) for grid in grids(devices)) - owned
    assert bounds.matmul_elements(m, k, n, devices) <= best * (1 + 1e-9) + 1e-6


@pytest.mark.parametrize(
    ("shape", "devices"), [((64, 64, 64), 8), ((64, 64, 64), 64), ((256, 64, 64), 4), ((128, 128, 32), 16)]
)
def test_some_grid_attains_it(shape, devices):
    owned = sum(math.prod(pair) for pair in itertools.combinations(shape, 2)) / devices
    best = min(accessed(*shape, grid) for grid in grids(devices)) - owned
    assert bounds.matmul_elements(*shape, devices) == pytest.approx(best)


def test_one_device_moves_nothing_and_the_order_does_not_matter():
    assert bounds.matmul_elements(10, 20, 30, 1) == 0
    assert len({round(bounds.matmul_elements(*order, 8), 6) for order in itertools.permutations((10, 200, 30))}) == 1


@pytest.mark.parametrize(("strategy", "mesh"), [("summa-2d", (4, 4)), ("3d", (4, 2, 2)), ("zero3", (16,))])
def test_no_forward_product_without_copies_at_rest_stays_below(strategy, mesh):
    """These schemes rest in one copy, so the theorem holds. (Backward products share dC, so their bounds do not add up.)"""
    with torch.device("meta"):
        model, x = Chain(3, 1024, 2048), torch.zeros(16, 64, 1024)
    plan = autotp.plan(model, autotp.Topology.flat(16), (x,), strategy=strategy, mesh=mesh, mode="inference")
    inner = [op for op in plan.operators if op.bound_bytes and op.module.startswith("layers.1")]
    assert len(inner) == 2
    for op in inner:
        assert op.bound_ratio >= 1 and op.bytes_moved == pytest.approx(op.bound_ratio * op.bound_bytes)


def test_a_pipeline_hides_the_shorter_stage():
    assert pipeline.seconds(2.0, 3.0, 1) == 5
    assert pipeline.seconds(2.0, 3.0, 4) == 2 + 3 * 3 + 3
    assert pipeline.seconds(3.0, 2.0, 4) == 3 + 3 * 3 + 2
