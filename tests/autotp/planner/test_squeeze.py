"""Recomputation where memory is short: the optimum, its proof, and plans whose layers differ."""

import itertools
import math
import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from comparing import close
from models import MODELS
from thinned import thinned
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autotp
from autotp import FAMILIES
from autotp.costs.floor import least_seconds
from autotp.costs.footprint import Footprint
from autotp.costs.priced import Priced
from autotp.costs.recompute import decided, recomputed_by, undecided, within_kernels
from autotp.costs.step import Moment, Turn
from autotp.planner import plan_captured, prepare, squeeze
from autotp.planner.candidates import Candidate, Candidates
from autotp.planner.choices import Choice
from autotp.planner.contest import Contest
from autotp.planner.folding import apart, folded
from autotp.planner.ilp import NEVER, Deadline, cheapest, copies, evaluate
from autotp.planner.memory.moments import Moments
from autotp.planner.shares import next_shares
from autotp.plans.options import Options
from benchmarks.models import Decoder, Transformer, chain
from benchmarks.settings import behind, outcomes
from passes.capture import capture
from passes.graph import note_of


class RandomBlock(nn.Module):
    """A few operators with a residual connection around them."""

    def __init__(self, rng, width, most, affine):
        super().__init__()
        self.kinds = [rng.choice(["linear", "gelu", "norm", "tanh", "times"]) for _ in range(rng.randint(2, most))]
        make = {
            "linear": lambda: nn.Linear(width, width, bias=affine),
            "norm": lambda: nn.LayerNorm(width, elementwise_affine=affine),
        }
        self.layers = nn.ModuleList(make.get(kind, nn.Identity)() for kind in self.kinds)

    def forward(self, x):
        y = x
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            other = {"gelu": F.gelu, "tanh": torch.tanh, "times": lambda y: y * x}
            y = other.get(kind, layer)(y)
        return x + y


