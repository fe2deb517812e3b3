"""Fits to synthetic measurements, and topologies written as TOML."""

import dataclasses
import math
import os

import numpy as np
import pytest

from costmodel import COLLECTIVES, Device, Level, Link, Measured, Topology, collectives
from costmodel.fit import fit_link, fit_parts, fit_products, robust, split_copying
from costmodel.text.files import write_atomically
from costmodel.toml_out import topology_toml

VOLUMES = [1024.0 * 4**k for k in range(8)]
DIMS = [(m, k, n) for m in (32, 128, 512, 1024) for k in (32, 256, 1024) for n in (64, 512)]


def times(kind, ranks, latency, bandwidth, library="gloo"):
    link = Link(ranks, bandwidth, latency)
    return np.array([collectives.of_link(kind, volume, link, library) for volume in VOLUMES])


def test_robust_median_drops_and_counts_outliers():
    noise = np.random.default_rng(0).normal(1.0, 0.02, 20)
    sample = robust([*noise, 9.0, 30.0])
    assert sample.seconds == pytest.approx(1.0, rel=0.02)
    assert (sample.outliers, sample.repetitions) == (2, 22)
    assert 0.005 < sample.spread < 0.04
    assert robust([2.0] * 5 + [2.001]) == robust([2.0] * 5 + [2.001])
    assert robust([2.0] * 5 + [2.001]).outliers == 0
    with pytest.raises(ValueError, match="no durations"):
        robust([])


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("library", ["gloo", "nccl"])
def test_latency_and_bandwidth_are_recovered(kind, ranks, library):
    exact = fit_link(kind, ranks, VOLUMES, times(kind, ranks, 40e-6, 3e9, library), library)
    assert exact.latency == pytest.approx(40e-6, rel=1e-6)
    assert exact.bandwidth == pytest.approx(3e9, rel=1e-6)
    assert exact.largest_error < 1e-6
    random = np.random.default_rng(1)
    # Repetitions with noise and occasional stalls; their median is fitted.
    measured = [
        robust(np.append(t * random.lognormal(0, 0.05, 21), [20 * t, 50 * t])).seconds
        for t in times(kind, ranks, 40e-6, 3e9, library)
    ]
    noisy = fit_link(kind, ranks, VOLUMES, measured, library)
    assert noisy.latency == pytest.approx(40e-6, rel=0.05)
    assert noisy.bandwidth == pytest.approx(3e9, rel=0.05)
    assert noisy.median_error <= noisy.largest_error < 0.1
    assert noisy == fit_link(kind, ranks, VOLUMES[::-1], measured[::-1], library)


