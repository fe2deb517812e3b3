"""Plans for gradient accumulation: price, bound and moved bytes count one reduction of parameters' gradients per step."""

import contextlib
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from comparing import proven_least
from devices import SMALL
from thinned import thinned
from torch import nn

import autotp
from autotp.analysis.explain import priced_plan
from autotp.analysis.sweep import sweep
from autotp.costs.prices import Prices
from autotp.planner import plan_captured
from autotp.planner.assemble import assemble
from autotp.planner.ilp import evaluate
from autotp.planner.structure import structure
from autotp.plans.families import family
from autotp.plans.options import Options
from autotp.runtime.durations import overlap_of
from autotp.runtime.rewrite import rewrite
from autotp.runtime.simulate import Simulated
from benchmarks.allocated import Allocated
from benchmarks.memory import pretended
from benchmarks.models import Transformer, trained
from benchmarks.volumes import CountingWorld
from costmodel import overlap
from costmodel.overlap import Weight, Weights
from passes.capture import capture

MICRO = 3


@pytest.mark.exact
def test_the_step_equals_exhaustive_search_where_it_is_proven(small_problems):
    proven = 0
    nothing, kinds = Weight(0, 0, 0), (Weight(1, 0, 0), Weight(0, 1, 0), Weight(0, 0, 1), Weight(0, 0, 0, (1.0,)))
    for seed, model, mesh, flat, problem in small_problems:
        prices = Prices(flat.topology, mesh, together=model.parameter_bytes, accumulate=MICRO)
        built = structure(model, family("auto").restrictions(len(mesh))[0], len(mesh))
        pure = [
            [assemble(built, prices, weights=weights).problem for weights in each]
            for each in (
                [Weights(kind, nothing, nothing, 0.0) for kind in kinds],
                [Weights(nothing, kind, nothing, 0.0) for kind in kinds],
                [Weights(nothing, nothing, kind, 0.0) for kind in kinds],
                [Weights(nothing, nothing, nothing, 1.0)],
            )
        ]
        options = Options("auto", mesh=mesh, panels=1, chunks={}, memory=math.inf, accumulate=MICRO)
        plan = plan_captured(model.captured, prices.topology, options)
        least, depth = math.inf, model.depth

        def seconds(sums, depth=depth):
            return max(overlap.sides(*sums[:3], 0.0, depth, 1, (0, 0), sums[3:]))

        for choice in itertools.product(*(range(len(n.cost)) for n in problem.nodes)):
            if math.isfinite(evaluate(problem, choice).seconds):
                forward, backward, once, (update,) = ([evaluate(each, choice).seconds for each in every] for every in pure)
                one = np.array(backward) / MICRO
                step = seconds(forward) + (MICRO - 1) * seconds(one) + seconds(one + np.array(once)) + update
                least = min(least, step)
        proven += proven_least(plan, least, seed)
    assert proven >= len(small_problems) // 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh"), thinned([("zero3", (4,)), ("data", (4,)), ("tesseract-2.5d", (2, 2, 2))], first=1)
)
def test_bytes_of_an_accumulated_step_are_those_that_move(strategy, mesh):
    """Predicted bytes equal those counted; only reductions of parameters' gradients are not repeated per micro-batch."""
    model, x = Transformer(2, 32, 4), torch.randn(8, 4, 32)
    topology = autotp.Topology.flat(math.prod(mesh), bandwidth=1e6, latency=1e-9, device=SMALL)
    moved = {}
    for count in (1, MICRO):
        plan = autotp.plan(model, topology, (x,), strategy=strategy, mesh=mesh, panels=1, chunks={}, accumulate=count)
        world = CountingWorld(mesh)
        how = dataclasses.replace(overlap_of(plan, merge=False), faster=None)
        ours = Simulated(model, plan, rewrite(model, plan, (x,)), world, lambda _, how=how: how)
        for k in range(count):
            with ours.no_sync() if k + 1 < count else contextlib.nullcontext():
                ours(x).sum().backward()
        moved[count] = 4 * world.total
        predicted = sum(op.bytes_moved for op in plan.operators)
        assert predicted == pytest.approx(moved[count], rel=0.02), "biases are gathered again by the price alone"
    assert moved[1] < moved[MICRO] < MICRO * moved[1] or strategy == "data"
    assert strategy != "data" or moved[MICRO] == pytest.approx(moved[1], rel=0.01)


def test_a_step_is_so_often_a_micro_batch_and_once_its_reductions():
    model, x = Transformer(2, 64, 4), torch.randn(8, 16, 64)
    topology = autotp.Topology.flat(4, bandwidth=1e7, latency=1e-6, device=SMALL)
    for schedule in ("none", "overlap"):
        one, many = (
            autotp.plan(model, topology, (x,), strategy="data", mesh=(4,), schedule=schedule, accumulate=n, chunks={})
            for n in (1, 5)
        )
        captured = capture(model, (x,))
        sums, more = priced_plan(captured, one).sums, priced_plan(captured, many).sums
        passes = 5 * (sums.compute - sums.update)
        assert more.compute == pytest.approx(passes + sums.update) == many.predicted.compute_seconds
        assert more.update == sums.update == many.predicted.update_seconds > 0, "the optimizer steps once"
        assert (
            one.predicted.passes_seconds == pytest.approx(sum(max(each) for each in sums.sides[:-1]), rel=1e-9)
            or schedule == "none"
        )
        assert more.activations == pytest.approx(5 * sums.activations)
        assert more.parameters == pytest.approx(sums.parameters) and more.parameters > 0
        exposed = one.predicted.exposed_seconds + 4 * sums.activations
        assert many.predicted.exposed_seconds == pytest.approx(exposed), "only the last reduces, under its own pass"


