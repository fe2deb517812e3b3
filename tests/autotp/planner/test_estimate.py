"""Bounds and short looks against enumeration: what decides which meshes are never solved exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest

import autotp
from autotp.planner import prepare
from autotp.planner.candidates import Candidate, Candidates
from autotp.planner.contest import Contest
from autotp.planner.ilp import (
    NEVER,
    Deadline,
    Infeasible,
    Node,
    Problem,
    Pruned,
    Solution,
    Tensor,
    Use,
    estimate,
    glance,
    settle,
    solve,
)
from autotp.plans.families import family
from autotp.plans.options import Options
from benchmarks.models import trained
from passes.capture import capture

NODES, STRATEGIES, SEEDS = 6, 7, 25


def chain(seed: int, tightness: float) -> tuple[Problem, float]:
    """A chain of nodes, and the least seconds within its memory bound, by enumeration."""
    draw = np.random.default_rng(seed)
    nodes = [Node(f"n{i}", draw.uniform(0, 10, STRATEGIES), draw.uniform(0, 10, STRATEGIES)) for i in range(NODES)]
    tensors = []
    every = np.arange(STRATEGIES)
    for i in range(NODES - 1):
        table = draw.uniform(0, 6, (STRATEGIES, STRATEGIES))
        memory = draw.uniform(0, 4, (STRATEGIES, STRATEGIES))
        tensors.append(Tensor(f"t{i}", i, every, (Use(i + 1, every),), table, memory, np.zeros_like(table)))
    seconds, memory = np.zeros(()), np.zeros(())

    def along(values: np.ndarray, *axes: int) -> np.ndarray:
        return values.reshape([STRATEGIES if a in axes else 1 for a in range(NODES)])

    for i, node in enumerate(nodes):
        seconds, memory = seconds + along(node.cost, i), memory + along(node.memory, i)
    for i, tensor in enumerate(tensors):
        seconds, memory = seconds + along(tensor.cost, i, i + 1), memory + along(tensor.memory, i, i + 1)
    bound = float(memory.min() + tightness * (np.median(memory) - memory.min()))
    return Problem(tuple(nodes), tuple(tensors), bound), float(seconds[memory <= bound].min())


@pytest.mark.parametrize("tightness", [0.1, 0.4, 0.8])
def test_a_short_look_bounds_what_enumeration_finds(tightness):
    settled = 0
    for seed in range(SEEDS):
        problem, best = chain(seed, tightness)
        found = estimate(problem, deadline=Deadline.after(10))
        assert found.bound <= best * (1 + 1e-9), seed
        if found.solution is not None:
            assert found.solution.memory <= problem.memory_bound and found.solution.seconds >= best * (1 - 1e-9)
        if found.settled:
            assert found.solution is not None and found.solution.seconds == pytest.approx(best, rel=1e-9), seed
            settled += 1
        for factor in (0.9, 1.05):
            repeated = estimate(problem, deadline=Deadline.after(10), cutoff=factor * best, price=found.price)
            assert repeated.bound <= max(best, factor * best) * (1 + 1e-9), seed
            if factor > 1 and repeated.settled:
                assert repeated.solution is not None and repeated.solution.seconds == pytest.approx(best, rel=1e-9), seed
        for price in (0.0, 0.3 * found.price, found.price, 3 * found.price):
            assert glance(problem, cutoff=2 * best, price=price) <= best * (1 + 1e-9), seed
    assert settled < SEEDS, "a bound that settles every chain leaves nothing to bound"
    assert settled or tightness < 0.8, "where memory hardly binds, a look settles some chains"


@pytest.mark.parametrize("tightness", [0.1, 0.4, 0.8])
def test_settling_finds_the_optimum_or_proves_that_none_is_below_the_cutoff(tightness):
    for seed in range(SEEDS):
        problem, best = chain(seed, tightness)
        looked = estimate(problem, deadline=Deadline.after(10))
        for factor in (0.999, 1.001, 1.05, 1.4):
            found = settle(
                problem, deadline=Deadline.after(30), cutoff=factor * best, price=looked.price, floor=looked.bound
            )
            if factor < 1:
                assert isinstance(found, Pruned), seed
            else:
                assert isinstance(found, Solution) and found.optimal, (seed, factor)
                assert found.seconds == pytest.approx(best, rel=1e-9), (seed, factor)


def contest(memory: float) -> Contest:
    model, args = trained("gpt")
    topology = autotp.Topology.flat(4, bandwidth=1e9, latency=1e-5)
    return Contest(Candidates(prepare(capture(model, args, None)), topology, Options()), memory, memory, NEVER)


@pytest.mark.parametrize("mesh", [(4,), pytest.param((2, 2), marks=pytest.mark.exact)])
def test_one_relaxation_bounds_plans_with_and_without_panels(mesh):
    restriction = family("auto").restrictions(len(mesh))[0]
    roomy = solve(contest(math.inf).assemble(Candidate(mesh, restriction, 1)).problem)
    compared = 0
    for share in (0.5, 0.7, 0.9) if len(mesh) == 1 else (0.9,):
        held = contest(share * roomy.memory)
        seconds, prices = [], [1e-10, 1e-9]
        for panels in (1, None):
            problem = held.assemble(Candidate(mesh, restriction, panels)).problem
            try:
                found = solve(problem)
            except Infeasible:
                continue
            seconds.append(found.seconds)
            prices.append(found.price)
        for price in prices:
            either = held.assemble(Candidate(mesh, restriction, None), either=price).problem
            assert glance(either, cutoff=10 * roomy.seconds, price=price) <= min(seconds, default=math.inf) * (1 + 1e-9)
            compared += bool(seconds)
    assert compared >= (3 if len(mesh) == 1 else 1)
