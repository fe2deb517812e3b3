"""Sweeps over device counts and topologies: the points, the written files, and the command."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
import textwrap

import pytest
import torch
from torch import nn

from autotp import AutotpError, cli, plan
from autotp.analysis.sweep import Point, sweep
from autotp.cli.sweep_output import sweep_csv, sweep_table, write_plot
from autotp.cli.terminal import Terminal
from benchmarks.models import gpt
from costmodel import Topology, TopologyError
from costmodel.energy import step_energy

SPEC = """
    import torch
    from torch import nn

    def build():
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), (torch.zeros(64, 256),)

    def grown(devices):
        with torch.device("meta"):
            return nn.Linear(256, 256), (torch.zeros(16 * devices, 256),)

    def failing():
        raise RuntimeError("no such weights")
"""


def small_gpt():
    return gpt(1, 256, 4, 512, 32, 64)


def mlp(batch=64):
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), (torch.zeros(batch, 256),)


@pytest.fixture(scope="module")
def points():
    return sweep(small_gpt, ["dgx-a100", "dgx-h100"], [8, 13])


@pytest.fixture
def spec(tmp_path):
    file = tmp_path / "swept_model.py"
    file.write_text(textwrap.dedent(SPEC))
    return str(file)


def test_points(points):
    assert [(p.topology, p.devices) for p in points] == [(t, n) for t in ("dgx-a100", "dgx-h100") for n in (8, 13)]
    model, args = small_gpt()
    best = plan(model, Topology.load("dgx-a100").resized(8), args)
    found = points[0]
    assert found.step_seconds == pytest.approx(best.predicted.step_seconds) and found.mesh == best.mesh_shape
    assert found.tokens == 32 * 64 and found.unit == "tokens" and found.strategy == "auto" and found.family is None
    assert found.tokens_per_second == pytest.approx(2048 / found.step_seconds / 8)
    assert found.memory_bytes == best.predicted.memory_bytes and found.optimal == best.optimal
    assert found.exposed_share == pytest.approx(best.predicted.exposed_seconds / best.predicted.step_seconds)
    energy = step_energy(best.topology.device, 8, best.predicted.compute_seconds, best.predicted.step_seconds)
    assert found.energy_per_token == pytest.approx(energy / 2048) and found.money_per_token is None


def test_mfu_counts_products(points):
    # FLOP per token and layer: 24 hidden² for the weights, 4 sequence x hidden for attention; and the vocabulary's product.
    flop = 3 * 2048 * (24 * 256**2 + 4 * 64 * 256 + 2 * 256 * 512)
    for point, peak in ((points[0], 312e12), (points[2], 989e12)):
        assert point.mfu == pytest.approx(flop / (point.step_seconds * 8 * peak), rel=0.02)


def test_counts_that_do_not_fit_are_rows(points):
    for point in (points[1], points[3]):
        assert not point.planned and "cannot have 13 devices" in point.reason
        assert point.step_seconds is None and point.mesh is None


def test_csv_and_json_agree(points):
    rows = list(csv.DictReader(io.StringIO(sweep_csv(points))))
    assert list(rows[0]) == list(Point.names())
    for row, entry, point in zip(rows, json.loads(json.dumps([point.to_dict() for point in points])), points, strict=True):
        for key, value in entry.items():
            if key == "mesh" and value is not None:
                assert tuple(value) == point.mesh and row[key] == "x".join(map(str, value))
            else:
                assert row[key] == ("" if value is None else str(value)), key


def test_table(points):
    console = Terminal(width=200, no_color=True, file=io.StringIO())
    console.print(sweep_table(points))
    text = console.file.getvalue()
    for said in ("dgx-h100", "tokens/s", "MFU", "exposed", "energy", "cannot have 13 devices"):
        assert said in text
    assert "price" not in text and "best family" not in text


@pytest.mark.parametrize(("name", "start"), [("p.svg", b"<?xml"), ("p.png", b"\x89PNG")])
def test_plot(points, tmp_path, name, start):
    write_plot(points, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(start) and [f.name for f in tmp_path.iterdir()] == [name]


def test_a_plot_without_any_plan(points, tmp_path):
    write_plot([points[1]], tmp_path / "none.svg")
    assert (tmp_path / "none.svg").stat().st_size


def test_plots_that_cannot_be_made(points, tmp_path, monkeypatch):
    with pytest.raises(AutotpError, match=".svg or .png"):
        write_plot(points, tmp_path / "p.pdf")
    with pytest.raises(AutotpError, match="cannot write"):
        write_plot(points, tmp_path / "nowhere" / "p.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(AutotpError, match=r"pip install autotp\[plot\]"):
        write_plot(points, tmp_path / "p.svg")


def test_families():
    priced = Topology.load("dgx-a100")
    priced = dataclasses.replace(priced, device=dataclasses.replace(priced.device, price=3.6))
    (point,) = sweep(mlp, [priced], [4], families=True, tokens=100)
    assert point.family not in (None, "auto") and point.family_seconds >= point.step_seconds
    assert point.tokens == 100 and point.money_per_token == pytest.approx(4 * 3.6 * point.step_seconds / 3600 / 100)
    (only,) = sweep(mlp, [priced], [4], strategies=("data", "megatron-1d"))
    assert only.strategy == only.family and only.strategy in ("data", "megatron-1d")
    assert (only.tokens, only.unit) == (64, "samples")


def test_no_memory_and_no_batch_are_rows():
    (short,) = sweep(mlp, ["dgx-a100"], [4], memory=1e3)
    assert "the smallest found needs" in short.reason and short.tokens == 64
    odd, even = sweep(lambda: mlp(4), ["dgx-a100"], [8, 4], strategies=("data",))
    assert "multiple of 8" in odd.reason and even.planned


def test_weak_scaling():
    asked = []

    def factory(devices):
        asked.append(devices)
        return mlp(16 * devices)

    points = sweep(factory, ["dgx-a100", "dgx-h100"], [2, 4])
    assert asked == [2, 4] and [p.tokens for p in points] == [32, 64, 32, 64]
    assert points[0].step_seconds <= points[1].step_seconds * 1.1, "more devices may find better sizes for small kernels"


def test_a_model_is_captured_once():
    asked = []
    sweep(lambda: asked.append(1) or mlp(), ["dgx-a100", "dgx-h100"], [2, 4])
    assert asked == [1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"topologies": []}, "topologies is empty"),
        ({"topologies": ["dgx-a100", "dgx-a100"]}, "two of the topologies"),
        ({"devices": []}, "devices is empty"),
        ({"devices": [0]}, "devices is 0"),
        ({"tokens": 0}, "tokens is 0"),
        ({"strategies": ["magic"]}, "choose one of"),
        ({"strategies": []}, "strategies is empty"),
        ({"mode": "dream"}, "mode 'dream'"),
        ({"factory": lambda: 3}, "expected"),
    ],
)
def test_wrong_arguments(changes, said):
    with pytest.raises(AutotpError, match=said):
        sweep(**({"factory": mlp, "topologies": ["dgx-a100"], "devices": [2]} | changes))
    with pytest.raises(TopologyError, match="no topology preset"):
        sweep(mlp, ["dgx-a1000"], [2])


def test_command(run_cli, spec, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table, plot = tmp_path / "points.csv", tmp_path / "points.svg"
    words = ("--topology", "dgx-a100,cpu", "--devices", "2,4,12", "--csv", table, "--plot", plot)
    assert run_cli("sweep", "--model", f"{spec}:build", *words) == 0
    shown = capsys.readouterr().out
    assert "dgx-a100" in shown and "samples/s" in shown and "12 devices: no plan" in shown
    assert len(table.read_text().splitlines()) == 7 and plot.read_text().startswith("<?xml")
    assert run_cli("sweep", "--model", f"{spec}:build", "--topology", "dgx-a100,cpu", "--devices", "2,4,12", "--json") == 0
    entries = json.loads(capsys.readouterr().out)
    assert [bool(e["reason"]) for e in entries] == [False, False, True, False, False, False]
    assert entries[3]["energy_per_token"] is None and sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [
        "points.csv", "points.svg", "swept_model.py",
    ]  # fmt: skip


def test_command_scales_the_batch(run_cli, spec, capsys):
    assert run_cli("sweep", "--model", f"{spec}:grown", "--topology", "cpu", "--devices", "2,4", "--weak", "--json") == 0
    assert [e["tokens"] for e in json.loads(capsys.readouterr().out)] == [32, 64]
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--model", f"{spec}:grown", "--topology", "cpu", "--json"])
    assert ended.value.code == 0 and json.loads(capsys.readouterr().out)["mesh_shape"]


@pytest.mark.parametrize(
    ("name", "words", "code", "said"),
    [
        ("build", ("--topology", "dgx-a100", "--devices", "9"), 1, ""),
        ("build", ("--topology", "dgx-a100", "--devices", "8;9"), 2, "--devices '8;9'"),
        ("build", ("--topology", "dgx-a1000", "--devices", "8"), 2, "no topology preset"),
        ("build", ("--topology", "cpu", "--devices", "2", "--strategy", "magic"), 2, "choose one of"),
        ("build", ("--topology", "cpu", "--devices", "2", "--plot", "p.jpg"), 2, ".svg or .png"),
        ("build", ("--topology", "cpu", "--devices", "2", "--csv", "no/where.csv"), 2, "no directory"),
        ("build", ("--topology", "cpu", "--devices", "2", "--weak"), 2, "no argument `devices`"),
        ("build", ("--topology", "cpu", "--devices", "2", "--memory", "lots"), 2, "--memory"),
        ("failing", ("--topology", "cpu", "--devices", "2"), 2, "no such weights"),
        ("nothing", ("--topology", "cpu", "--devices", "2"), 2, "no function 'nothing'"),
    ],
)
def test_exit_codes(run_cli, spec, capsys, name, words, code, said):
    assert run_cli("sweep", "--model", f"{spec}:{name}", *words) == code
    assert said in capsys.readouterr().err
