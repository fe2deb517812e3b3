"""``autotp calibrate`` with real processes."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autotp.analysis.reprice import repriced
from autotp.calibrate import calibrate, shape_of_job
from autotp.calibrate.collectives import FULL, KINDS, QUICK, Timing, job, time_sizes
from autotp.calibrate.kernels import operators, product_sizes
from autotp.calibrate.step import TimedStep, contended, corrected, parts_of
from autotp.cli import main
from autotp.errors import AutotpError
from autotp.planner import plan_captured
from autotp.plans.options import Options
from costmodel import KINDS as OPERATOR_KINDS
from costmodel import Level, Measured, Topology
from costmodel.fit import Sample
from passes.capture import capture

ROOT = Path(__file__).parents[3]
FAILING = """
import os, sys
import autotp.calibrate.job as module
from autotp.cli import main
fit = module.fit_link
def broken(*arguments):
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 is broken")
    return fit(*arguments)
module.fit_link = broken
main(sys.argv[1:])
"""


def torchrun(processes, *arguments, timeout=280):
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    done = torchrun(2, "-m", "autotp", "calibrate", "--quick", "--name", "box", "--output", folder / "box.toml")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done


@pytest.mark.exact
@pytest.mark.distributed
def test_writes_a_topology_that_loads(calibrated):
    folder, done = calibrated
    topology = Topology.load(folder / "box.toml")
    assert (topology.name, topology.library, topology.devices) == ("box", "gloo", 2)
    (level,) = topology.levels
    assert (level.name, level.size, set(level.measured)) == ("node", 2, set(KINDS))
    assert (level.bandwidth, level.latency) == (
        level.measured["all_gather"].bandwidth,
        level.measured["all_gather"].latency,
    )
    for figures in level.measured.values():
        assert 1e6 < figures.bandwidth < 1e12
        assert 0 <= figures.latency < 1
    device = topology.device
    assert {"float32", "float64"} <= set(device.flops)
    assert 1e-8 < device.launch < 1e-2
    assert device.memory >= 2**30 and device.memory % 2**30 == 0
    assert device.memory_bandwidth > 1e7
    assert set(device.slowdown) == set(OPERATOR_KINDS)
    assert [path.name for path in folder.iterdir()] == ["box.toml"]


@pytest.mark.exact
@pytest.mark.distributed
def test_the_fit_goes_to_stdout_and_progress_to_stderr(calibrated):
    folder, done = calibrated
    for word in (
        *KINDS,
        "outliers",
        "float32",
        "half size",
        "slowdown: attention",
        "convolutions zero3 2",
        f"written to {folder / 'box.toml'}",
    ):
        assert word in done.stdout
    assert done.stderr.count("measuring node: all_gather") == 1
    text = (folder / "box.toml").read_text()
    assert text.startswith("# Measured by autotp calibrate on ")
    assert f"torch {torch.__version__}" in text
    assert "# Command: autotp calibrate --quick" in text
    assert text.count("error ") >= len(KINDS) + 2
    errors = [line for line in text.splitlines() if line.startswith("#   ")]
    assert len(errors) >= 8 and {line.split()[1] for line in errors} == {"transformer", "convolutions"}


@pytest.mark.exact
@pytest.mark.distributed
def test_refuses_to_overwrite_before_measuring(tmp_path):
    (tmp_path / "there.toml").write_text("mine")
    done = torchrun(2, "-m", "autotp", "calibrate", "--quick", "--output", tmp_path / "there.toml")
    assert done.returncode != 0
    assert done.stderr.count("error: --output") == 1, done.stderr[-3000:]
    assert "is there already; give another name, or --force" in done.stderr
    assert "exitcode  : 2" in done.stderr
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT) not in done.stderr
    assert "measuring" not in done.stderr
    assert (tmp_path / "there.toml").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.distributed
def test_one_process_measures_its_device(tmp_path):
    done = torchrun(1, "-m", "autotp", "calibrate", "--quick", "--output", tmp_path / "one.toml")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "device" in done.stdout and "collective" not in done.stdout
    topology = Topology.load(tmp_path / "one.toml")
    assert topology.devices == 1 and set(topology.device.slowdown) == set(OPERATOR_KINDS)
    assert set(topology.device.flops) == {"float32", "float64", "bfloat16", "float16"}, "slow ones are no float32"


@pytest.mark.exact
@pytest.mark.distributed
def test_one_failing_rank_ends_the_job(tmp_path):
    program = tmp_path / "failing.py"
    program.write_text(FAILING)
    done = torchrun(3, program, "calibrate", "--quick", "--output", tmp_path / "box.toml")
    assert done.returncode != 0
    assert "rank 1 is broken" in done.stderr
    assert not (tmp_path / "box.toml").exists()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "start it by torchrun"),
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "WORLD_SIZE=3 is not a multiple of LOCAL_WORLD_SIZE=2"),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_is_wrong_from_the_start_is_reported_once(tmp_path, monkeypatch, capsys, environ, message, rank):
    for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    others = {"RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"} if environ else {}
    for key, value in (environ | others).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", "--output", str(tmp_path / "box.toml")])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    if environ and rank == "1":
        assert said == ""
    else:
        assert said.startswith("error: ") and said.count("\n") == 1 and message in said


def test_shape_of_a_job():
    assert shape_of_job(8, {"LOCAL_WORLD_SIZE": "4"}) == (2, 4)
    assert shape_of_job(8, {}) == (1, 8)
    with pytest.raises(AutotpError, match="must be a whole number"):
        shape_of_job(8, {"LOCAL_WORLD_SIZE": "x"})


def test_needs_a_process_group():
    with pytest.raises(AutotpError, match="init_process_group"):
        calibrate()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ways", [2, 3, 64])
@pytest.mark.parametrize("volume", [1024, 2**20, 2**24])
def test_jobs_split_evenly_and_have_about_the_volume(kind, ways, volume):
    step, tensor, whole = job(kind, 0, ways, volume, torch.device("meta"))
    assert step.kind == kind
    assert whole == tensor.numel() * 4 * (ways if kind == "all_gather" else 1)
    assert tensor.shape[0] % ways == 0 and (kind == "all_gather" or tensor.shape[1] % ways == 0)
    assert whole == pytest.approx(volume, rel=0.1) or whole == 4 * ways * ways > volume or volume == 1024


def test_larger_sizes_are_left_out_when_they_take_too_long():
    def measure(pace):
        return lambda volume: Timing(volume, Sample(1e-3 + volume * pace, 0.0, 0, 5))

    assert len(time_sizes(measure(1e-12), FULL.volumes, 0.5)) == len(FULL.volumes)
    slow = time_sizes(measure(1e-7), FULL.volumes, 0.5)
    assert 3 <= len(slow) < len(FULL.volumes)
    assert slow[-1].sample.seconds <= 0.5
    assert len(time_sizes(measure(1e-2), QUICK.volumes, 0.5)) == 3


def test_operators_count_as_the_rules_do():
    found = list(operators(torch.device("cpu")))
    assert {operator.kind for operator in found} == set(OPERATOR_KINDS)
    for operator in found:
        result = operator.function()
        assert len(torch.autograd.grad(result, operator.inputs, torch.ones_like(result))) == len(operator.inputs)
        assert operator.bytes * operator.count >= result.numel() * 4 + sum(t.numel() * 4 for t in operator.inputs)
        assert (operator.flop > 0) == (operator.kind in ("product", "convolution", "attention"))


def test_products_are_of_every_orientation():
    shapes = product_sizes(1024)
    assert len(shapes) == len(set(shapes))
    assert {(32, 32, 32), (1024, 1024, 1024), (64, 1024, 1024), (1024, 64, 1024), (1024, 1024, 64)} <= set(shapes)


@pytest.mark.parametrize("family", ["zero3", "megatron-1d"])
def test_a_step_is_the_sum_of_its_parts(family):
    measured = {kind: Measured(1e9 * (1 + at), 1e-5 * (1 + at), 3e-5, 2e9) for at, kind in enumerate(KINDS)}
    levels = tuple(Level(name, 2, 1e9, 1e-5, measured=measured) for name in ("node", "network"))
    topology = dataclasses.replace(Topology.load("cpu"), levels=levels)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    captured = capture(model, (torch.randn(8, 64),), None)
    plan = plan_captured(captured, topology, Options(family, mesh=(2, 2), panels=1, schedule="none"))
    parts, seconds = parts_of(captured, plan), plan.predicted.passes_seconds
    assert sum(parts.values()) == pytest.approx(seconds, rel=1e-6)
    factors = {part: 1 + 0.1 * at for at, part in enumerate(parts)}
    again = repriced(captured, plan, corrected(topology, factors)).predicted.passes_seconds
    assert again - seconds == pytest.approx(sum((factors[part] - 1) * parts[part] for part in parts), rel=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.35, 1.0])
def test_overlapped_steps_show_the_contention_of_a_level(share):
    def machine(contention):
        network = Level("network", 2, 4e8, 1e-5, contention=contention)
        return dataclasses.replace(Topology.load("cpu"), levels=(Level("node", 2, 1e10, 1e-6, contention=0.5), network))

    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    captured = capture(model, (torch.randn(1024, 512),), None)
    steps = []
    for schedule in ("overlap", "none"):
        plan = plan_captured(captured, machine(0.6), Options("zero3", mesh=(4,), panels=1, schedule=schedule))
        steps.append(TimedStep(captured, plan, repriced(captured, plan, machine(share)).predicted.passes_seconds))
    overlapped, serial = steps
    found = contended(machine(0.6), 1, [overlapped] * 32)
    assert found.levels[1].contention == pytest.approx(share, abs=0.051) and found.levels[0].contention == 0.5
    assert overlapped.error(found) == pytest.approx(0.0, abs=0.02)
    assert contended(machine(0.6), 1, [serial]) == machine(0.6), "it does not depend on it"
