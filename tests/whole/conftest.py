"""Runs programs in several processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def torchrun():
    """Returns a function that runs one of ``tests/torchrun_programs`` under torchrun, on CPUs unless ``gpus``."""

    def run(processes, program, *arguments, timeout=150, gpus=False):
        before = os.environ.get("PYTHONPATH", "")  # may lead to another torch
        path = os.pathsep.join(filter(None, (before, str(TESTS.parent), str(TESTS))))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        environment |= {} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += [str(TESTS / "torchrun_programs" / program), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)

    return run