def test_accumulation_changes_the_choice():
    """If gradients are expensive to reduce, one micro-batch favours sharded weights, and many favour data parallelism."""
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(64, 256)
    topology = autotp.Topology.flat(4, bandwidth=1e6, latency=1e-9, device=SMALL)
    data, split = (
        [
            autotp.plan(model, topology, (x,), strategy=s, mesh=(4,), schedule="none", accumulate=n).predicted.step_seconds
            for n in (1, 64)
        ]
        for s in ("data", "megatron-1d")
    )
    assert data[0] > split[0] and data[1] < split[1]
    best = [autotp.plan(model, topology, (x,), mesh=(4,), schedule="none", accumulate=n) for n in (1, 64)]
    assert all(plan.optimal for plan in best)
    assert best[1].predicted.step_seconds <= data[1] and best[0].predicted.step_seconds <= split[0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", thinned(["zero3", "data", "megatron-1d"], first=1, whole=True))
def test_memory_counts_what_waits(strategy):
    """Predicted memory equals the measured peak of one device of four, with unreduced gradients and optimizer state."""
    model, args = trained("gpt")
    topology = autotp.Topology.load("dgx-h100").resized(4)
    plan, alone = (
        autotp.plan(model, topology, args, strategy=strategy, mesh=(4,), schedule="none", accumulate=n, panels=1)
        for n in (MICRO, 1)
    )
    with pretended(4):
        ours = autotp.parallelize(model, args=args, plan=plan, schedule="none")
        optimizer = torch.optim.AdamW(ours.parameters(), foreach=False)
        watch = Allocated()
        for step in range(3):
            with watch if step else contextlib.nullcontext():
                watch.reset()
                for k in range(MICRO):
                    with ours.no_sync() if k + 1 < MICRO else contextlib.nullcontext():
                        ours(*args).backward()
                optimizer.step()
                optimizer.zero_grad()
            if not step:
                state = [v for each in optimizer.state.values() for v in each.values() if isinstance(v, torch.Tensor)]
                for tensor in (*state, *ours.parameters(), *ours.buffers(), *args):
                    watch.add(tensor)
    assert watch.peak == pytest.approx(plan.predicted.memory_bytes, rel=0.1)
    assert plan.predicted.memory_bytes > alone.predicted.memory_bytes


def test_products_in_panels_reduce_in_every_micro_batch():
    """The runtime's loop reduces each panel of a gradient in every micro-batch, and the price must count all of them."""
    model, x = Transformer(2, 64, 4), torch.randn(8, 16, 64)
    topology = autotp.Topology.flat(4, bandwidth=1e7, latency=1e-6, device=SMALL)
    whole, panelled = (
        autotp.plan(model, topology, (x,), strategy="zero3", mesh=(4,), schedule="none", accumulate=3, panels=panels)
        for panels in (1, 2)
    )
    assert any(op.panels > 1 for op in panelled.operators)
    captured = capture(model, (x,))
    assert priced_plan(captured, panelled).sums.parameters > priced_plan(captured, whole).sums.parameters * 1.1


def test_a_sweep_counts_all_micro_batches():
    def factory():
        return nn.Linear(64, 64), (torch.randn(64, 64),)

    one, many = (sweep(factory, [autotp.Topology.flat(2)], [2], accumulate=n)[0] for n in (1, 4))
    assert many.tokens == 4 * one.tokens
    assert many.mfu >= one.mfu > 0


def test_round_trip(tmp_path):
    model, x = nn.Linear(8, 8), torch.randn(8, 8)
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), accumulate=4)
    plan.save(tmp_path / "plan.json")
    assert autotp.Plan.load(tmp_path / "plan.json") == plan
    assert Options.of(plan).accumulate == plan.accumulate == 4


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", None])
def test_wrong_numbers_of_micro_batches(wrong):
    with pytest.raises(autotp.AutotpError, match="accumulate.*number of micro-batches"):
        Options(accumulate=wrong)


def test_accumulation_without_gradients_contradicts():
    with pytest.raises(autotp.AutotpError, match="accumulate=2.*'inference' has no gradients"):
        Options(mode="inference", accumulate=2)


def test_a_plan_for_another_number_contradicts():
    model, x = nn.Linear(8, 8), torch.randn(8, 8)
    plan = autotp.plan(model, autotp.Topology.flat(2), (x,), accumulate=4)
    with pytest.raises(autotp.AutotpError, match="accumulate=2, but the plan is for 4"):
        autotp.parallelize(model, plan=plan, args=(x,), accumulate=2)
