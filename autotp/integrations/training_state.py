"""Saves and loads the state of a training run besides weights: of the optimizer, and of torch's generators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from autotp.errors import AutotpError
from autotp.runtime.checkpoint.random_state import RandomState
from autotp.runtime.module import DistributedModule

__all__ = [
    *("RANDOM", "load_optimizer", "load_random", "optimizer_state", "reading", "require_global", "save_optimizer"),
    "set_optimizer",
]

#: File with the states of rank 0's generators, from which a job with another number of ranks can continue.
RANDOM = "autotp_random.pt"


def require_global(parallel: Any) -> DistributedModule:
    """Returns a distributed module, after checking that it takes the whole batch on every rank and returns whole tensors.

    Args:
        parallel: what ``autotp.parallelize`` returned.

    Raises:
        AutotpError: ``parallel`` is not such a module.
    """
    if not isinstance(parallel, DistributedModule):
        raise AutotpError(f"{type(parallel).__name__} is not a distributed module: pass what autotp.parallelize returned")
    if parallel._programs.ways != 1 or parallel.plan.outputs != "whole":
        raise AutotpError(
            "every rank is given the whole batch here, and whole outputs are read: leave inputs= and outputs= of "
            "autotp.parallelize at their defaults, 'global' and 'whole'"
        )
    return parallel


def save_optimizer(module: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> None:
    """Writes an optimizer's state with ``torch.distributed.checkpoint``; a collective call.

    Args:
        module: the module whose parameters the optimizer updates.
        optimizer: one of torch, or a wrapper with the attribute ``optimizer``, such as accelerate's.
        directory: of the checkpoint.
    """
    dcp.save({"optimizer": optimizer_state(module, _inner(optimizer))}, checkpoint_id=directory)


def optimizer_state(module: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None) -> dict[str, Any]:
    """An optimizer's state by names of parameters; empty before the first step, as with torch's optimizers.

    torch's ``get_optimizer_state_dict`` initializes missing state by a step, which is undone here.

    Args:
        module: the module whose parameters the optimizer updates.
        optimizer: one of torch.
        options: of ``get_optimizer_state_dict``.
    """
    new = not optimizer.state
    state = get_optimizer_state_dict(module, optimizer, options=options)
    if new:
        optimizer.state.clear()
        state["state"] = {}
    return state


def load_optimizer(
    module: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str], name: str = "optimizer"
) -> None:
    """Loads an optimizer's state from a checkpoint that was written with any plan; a collective call.

    Entries that others added to the optimizer's groups, such as a scheduler's ``initial_lr``, are kept if the checkpoint
    does not have them. Parameters without state in the checkpoint, as they never had a gradient, have none afterwards.

    Args:
        module, optimizer: as for ``save_optimizer``.
        directory: a checkpoint that ``save_optimizer`` wrote.
        name: of the optimizer's state in the checkpoint.

    Raises:
        AutotpError: the checkpoint is incomplete; or it has state of a parameter for which this optimizer has none although
            it has made steps.
    """
    inner = _inner(optimizer)
    state = get_optimizer_state_dict(module, inner)
    groups, states = cast(Any, state["param_groups"]), cast(Any, state["state"])
    own = {*inner.defaults, "params"}
    with reading(directory, "state of the optimizer"):
        saved = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    later = [
        {key: group.pop(key) for key in {*group} - own if f"{name}.param_groups.{number}.{key}" not in saved}
        for number, group in enumerate(groups)
    ]
    for each, parameter in module.named_parameters():
        stepped = states and parameter.requires_grad and each not in states
        if stepped and any(key.startswith(f"{name}.state.{each}.") for key in saved):
            raise AutotpError(f"the optimizer has stepped without {each}, of which {directory} has a state: load a new one")
    kept = {each: held for each, held in states.items() if any(f"{name}.state.{each}.{key}" in saved for key in held)}
    state["state"] = kept
    with reading(directory, "state of the optimizer"):
        dcp.load({name: state}, checkpoint_id=directory)
    for group, settings in zip(groups, later, strict=True):
        group.update(settings)
    set_optimizer(module, inner, state)


def set_optimizer(module: nn.Module, optimizer: Optimizer, state: dict[str, Any], *, whole: bool = False) -> None:
    """Sets an optimizer's state by names of parameters; parameters that ``state`` lacks have no state afterwards.

    Args:
        module: the module whose parameters the optimizer updates.
        optimizer: one of torch.
        state: in the format of torch's ``get_optimizer_state_dict``.
        whole: whether ``state`` has whole tensors instead of ``DTensor``.
    """
    without = [each for name, each in module.named_parameters() if name not in state["state"]]
    options = StateDictOptions(full_state_dict=whole and bool(state["state"]), strict=False)
    set_optimizer_state_dict(module, optimizer, state, options=options)
    for each in without:  # torch initializes the state of all parameters first
        optimizer.state.pop(each, None)


@contextmanager
def reading(directory: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Turns errors in this context into an `AutotpError`, which names the directory and what could not be read from it.

    Raises:
        AutotpError: a file is missing or damaged.
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
        AutotpError: the file is missing or damaged.
    """
    with reading(file, "states of torch's generators"):
        state = torch.load(file, weights_only=True)
    RandomState().load_state_dict(state)


def _inner(optimizer: Optimizer) -> Optimizer:
    return getattr(optimizer, "optimizer", optimizer)
