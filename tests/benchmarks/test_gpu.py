"""The GPU benchmark, run on the CPU with small models and without a compiler."""

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu, gpu_steps
from costmodel import Topology


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(gpu_steps, "unavailable", lambda device: "not tried here")
    monkeypatch.setattr(gpu_steps, "FAMILIES", ("zero3",))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cpu")
    dist.destroy_process_group()


@pytest.mark.exact
def test_steps_are_measured_once_and_reported(one_rank, tmp_path):
    known, settings = tmp_path / "steps.jsonl", gpu_steps.QUICK[1:2]
    topology = Topology.load("h200").resized(1)
    assert gpu_steps.steps(settings, topology, one_rank, known, end=0.0) == []
    found = gpu_steps.steps(settings, topology, one_rank, known, time.monotonic() + 100)
    assert [step.way for step in found] == ["eager", "autotp"] and all(step.seconds > 0 for step in found)
    assert gpu_steps.steps(settings, topology, one_rank, known, end=0.0) == found
    eager, autotp = gpu.rows_of(found, settings, (topology, topology))
    assert eager[6:8] == ["", ""] and autotp[6] == autotp[7] and float(autotp[6]) > 0


@pytest.mark.exact
def test_exactness_is_relative_to_what_is_not_rounding(one_rank):
    rows = gpu_steps.exactness(("unet",), one_rank)
    assert [row[1] for row in rows] == ["one rank, three steps", "zero3 on 2×2 simulated ranks"]
    assert all(float(row[2]) < 1e-9 for row in rows)


def test_figures_of_two_devices():
    page = gpu.figures(Topology.load("dgx-h100"), Topology.load("h200"))
    assert "| memory, GB | 80.0 | 141.0 |" in page and "preset `dgx-h100`" in page
