"""All-reduces in stages, level by level: where they occur, that their numbers are correct, and their price."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapping import random_durations, same, tokens, traced
from torch import nn

import autotp
from autotp.analysis.collective import explain_collective
from autotp.costs.prices import Prices
from autotp.runtime.compiled import Overlap
from autotp.runtime.durations import overlap_of
from autotp.runtime.rewrite import rewrite
from autotp.runtime.simulate import Simulated
from costmodel import Level, Topology
from passes.overlap.primitives import all_reduce, axes_of
from passes.overlap.stage import stage, stages
from passes.world.world import LocalWorld

DEVICE = Topology.load("cpu").device


def levels(sizes, slower=100.0):
    """A topology in which each level's links are ``slower`` times slower than those of the level inside it."""
    made = (Level(f"level {i}", size, 1e9 / slower**i, 1e-6) for i, size in enumerate(reversed(sizes)))
    return Topology("levels", DEVICE, tuple(made))


def planned(model, args, mesh, slower=100.0):
    return autotp.plan(model, levels(mesh, slower), args, strategy="data", mesh=mesh, panels=1, chunks={})


@pytest.mark.exact
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    mesh=st.sampled_from([(2, 2), (2, 4), (4, 2), (2, 2, 2)]),
    seed=st.integers(0, 2**30),
    bytes_=st.sampled_from([None, 300.0, 1e9]),
)
def test_any_stages_give_the_same_numbers(mesh, seed, bytes_):
    """Some widths are not divisible by the number of devices, so that messages are padded with zeros."""
    model, args = tokens()
    plan = planned(model, args, mesh)
    made, merged = rewrite(model, plan, args), None if bytes_ is None else lambda *_: bytes_
    how = Overlap(random_durations(seed), merged, faster=lambda axes, volume: (seed >> int(volume) % 29) % 2 == 0)
    same(model, Simulated(model, plan, made, LocalWorld(mesh), lambda _: how), args)


def test_a_number_of_elements_that_the_devices_do_not_divide():
    torch.manual_seed(0)
    model, args = nn.Linear(3, 3).double(), (torch.randn(12, 3, dtype=torch.float64),)
    plan = planned(model, args, (2, 2))
    made = rewrite(model, plan, args)
    ours = Simulated(model, plan, made, LocalWorld((2, 2)), lambda _: Overlap(random_durations(0), faster=lambda *_: True))
    ours(*args).square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(*args).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_devices_with_unequal_parts_have_the_same_nodes():
    """One device has four of seven columns and the other three, which two devices of the inner axes do not divide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 10)).double()
    args = (torch.randn(8, 10, dtype=torch.float64),)
    mesh = (2, 2, 2)
    plan = autotp.plan(model, levels(mesh), args, strategy="megatron-1d", mesh=mesh, panels=1, chunks={})
    how = Overlap(random_durations(0), faster=lambda *_: True)
    ours = Simulated(model, plan, rewrite(model, plan, args), LocalWorld(mesh), lambda _: how)
    assert not ours.rewritten.even
    ours(*args).square().sum().backward()
    graphs = next(iter(ours._compiled.values())).graphs
    assert any(node.target is torch.ops.aten.constant_pad_nd.default for node in graphs.backward.nodes)
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(*args).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_what_crosses_the_slow_links_is_what_one_device_of_a_node_has():
    model, args = tokens()
    found = traced(model, args, planned(model, args, (2, 4)))
    graph = found.cut.backward
    before = {n.name: n.meta["val"].numel() for n in graph.nodes if n.target is all_reduce}
    chosen = stages(graph, (2, 4), lambda axes, volume: True)
    assert len(chosen) == len([n for n in graph.nodes if n.target is all_reduce and len(n.args[1]) == 2]) > 5
    stage(graph, (2, 4), chosen)
    graph.lint()
    after = [n for n in graph.nodes if n.target is all_reduce]
    assert {axes_of(n.target, n.args) for n in after} == {(0,)}
    assert sum(n.meta["val"].numel() for n in after) == sum(math.ceil(count / 4) for count in before.values())


@pytest.mark.parametrize(("slower", "staged"), [(100.0, True), (1.0, False)])
def test_the_planner_counts_on_stages_where_links_differ(slower, staged):
    topology = levels((2, 2), slower)
    waiting, together = Prices(topology, (2, 2)), Prices(topology, (2, 2), together=1e9)
    volumes = np.array([1e3, 1e6, 1e8])
    flat = waiting.spent("all_reduce", (0, 1), volumes)[0]
    inside = waiting.spent("reduce_scatter", (1,), volumes)[0] + waiting.spent("all_gather", (1,), volumes)[0]
    least = inside + waiting.spent("all_reduce", (0,), volumes / 2)[0]
    counted = together.spent("all_reduce", (0, 1), volumes)[0]
    assert np.allclose(counted[1:], (least if staged else flat)[1:])
    assert (counted <= flat).all() and waiting.faster_staged((0, 1), 1e8) == staged
    assert (flat[-1] / least[-1] > 1.4) == staged


def test_a_plan_is_run_in_the_stages_that_it_was_priced_with():
    model, args = tokens()
    for slower in (100.0, 1.0):
        plan = planned(model, args, (2, 2), slower)
        chosen, staged = overlap_of(plan, merge=False).decided(traced(model, args, plan))
        assert chosen == ((), ()) and bool(staged[1]) == (slower > 1)


def test_explaining_a_collective_names_what_planning_takes():
    seen = set()
    for slower in (1.0, 1.5, 2.0, 3.0, 100.0):
        machine = levels((2, 2), slower)
        found = explain_collective("all_reduce", machine, (2, 2), (0, 1), 1e8)
        taken = float(Prices(machine, (2, 2), together=1e9).spent("all_reduce", (0, 1), np.array([1e8]))[0, 0])
        assert math.isclose(found["seconds"], taken, rel_tol=1e-9), slower
        seen.add(found["chosen"] == "in stages")
    assert seen == {True, False}
