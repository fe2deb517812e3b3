"""True processes: torchrun and gloo."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.distributed


def torchrun(processes, program, *arguments, timeout=150):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}:{HERE}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(HERE / "torchrun_programs" / program), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    ("processes", "model", "strategy", "mesh"),
    [
        (2, "llama", "zero3", "2"),
        (2, "unet", "megatron-1d", "2"),
        (4, "llama", "megatron-sp", "2x2"),
        (4, "unet", "tensor3d", "2x2"),
        (8, "llama", "3d", "2x2x2"),
    ],
)
def test_three_steps_equal_one_device(processes, model, strategy, mesh):
    done = torchrun(processes, "train.py", model, strategy, mesh)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exact" in done.stdout


@pytest.mark.parametrize(
    ("processes", "program"),
    [*((n, program) for n in (1, 2) for program in ("own_gradients.py", "as_eager.py")), (4, "staged.py")],
)
def test_training_scripts_mean_what_they_mean_with_eager_modules(processes, program):
    done = torchrun(processes, program)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passed" in done.stdout


def test_panels_equal_one_device():
    done = torchrun(4, "train.py", "llama", "summa-2d", "2x2", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exact" in done.stdout


@pytest.mark.parametrize(
    ("processes", "case"),
    [
        *((2, case) for case in ("meta", "dropout", "local_inputs", "checkpoint", "destroyed", "twice", "orders")),
        *((2, case) for case in ("hooks", "state")),
        *((4, case) for case in ("collectives", "resting")),
    ],
)
def test_special_cases(processes, case):
    done = torchrun(processes, "special.py", case)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passed" in done.stdout


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("mismatch", "the plan is for 4 devices (mesh (4,)), but 2 processes run"),
        ("refused", "choose a batch that is a multiple of 2"),
    ],
)
def test_errors_reach_every_rank_and_end_the_job(case, message):
    begun = time.monotonic()
    done = torchrun(2, "special.py", case)
    assert done.returncode != 0
    assert done.stderr.count(message) >= 1, done.stderr[-3000:]
    assert time.monotonic() - begun < 90