class RandomBlocks(nn.Module):
    def __init__(self, seed, width=16, most=5, affine=True):
        super().__init__()
        rng = random.Random(seed)
        self.blocks = nn.ModuleList(RandomBlock(rng, width, most, affine) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


def everything(captured, topology, options, sharded=False):
    """(seconds, bytes) of every choice of recomputed operators and, if ``sharded``, of parameters gathered only once.

    Every operator has one strategy. If ``sharded``, every parameter rests as ``Shard(0)``; otherwise it rests replicated.
    """
    model, mesh = prepare(captured), (topology.devices,)
    candidates = Candidates(model, topology, options, model.parameter_bytes if options.hides else 0.0)
    (restriction,) = candidates.options.family.restrictions(1)
    assembled = candidates.assemble(Candidate(mesh, restriction, 1))
    pairs = zip(assembled.structure.nodes, assembled.problem.nodes, strict=True)
    rows = {node: int(np.isfinite(one.cost).argmax()) for (node, *_), one in pairs}
    strategies = {node.name: assembled.chosen(model.stands[node], rows[model.stands[node]]) for node in model.operators}
    parameters = list(captured.parameters) if sharded else []
    resting = dict.fromkeys(parameters, (Shard(0),))
    found = []
    open_model = undecided(model)
    for some in subsets(open_model.undecided):
        recomputed = replace(decided(open_model, some), stands={node: node for node in model.stands})
        for once in subsets(parameters):
            priced = Priced.of(recomputed, candidates.prices(mesh), strategies, resting, {}, [], once)
            found.append((priced.sums.step(options.hides), Footprint(priced).run()))
    return found


def subsets(values):
    return itertools.chain.from_iterable(itertools.combinations(values, count) for count in range(len(values) + 1))


@pytest.mark.parametrize("seed", thinned(reversed(range(30)), 11, whole=True))
def test_the_optimum_is_that_of_an_exhaustive_search_at_every_moment(seed, monkeypatch):
    monkeypatch.setattr(squeeze, "_SETTLING", 60.0)  # long enough on a busy machine, too
    torch.manual_seed(seed)
    captured = capture(RandomBlocks(seed), (torch.randn(64 * (1 + seed % 3), 16),))
    topology = autotp.Topology.load("dgx-h100").resized(1)
    options = Options("data", mesh=(1,), schedule=("none", "overlap")[seed % 2], gap=0.0)
    every = everything(captured, topology, options)
    low, high = (least(taken for _, taken in every) for least in (min, max))
    for share in (0.0, 0.3, 0.7):
        bound = low + share * (high - low)
        best = min(seconds for seconds, taken in every if taken <= bound)
        plan = plan_captured(captured, topology, replace(options, memory=bound))
        assert plan.predicted.step_seconds == pytest.approx(best, rel=1e-9)
        assert plan.predicted.memory_bytes <= bound
        assert plan.gap <= 1e-6, "and it is proven"


@pytest.mark.parametrize("seed", thinned(range(4), first=1, slow=1, whole=True))
def test_what_is_gathered_once_is_that_of_an_exhaustive_search(seed):
    """Also decides for each sharded parameter whether its gathered copy is kept, or it is gathered again."""
    torch.manual_seed(seed)
    model = RandomBlocks(seed, most=3, affine=False)
    captured = capture(model, (torch.randn(64, 16),))
    topology = autotp.Topology.load("dgx-h100").resized(2)
    family = replace(FAMILIES["zero3"], gathers="free", fills=True)
    options = Options(family, mesh=(2,), schedule=("none", "overlap")[seed % 2], chunks={}, gap=0.0)
    every = everything(captured, topology, options, sharded=True)
    low, high = (least(taken for _, taken in every) for least in (min, max))
    for share in (0.0, 0.2, 0.4, 0.7, 1.0):
        bound = low + share * (high - low)
        best = min(seconds for seconds, taken in every if taken <= bound)
        plan = plan_captured(captured, topology, replace(options, memory=bound))
        assert plan.predicted.memory_bytes <= bound
        assert plan.predicted.step_seconds * (1 - plan.gap) <= best * (1 + 1e-9), share
        assert plan.predicted.step_seconds == pytest.approx(best, rel=1e-9), share


def recomputing(captured, recompute):
    """The analysed model with one way to recompute, besides what its own checkpoints recompute."""
    model = prepare(captured, compiled=recompute == "kernels")
    fixed = recompute in ("none", "selective", "full")
    model = replace(model, recomputed=recomputed_by(model, recompute if fixed else "none", checkpoints=True))
    if recompute == "kernels":
        model = within_kernels(model)
    model = model if fixed or recompute == "kernels" else undecided(model)
    return apart(model) if recompute == "apart" else folded(model)


def random_choices(model, options, panels=1, times=3):
    """Random choices on two meshes: the moments of plans, the choice, and what is found of it."""
    rng = np.random.default_rng(0)
    together = model.parameter_bytes if options.hides else 0.0
    candidates = Candidates(model, autotp.Topology.load("dgx-h100").resized(4), options, together)
    for mesh in ((4,), (2, 2)):
        (restriction,) = candidates.options.family.restrictions(len(mesh))
        candidate = Candidate(mesh, restriction, panels)
        assembled = candidates.assemble(candidate)
        moments = Moments(assembled, candidates.prices(mesh), panels != 1, Deadline())
        for _ in range(times):
            nodes = tuple(
                replace(n, cost=np.where(np.isfinite(n.cost), rng.random(n.cost.shape), math.inf))
                for n in assembled.problem.nodes
            )
            tensors = tuple(
                replace(t, cost=np.where(np.isfinite(t.cost), rng.random(t.cost.shape) / 5, math.inf))
                for t in assembled.problem.tensors
            )
            choice = cheapest(replace(assembled.problem, nodes=nodes, tensors=tensors), Deadline())
            found = candidates.found(candidate, assembled, choice)
            # An operator that is recomputed in vain holds nothing, whatever its table says; an optimum has none.
            choice = tuple(
                row % len(made.space.serves) if isinstance(made, Choice) and node not in found.model.recomputed else row
                for (node, made, _), row in zip(assembled.structure.nodes, choice, strict=True)
            )
            yield moments, choice, candidates.found(candidate, assembled, choice)


def closeness(model, options, panels=1):
    """Compares bounds on memory with the footprints of random choices; returns their ratio at the worst moment of each."""
    close = []
    for moments, choice, found in random_choices(model, options, panels):
        for moment, held in found.held.items():
            assert moments.bytes(moment, choice, surely=True) <= held * (1 + 1e-9), (found.prices.mesh, moment)
        worst, problem = max(found.held, key=found.held.__getitem__), found.assembled.problem
        seconds = evaluate(problem, choice).seconds
        for surely in (True, False):
            prices = {worst: 0.5, moments.usual[0]: 0.25}
            both = moments.program(prices, surely, problem, 3.0)
            bytes_held = sum(price * moments.bytes(one, choice, surely) for one, price in prices.items())
            assert evaluate(both, choice).seconds == pytest.approx(3 * seconds + bytes_held, rel=1e-9)
        close.append(moments.bytes(worst, choice, surely=True) / found.held[worst])
    return close


@pytest.mark.parametrize("recompute", thinned(["auto", "none", "selective", "full"], first=1, whole=True))
@pytest.mark.parametrize(
    ("options", "panels"),
    [
        ({}, 1),
        ({"schedule": "none", "accumulate": 2}, None),
        ({"precision": "bf16-mixed", "reshard_after_forward": False}, 1),
    ],
)
def test_few_of_identical_layers_show_what_all_of_them_hold(options, panels, recompute):
    captured = capture(Decoder(14, 32, 4, 64, 16), (torch.randint(0, 64, (8, 16)),), {}, options.get("precision"))
    model, before = recomputing(captured, recompute), None
    for _, choice, found in random_choices(model, Options(**options), panels, times=2):
        plans = [found]
        if before is not None and before.prices.mesh == found.prices.mesh and model.undecided:
            plans.append(replace(found, layers=0.2, other=frozenset(before.assembled.rematerialized(choice))))
        for plan in plans:
            nearly, held = plan.nearly_held, plan.held
            assert len(nearly) < 0.8 * len(held)
            for moment, size in nearly.items():
                assert size == pytest.approx(held[moment], rel=1e-9), moment
            assert max(nearly.values()) == pytest.approx(max(held.values()), rel=1e-9)
        before = found


class Watched(nn.Module):
    """Identical layers, whose results the loss reads all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(14))

    def forward(self, x):
        found = []
        for layer in self.layers:
            x = x + F.gelu(layer(x))
            found.append(x)
        return torch.cat(found).square().mean()


def test_no_layers_are_left_out_that_others_than_their_neighbours_read():
    model = recomputing(capture(Watched(), (torch.randn(8, 16),)), "auto")
    assert any(count == 14 for *_, count in model.layers)
    for _, _, found in random_choices(model, Options(), times=1):
        assert found.nearly_held == found.held


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["auto", "selective", "full"])
@pytest.mark.parametrize("schedule", ["none", "overlap"])
@pytest.mark.parametrize("name", thinned(["vit", "resnet", "llama", "gpt2", "bert", "unet"], first=2, whole=True))
def test_a_bound_counts_no_more_than_what_is_held(name, schedule, recompute):
    model, args, kwargs = MODELS[name]()
    close = closeness(recomputing(capture(model, args, kwargs), recompute), Options(schedule=schedule))
    assert max(close) > (0.55 if recompute == "selective" else 0.6), "and they are no trivial bounds"


class Tied(nn.Module):
    """A language model whose head is its embedding, with a block that is checkpointed, and one that is not."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", True) for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x) if number == 1 else checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), tokens.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("panels", [1, None])
