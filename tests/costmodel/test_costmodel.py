from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

import costmodel
from costmodel import (
    Device,
    Level,
    Link,
    Topology,
    TopologyError,
    UnitError,
    collectives,
    compute,
    format_quantity,
    memory,
    parse_quantity,
)
from costmodel.errors import AutotpError

DEVICE = Device("d", {"float32": 1e12, "bfloat16": 8e12}, 1e9, 1e11, 1e-6)
BOXES = Topology("boxes", DEVICE, (Level("in", 4, 100.0, 1.0), Level("out", 2, 60.0, 5.0)))
PODS = Topology("pods", DEVICE, (Level("a", 2, 80.0, 1.0), Level("b", 2, 40.0, 2.0), Level("c", 2, 12.0, 3.0)))
GOOD = """
name = "mine"
[device]
name = "x"
memory = "80 GB"
memory_bandwidth = "2 TB/s"
launch = "4 us"
flops = { float32 = "19.5 TFLOP/s" }
[[levels]]
name = "in"
size = 8
bandwidth = "300 GB/s"
latency = "2 us"
[[levels]]
name = "out"
size = 2
bandwidth = "25 Gbit/s"
latency = 1e-5
"""


def write(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


# Units


@pytest.mark.parametrize(
    ("text", "quantity", "value"),
    [
        ("600 GB/s", "bandwidth", 600e9),
        ("25 Gbit/s", "bandwidth", 25e9 / 8),
        ("1GiB/s", "bandwidth", 2.0**30),
        ("3 us", "time", 3e-6),
        ("3 µs", "time", 3e-6),
        ("1.9 us", "time", 1.9e-6),
        ("+.5e1 ms", "time", 5e-3),
        ("80 GB", "memory", 80e9),
        ("80 GiB", "memory", 80 * 2.0**30),
        ("312 TFLOP/s", "rate", 312e12),
        ("1_000", "memory", 1000.0),
        (7, "memory", 7.0),
        ("1e3 B", "memory", 1000.0),
    ],
)
def test_units(text, quantity, value):
    assert parse_quantity(text, quantity) == value


@pytest.mark.parametrize(
    ("text", "quantity", "said"),
    [
        ("25 Gb/s", "bandwidth", "'Gbit/s' or 'GB/s'"),
        ("25 GB", "bandwidth", "is a memory, but a bandwidth is needed"),
        ("25 Gbits/s", "bandwidth", "did you mean 'Gbit/s'"),
        ("-3 us", "time", "not negative"),
        ("fast", "time", "write a number and a unit"),
        ("nan", "time", "write a number"),
        (float("inf"), "memory", "finite"),
        ("1e999 B", "memory", "finite"),
        ("1e99999999999 B", "memory", "finite"),
        (True, "memory", "must be a number"),
        (None, "memory", "must be a number"),
    ],
)
def test_bad_units(text, quantity, said):
    with pytest.raises(UnitError, match=said.replace("(", r"\(")):
        parse_quantity(text, quantity)


@settings(max_examples=200, deadline=None)
@given(
    st.floats(1e-9, 1e17),
    st.sampled_from(["memory", "bandwidth", "time", "rate"]),
    st.sampled_from(["", "s", "us", "GB", "MiB", "kB/s", "Gbit/s", "TFLOP/s"]),
)
def test_units_scale_exactly_or_are_refused(number, quantity, unit):
    kinds = {"s": "time", "us": "time", "GB": "memory", "MiB": "memory", "kB/s": "bandwidth"}
    kinds |= {"Gbit/s": "bandwidth", "TFLOP/s": "rate", "": quantity}
    scale = {
        "": 1,
        "s": 1,
        "us": 1e-6,
        "GB": 1e9,
        "MiB": 2**20,
        "kB/s": 1e3,
        "Gbit/s": 1e9 / 8,
        "TFLOP/s": 1e12,
    }
    if kinds[unit] != quantity:
        with pytest.raises(UnitError):
            parse_quantity(f"{number!r} {unit}", quantity)
    else:
        assert parse_quantity(f"{number!r} {unit}", quantity) == pytest.approx(number * scale[unit], rel=1e-15)


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-12, 1e20), st.sampled_from(["memory", "bandwidth", "time", "rate"]))
def test_shown_quantities_read_back(value, quantity):
    assert parse_quantity(format_quantity(value, quantity, 6), quantity) == pytest.approx(value, rel=1e-5)


