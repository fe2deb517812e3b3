"""The device time and the time on each network level that communication occupies concurrently."""

import dataclasses

import numpy as np
import pytest
import torch
from overlapping import tokens, traced
from torch import nn

import autotp
from autotp.analysis.explain import priced_plan
from autotp.costs.prices import Prices
from costmodel import Level, Topology
from costmodel.machine.links import Measured
from costmodel.overlap import copied
from passes.capture import capture
from passes.overlap.bucket import merge
from passes.overlap.primitives import all_gather, reduce_scatter

DEVICE = dataclasses.replace(Topology.load("cpu").device, contention=0.5)
RATE, LATENCY = 1e9, 1e-3
COPYING = (torch.ops.aten.clone.default, torch.ops.aten.cat.default, torch.ops.aten.stack.default)


def two_levels(slower=10.0, within=1.0, between=0.2):
    """Two nodes of two devices, with the contention of each level."""
    inner = Level("node", 2, RATE, LATENCY, contention=within)
    return Topology("nodes", DEVICE, (inner, Level("network", 2, RATE / slower, LATENCY, contention=between)))


def test_a_ring_takes_of_each_level_what_its_hops_take():
    machine = two_levels(slower=4.0)
    assert machine.link((2, 2), (1,)).contention == pytest.approx(1.0)
    assert machine.link((2, 2), (0,)).contention == pytest.approx(0.2)
    # two of four hops stay within nodes, where the bytes take a quarter of the ring's time
    assert machine.link((4,), (0,)).contention == pytest.approx(0.5 * 1.0 * 0.25 + 0.5 * 0.2)


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_bytes_of_a_collective_take_device_time_and_latency_does_if_cpus_drive_it(library):
    flat = Prices(Topology("flat", DEVICE, (Level("all", 4, RATE, LATENCY),), library), (4,))
    volumes = np.array([1.0, 1e6, 1e9])
    seconds, taken, occupied = flat.spent("all_gather", (0,), volumes, parameter=True)
    latency = flat.spent("all_gather", (0,), np.ones(1))[0, 0]
    assert np.allclose(occupied, seconds) and taken[0] == 0
    assert np.allclose(taken, 0.5 * (seconds - latency)) and latency >= 3 * LATENCY
    many = flat.spent("all_gather", (0,), volumes)[1]
    assert np.allclose(many, taken + (latency if library == "gloo" else 0.0)), "of activations' messages"


def test_stages_occupy_one_level_after_the_other():
    prices, volumes = Prices(two_levels(), (2, 2), together=1e9), np.array([1e8])
    seconds, taken, node, network = prices.spent("all_reduce", (0, 1), volumes)[:, 0]
    within = prices.spent("reduce_scatter", (1,), volumes)[0] + prices.spent("all_gather", (1,), volumes)[0]
    between = prices.spent("all_reduce", (0,), volumes / 2)[0]
    assert (node, network) == (pytest.approx(within[0]), pytest.approx(between[0]))
    assert seconds == pytest.approx(node + network)
    least = prices.latency("reduce_scatter", (1,)) + prices.latency("all_gather", (1,)), prices.latency("all_reduce", (0,))
    assert taken == pytest.approx(1.0 * (node - least[0]) + 0.2 * (network - least[1]), rel=1e-6)


def test_each_collective_occupies_levels_by_what_it_reaches_there():
    """All-gathers are limited by the network between nodes, all-reduces by the links within nodes."""
    gathers, sums = Measured(2e9, 0.0), Measured(0.4e9, 0.0)
    between = {"all_gather": Measured(0.5e9, 0.0), "all_reduce": Measured(0.5e9, 0.0)}
    inner = Level("node", 2, 2e9, 0.0, measured={"all_gather": gathers, "all_reduce": sums}, contention=1.0)
    outer = Level("network", 2, 0.5e9, 0.0, measured=between, contention=0.0, shared=False)
    prices = Prices(Topology("nodes", DEVICE, (inner, outer)), (4,))
    for kind, node, network in (("all_gather", 0.25, 1.0), ("all_reduce", 1.0, 0.8)):
        seconds, taken, *busy = prices.spent(kind, (0,), np.array([1e8]))[:, 0]
        assert busy == pytest.approx([node * seconds, network * seconds])
        assert taken == pytest.approx(0.5 * node * seconds, rel=1e-6), "two of four hops stay within nodes"


def test_levels_work_at_the_same_time():
    """A step with staged collectives takes less than both levels one after the other, and at least as long as either."""
    model, args = tokens()
    machine = two_levels(slower=4.0, within=0.0, between=0.0)
    fast = dataclasses.replace(
        machine, device=dataclasses.replace(DEVICE, contention=0.0, memory_bandwidth=1e15, launch=0.0)
    )
    plan = autotp.plan(model, fast, args, strategy="data", mesh=(2, 2), panels=1, chunks={})
    sums = priced_plan(capture(model, args), plan).sums
    node, network = sums.backward.levels
    assert min(node, network) > 10 * sums.compute, "the network is what limits"
    assert max(node, network) <= max(sums.sides[1]) < 0.9 * (node + network)


def test_what_travels_together_is_copied_and_what_travels_alone_is_not():
    machine = two_levels()
    alone, together = Prices(machine, (2, 2)), Prices(machine, (2, 2), together=1e12)
    small, large = np.array([1e5]), np.array([1e11])
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        merged, whole = (together.spent(kind, (1,), v, True)[:, 0] for v in (small, large))
        first, second = (alone.spent(kind, (1,), v, True)[:, 0] for v in (small, large))
        copying = 2 * copied(kind, 2, 1e5) / DEVICE.memory_bandwidth
        assert merged[1] - first[1] == pytest.approx(copying) and copying > 0, "which takes device time"
        assert merged[2] < first[2], "and the network has fewer messages"
        assert np.allclose(whole, second)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_gathered_weight_is_copied_once_at_most(dim):
    """Gathered shards of rows form the weight without a copy; only out of a merged message they have to be copied."""
    model, args = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), (torch.randn(4, 8),)
    machine = Topology("flat", DEVICE, (Level("all", 2, RATE, LATENCY),))
    rest = [f"{i}.weight=Shard({dim})@x" for i in range(2)]
    plan = autotp.plan(model, machine, args, strategy="zero3", mesh=(2,), panels=1, chunks={}, constraints=rest)
    graph = traced(model, args, plan).cut.forward
    gathers = tuple(i for i, n in enumerate(graph.nodes) if n.target is all_gather)
    assert len(gathers) == 3, "of the weights, and of the output"
    assert sum(n.target in COPYING for n in graph.nodes) == (0 if dim == 0 else 2)
    merge(graph, (gathers[:2],))
    assert sum(n.target is all_gather for n in graph.nodes) == 2
    assert sum(n.target in COPYING for n in graph.nodes) == 1 + 2, "into the message, and each weight out of it"


def test_gradients_of_rows_are_scattered_without_a_copy():
    model, args = tokens()
    machine = Topology("flat", DEVICE, (Level("all", 2, RATE, LATENCY),))
    plan = autotp.plan(model, machine, args, strategy="zero3", mesh=(2,), panels=1, chunks={})
    graph = traced(model, args, plan).cut.backward
    sent = [n.args[0] for n in graph.nodes if n.target is reduce_scatter]
    rows = [n for n in sent if n.target is not torch.ops.aten.stack.default]
    assert len(rows) > 5
    assert all(n.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default) for n in rows)
