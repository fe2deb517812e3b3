"""What tests of several folders share: the command line in this process, and that a file leaves nothing to the next."""

import os
from unittest import mock

import pytest
import torch.distributed as dist

from autotp.cli import main


@pytest.fixture
def run_cli():
    """Runs an ``autotp`` command in this process, and returns its exit code."""

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
    """Frameworks set variables that make others believe in a job of several processes."""
    with mock.patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("a process group is left")