@pytest.mark.parametrize("recompute", ["none", "auto", "apart", "kernels", "selective", "full"])
def test_a_bound_counts_no_more_with_tied_weights_and_checkpoints(recompute, panels):
    captured = capture(Tied(), (torch.randint(0, 100, (8, 32)),))
    assert max(closeness(recomputing(captured, recompute), Options(compile=recompute == "kernels"), panels)) > 0.5


@pytest.mark.parametrize(
    ("strategy", "schedule", "mesh"),
    [("auto", "overlap", (8,)), ("auto", "overlap", (4, 2)), ("megatron-1d", "overlap", (4, 2)), ("zero3", "none", (8,))],
)
def test_the_bound_of_a_plan_that_recomputes_nothing_is_what_it_holds(strategy, schedule, mesh):
    """A product's gradients, its weight, and results that other gradients read are all held together at the peak."""
    captured = capture(*chain(2, 256, 1024, 32, 64))
    model, options = folded(prepare(captured)), Options(strategy, schedule=schedule)
    candidates = Candidates(model, autotp.Topology.flat(8), options, model.parameter_bytes if options.hides else 0.0)
    (restriction,) = options.family.restrictions(len(mesh))
    candidate = Candidate(mesh, restriction, 1)
    assembled = candidates.assemble(candidate)
    choice = cheapest(assembled.problem, Deadline())
    held = candidates.found(candidate, assembled, choice).held
    worst = max(held, key=held.__getitem__)
    moments = Moments(assembled, candidates.prices(mesh), False, Deadline())
    assert moments.bytes(worst, choice, surely=True) == pytest.approx(held[worst], rel=1e-6)