def test_shown_quantities():
    assert format_quantity(300e9, "bandwidth") == "300 GB/s"
    assert format_quantity(999.9999e9, "memory") == "1 TB"
    assert format_quantity(0, "time") == "0 s"


# Devices


def test_peak_falls_back():
    assert DEVICE.peak("torch.bfloat16") == 8e12
    assert DEVICE.peak("float64") == 5e11
    assert DEVICE.peak("float16") == DEVICE.peak("int64") == DEVICE.peak("bool") == 1e12
    assert DEVICE.peak("float8_e4m3fn") == 8e12


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"flops": {"float32": 0.0}}, "flops.float32 is 0.0"),
        ({"flops": {"bfloat16": 1.0}}, "'float32' is missing"),
        ({"flops": {"float32": 1.0, "fp16": 1.0}}, "unknown dtype 'fp16'"),
        ({"memory": math.nan}, "memory is nan"),
        ({"launch": -1.0}, "launch is -1.0"),
    ],
)
def test_bad_devices(change, said):
    fields = {"name": "d", "flops": {"float32": 1.0}, "memory": 1.0, "memory_bandwidth": 1.0, "launch": 0.0}
    with pytest.raises(TopologyError, match=said):
        Device(**(fields | change))


# Topologies: reading and writing


@pytest.mark.parametrize("name", Topology.preset_names())
def test_presets(name):
    topology = Topology.load(name)
    assert topology.name == name
    assert topology.links((topology.devices,))[0].size == topology.devices
    assert Topology.from_dict(json.loads(json.dumps(topology.to_dict()))) == topology
    assert pickle.loads(pickle.dumps(topology)) == topology and hash(topology) == hash(Topology.load(name))
    for inner, outer in itertools.pairwise(topology.levels):
        assert outer.bandwidth <= inner.bandwidth * inner.size


def test_a_file_is_read(tmp_path):
    topology = Topology.load(write(tmp_path, GOOD))
    assert topology == Topology.load(str(tmp_path / "mine.toml"))
    assert topology.devices == 16 and topology.levels[1] == Level("out", 2, 25e9 / 8, 1e-5)
    assert topology.device == Device("x", {"float32": 19.5e12}, 80e9, 2e12, 4e-6)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'bandwidth = "300 GB/s"',
            'bandwith = "300 GB/s"',
            r"\[\[levels\]\] number 1: unknown key 'bandwith'; did you mean",
        ),
        ('latency = "2 us"', "", r"\[\[levels\]\] number 1: key 'latency' is missing"),
        ('"25 Gbit/s"', '"25 Gbitt/s"', r"\[\[levels\]\] number 2: bandwidth: .*unknown unit 'Gbitt/s'"),
        ('"25 Gbit/s"', "0", r"\[\[levels\]\] number 2: bandwidth is 0.0; it must be finite and positive"),
        ("size = 2", "size = 2.0", r"\[\[levels\]\] number 2: size is 2.0; it must be a whole number"),
        ("size = 2", "size = 0", r"number 2: size is 0; it must be a whole number of at least 1"),
        ('"80 GB"', "-80", r"\[device\]: memory: .* is -80; .*not negative"),
        ('"80 GB"', '"80 GB/s"', r"\[device\]: memory: .*is a bandwidth, but a memory is needed"),
        ("float32", "float23", r"\[device\]: flops: unknown key 'float23'; did you mean 'float32'"),
        ("[device]", "[devices]", r"unknown key 'devices'; did you mean 'device'"),
        ('name = "out"', 'name = "in"', r"two levels are named 'in'"),
        ('name = "mine"', "name = 3", r"name must be non-empty text"),
        ('name = "mine"', "name = ", r"is not valid TOML"),
        ("[[levels]]", "[[level]]", r"unknown key 'level'"),
        (
            'flops = { float32 = "19.5 TFLOP/s" }',
            'flops = "19.5 TFLOP/s"',
            r"\[device\]: flops must be a table",
        ),
    ],
)
def test_errors_name_file_table_and_key(tmp_path, old, new, said):
    assert old in GOOD
    with pytest.raises(TopologyError, match=rf"mine\.toml: .*{said}|mine\.toml: {said}"):
        Topology.load(write(tmp_path, GOOD.replace(old, new)))


