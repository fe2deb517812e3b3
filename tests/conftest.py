"""Fixtures of several folders: the command line in this process, and a check that no test file leaves job state behind."""

import os
from unittest import mock

import pytest
import torch.distributed as dist

from autotp.cli import main


@pytest.fixture
def run_cli():
    """Returns a function that runs an ``autotp`` command in this process, and returns its exit code."""

    def run(*words: object) -> int:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        return int(ended.value.code or 0)

    return run


@pytest.fixture(scope="module")
def one_rank():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def leaves_no_job():
    """Restores the environment variables with which frameworks announce a job; fails if a process group is left."""
    with mock.patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("a process group is left")