def test_the_plan_of_a_few_large_products_in_short_memory_is_proven():
    """Regression: after 17 s, its gap was 7%, and `auto` was 1.8% slower than it."""
    captured = capture(*chain(2, 4096, 16384, 64, 512))
    plan = plan_captured(captured, autotp.Topology.flat(16), Options("megatron-1d", mesh=(8, 2), memory=0.747e9))
    assert plan.recomputed and plan.gap <= 1e-3


class Deep(nn.Module):
    """Identical transformer layers, and a loss."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x**2).mean()


@pytest.mark.exact
@pytest.mark.parametrize(("mesh", "schedule"), [((4,), "overlap"), ((2, 2), "none")])
def test_no_way_for_all_layers_is_faster_and_gradients_are_exact(mesh, schedule):
    torch.manual_seed(0)
    model, x = Deep(6).double(), torch.randn(8, 32, 32, dtype=torch.float64)
    captured, topology = capture(model, (x,)), autotp.Topology.load("dgx-h100").resized(4)

    def planned(**asked):
        return plan_captured(captured, topology, Options(mesh=mesh, schedule=schedule, **asked))

    ways = [planned(recompute=way) for way in ("none", "selective", "full")]
    most, least = (extreme(plan.predicted.memory_bytes for plan in ways) for extreme in (max, min))
    for share in (0.8, 0.2):
        bound = least + share * (most - least)
        plan = planned(memory=bound)
        assert plan.predicted.memory_bytes <= bound
        fitting = [way.predicted.step_seconds for way in ways if way.predicted.memory_bytes <= bound]
        assert plan.predicted.step_seconds <= min(fitting) * (1 + 1e-9)
        assert plan.predicted.step_seconds * (1 - plan.gap) <= min(fitting), "no bound is above a plan that fits"
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    autotp.simulate(model, plan, (x,), schedule=schedule)(x).backward()
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        close(parameter.grad, gradient, max(1.0, gradient.abs().max().item()), name)


def test_the_first_of_identical_layers_may_keep_less():
    captured, topology = capture(Deep(6), (torch.randn(8, 32, 32),)), autotp.Topology.load("dgx-h100").resized(4)
    prepared = folded(undecided(prepare(captured)))
    candidates = Candidates(prepared, topology, Options(schedule="none"), 0.0)
    (restriction,) = candidates.options.family.restrictions(1)
    candidate = Candidate((4,), restriction, 1)
    assembled = candidates.assemble(candidate)
    kept = cheapest(assembled.problem, Deadline())
    recomputing = tuple(
        row + len(made.space.serves) if isinstance(made, Choice) and made.undecided else row
        for (_, made, _), row in zip(assembled.structure.nodes, kept, strict=True)
    )
    none, full = (candidates.found(candidate, assembled, choice) for choice in (kept, recomputing))
    before = none
    for layers in (0.5, 1.0):
        found = replace(none, layers=layers, other=frozenset(assembled.rematerialized(recomputing)))
        modules = {".".join(note_of(node).module.split(".")[:2]) for node in found.model.recomputed}
        assert modules == {f"layers.{i}" for i in range(round(6 * layers))}
        assert found.memory < before.memory
        assert found.priced.sums.step(hides=False) > before.priced.sums.step(hides=False)
        before = found
    assert before.memory == full.memory
    assert before.priced.sums.step(hides=False) == pytest.approx(full.priced.sums.step(hides=False), rel=1e-12)


@pytest.mark.slow
def test_a_wider_gap_ends_the_search_earlier_and_is_kept():
    model, args = Transformer(4, 64, 4), (torch.zeros(8, 32, 64),)
    captured, topology = capture(model, args), autotp.Topology.load("dgx-h100").resized(4)
    none, full = (
        plan_captured(captured, topology, Options(mesh=(4,), recompute=way)).predicted.memory_bytes
        for way in ("none", "full")
    )
    options = Options(mesh=(4,), memory=(none + full) / 2)
    narrow, wide = (plan_captured(captured, topology, replace(options, gap=gap)) for gap in (1e-3, 0.2))
    assert wide.gap <= 0.2
    assert narrow.predicted.step_seconds <= wide.predicted.step_seconds * (1 + 1e-9)
    with pytest.raises(autotp.AutotpError, match="gap 1.5: give a share of the step from 0 to below 1"):
        Options(gap=1.5)


@pytest.mark.slow
def test_copies_of_the_process_bound_what_this_one_does(monkeypatch):
    captured, topology = capture(Deep(3), (torch.randn(8, 32, 32),)), autotp.Topology.load("dgx-h100").resized(8)
    none = plan_captured(captured, topology, Options(mesh=(8,), recompute="none")).predicted.memory_bytes
    options = Options(memory=0.7 * none)

    def planned():
        plan = plan_captured(captured, topology, options)
        return plan.mesh_shape, plan.gap, plan.recomputed, [(op.name, op.layouts) for op in plan.operators]

    alone, made = planned(), []
    monkeypatch.setattr(copies, "_WORTH", 0.0)
    monkeypatch.setattr(copies, "_cores", lambda: 2)
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: made.append(True) or fork())
    assert planned() == alone
    assert made


@pytest.mark.slow
def test_what_holds_on_all_meshes_counts_what_has_to_be_recomputed():
    captured = capture(Transformer(4, 64, 4), (torch.zeros(8, 32, 64),))
    topology, meshes = autotp.Topology.load("dgx-h100").resized(4), [(4,), (2, 2)]
    model = folded(undecided(prepare(captured)))
    candidates = Candidates(model, topology, Options())
    allowed = 1.05 * Contest(candidates, math.inf, NEVER).least(meshes).used
    steps = [
        plan_captured(captured, topology, Options(mesh=mesh, memory=allowed)).predicted.step_seconds for mesh in meshes
    ]
    computing, found = least_seconds(model, candidates.prices((4,))), []
    for moment in (Moment(len(model.operators) - 1, Turn.BACKWARD), Moment(0, Turn.BACKWARD)):
        for price in (0.01, 0.1, 1.0, 10.0):
            short, shorter = (Contest(candidates, room, NEVER) for room in (allowed, allowed / 2))
            worth = {moment: price * computing / allowed}
            assert short.shared_step(meshes, worth) <= min(steps)
            found.append(shorter.shared_step(meshes, worth))
    assert max(found) > 1.01 * computing, "bytes count"


def test_prices_of_many_orders_have_a_solution():
    """Regression: GLOP calls its solution imprecise and gave none: a job with short memory ended in OR-Tools' error."""
    found = next_shares([[[3.0, 1.0]], [[1.0, 2.0]]], [[5e-4], [-1.0]], [(1e11, 1e12)])
    assert found.prices == pytest.approx((1e11,)) and found.value == pytest.approx(-1e11)