def test_unknown_names(tmp_path):
    with pytest.raises(TopologyError, match="did you mean 'dgx-a100'"):
        Topology.load("dgx-a10")
    with pytest.raises(TopologyError, match=r"absent\.toml: cannot be read"):
        Topology.load(tmp_path / "absent.toml")
    with pytest.raises(TopologyError, match="levels must be one table or more"):
        Topology.from_dict(BOXES.to_dict() | {"levels": []})
    with pytest.raises(TopologyError, match="at least one level"):
        Topology("none", DEVICE, ())


# Links


@pytest.mark.parametrize(
    ("topology", "mesh", "expected"),
    [
        # The outer axis has 4 rings through each box's uplink, the inner one stays in the box.
        (BOXES, (2, 4), [(60 / 4, 5, "out"), (100, 1, "in")]),
        # The outer axis straddles levels: 2 rings per box, each with 60 / 2 outside, against 100 inside.
        (BOXES, (4, 2), [(60 / 2, 5, "in out"), (100, 1, "in")]),
        # One ring over everything: it has the uplink to itself, and 60 < 100.
        (BOXES, (8,), [(60, 5, "in out")]),
        (BOXES, (2, 2, 2), [(60 / 4, 5, "out"), (100, 1, "in"), (100, 1, "in")]),
        (BOXES, (1, 8), [(100, 0, ""), (60, 5, "in out")]),
        (BOXES, (2, 1, 4), [(60 / 4, 5, "out"), (100, 0, ""), (100, 1, "in")]),
        (PODS, (2, 2, 2), [(12 / 4, 3, "c"), (40 / 2, 2, "b"), (80, 1, "a")]),
        (PODS, (4, 2), [(min(40 / 2, 12 / 2), 3, "b c"), (80, 1, "a")]),
        (PODS, (2, 4), [(12 / 4, 3, "c"), (40, 2, "a b")]),
        (PODS, (8,), [(12, 3, "a b c")]),
    ],
)
def test_links(topology, mesh, expected):
    found = topology.links(mesh)
    assert found == tuple(Link(s, b, lat, tuple(lv.split())) for s, (b, lat, lv) in zip(mesh, expected, strict=True))


