"""Casts and gathers parameters again for the backward pass, instead of keeping their gathered copies."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from passes.layouts.reshard import Step
from passes.torch_internals import version
from passes.world.world import World

__all__ = ["Regather"]


class Regather:
    """Keeps gathered parameters out of autograd's saved tensors: the backward pass gathers them again.

    Used as a context around the forward pass. A saved tensor that shares its storage with a gathered parameter is
    replaced by a function that gathers it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._gathered: dict[int, tuple[weakref.ref, Tensor, tuple[Step, ...], str]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, operator.call)

    def register(self, gathered: Tensor, source: Tensor, steps: tuple[Step, ...], at: str = "") -> None:
        """Records that ``gathered`` was made from ``source`` by a cast and ``steps``, for the operator ``at``."""
        key = gathered.untyped_storage().data_ptr()
        self._gathered[key] = weakref.ref(gathered), source.detach(), steps, at

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        entry = self._gathered.get(tensor.untyped_storage().data_ptr())
        if entry is None or entry[0]() is None:
            # Detached: an operator that saves its own result would form a reference cycle with it, and never be freed.
            return functools.partial(_unchanged, tensor.detach(), version(tensor))
        _, source, steps, at = entry
        lies = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return functools.partial(self._gather, at, source, version(source), tensor.dtype, steps, lies)

    def _gather(
        self,
        at: str,
        source: Tensor,
        expected: int,
        dtype: torch.dtype,
        steps: tuple[Step, ...],
        lies: tuple[torch.Size, tuple[int, ...], int],
    ) -> Tensor:
        self._world.whereabouts.going_back(at)
        (gathered,) = self._world.run(steps, [_unchanged(source, expected).to(dtype)])
        return gathered.as_strided(*lies)

    def __enter__(self) -> Regather:
        self._world.regather = self
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._world.regather = None
        self._gathered.clear()


def _unchanged(tensor: Tensor, expected: int) -> Tensor:
    """A saved tensor, if it is at the expected version, which torch does not check for tensors saved by hooks."""
    if version(tensor) != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {version(tensor)}; expected version {expected}"
        )
    return tensor
