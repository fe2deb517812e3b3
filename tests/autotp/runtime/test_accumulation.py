"""Gradient accumulation: only the last of several micro-batches reduces, and gradients are those of the sum, to 1e-9."""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections import Counter

import pytest
import torch
from comparing import close, loss_of
from devices import slow_machine
from float64 import double, float64_mode
from models import MODELS
from overlapping import planned, tokens
from thinned import thinned
from torch import nn
from torch.utils._pytree import tree_map

import autotp
from autotp.planner import plan_captured
from autotp.plans.options import Options
from autotp.runtime.durations import overlap_of
from autotp.runtime.rewrite import apply, rewrite
from autotp.runtime.simulate import Simulated
from passes.capture import capture
from passes.graph import note_of
from passes.layouts.reshard import COMMUNICATING, Step
from passes.overlap.launch import launch
from passes.overlap.primitives import COLLECTIVE_OF
from passes.world import ops
from passes.world.world import LocalWorld

STEPS, MICRO = 3, 3

#: Every family on both meshes, alternately without and with overlap, and every model.
NAMES = ("gpt2", "llama", "unet", "resnet", "vit", "bert")
FAMILIES = [
    ("llama" if family in ("summa-2d", "tesseract-2.5d", "3d") else NAMES[(i + j) % len(NAMES)], family, mesh, (i + j) % 2)
    for i, family in enumerate(autotp.FAMILIES)
    for j, mesh in enumerate([(4,), (2, 2)])
    if mesh == (2, 2) or family not in ("summa-2d", "tesseract-2.5d", "3d")
]


@functools.cache
def captured(name):
    with float64_mode():
        model, args, kwargs = double(MODELS[name])
        return capture(model, args, kwargs)


def shifted(tree, by):
    """Returns the tree with other values of the same dtypes and shapes, as another micro-batch."""

    def shift(leaf):
        if not isinstance(leaf, torch.Tensor) or leaf.dtype is torch.bool:
            return leaf
        return leaf.roll(by, -1) * (1 + by / 10 if leaf.is_floating_point() else 1)

    return tree_map(shift, tree)


def simulated(name, strategy, mesh, overlap, panels=None, chunks=None):
    plan = plan_captured(captured(name), slow_machine(mesh), Options(strategy, mesh=mesh, panels=panels, schedule="none"))
    plan = dataclasses.replace(plan, chunks=chunks or {})
    model, args, kwargs = double(MODELS[name])
    how = overlap_of if overlap else lambda _: None
    return Simulated(model, plan, apply(captured(name), plan), LocalWorld(mesh), how), args, kwargs


def micro_batches(module, args, kwargs, count=MICRO):
    """Yields the loss of every micro-batch; all but the last run under ``no_sync``, if the module has it."""
    for k in range(count):
        inner = k + 1 < count and hasattr(module, "no_sync")
        with module.no_sync() if inner else contextlib.nullcontext():
            yield loss_of(module(*shifted(args, k), **shifted(kwargs, k)))


def same_gradients(module, plain):
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    largest = max(g.abs().max().item() for g in wanted.values() if g is not None)
    for n, p in module.named_parameters():
        if wanted[n] is None:
            assert p.grad is None or not p.grad.any(), n
        else:
            close(p.grad, wanted[n], max(wanted[n].abs().max().item(), 1e-3 * largest), f"gradient of {n}")


def check(name, strategy, mesh, overlap, panels=None, chunks=None):
    with float64_mode():
        plain, _, _ = double(MODELS[name])
        ours, args, kwargs = simulated(name, strategy, mesh, overlap, panels, chunks)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (plain, ours)]
        for _ in range(STEPS):
            for module in (plain, ours):
                module.zero_grad()
                for loss in micro_batches(module, args, kwargs):
                    assert module is plain or all(p.grad is None for p in module.parameters())
                    loss.backward()
            same_gradients(ours, plain)
            for optimizer in optimizers:
                optimizer.step()
    assert not overlap or all(found is not None for found in ours._compiled.values())
    for (n, want), got in zip(plain.named_parameters(), ours.parameters(), strict=True):
        close(got, want, max(want.abs().max().item(), 1e-2), f"parameter {n} after the steps")


