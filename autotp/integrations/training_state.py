"""What a training run keeps besides weights: the optimizer's state, and where random numbers stand."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from autotp.errors import AutotpError
from autotp.runtime.checkpoint.random_state import RandomState
from autotp.runtime.module import DistributedModule

__all__ = ["RANDOM", "load_optimizer", "load_random", "read_optimizer", "reading", "require_global", "save_optimizer"]

#: The file that says where random numbers stand on rank 0, which a job with other ranks goes on from.
RANDOM = "autotp_random.pt"


def require_global(parallel: Any) -> DistributedModule:
    """A distributed module that takes the whole batch on every rank and returns whole tensors, as frameworks' loops do.

    Args:
        parallel: what ``autotp.parallelize`` returned.

    Raises:
        AutotpError: it is something else.
    """
    if not isinstance(parallel, DistributedModule):
        raise AutotpError(f"{type(parallel).__name__} is not a distributed module: pass what autotp.parallelize returned")
    if parallel._programs.ways != 1 or parallel.plan.outputs != "whole":
        raise AutotpError(
            "every rank is given the whole batch here, and whole outputs are read: leave inputs= and outputs= of "
            "autotp.parallelize at their defaults, 'global' and 'whole'"
        )
    return parallel


def save_optimizer(parallel: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> None:
    """Writes an optimizer's state with ``torch.distributed.checkpoint``; a collective call.

    Args:
        parallel: whose parameters it steps.
        optimizer: torch's own, or one that has it as ``optimizer``, as accelerate's has.
        directory: of the checkpoint.
    """
    dcp.save({"optimizer": get_optimizer_state_dict(parallel, _inner(optimizer))}, checkpoint_id=directory)


def load_optimizer(parallel: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> None:
    """Reads what ``save_optimizer`` wrote, whatever plan wrote it; a collective call.

    Args:
        parallel, optimizer, directory: as there.

    Raises:
        AutotpError: there is no whole checkpoint of it.
    """
    inner = _inner(optimizer)
    state = get_optimizer_state_dict(parallel, inner)
    read_optimizer(state, inner, "optimizer", directory)
    set_optimizer_state_dict(parallel, inner, state)


def read_optimizer(state: dict[str, Any], optimizer: Optimizer, name: str, directory: str | os.PathLike[str]) -> None:
    """Fills an optimizer's state from a checkpoint; a collective call.

    Args:
        state: of the optimizer, as torch's ``get_optimizer_state_dict`` gives it.
        optimizer: torch's own. What others added to its groups, as schedulers add ``initial_lr``, stays if the checkpoint
            does not have it.
        name: of the state in the checkpoint.
        directory: of the checkpoint.

    Raises:
        AutotpError: there is no whole checkpoint of it.
    """
    groups: Any = state["param_groups"]
    own = {*optimizer.defaults, "params"}
    with reading(directory, "state of the optimizer"):
        saved = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
        later = [
            {key: group.pop(key) for key in {*group} - own if f"{name}.param_groups.{number}.{key}" not in saved}
            for number, group in enumerate(groups)
        ]
        dcp.load({name: state}, checkpoint_id=directory)
    for group, settings in zip(groups, later, strict=True):
        group.update(settings)


@contextmanager
def reading(directory: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Says what is not whole in a directory that is read inside.

    Raises:
        AutotpError: something is missing or damaged.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        said = str(first).strip().partition("\n")[0]
        raise AutotpError(f"{directory} has no whole {what} ({type(first).__name__}: {said})") from error


def load_random(file: str | os.PathLike[str]) -> None:
    """Sets this process's generators to the states in a file.

    Raises:
        AutotpError: it is not there or damaged.
    """
    try:
        state = torch.load(file, weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise AutotpError(f"{file} has no states of torch's generators ({type(error).__name__}): copy it again") from error
    RandomState().load_state_dict(state)


def _inner(optimizer: Optimizer) -> Optimizer:
    return getattr(optimizer, "optimizer", optimizer)
