"""A model's state as this device's parts: from real tensors, or from ``meta`` one module at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autotp.errors import AutotpError
from passes.layouts.layout import Layout, take

__all__ = ["distribute", "state_of"]


def distribute(tensor: Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """A whole tensor as a ``DTensor`` that keeps this device's part alone."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    part = take(tensor.detach(), layout, tuple(mesh.shape), coordinate)
    local = part.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    stride = torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, layout, run_check=False, shape=tensor.shape, stride=stride)


def state_of(model: nn.Module, initialise: Callable[[nn.Module], None] | None, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer (name, whole value), one module at a time.

    A module whose own state is on ``meta`` is filled in by a copy of that module alone, initialised by ``initialise`` (by
    default a Hugging Face model's own, or the module's ``reset_parameters``); the copy is dropped before the next module.

    Raises:
        AutotpError: when nothing initialises a tensor that is on ``meta``.
    """
    for position, (path, module) in enumerate(model.named_modules()):
        own = {**_own(module._parameters), **_own(module._buffers)}
        if any(tensor.is_meta for tensor in own.values()):
            own = _filled(model, module, path, initialise, seed + position)
        for name, tensor in own.items():
            yield (f"{path}.{name}" if path else name), tensor


def _own(table: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in table.items() if tensor is not None}


def _filled(
    model: nn.Module, module: nn.Module, path: str, initialise: Callable[[nn.Module], None] | None, seed: int
) -> dict[str, Tensor]:
    alone = copy.copy(module)
    alone._modules = {}
    alone._parameters = {
        n: None if p is None else nn.Parameter(_unset(p), requires_grad=p.requires_grad)
        for n, p in module._parameters.items()
    }
    alone._buffers = {n: None if b is None else _unset(b) for n, b in module._buffers.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if initialise is not None:
            initialise(alone)
        elif callable(getattr(model, "_init_weights", None)):
            model._init_weights(alone)  # type: ignore[operator]
        elif callable(getattr(alone, "reset_parameters", None)):
            alone.reset_parameters()  # type: ignore[operator]
    filled = {**_own(alone._parameters), **_own(alone._buffers)}
    for name, tensor in filled.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            where = f"{path}.{name}" if path else name
            raise AutotpError(
                f"{where} is on meta and nothing initialises it: give the model real tensors, or pass "
                f"initialise=FUNCTION that fills in a {type(module).__name__}'s own parameters and buffers"
            )
    return filled


def _unset(tensor: Tensor) -> Tensor:
    """A real tensor of the same kind whose every element shows that it was not set."""
    if tensor.is_floating_point():
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
