"""True processes: torchrun and gloo."""

import time

import pytest
import torch
from thinned import thinned
from torch._subclasses import FakeTensorMode

from autotp.errors import AutotpError
from autotp.runtime.parallelize import _kind_of_device

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("processes", "model", "strategy", "mesh", "recompute"),
    thinned(
        [
            (2, "llama", "zero3", "2", "full"),
            (2, "unet", "megatron-1d", "2", "selective"),
            (4, "unet", "tensor3d", "2x2", "none"),
            (4, "llama", "megatron-sp", "2x2", "full"),
            (8, "llama", "3d", "2x2x2", "none"),
        ]
    ),
)
def test_three_steps_equal_one_device(torchrun, processes, model, strategy, mesh, recompute):
    done = torchrun(processes, "train.py", model, strategy, mesh, "--recompute", recompute)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exact" in done.stdout


@pytest.mark.parametrize(
    ("backend", "model_on", "runs_on"),
    [("gloo", "cpu", "cpu"), ("gloo", "cuda", "cuda"), ("nccl", "cpu", "cuda"), ("cpu:gloo,cuda:nccl", "meta", "cuda")],
)
def test_a_module_runs_on_gpus_if_its_processes_do_or_the_model_is_there(backend, model_on, runs_on, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    with FakeTensorMode():
        model = torch.nn.ParameterList([torch.empty(2, device=model_on)])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    if (backend, runs_on) == ("gloo", "cuda"):
        with pytest.raises(AutotpError, match=r"init_process_group\('nccl'\)"):
            _kind_of_device(model)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert _kind_of_device(model) == runs_on


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("model", "strategy"), [("llama", "zero3"), ("unet", "megatron-1d")])
def test_three_steps_on_a_gpu(torchrun, model, strategy):
    done = torchrun(1, "train.py", model, strategy, "1", "--backend", "nccl", "--device", "cuda", gpus=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exact" in done.stdout


@pytest.mark.parametrize(
    ("processes", "program"),
    [
        *((2, program) for program in ("own_gradients.py", "as_eager.py")),
        (4, "staged.py"),
        (2, "uneven_chunks.py"),
        (2, "precision.py"),
        (2, "accumulate.py"),
        (2, "checkpoints.py"),
        (2, "programs.py"),
        (2, "observed.py"),
        *(pytest.param(4, program, marks=pytest.mark.exact) for program in ("programs.py", "observed.py")),
        *(pytest.param(1, program, marks=pytest.mark.exact) for program in ("own_gradients.py", "as_eager.py")),
    ],
)
def test_training_scripts_mean_what_they_mean_with_eager_modules(torchrun, processes, program):
    done = torchrun(processes, program)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passed" in done.stdout


def test_compiled_regions_equal_one_device(torchrun):
    done = torchrun(2, "compiled.py", timeout=400)  # what is compiled is in torch's cache the next time
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passed" in done.stdout


@pytest.mark.parametrize("case", ["round_trip", pytest.param("heads", marks=pytest.mark.exact), "errors"])
def test_directories_of_hugging_face(torchrun, case):
    done = torchrun(2, "pretrained.py", case)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passed" in done.stdout


@pytest.mark.parametrize(
    "case",
    [
        *("losses", "resume"),
        *(pytest.param(case, marks=pytest.mark.exact) for case in ("resume_with_another_plan", "adapters", "accelerated")),
    ],
)
def test_loops_of_transformers_and_accelerate(torchrun, case):
    done = torchrun(2, "trainer.py", case)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passed" in done.stdout


@pytest.mark.parametrize(
    "case",
    ["by_norm", *(pytest.param(case, marks=pytest.mark.exact) for case in ("by_value", "resumes", "resumes_with_dropout"))],
)
def test_loops_of_lightning(torchrun, case):
    done = torchrun(2, "lightning_fit.py", case, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passed" in done.stdout


def test_panels_equal_one_device(torchrun):
    done = torchrun(4, "train.py", "llama", "summa-2d", "2x2", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exact" in done.stdout


@pytest.mark.parametrize(
    ("processes", "case"),
    [
        *((2, case) for case in ("meta", "dropout", "local_inputs", "destroyed", "twice", "orders")),
        *((2, case) for case in ("hooks", "state")),
        *((4, case) for case in ("collectives", "resting")),
        (8, "short_dims"),
    ],
)
def test_special_cases(torchrun, processes, case):
    done = torchrun(processes, "special.py", case)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passed" in done.stdout


@pytest.mark.parametrize("adamw", ["fused", pytest.param("foreach", marks=pytest.mark.exact)])
def test_what_four_processes_save_others_load(torchrun, adamw):
    done = torchrun(4, "resuming.py", adamw)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passed" in done.stdout


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("mismatch", "the plan is for 4 devices (mesh (4,)), but 2 processes run"),
        ("refused", "choose a batch that is a multiple of 2"),
    ],
)
def test_errors_reach_every_rank_and_end_the_job(torchrun, case, message):
    begun = time.monotonic()
    done = torchrun(2, "special.py", case)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr[-3000:]
    assert time.monotonic() - begun < 90