def test_fits_are_never_negative_nor_infinite():
    falling = fit_link("all_gather", 2, VOLUMES, [1e-3 / (1 + k) for k in range(8)])
    assert falling.latency > 0
    assert 0 < falling.bandwidth < math.inf
    # Times grow faster than in proportion to the size, which no latency explains.
    steep = fit_link("all_gather", 2, VOLUMES, [volume**1.2 / 1e9 for volume in VOLUMES])
    assert steep.latency == 0
    rates = [volume / 2 / (volume**1.2 / 1e9) for volume in VOLUMES]
    assert min(rates) <= steep.bandwidth <= rates[len(rates) // 2], "that of the larger sizes"
    Measured(falling.bandwidth, falling.latency)


@pytest.mark.parametrize(
    ("ranks", "volumes", "seconds"),
    [(1, [1, 2], [1, 2]), (2, [1], [1]), (2, [1, 1], [1, 1]), (2, [1, 2], [1, 0]), (2, [1, 2], [1, math.nan])],
)
def test_what_cannot_be_fitted_is_refused(ranks, volumes, seconds):
    with pytest.raises(ValueError, match="all_gather"):
        fit_link("all_gather", ranks, volumes, seconds)


def product_times(rate, half, launch):
    sides = np.array(DIMS, dtype=float)
    return 2 * sides.prod(axis=1) * (1 + half / sides).prod(axis=1) / rate + launch


@pytest.mark.parametrize("half", [0.0, 3.0, 40.0, 300.0])
def test_rates_and_half_size_are_recovered(half):
    random = np.random.default_rng(2)
    true = {"float32": 80e9, "float64": 35e9}
    seconds = {d: product_times(rate, half, 3e-6) * random.lognormal(0, 0.02, len(DIMS)) for d, rate in true.items()}
    seconds["float64"][[3, 11]] *= 12
    fit = fit_products(dict.fromkeys(true, DIMS), seconds, 3e-6)
    for dtype, rate in true.items():
        assert fit.rates[dtype] == pytest.approx(rate, rel=0.04)
    assert fit.half_size == pytest.approx(half, rel=0.06, abs=0.5)
    assert np.median(np.abs(fit.errors["float32"])) < 0.03
    assert sorted(np.abs(fit.errors["float64"]))[-3] < 0.15
    assert fit == fit_products(dict.fromkeys(true, DIMS), seconds, 3e-6)


def test_only_decisive_dtypes_choose_the_half_size():
    seconds = {"float32": product_times(8e10, 20, 0), "bfloat16": product_times(5e11, 400, 0)}
    fit = fit_products(dict.fromkeys(seconds, DIMS), seconds, decisive=["float32"])
    assert fit.half_size == pytest.approx(20, rel=0.01)
    assert fit.rates["float32"] == pytest.approx(8e10, rel=0.01)
    assert np.median(fit.errors["bfloat16"]) == pytest.approx(0, abs=0.1)


def test_products_that_cannot_be_fitted_are_refused():
    with pytest.raises(ValueError, match="float32"):
        fit_products({"float32": []}, {"float32": []})
    with pytest.raises(ValueError, match="float32"):
        fit_products({"float32": [(1, 2, 3)]}, {"float32": [0.0]})


def awkward():
    device = Device(
        'a "core" \\ of\ttab\x7f, Gerät',
        {"float32": 1 / 3 * 1e11, "float64": 1e10, "bfloat16": 123456789012.3},
        4e9,
        1e10 / 7,
        1e-6 / 3,
        efficiency=0.9,
        half_size=17.25,
        slowdown={"norm": 0.1 + 0.2, "product": 1.0},
        idle_power=1.5,
        busy_power=99.5,
        price=0.25,
    )
    measured = {kind: Measured(1e9 / (3 + k), 1e-5 / (7 + k), copying=1e10 / (7 + k)) for k, kind in enumerate(COLLECTIVES)}
    levels = (
        Level("node", 4, 1e9 / 3, 0.0, links=3, point_to_point=1e8, measured=measured),
        Level("torus", 2, 12e9, 1e-29, direct=True, shared=False),
        Level("odd", 3, 2e9, 5e-6, matrix=((0.0, 2e9, 1e9 / 3), (2e9, 0.0, 0.0), (1e9 / 3, 0.0, 0.0))),
    )
    return Topology('name = "x"\n[device] # \N{SNOWMAN} \U0001f600', device, levels, "mpi")


def test_factors_of_parts_are_recovered_and_others_stay_near_1():
    rng = np.random.default_rng(0)
    parts, factors = np.exp(rng.normal(size=(12, 3))), np.array([1.4, 0.6, 1.0])
    found, errors = fit_parts(np.hstack([parts, np.zeros((12, 1))]).tolist(), (parts @ factors).tolist())
    assert found == pytest.approx([*factors, 1.0], abs=0.02)
    assert max(map(abs, errors)) < 0.02
    # One sum cannot tell its parts apart: both take the same share of what is missing.
    found, errors = fit_parts([[1.0, 1.0]], [3.0])
    assert found == pytest.approx([1.5, 1.5], abs=0.03)
    assert errors == pytest.approx([0.0], abs=0.02)
    found, _ = fit_parts([[1.0]] * 200, [100.0] * 200)
    assert found == [4.0]


@pytest.mark.parametrize("seconds", [[], [0.0], [math.nan]])
def test_parts_that_cannot_be_fitted_are_refused(seconds):
    with pytest.raises(ValueError, match="at least one sum"):
        fit_parts([[1.0]] * len(seconds), seconds)


def test_a_written_topology_reads_back_exactly(tmp_path):
    topology = awkward()
    file = tmp_path / "made.toml"
    notes = {("levels", "node", "all_reduce"): "error 3 %\nname = 4", ("device", "flops", "float32"): "noted"}
    write_atomically(file, topology_toml(topology, ["made\nup = 1", "\x00\x1b", ""], notes))
    loaded = Topology.load(file)
    assert loaded == topology
    assert loaded.to_dict() == topology.to_dict()
    assert "; error 3 % name = 4\n" in file.read_text()
    assert "33.3 GFLOP/s; noted" in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["made.toml"]


@pytest.mark.parametrize("preset", Topology.preset_names())
def test_presets_survive_being_written(tmp_path, preset):
    topology = Topology.load(preset)
    write_atomically(tmp_path / "made.toml", topology_toml(topology))
    assert Topology.load(tmp_path / "made.toml") == topology


def test_writing_is_all_or_nothing(tmp_path, monkeypatch):
    file = tmp_path / "made.toml"
    write_atomically(file, "old")

    def fails(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(os, "replace", fails)
        write_atomically(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["made.toml"]
    write_atomically(file, "name \udce9")
    assert file.read_text() == "name ?"
    with pytest.raises(OSError):
        write_atomically(tmp_path / "nowhere" / "made.toml", "new")


def test_measured_figures_price_collectives():
    level = Level("node", 4, 1e9, 1e-5, measured={"all_reduce": Measured(2e9, 2e-5)})
    topology = dataclasses.replace(Topology.flat(4), levels=(level,), library="gloo")
    fit = fit_link(
        "all_reduce",
        4,
        VOLUMES,
        [collectives.of_link("all_reduce", v, topology.link((4,), (0,), "all_reduce"), "gloo") for v in VOLUMES],
    )
    assert (fit.latency, fit.bandwidth) == (pytest.approx(2e-5), pytest.approx(2e9))


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("ranks", [4, 6])
def test_pairs_separate_copying_from_moving(kind, ranks):
    """Both groups of a level take the times of a machine that copies, from which its figures are fitted."""
    measured = Measured(2e9, 0.0, copying=3e9)
    topology = dataclasses.replace(
        Topology.flat(ranks), levels=(Level("node", ranks, 1e9, 1e-5, measured={kind: measured}),), library="gloo"
    )
    bandwidths = []
    for mesh in ((ranks,), (ranks // 2, 2)):
        link = topology.link(mesh, (len(mesh) - 1,), kind)
        seconds = [collectives.of_link(kind, volume, link, "gloo") for volume in VOLUMES]
        bandwidths.append(fit_link(kind, mesh[-1], VOLUMES, seconds).bandwidth)
    assert split_copying(kind, ranks, *bandwidths) == (pytest.approx(2e9), pytest.approx(3e9))
    assert split_copying(kind, ranks, 1e9, 1.1e9) == (1e9, None), "pairs take less time than by moving alone"
    _, most = split_copying(kind, ranks, 1e9, 1e8)
    turns = 2 if kind == "all_reduce" else 1
    assert 1 / most == pytest.approx(0.9 * turns * (1 - 1 / ranks) / 1e9), "pairs that take longer than all"
