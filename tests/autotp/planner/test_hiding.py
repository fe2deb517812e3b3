"""Plans for overlap: the formula of the step time, the proof of optimality, and chunks priced as a virtual axis."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from comparing import proven_least
from devices import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st

import autotp
from autotp.costs.prices import Prices
from autotp.planner import contest, fitting, plan_captured, prepare
from autotp.planner.assemble import assemble
from autotp.planner.describe import Found
from autotp.planner.ilp import NEVER, Deadline, evaluate, solve
from autotp.planner.least_step import Searched, best_chunks, chunked, in_parts, least_of_meshes, least_step
from autotp.planner.structure import structure
from autotp.plans.families import family
from autotp.plans.options import Options
from benchmarks.models import Transformer, products
from costmodel import overlap
from costmodel.overlap import Weight, Weights
from passes.capture import capture

positive = st.floats(1e-3, 1e3)


@settings(deadline=None, derandomize=True)
@given(positive, positive, positive, st.integers(1, 100), st.tuples(st.floats(0, 1), st.floats(0, 1)), st.floats(0, 1))
def test_a_weighted_sum_of_both_sides_is_the_programs_objective(compute, activations, parameters, depth, contention, share):
    device, network = overlap.sides(compute, activations, parameters, 0.0, depth, 1, contention)
    weight = overlap.weights(((share, 1 - share), (1.0,), (1.0,)), depth).forward
    mixed = weight.compute * compute
    for seconds, taken, parameter in ((activations, contention[0], False), (parameters, contention[1], True)):
        mixed += float(weight.of(np.array([seconds, taken * seconds, seconds]), parameter=parameter))
    assert mixed == pytest.approx(share * device + (1 - share) * network, rel=1e-9)
    assert max(device, network) >= mixed * (1 - 1e-9)
    assert max(device, network) <= (compute + activations + parameters) * (1 + 1e-9), "hiding never costs"


def test_limits_of_the_formula():
    assert overlap.sides(3.0, 0.0, 1.0, 0.0, 1e9, 1, (0, 0))[0] == pytest.approx(3.1), "of parameters all but a tenth hides"
    assert overlap.sides(3.0, 0.0, 1.0, 0.0, 2, 1, (0, 0))[0] == pytest.approx(3.5), "in a model of two layers half"
    assert overlap.sides(3.0, 2.0, 0.0, 0.0, 10, 1, (0, 0))[0] == pytest.approx(5.0), "activations are waited for"
    assert overlap.sides(3.0, 2.0, 1.0, 1.5, 1e9, 1, (1, 1))[0] == pytest.approx(6.0), "full contention hides nothing"
    assert overlap.hidden_by_batch(2.0, 10, 1) == 0 and overlap.hidden_by_batch(2.0, 10, 2) == pytest.approx(1.9)
    assert overlap.hidden_by_rows(2.0, 3.0, 4) == pytest.approx(1.5) and overlap.hidden_by_rows(2.0, 3.0, 1) == 0


def test_neither_the_host_nor_the_passes_hide_all_of_the_other():
    assert overlap.hosted(3.0, 4.0) == pytest.approx(5.0)
    assert overlap.hosted(0.3, 0.0) == 0.3, "to the last bit, where no step waits for the host"


@pytest.mark.parametrize("schedule", ["overlap", "none"])
def test_a_step_waits_for_the_host_and_its_plan_stays_the_proven_one(schedule):
    machine = autotp.Topology.load("dgx-a100").resized(4)
    fast, slow = (replace(machine, device=replace(machine.device, host=host)) for host in (0.0, 1e-3))
    ways = {"recompute": "none", "chunks": {}, "schedule": schedule}
    plain, hosted = _planned(topology=fast, **ways), _planned(topology=slow, **ways)
    assert hosted.operators == plain.operators and hosted.optimal and plain.optimal
    kernels = sum(3 if one.target == "aten.linear.default" else 0 for one in hosted.operators)
    host = math.sqrt(hosted.predicted.step_seconds**2 - plain.predicted.step_seconds**2)
    assert host >= kernels * 1e-3, "one kernel forward, two backward, and those of other operators"
    assert host / 1e-3 == pytest.approx(round(host / 1e-3), abs=1e-3), "a whole number of kernels"
    assert hosted.predicted.host_seconds == hosted.predicted.step_seconds - plain.predicted.step_seconds
    assert hosted.predicted.exposed_seconds == plain.predicted.exposed_seconds
    twice = _planned(topology=slow, **ways | {"recompute": "full"})
    again = math.sqrt(twice.predicted.step_seconds**2 - (twice.predicted.step_seconds - twice.predicted.host_seconds) ** 2)
    assert again > host, "what is recomputed is started again"


def _planned(**options):
    with torch.device("meta"):
        model = Transformer(hidden=64, layers=2, heads=4)
    options = {"memory": math.inf, **options}
    topology = options.pop("topology")
    return autotp.plan(model, topology, (torch.zeros(8, 16, 64, device="meta"),), **options)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30), st.floats(0.0, 1e-2))
def test_what_travels_together_costs_a_message_at_least_and_no_more_than_alone(moving, latency):
    whole = sum(moving)
    found = [float(overlap.merged(latency + one, latency, one / whole)) for one in moving]
    assert latency + whole <= sum(found) * (1 + 1e-9)
    assert sum(found) <= (latency + whole / (1 - overlap.LATENCY_SHARE)) * (1 + 1e-9)
    assert all(one <= (latency + alone) * (1 + 1e-9) for one, alone in zip(found, moving, strict=True))


@pytest.mark.exact
def test_the_step_equals_exhaustive_search_where_it_is_proven(small_problems):
    proven = 0
    nothing, kinds = Weight(0, 0, 0), (Weight(1, 0, 0), Weight(0, 1, 0), Weight(0, 0, 1))
    levels = Weight(0, 0, 0, (1.0,)), Weight(0, 0, 0, (0.0, 1.0))
    for seed, model, mesh, flat, problem in small_problems:
        nodes = (
            replace(flat.topology.levels[0], size=2, bandwidth=5e6, name="within"),
            replace(flat.topology.levels[0], size=2, name="between"),
        )
        topology = replace(flat.topology, levels=nodes) if len(mesh) == 2 else flat.topology
        prices = Prices(topology, mesh, together=model.parameter_bytes)
        every = (*kinds, *levels[: len(topology.levels)])
        pure_weights = [Weights(kind, nothing, update=0.0) for kind in every]
        pure_weights += [Weights(nothing, kind, update=0.0) for kind in every] + [Weights(nothing, nothing, update=1.0)]
        pure = [
            assemble(structure(model, family("auto").restrictions(len(mesh))[0], len(mesh)), prices, weights=weights)
            for weights in pure_weights
        ]
        plan = plan_captured(
            model.captured,
            prices.topology,
            Options("auto", mesh=mesh, panels=1, chunks={}, schedule="overlap", memory=math.inf),
        )
        least = math.inf
        depth = model.depth
        for choice in itertools.product(*(range(len(n.cost)) for n in problem.nodes)):
            if math.isfinite(evaluate(problem, choice).seconds):
                *sums, update = [evaluate(each.problem, choice).seconds for each in pure]
                halves = sums[: len(every)], sums[len(every) :]
                passes = (max(overlap.sides(*half[:3], 0.0, depth, 1, (0, 0), half[3:])) for half in halves)
                least = min(least, sum(passes) + update)
        proven += proven_least(plan, least, seed)
    assert proven >= len(small_problems) // 3


def test_overlap_shortens_the_best_step():
    """Reductions of gradients hide behind the backward pass; without overlap, nothing hides."""
    model, x = Transformer(4, 128, 4), torch.randn(8, 64, 128)
    topology = autotp.Topology.flat(4, bandwidth=2e8, latency=1e-6, device=SMALL)
    hidden = autotp.plan(model, topology, (x,), mesh=(4,))
    exposed = autotp.plan(model, topology, (x,), mesh=(4,), schedule="none")
    assert hidden.predicted.step_seconds < exposed.predicted.step_seconds
    assert hidden.predicted.exposed_seconds < hidden.predicted.communication_seconds
    assert exposed.predicted.exposed_seconds == pytest.approx(exposed.predicted.communication_seconds)


def made(way, count, strategy="megatron-1d", bandwidth=1e9):
    model, x = Transformer(2, 64, 4), torch.randn(8, 16, 64)
    analysed = prepare(capture(model, (x,)))
    topology = autotp.Topology.flat(2, bandwidth=bandwidth, latency=1e-5, device=SMALL)
    prices = Prices(topology, (2,))
    assembled = assemble(structure(analysed, family(strategy).restrictions(1)[0], 1), prices)
    one = Found(assembled, solve(assembled.problem), prices).priced
    return one.sums, chunked(one, in_parts(one, {way: count}))


@pytest.mark.parametrize("way", ["batch", "rows"])
def test_chunks_move_the_same_bytes_more_often(way):
    whole, cut = made(way, 2)
    latency = cut.activations - whole.activations
    assert latency > 0, "every chunk pays the latency"
    assert latency < whole.activations, "and no byte twice"
    assert cut.parameters == pytest.approx(whole.parameters), "parameters' gradients are summed up first"
    assert cut.compute > whole.compute, "smaller products, more kernels, and sums of gradients"
    assert cut.chunks == 2 and 0 < cut.hidden <= cut.activations


def test_more_chunks_cost_more_and_hide_more():
    two, four = made("batch", 2)[1], made("batch", 4)[1]
    assert four.compute > two.compute and four.activations > two.activations
    assert four.hidden / four.activations > two.hidden / two.activations


@pytest.mark.parametrize("way", ["batch", "rows"])
def test_what_cannot_be_cut_hides_nothing(way):
    """A batch of one sequence cannot be cut into chunks, and seven rows cannot be halved."""
    model, x = Transformer(2, 64, 4), torch.randn(1, 7, 64)
    analysed = prepare(capture(model, (x,)))
    prices = Prices(autotp.Topology.flat(2, bandwidth=1e5, latency=1e-5, device=SMALL), (2,))
    assembled = assemble(structure(analysed, family("megatron-1d").restrictions(1)[0], 1), prices)
    one = Found(assembled, solve(assembled.problem), prices).priced
    whole, cut = one.sums, chunked(one, in_parts(one, {way: 2}))
    assert whole.activations > 0 and cut.hidden == 0 and cut.step(hides=True) == pytest.approx(whole.step(hides=True))
    assert best_chunks(one, Deadline())[0] == {}


def test_zero3_sums_chunks_gradients_before_it_scatters_them():
    whole, cut = made("batch", 2, strategy="zero3")
    assert cut.parameters == pytest.approx(whole.parameters), "one reduce-scatter for both chunks"
    assert cut.compute > whole.compute


@pytest.mark.slow
def test_chunks_are_chosen_where_activations_are_waited_for():
    model, x = Transformer(4, 256, 4), torch.randn(8, 128, 256)
    slow = autotp.Topology.flat(2, bandwidth=2e4, latency=1e-6, device=SMALL)
    plan = autotp.plan(model, slow, (x,), strategy="megatron-1d")
    assert (
        plan.chunks
        and plan.predicted.step_seconds
        < autotp.plan(model, slow, (x,), strategy="megatron-1d", chunks={}).predicted.step_seconds
    )
    fast = autotp.Topology.flat(2, bandwidth=1e13, latency=0.0, device=SMALL)
    assert not autotp.plan(model, fast, (x,), strategy="megatron-1d").chunks
    torch.testing.assert_close(autotp.simulate(model, plan, (x,))(x), model(x), rtol=1e-4, atol=1e-5)


def test_plans_in_chunks_are_searched_for_by_themselves(monkeypatch):
    """Chunked plans are searched after those without chunks under any limit: shares of the time must not prevent it."""
    searches = []

    def least_of_meshes(*args):
        searches.append(args)
        return original(*args)

    original = fitting.least_of_meshes
    monkeypatch.setattr(fitting, "least_of_meshes", least_of_meshes)
    model, args = products(2, 64, 4, 8, 16)
    topology = autotp.Topology.flat(4, bandwidth=1e9)
    autotp.plan(model, topology, args, strategy="megatron-1d", mesh=(4,), panels=1, schedule="overlap")
    assert len(searches) == 2


@dataclass(frozen=True)
class Sides:
    """The seconds of a step of one pass: of the devices, and of the network."""

    devices: float
    network: float

    @property
    def sides(self):
        return ((self.devices, self.network),)

    def at_least(self, chunks):
        return self

    def step(self, hides):
        return max(self.devices, self.network)


def test_meshes_are_searched_one_after_the_other_if_a_gap_remains(monkeypatch):
    """At the weights at which the bound of both meshes is greatest, neither has its own best plan."""
    plans = {(4,): [Sides(10.0, 4.0)], (2, 2): [Sides(4.0, 10.0), Sides(9.0, 8.0)]}
    monkeypatch.setattr(overlap, "weights", lambda shares, *_: shares[0])
    asked = []

    def search(meshes, limit, shares):
        asked.append(list(meshes))
        every = [plan for mesh in meshes for plan in plans[mesh]]
        costs = [sum(share * side for share, side in zip(shares, plan.sides[0], strict=False)) for plan in every]
        least = min(costs)
        return Searched(every[costs.index(least)] if least < limit else None, min(least, limit), 0.0)

    together, bound = least_step(partial(search, list(plans), math.inf), lambda each: each, 1, NEVER)
    assert (together[0].best.step(hides=True), bound) == (10.0, pytest.approx(7.0))
    found, floor = least_of_meshes(search, lambda each: each, list(plans), 1, NEVER)
    assert found[0].best == Sides(9.0, 8.0)
    assert floor == pytest.approx(4 * 2 / 7 + 10 * 5 / 7), "the bound of the second mesh by itself"
    asked.clear()
    least_of_meshes(search, lambda each: each, list(plans), 1, NEVER, enough=0.35)
    assert all(len(meshes) == 2 for meshes in asked), "a gap of 30 % is small enough"


def test_the_best_plan_is_that_if_it_fits_though_the_first_choice_does_not(monkeypatch):
    monkeypatch.setattr(contest, "_NEAR", 0.0)
    layers = [torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)]
    captured = capture(torch.nn.Sequential(*layers, *layers[1:2]), (torch.zeros(4096, 64),))
    topology = autotp.Topology.flat(8, bandwidth=1e9, device=SMALL)
    ample = plan_captured(captured, topology, Options(recompute="none"))
    first = plan_captured(captured, topology, Options(recompute="none", mesh=(2, 2, 2)))
    assert ample.predicted.memory_bytes < first.predicted.memory_bytes
    bound = (ample.predicted.memory_bytes + first.predicted.memory_bytes) / 2
    plan = plan_captured(captured, topology, Options(recompute="none", memory=bound))
    assert (plan.mesh_shape, plan.gap) == (ample.mesh_shape, 0.0)