def test_links_where_nothing_divides():
    # Boxes of 6 under a mesh of 3 x 4: ranks 4..7 lie in both boxes, so the inner axis crosses the outer
    # level.
    odd = Topology("odd", DEVICE, (Level("in", 6, 100.0, 1.0), Level("out", 2, 60.0, 5.0)))
    outer, inner = odd.links((3, 4))
    assert inner == Link(4, 60.0, 5.0, ("in", "out"))
    assert outer == Link(3, 60.0 / 4, 5.0, ("in", "out"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.randoms())
def test_links_stay_within_the_levels(sizes, random):
    levels = tuple(Level(f"l{i}", s, 64.0 / 2**i, 1.0 + i) for i, s in enumerate(sizes))
    topology = Topology("t", DEVICE, levels)
    factors = [p for s in sizes for p in ((2, 2) if s == 4 else (s,))]
    random.shuffle(factors)
    found = topology.links(factors)
    crossed = {name for link in found for name in link.levels}
    assert crossed == {level.name for level in levels if level.size > 1}
    for link in found:
        assert 0 < link.bandwidth <= 64 and (link.latency > 0) == (link.size > 1)


@pytest.mark.parametrize("axes", [(0, 0), (2,), (-1,)])
def test_axes_that_a_mesh_does_not_have(axes):
    with pytest.raises(TopologyError, match="has the axes 0 to 1, each of them once"):
        BOXES.link((2, 4), axes)


@pytest.mark.parametrize("mesh", [(3, 3), (8, 0), (-2, -4), (), (4,)])
def test_meshes_that_do_not_fit(mesh):
    with pytest.raises(TopologyError, match="has 8 .*product is 8"):
        BOXES.links(mesh)


@pytest.mark.parametrize(
    ("ask", "about"),
    [
        (lambda: BOXES.links(None), "the mesh"),
        (lambda: BOXES.links((2.5, 4)), "the mesh"),
        (lambda: BOXES.link((2, 4), 0), "axes"),
        (lambda: BOXES.link((2, 4), (5,)), "axes"),
        (lambda: BOXES.link((2, 4), (0,), ["all_reduce"]), "no collective"),
        (lambda: Topology.local(1), "environ"),
        (lambda: Topology.local({}, None), "driver"),
        (lambda: replace(BOXES, library=3), "library"),
        (lambda: replace(BOXES.device, flops=3), "flops"),
        (lambda: replace(BOXES.device, name=3), "name"),
        (lambda: replace(BOXES.levels[0], matrix=[1, 2]), "matrix"),
        (lambda: replace(BOXES.levels[0], measured={"all_reduce": 3}), "measured"),
        (lambda: replace(BOXES.levels[0], name=3), "name"),
    ],
)
def test_arguments_of_another_kind(ask, about):
    with pytest.raises(AutotpError, match=about):
        ask()


def test_resizing():
    sizes = {8: (4, 2), 4: (4, 1), 3: (3, 1), 1: (1, 1), 40: (4, 10)}
    for devices, expected in sizes.items():
        assert tuple(lv.size for lv in BOXES.resized(devices).levels) == expected
        assert BOXES.resized(devices).devices == devices
    assert tuple(lv.size for lv in PODS.resized(12).levels) == (2, 2, 3)
    assert Topology.flat(4).resized(7).devices == 7


@pytest.mark.parametrize(
    ("devices", "said"),
    [(6, "4 or 8 would fit"), (9, "8 or 12"), (0, "is 0; it must be a whole number of at least 1"), (8.0, "is 8.0")],
)
def test_sizes_that_do_not_fit(devices, said):
    with pytest.raises(TopologyError, match=said):
        BOXES.resized(devices)


def test_flat():
    topology = Topology.flat(4, bandwidth="10 Gbit/s", latency=1e-5, device=DEVICE)
    assert topology.links((2, 2)) == (Link(2, 1.25e9, 1e-5, ("flat",)),) * 2
    assert Topology.flat(4, device="cpu").device == Topology.load("cpu").device
    with pytest.raises(TopologyError, match="bandwidth is 0"):
        Topology.flat(4, bandwidth=0)


def gpu_files(tmp_path, count, model):
    for index in range(count):
        (tmp_path / f"gpu{index}").mkdir()
        (tmp_path / f"gpu{index}" / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\n")
    return tmp_path


def test_local(tmp_path):
    assert Topology.local({}).devices == 1
    one = Topology.local({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, tmp_path)
    threads = min(os.cpu_count() / 4, 1)
    assert [lv.size for lv in one.levels] == [4]
    assert one.device.flops["float32"] == pytest.approx(threads * Topology.load("cpu").device.flops["float32"])
    two = Topology.local({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, tmp_path)
    assert [lv.size for lv in two.levels] == [4, 2] and two.levels[1].name == "ethernet"
    half = Topology.local({"WORLD_SIZE": "8"}, tmp_path).device
    assert half.memory == pytest.approx(Topology.local({"WORLD_SIZE": "4"}, tmp_path).device.memory / 2)
    for environ in (
        {"WORLD_SIZE": "many"},
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"},
    ):
        with pytest.raises(TopologyError, match="environment: .*WORLD_SIZE"):
            Topology.local(environ, tmp_path)


def test_local_knows_gpus(tmp_path):
    driver = gpu_files(tmp_path, 4, "NVIDIA A100-SXM4-80GB")
    a100 = Topology.load("dgx-a100")
    four = Topology.local({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, driver)
    assert four.device == a100.device and [lv.size for lv in four.levels] == [4, 2]
    assert four.levels[1].bandwidth == a100.levels[1].bandwidth
    hidden = {"WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert Topology.local(hidden, driver).levels[0].name == "loopback"
    assert Topology.local({"CUDA_VISIBLE_DEVICES": ""}, driver).levels[0].name == "loopback"


# Collectives


CLOSED = {
    "all_reduce": lambda n, v, a, b: min(
        2 * (n - 1) / n * v / b + 2 * (n - 1) * a, 2 * math.ceil(math.log2(n)) * a + 2 * v / b
    ),
    "all_gather": lambda n, v, a, b: (n - 1) / n * v / b + (n - 1) * a,
    "reduce_scatter": lambda n, v, a, b: (n - 1) / n * v / b + (n - 1) * a,
    "all_to_all": lambda n, v, a, b: (n - 1) / n * v / b + (n - 1) * a,
    "broadcast": lambda n, v, a, b: min(
        math.ceil(math.log2(n)) * (a + v / b), (math.ceil(math.log2(n)) + n - 1) * a + 2 * (n - 1) / n * v / b
    ),
}
KINDS = sorted(collectives.ALGORITHMS)
ranks = st.integers(1, 4096)
volumes = st.floats(0, 1e12)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KINDS), ranks, volumes, st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_collectives_follow_their_closed_forms(kind, n, v, a, b):
    link = Link(n, b, a)
    assert collectives.of_link(kind, v, link) == pytest.approx(CLOSED[kind](n, v, a, b), rel=1e-12, abs=1e-18)
    factor = 2 if kind == "all_reduce" else 1
    assert collectives.bytes_moved(kind, n, v) == pytest.approx(factor * (n - 1) / n * v, rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KINDS), ranks, volumes, st.integers(0, 64), st.floats(0, 1e9))
def test_collectives_grow_with_ranks_and_bytes(kind, n, v, more_ranks, more_bytes):
    base = collectives.of_link(kind, v, Link(n, 1e9, 1e-6))
    slack = 1e-12 * base
    assert collectives.of_link(kind, v, Link(n + more_ranks, 1e9, 1e-6)) >= base - slack
    assert collectives.of_link(kind, v + more_bytes, Link(n, 1e9, 1e-6)) >= base - slack


@pytest.mark.parametrize("kind", KINDS)
def test_collective_expressions_equal_what_is_compiled(kind):
    for ranks, volume, rate in itertools.product((2, 3, 8, 2048), (1, 10**9), (10**9, 10**11)):
        link = Link(ranks, float(rate), 1e-6)
        values = map(sympy.Rational, (volume, *collectives.figures(link)))
        exact = collectives.expression(kind).subs(dict(zip(collectives.OF_LINK, values, strict=True)), simultaneous=True)
        assert collectives.of_link(kind, float(volume), link) == pytest.approx(float(exact), rel=1e-12)
    moved = collectives.TRAFFIC[kind].subs({collectives.n: 8, collectives.V: 1000})
    assert collectives.bytes_moved(kind, 8, 1000) == float(moved)


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_in_bulk(kind):
    v = np.array([[1, 2**40, 10**6], [0, 10**9, 7]])
    for link in (Link(n, 1e9, 1e-6) for n in range(1, 9)):
        bulk = collectives.of_link(kind, v, link)
        assert isinstance(bulk, np.ndarray) and bulk.shape == v.shape
        np.testing.assert_allclose(bulk, [[collectives.of_link(kind, int(b), link) for b in row] for row in v], rtol=1e-15)
        assert bulk.any() == (link.size > 1)
    assert isinstance(collectives.of_link(kind, 4, Link(4, 1.0, 1.0)), float)


def test_tree_depth_is_exact_at_powers_of_two():
    binomial = costmodel.compile_formula(collectives.OF_LINK, collectives.ALGORITHMS["broadcast"]["binomial"])
    for power in range(1, 40):
        # With few bytes and many ranks, the tree is fastest, with 2 log2(n) messages.
        assert collectives.of_link("all_reduce", 0.0, Link(2**power, 1.0, 1.0)) == 2 * min(power, 2.0**power - 1)
        assert binomial(1.0, *collectives.figures(Link(2**power, 1.0, 0.0))) == power


def test_unknown_collective():
    with pytest.raises(ValueError, match="did you mean 'all_reduce'"):
        collectives.of_link("allreduce", 1, Link(2, 1.0, 1.0))


# Compute and memory


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1e18), st.floats(0, 1e15), st.sampled_from(["float32", "bfloat16", "int64"]))
def test_roofline(flop, moved, dtype):
    expected = max(flop / DEVICE.peak(dtype), moved / 1e11) + 1e-6
    assert compute.seconds(flop, moved, DEVICE, dtype) == pytest.approx(expected, rel=1e-14)
    values = {
        compute.F: flop,
        compute.Q: moved,
        compute.P: DEVICE.peak(dtype),
        compute.B: 1e11,
        compute.L: 1e-6,
    }
    assert float(compute.ROOFLINE.subs(values)) == pytest.approx(expected, rel=1e-12)


def test_roofline_in_bulk():
    bulk = compute.seconds(0, np.array([[1e9], [2e9]]) / np.array([1, 2]), DEVICE, "float32")
    np.testing.assert_allclose(bulk, np.array([[1e-2, 5e-3], [2e-2, 1e-2]]) + 1e-6)


@pytest.mark.parametrize(
    ("itemsize", "optimizer", "train", "per_element"),
    [
        (4, "adamw", True, 16),
        (8, "adamw", True, 32),
        (2, "adamw", True, 8),
        (2, "adamw-master", True, 16),
        (4, "adamw-master", True, 16),
        (8, "adamw-master", True, 32),
        (4, "sgd", True, 8),
        (4, "sgd-momentum", True, 12),
        (2, "adamw-master", False, 2),
    ],
)
def test_state_bytes(itemsize, optimizer, train, per_element):
    assert memory.state_bytes(10, itemsize, optimizer, train) == 10 * per_element
    exact = memory.expression(optimizer, train=train).subs({memory.E: 10, memory.e: itemsize})
    assert exact == 10 * per_element
    bulk = memory.state_bytes(np.array([0, 10]), np.full((3, 1), itemsize), optimizer, train)
    np.testing.assert_array_equal(bulk, np.tile([0.0, 10.0 * per_element], (3, 1)))


@pytest.mark.parametrize(
    ("itemsize", "optimizer", "per_element"),
    [(4, "adamw", 28), (2, "adamw", 14), (4, "adamw-master", 28), (2, "adamw-master", 30), (4, "sgd", 12)],
)
def test_update_bytes(itemsize, optimizer, per_element):
    assert memory.update_bytes(10, itemsize, optimizer) == 10 * per_element


def test_unknown_optimizer():
    with pytest.raises(ValueError, match="did you mean 'adamw'"):
        memory.state_bytes(1, 4, "adam")


def test_a_stray_symbol_is_refused():
    with pytest.raises(ValueError, match="symbols"):
        costmodel.compile_formula([sympy.Symbol("a")], sympy.Symbol("a") + sympy.Symbol("b"))


def test_no_torch_is_imported():
    code = "import sys, costmodel; costmodel.Topology.local({}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_optimizers_step_reads_and_writes_each_of_its_tensors():
    # AdamW: the gradient is read; the parameter and two tensors of state are read and written.
    assert memory.update_bytes(10, 4, "adamw") == 10 * 4 * 7
    assert memory.update_bytes(10, 4, "sgd-momentum") == 10 * 4 * 5
    assert memory.update_bytes(10, 8, "sgd") == 10 * 8 * 3
    with pytest.raises(ValueError, match="no optimizer is called 'adam'"):
        memory.update_expression("adam")
