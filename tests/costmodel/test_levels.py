"""Hierarchical topologies: shared and parallel links, link matrices, and the algorithms that libraries use on them."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel import Device, Level, Link, Measured, Topology, TopologyError, collectives
from costmodel.machine.matrix import ring_bandwidth

DEVICE = Device("d", {"float32": 1e12}, 1e9, 1e11, 1e-6)
#: 4 boxes of 8 devices; each box has 8 adapters of 10.
RAILS = Topology("rails", DEVICE, (Level("in", 8, 100.0, 1.0), Level("out", 4, 80.0, 5.0, links=8)))


@pytest.mark.parametrize(
    ("mesh", "axis", "bandwidth"),
    [
        # 8 rings at once, each with one device per box: one rail each.
        ((4, 8), 0, 10.0),
        # One ring over all devices: it has all the rails, 80 in total.
        ((32,), 0, 80.0),
        # 4 rings at once, each with 2 devices per box: two rails each.
        ((8, 4), 0, 20.0),
        ((4, 8), 1, 100.0),
    ],
)
def test_a_ring_uses_as_many_adapters_as_it_has_devices_in_a_box(mesh, axis, bandwidth):
    assert RAILS.link(mesh, (axis,)).bandwidth == bandwidth


def test_one_device_alone_in_its_box_uses_one_adapter():
    # No other ring shares the uplink, but a single device has only one adapter.
    alone = Topology("alone", DEVICE, (Level("in", 1, 100.0, 1.0), Level("out", 4, 80.0, 5.0, links=8)))
    assert alone.link((4,), (0,)).bandwidth == 10.0
    faster = Topology("x", DEVICE, (Level("in", 1, 100.0, 1.0), Level("out", 4, 80.0, 5.0, links=8, point_to_point=30.0)))
    assert faster.link((4,), (0,)).bandwidth == 30.0


def test_a_group_uses_the_links_that_join_its_devices():
    box = Topology("mesh", DEVICE, (Level("in", 8, 336.0, 1.0, links=7, direct=True), Level("out", 2, 80.0, 5.0, links=8)))
    assert [box.link(mesh, (1,)).bandwidth for mesh in ((2, 8), (4, 4), (8, 2))] == [336.0, 3 * 48.0, 48.0]
    assert box.resized(4).link((4,), (0,)).bandwidth == 3 * 48.0
    # Both devices of a pair send to each other at once.
    assert box.link((8, 2), (1,)).exchange_rate == pytest.approx(1 / 2 / 48)


def test_a_torus_shares_nothing():
    torus = Topology("torus", DEVICE, tuple(Level(f"d{i}", 4, 50.0, 1.0, shared=False) for i in range(3)))
    assert [link.bandwidth for link in torus.links((4, 4, 4))] == [50.0] * 3
    shared = Topology("tree", DEVICE, tuple(Level(f"d{i}", 4, 50.0, 1.0) for i in range(3)))
    assert [link.bandwidth for link in shared.links((4, 4, 4))] == [50.0 / 16, 50.0 / 4, 50.0]


def test_several_axes_communicate_as_one_group():
    boxes = Topology("boxes", DEVICE, (Level("in", 4, 100.0, 1.0), Level("out", 2, 60.0, 5.0)))
    both = boxes.link((2, 2, 2), (0, 2))
    # {0, 1, 4, 5} and {2, 3, 6, 7}: two rings share each uplink of 60.
    assert (both.size, both.bandwidth, both.levels) == (4, 30.0, ("in", "out"))
    assert [(s.ways, s.members, s.steps) for s in both.stages] == [(2, 1, 2), (2, 2, 1)]
    assert both.ring_latency == 2 * 1.0 + 1 * 5.0
    assert both.exchange_rate == pytest.approx(max(1 * 3 / 4 / 100, 2 * 2 / 4 / 30))


SQUARE = ((0.0, 10.0, 0.0, 40.0), (10.0, 0.0, 40.0, 0.0), (0.0, 40.0, 0.0, 10.0), (40.0, 0.0, 10.0, 0.0))


def test_a_matrix_gives_each_pair_its_link():
    box = Topology("box", DEVICE, (Level("in", 4, 1.0, 1.0, matrix=SQUARE),))
    assert box.link((4,), (0,)).bandwidth == 10.0  # 0 - 1 - 2 - 3 - 0
    inner, outer = box.link((2, 2), (1,)), box.link((2, 2), (0,))
    assert inner.bandwidth == 10.0  # 0 - 1 and 2 - 3
    assert outer.bandwidth == 10.0  # 0 - 2 has no link: it goes through 1 or 3
    data = Topology.from_dict(json.loads(json.dumps(box.to_dict())))
    assert data == box and hash(data) == hash(box)
    assert box.resized(2).levels[0].matrix == ((0.0, 10.0), (10.0, 0.0))
    with pytest.raises(TopologyError, match="its matrix joins 4 groups"):
        box.resized(8)


@settings(max_examples=50, deadline=None)
@given(st.integers(3, 6), st.randoms(use_true_random=False))
def test_the_best_ring_is_the_best_of_all_orders(count, random):
    matrix = [[0.0] * count for _ in range(count)]
    for i, j in itertools.combinations(range(count), 2):
        matrix[i][j] = matrix[j][i] = float(random.randint(1, 20))
    reach = [list(row) for row in matrix]
    for k, i, j in itertools.product(range(count), repeat=3):
        reach[i][j] = max(reach[i][j], min(reach[i][k], reach[k][j]))
    best = 0.0
    for order in itertools.permutations(range(1, count)):
        ring = (0, *order, 0)
        best = max(best, min(reach[a][b] for a, b in itertools.pairwise(ring)))
    assert ring_bandwidth(tuple(map(tuple, matrix)), tuple(range(count))) == best


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"matrix": ((0.0, 1.0),)}, "size 4 needs 4 rows of 4"),
        ({"matrix": tuple(tuple(float(i + 2 * j) for j in range(4)) for i in range(4))}, "bandwidth in both directions"),
        ({"matrix": ((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0))}, "no links connect 2 to 0"),
        ({"links": 0}, "links is 0"),
        ({"point_to_point": -1.0}, "point_to_point is -1.0"),
        ({"measured": {"gather": Measured(1.0, 1.0)}}, "no collective is called 'gather'"),
    ],
)
def test_bad_levels(change, said):
    with pytest.raises(TopologyError, match=said):
        Level("in", 4, 1.0, 1.0, **change)


def test_levels_are_read_with_all_their_keys(tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text("""
name = "odd"
library = "gloo"
[device]
name = "x"
memory = "80 GB"
memory_bandwidth = "2 TB/s"
launch = "4 us"
flops = { float32 = "19.5 TFLOP/s" }
half_size = 200
slowdown = { norm = 1.5 }
idle_power = "60 W"
busy_power = "400 W"
[[levels]]
name = "in"
size = 2
latency = "2 us"
matrix = [[0, "50 GB/s"], ["50 GB/s", 0]]
[[levels]]
name = "out"
size = 2
bandwidth = "40 GB/s"
latency = "5 us"
links = 2
point_to_point = "15 GB/s"
shared = false
[levels.measured.all_reduce]
bandwidth = "20 GB/s"
latency = "9 us"
overhead = "1 us"
""")
    topology = Topology.load(path)
    assert Topology.from_dict(json.loads(json.dumps(topology.to_dict()))) == topology
    assert topology.levels[1].measured["all_reduce"] == Measured(20e9, 9e-6, 1e-6)
    assert topology.link((2, 2), (0,), "all_reduce").bandwidth == 20e9
    assert topology.link((2, 2), (0,), "all_gather").bandwidth == 15e9  # one device in the group below: one link
    assert topology.device.slowdown == {"norm": 1.5} and topology.device.half_size == 200
    for old, new, said in (
        ('library = "gloo"', 'library = "glo"', "library 'glo' is not known.*'gloo'"),
        ("shared = false", "shared = 0", "shared must be true or false"),
        ("norm = 1.5", "nrom = 1.5", "unknown key 'nrom'"),
        ('idle_power = "60 W"', 'idle_power = "600 W"', "idle_power 600 W is more than busy_power 400 W"),
        ('[0, "50 GB/s"]', '[0, "50 GB"]', "matrix: .*is a memory"),
    ):
        (tmp_path / "bad.toml").write_text(path.read_text().replace(old, new))
        with pytest.raises(TopologyError, match=said):
            Topology.load(tmp_path / "bad.toml")


def test_libraries_differ_in_latency():
    """Latency grows with the logarithm of the number of ranks for trees, and with that number for rings."""
    few, many = Topology.flat(64, device=DEVICE), Topology.flat(4096, device=DEVICE)

    def seconds(topology, kind, library):
        return collectives.of_link(kind, 1.0, topology.link((topology.devices,), (0,), kind), library)

    assert seconds(many, "all_gather", "nccl") / seconds(few, "all_gather", "nccl") == pytest.approx(4095 / 63, rel=1e-3)
    assert seconds(many, "all_reduce", "nccl") / seconds(few, "all_reduce", "nccl") == pytest.approx(2, rel=1e-3)
    assert seconds(many, "all_reduce", "gloo") / seconds(few, "all_reduce", "gloo") == pytest.approx(4095 / 63, rel=1e-3)
    assert seconds(many, "all_gather", "mpi") / seconds(few, "all_gather", "mpi") == pytest.approx(2, rel=1e-3)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(collectives.ALGORITHMS)), st.sampled_from(sorted(collectives.LIBRARIES)), st.integers(2, 64))
def test_on_one_level_links_and_uniform_formulas_agree(kind, library, ranks):
    link = Topology.flat(ranks, device=DEVICE).link((ranks,), (0,), kind)
    uniform = {
        "ring": (ranks - 1) / ranks * 1e6 / link.bandwidth + (ranks - 1) * link.latency,
        "doubling": (ranks - 1) / ranks * 1e6 / link.bandwidth + math.ceil(math.log2(ranks)) * link.latency,
        "tree": 1e6 / link.bandwidth + math.ceil(math.log2(ranks)) * link.latency,
    }
    got = collectives.of_link(kind, np.array([1e6]), link, library)[0]
    if kind == "all_reduce":
        candidates = {"nccl": ("ring", "tree"), "gloo": ("ring",), "mpi": ("ring", "doubling")}[library]
        assert got == pytest.approx(2 * min(uniform[name] for name in candidates))
    elif kind in ("all_gather", "reduce_scatter"):
        assert got == pytest.approx(uniform["doubling"] if library == "mpi" else uniform["ring"])
    elif kind == "all_to_all":
        assert got == pytest.approx(uniform["ring"])


def test_overhead_is_paid_once_a_collective():
    level = Level("in", 4, 1e9, 0.0, measured={"all_reduce": Measured(1e9, 0.0, 3.0)})
    topology = Topology("t", DEVICE, (level,))
    assert collectives.of_link("all_reduce", 0.0, topology.link((4,), (0,), "all_reduce")) == 3.0
    assert collectives.of_link("all_gather", 0.0, topology.link((4,), (0,), "all_gather")) == 0.0


def test_a_link_of_one_level_is_what_it_was():
    link = Link(8, 100.0, 2.0)
    assert (link.ring_latency, link.tree_latency, link.staged_latency, link.exchange_latency) == (14.0, 6.0, 14.0, 14.0)
    assert link.staged_rate == link.exchange_rate == 7 / 8 / 100


def test_what_is_no_name_is_refused():
    topology = Topology.flat(4)
    for wrong in ([], np.array([2, 2]), ["gloo"]):
        with pytest.raises(TopologyError, match="library"):
            replace(topology, library=wrong)
        with pytest.raises(TopologyError, match="no collective is called"):
            topology.link((4,), (0,), wrong)
    with pytest.raises(TopologyError, match="idle_power"):
        replace(topology.device, idle_power=Fraction(10**9), busy_power=Fraction(1, 2))