@pytest.mark.exact
@pytest.mark.parametrize(("name", "strategy", "mesh", "overlap"), FAMILIES, ids=lambda v: str(v).replace(" ", ""))
def test_every_family(name, strategy, mesh, overlap):
    check(name, strategy, mesh, overlap)


@pytest.mark.exact
@pytest.mark.parametrize(
    ("name", "strategy", "mesh", "panels", "chunks"),
    thinned(
        [
            ("vit", "data", (4,), 1, {"batch": 2}),
            ("bert", "zero3", (4,), 1, {"batch": 2}),
            ("llama", "summa-2d", (2, 2), 2, None),
            ("gpt2", "zero3", (4,), 2, None),
            ("llama", "tensor3d", (2, 2), 1, {"batch": 2, "rows": 2}),
            ("gpt2", "summa-2d", (2, 2), 1, {"rows": 2}),
        ],
        first=1,
    ),
    ids=lambda v: str(v).replace(" ", ""),
)
def test_panels_and_chunks(name, strategy, mesh, panels, chunks):
    check(name, strategy, mesh, True, panels, chunks)


class Odd(nn.Module):
    """A tied weight, one read in two layouts and through a view, one that some batches do not use, and uneven shards."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 7)
        self.mixed = nn.Parameter(torch.randn(7, 7))
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(7, 7)

    def forward(self, ids):
        x = self.embed(ids)
        x = torch.tanh(x @ self.mixed) @ (self.mixed.exp() / 7).t()
        return x @ self.embed.weight.t(), self.sometimes(x)


def odd(strategy, mesh, schedule, seed=0):
    torch.manual_seed(seed)
    with float64_mode():
        plain = Odd().double()
        model = copy.deepcopy(plain)
        args = (torch.randint(10, (12, 5)),)
        plan = autotp.plan(model, slow_machine(mesh), args, strategy=strategy, mesh=mesh)
        return plain, autotp.simulate(model, plan, args, schedule=schedule), args


ODD = [
    (s, m, schedule)
    for s, m in (("zero3", (4,)), ("tensor3d", (2, 2)), ("data", (2, 3)))
    for schedule in ("none", "overlap")
]


@pytest.mark.parametrize(("strategy", "mesh", "schedule"), thinned(ODD, 5), ids=lambda v: str(v).replace(" ", ""))
def test_batches_that_do_not_reach_all_parameters(strategy, mesh, schedule):
    """The first, the last, none or all of the micro-batches use ``sometimes``; the second one goes backward twice."""
    plain, ours, args = odd(strategy, mesh, schedule)
    for using in ((0,), (2,), (), (0, 1, 2)):
        for module in (plain, ours):
            module.zero_grad()
            for k in range(3):
                with ours.no_sync() if k < 2 else contextlib.nullcontext():
                    first, second = module(*shifted(args, k))
                if k == 1:
                    first.sum().backward(retain_graph=True)
                (first**2).mean().backward(retain_graph=k in using)
                if k in using:
                    (second**3).mean().backward()
        same_gradients(ours, plain)
        assert ours.never.weight.grad is None


@pytest.mark.parametrize("schedule", thinned(["none", "overlap"], whole=True))
def test_orders_of_passes(schedule):
    """Backward passes run after all forward passes, one by one or as one; calls without gradients come between."""
    plain, ours, args = odd("zero3", (4,), schedule)
    for together in (False, True):
        found = []
        for module in (plain, ours):
            module.zero_grad()
            losses = []
            for k in range(3):
                with ours.no_sync() if k < 2 else contextlib.nullcontext():
                    losses.append((module(*shifted(args, k))[0] ** 2).mean())
                    with torch.no_grad():
                        found.append(module(*args)[0])
            if together:
                sum(losses).backward()
            else:
                for loss in losses:
                    loss.backward()
        same_gradients(ours, plain)
    torch.testing.assert_close(found[0], found[3], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_frozen_parameters_and_clipping():
    plain, ours, args = odd("zero3", (4,), "overlap")
    for frozen in (False, True):
        norms = []
        for module in (plain, ours):
            module.sometimes.weight.requires_grad_(not frozen)
            module.zero_grad()
            for k in range(3):
                with ours.no_sync() if k < 2 else contextlib.nullcontext():
                    first, second = module(*shifted(args, k))
                    (first.mean() + (second**2).mean()).backward()
            norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.01))
        torch.testing.assert_close(*norms, rtol=1e-9, atol=1e-12)
        same_gradients(ours, plain)


@pytest.mark.slow
def test_what_waits_is_kept_dropped_or_refused():
    """An optimizer's ``zero_grad`` keeps pending gradients, the module's drops them; parameters must not change then."""
    plain, ours, args = odd("zero3", (4,), "overlap")
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ((plain(*args)[0] ** 2).mean() + (plain(*shifted(args, 1))[0] ** 2).mean()).backward()
    with ours.no_sync():
        (ours(*args)[0] ** 2).mean().backward()
    optimizer.zero_grad()
    (ours(*shifted(args, 1))[0] ** 2).mean().backward()
    same_gradients(ours, plain)

    with ours.no_sync():
        ours(*args)[0].sum().backward()
    ours.zero_grad()
    for batch in (args, shifted(args, 1)):
        (ours(*batch)[0] ** 2).mean().backward()
    same_gradients(ours, plain)

    with ours.no_sync():
        ours(*args)[0].sum().backward()
    optimizer.step()
    with pytest.raises(autotp.AutotpError, match=r"embed.weight.*outside no_sync\(\)"):
        ours(*args)
    ours.zero_grad()
    ours(*args)


def collectives(graph):
    """Counts the collectives of a scheduled graph by kind."""
    return Counter(COLLECTIVE_OF[note_of(node).collective.target] for node in graph.nodes if node.target is launch)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", thinned([{"batch": 2}, {}], first=1, whole=True), ids=["chunks", "whole"])
@pytest.mark.parametrize(("strategy", "mesh"), thinned([("data", (4,)), ("zero3", (4,)), ("tesseract-2.5d", (2, 2, 2))], 3))
def test_inner_steps_reduce_no_gradients_of_parameters(strategy, mesh, chunks):
    """Inner steps lack exactly the collectives that reshard parameters' gradients; the last step has each once."""
    model, args = tokens()
    with float64_mode():
        plan = dataclasses.replace(planned(model, args, strategy, mesh), chunks=chunks)
        ours = Simulated(
            model, plan, rewrite(model, plan, args), LocalWorld(mesh), functools.partial(overlap_of, merge=False)
        )
        for context in (contextlib.nullcontext(), ours.no_sync(), contextlib.nullcontext()):
            with context:
                ours(*args).backward()
    ordinary, inner, last = (collectives(each.graphs.backward) for each in ours._compiled.values())
    steps = [Step(*s).kind for s in itertools.chain(*map(backward_of_parameters, ours.rewritten.graph_module.graph.nodes))]
    assert ordinary - inner == Counter(kind for kind in steps if kind in COMMUNICATING) != Counter()
    assert inner - ordinary == Counter()
    assert last == ordinary
    assert strategy not in ("data", "zero3") or set(inner) <= {"all_gather"}


def backward_of_parameters(node):
    """The steps by which a parameter's reshard converts its gradient back; empty for other nodes."""
    if node.target not in (ops.reshard, ops.gather) or not str(node.args[1].target).startswith("p_"):
        return ()
    return node.args[3]


def test_parameters_are_not_frozen_while_their_gradients_wait():
    model, (x,) = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double(), (torch.randn(8, 8, dtype=torch.float64),)
    ours = autotp.simulate(model, planned(model, (x,), "data"), (x,))
    with ours.no_sync():
        ours(x).sum().backward()
    model[0].weight.requires_grad_(False)
    with pytest.raises(
        autotp.AutotpError, match=r"0\.weight is frozen now, while gradients of steps under no_sync\(\) wait"
    ):
        ours(x)
    ours.zero_grad()
    ours(x).sum().backward()
    assert model[0].weight.grad is None and model[1].weight.grad is not None
