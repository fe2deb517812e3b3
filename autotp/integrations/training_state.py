"""What a training run keeps besides weights: the optimizer's state, and where random numbers stand."""

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


def save_optimizer(module: nn.Module, optimizer: Optimizer, directory: str | os.PathLike[str]) -> None:
    """Writes an optimizer's state with ``torch.distributed.checkpoint``; a collective call.

    Args:
        module: whose parameters it steps.
        optimizer: torch's own, or one that has it as ``optimizer``, as accelerate's has.
        directory: of the checkpoint.
    """
    dcp.save({"optimizer": optimizer_state(module, _inner(optimizer))}, checkpoint_id=directory)


def optimizer_state(module: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None) -> dict[str, Any]:
    """An optimizer's state by parameters' names; before its first step, it is empty, as that of torch's optimizers.

    Args:
        module: whose parameters it steps.
        optimizer: torch's own.
        options: of torch's ``get_optimizer_state_dict``, which would make a step, and count it.
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
    """Sets an optimizer's state to that in a checkpoint, whatever plan wrote it; a collective call.

    What others added to the optimizer's groups, as schedulers add ``initial_lr``, stays if the checkpoint does not have it.
    Parameters of which it has no state, as they never had a gradient, have none afterwards.

    Args:
        module, optimizer: as there.
        directory: what ``save_optimizer`` wrote.
        name: of the state in the checkpoint.

    Raises:
        AutotpError: there is no whole checkpoint of it; or it has the state of a parameter that this optimizer has stepped
            without.
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
    """Sets an optimizer's state by parameters' names; a parameter that has none there has none then.

    Args:
        module: whose parameters it steps.
        optimizer: torch's own.
        state: as torch's ``get_optimizer_state_dict`` gives it.
        whole: whether it has whole tensors.
    """
    without = [each for name, each in module.named_parameters() if name not in state["state"]]
    options = StateDictOptions(full_state_dict=whole and bool(state["state"]), strict=False)
    set_optimizer_state_dict(module, optimizer, state, options=options)
    for each in without:  # torch makes states for all before it sets them
        optimizer.state.pop(each, None)


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
    with reading(file, "states of torch's generators"):
        state = torch.load(file, weights_only=True)
    RandomState().load_state_dict(state)


def _inner(optimizer: Optimizer) -> Optimizer:
    return getattr(optimizer, "optimizer", optimizer)