@pytest.mark.slow
def test_a_family_that_finds_more_gives_its_plan():
    """Regression: `zero3` was 0.1 % faster than `auto`, which ended after 3 s of 120 with a gap of 0.4 %."""
    found = outcomes("GPT 4 × 1024", "8 × dgx-h100", ["short"], ["zero3"])
    assert behind([one.setting for one in found]) == []


@pytest.fixture(scope="module")
def tight():
    """A job of few operators, and the least memory that the planner says it needs, in bytes."""
    model, args = chain(2, 256, 1024, 32, 64)
    captured, topology = capture(model, args), autotp.Topology.flat(8)
    with pytest.raises(autotp.MemoryBoundError) as nothing:
        plan_captured(captured, topology, Options(memory=1e3))
    return captured, topology, nothing.value.needed


@pytest.mark.slow
def test_where_few_plans_fit_one_is_found(tight):
    """Regression: a program of few operators that no bound had reduced was given to a solver for the whole time limit."""
    captured, topology, needed = tight
    memory = 1.02 * needed
    plan = plan_captured(captured, topology, Options(memory=memory, time_limit=40.0))
    assert plan.predicted.memory_bytes <= memory and 0 <= plan.gap < 1


@pytest.mark.exact
def test_where_few_plans_fit_families_are_as_good(tight):
    captured, topology, needed = tight
    plan, family = (
        plan_captured(captured, topology, Options(name, memory=1.05 * needed, time_limit=40.0))
        for name in ("auto", "megatron-1d")
    )
    step, least = family.predicted.step_seconds, plan.predicted.step_seconds * (1 - plan.gap)
    assert least <= step, "of recomputation, none is certain"
    assert plan.predicted.step_seconds <= step * 1.01, "what a family finds, auto does, if there is time"
