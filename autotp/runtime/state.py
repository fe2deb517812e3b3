"""A model's state as this device's parts: made from real tensors, or module by module from ``meta``, and read by a step."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.experimental import register_sharding

from autotp.errors import AutotpError, PlanMismatchError
from autotp.runtime.agreement import everywhere, told
from autotp.runtime.strides import arranged
from passes.layouts.layout import Layout, take
from passes.torch_internals import detect_fake_mode, dtensor_handlers, dtensor_of, held_elsewhere, local_tensor, version

__all__ = [
    "checksum",
    "distribute",
    "held_part",
    "local_part",
    "local_parts",
    "of_rank_0",
    "real_tensors",
    "set_into",
]


@register_sharding(torch.ops.aten._is_any_true.default)  # type: ignore[misc]
def _whole(_: Any) -> list[Any]:
    """The sharding of an operator that anomaly detection calls on gradients; torch 2.13 has no rule for it."""
    return [([Replicate()], [Replicate()])]


def _check_and_unscale(operator: Any, args: Any, _: Any) -> None:
    """Unscales gradients for ``GradScaler``, and tells all ranks whether one of them has found an overflow.

    torch 2.13 asks only the ranks over which the first gradient is sharded.
    """
    gradients, found, _ = args
    operator([local_tensor(each) if isinstance(each, DTensor) else each for each in gradients], *args[1:])
    for mesh in dict.fromkeys(each.device_mesh for each in gradients if isinstance(each, DTensor)):
        largest = DTensor.from_local(found, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()
        found.copy_(largest)


dtensor_handlers[torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default] = _check_and_unscale


@contextmanager
def real_tensors() -> Iterator[None]:
    """In this context, new tensors are real and may require gradients, whatever default device and inference mode are."""
    with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext(), torch.inference_mode(False):
        yield


def distribute(tensor: Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """Returns a whole tensor as a ``DTensor``, which holds a copy of this device's part only."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    part = take(tensor.detach(), layout, tuple(mesh.shape), coordinate)
    local = part.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    stride = torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, layout, run_check=False, shape=tensor.shape, stride=stride)


def set_into(held: Tensor | None, value: Any, path: str) -> Any:
    """Copies an assigned tensor into the existing buffer, and returns the buffer, which stays in its place.

    Calls write into buffers; the assigned tensor must stay unchanged, as with a model that sets its buffer to a new tensor.

    Args:
        held: the buffer, if there is one.
        value: a whole tensor or a ``DTensor``; any other value is returned, for torch to handle.
        path: the buffer's name, for messages.

    Raises:
        AutotpError: the value's shape or dtype is not the buffer's, for which graphs were made.
    """
    if held is None or value is held or not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return value
    if (value.shape, value.dtype) != (held.shape, held.dtype):
        raise AutotpError(
            f"{path}: graphs were made for {held.dtype} of shape {tuple(held.shape)}, and this is {value.dtype} of shape "
            f"{tuple(value.shape)}: distribute the model with that"
        )
    with torch.no_grad():
        if isinstance(held, DTensor):
            value = value if isinstance(value, DTensor) else distribute(value, held.placements, held.device_mesh)
        held.copy_(value.full_tensor() if isinstance(value, DTensor) and not isinstance(held, DTensor) else value)
    return held


def _state_of(
    model: nn.Module, initialise: Callable[[nn.Module], None] | None, seed: int, problems: list[Exception]
) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter and buffer (name, whole value), one module at a time.

    If a module's own state is on ``meta``, a copy of that module alone is initialised by ``initialise`` (by default, a
    Hugging Face model's ``_init_weights``, or the module's ``reset_parameters``), and dropped before the next module.
    An error there is added to ``problems``, and nothing else is initialised: other ranks wait for the tensors.
    """
    for position, (path, module) in enumerate(model.named_modules()):
        own = {**_own(module._parameters), **_own(module._buffers)}
        if any(tensor.is_meta for tensor in own.values()):
            try:
                own = own if problems else _filled(model, module, path, initialise, seed + position)
            except Exception as error:  # noqa: BLE001 - from the user's function
                problems.append(error)
            if problems:
                own = {name: _unset(tensor) for name, tensor in own.items()}
        for name, tensor in own.items():
            yield (f"{path}.{name}" if path else name), tensor


def of_rank_0(
    model: nn.Module,
    initialise: Callable[[nn.Module], None] | None,
    seed: int,
    device: torch.device,
    without: Collection[str] = (),
    *,
    broadcast: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's parameters and buffers (name, whole value), the same on all ranks.

    Args:
        model: the same on every rank, except for its values.
        initialise, seed: initialise modules on ``meta`` (see ``autotp.parallelize``); ``initialise`` may be None.
        device: the device of this rank, to which rank 0's values are broadcast.
        without: names to leave out.
        broadcast: whether all ranks take rank 0's values; otherwise, all must have the same, which is checked.

    Raises:
        AutotpError: on every rank, if one fails to initialise a module on ``meta``, or nothing initialises it.
        PlanMismatchError: on every rank, if values differ; names the ranks and the tensor.
    """
    ranks, sums, problems = dist.get_world_size(), dict[str, int](), list[Exception]()
    for name, tensor in _state_of(model, initialise, seed, problems):
        if name in without:
            continue
        value = tensor.detach()
        if broadcast and ranks > 1:
            value = value.to(device, copy=True, memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
            with told(f"sending {name} from rank 0"):
                dist.broadcast(_bytes(value), src=0)
        elif ranks > 1:
            sums[name] = checksum(value)
        yield name, value
    with everywhere("cannot initialise the model"):
        if problems:
            raise problems[0]
    every: list[dict[str, int]] = [sums] * ranks
    if sums:
        dist.all_gather_object(every, sums)
    for rank, other in enumerate(every):
        if different := [name for name in sums if other[name] != every[0][name]]:
            raise PlanMismatchError(
                f"{different[0]} has other values on rank {rank} than on rank 0 ({len(different)} of {len(sums)} "
                "parameters and buffers differ): give all ranks the same weights, by one seed or one checkpoint, or leave "
                "broadcast=True to take rank 0's"
            )


def require_parts(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    """A module's ``load_state_dict`` pre-hook, which rejects plain tensors for parameters that are ``DTensor``s.

    Plain tensors without dims are copied, as `torch.distributed.checkpoint.state_dict` leaves them plain.

    Args:
        module: a distributed module, or one of its submodules.
        state_dict: the state dict to load, in which names begin with ``prefix``.
        local_metadata: torch's metadata, which says whether loaded tensors replace the parameters.

    Raises:
        AutotpError: there are such tensors, or ``DTensor``s on another mesh.
    """
    own = {prefix + name: each for name, each in module.named_parameters(remove_duplicate=False)}
    least = 0 if local_metadata.get("assign_to_params_buffers") else 1
    given = {name: state_dict[name] for name in own if type(state_dict.get(name)) in (Tensor, nn.Parameter)}
    plain = [name for name, tensor in given.items() if tensor.dim() >= least]
    meshes = {name: each.device_mesh for name, each in own.items() if isinstance(each, DTensor)}
    for name, mesh in meshes.items():
        if isinstance(other := state_dict.get(name), DTensor) and other.device_mesh != mesh and least:
            raise AutotpError(
                f"the state dict's {name} lies on {other.device_mesh}, and the module's on {mesh}: load it by "
                "torch.distributed.checkpoint, or whole, from torch.distributed.checkpoint.state_dict.get_model_state_dict "
                "with StateDictOptions(full_state_dict=True)"
            )
    if plain:
        raise AutotpError(
            f"the state dict has a plain tensor for {plain[0]}, a DTensor here: whole ones are loaded by "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict with StateDictOptions(full_state_dict=True)"
        )


def checksum(tensor: Tensor) -> int:
    """The CRC-32 checksum of a tensor's values: almost certainly different if values differ.

    Raises:
        AutotpError: the tensor is fake, and has no values.
    """
    if detect_fake_mode((tensor,)) is not None:
        raise AutotpError("processes cannot exchange fake tensors: call what autotp.simulate returns in a FakeTensorMode")
    return zlib.crc32(_bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()).numpy().data)


def _bytes(tensor: Tensor) -> Tensor:
    # a contiguous tensor may have any stride in dims of size 1, which view(-1) keeps if there are no other dims
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


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
    """A real tensor of the same shape and dtype: NaN marks elements that are not set; zeros if it is not floating-point."""
    if tensor.is_floating_point():
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def held_part(buffer: Tensor) -> Tensor:
    """This device's part of a buffer: the buffer itself, unless it is a ``DTensor``."""
    return local_tensor(buffer) if isinstance(buffer, DTensor) else buffer


def local_part(parameter: Tensor, name: str) -> Tensor:
    """This device's part of a parameter; its gradient flows to the parameter, as a ``DTensor``."""
    return _LocalParts.apply((name,), False, parameter)[0]


def local_parts(names: Sequence[str], parameters: Sequence[Any]) -> tuple[Tensor, ...]:
    """Returns ``local_part`` of all parameters of a step at once.

    The gradients of the parts must share no memory (see `autotp.runtime.compiled.Disjoint`).

    Args:
        names: names of the parameters, for messages.
        parameters: the module's parameters.
    """
    return _LocalParts.apply(tuple(names), True, *parameters)


class _LocalParts(torch.autograd.Function):
    """This device's parts of several parameters: one call per step, where ``to_local`` takes one per parameter.

    Scheduled graphs give every part a gradient with its own memory (``disjoint``); autograd may give several the same.
    """

    @staticmethod
    def forward(ctx: Any, names: tuple[str, ...], disjoint: bool, *parameters: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.names, ctx.disjoint, ctx.parameters = names, disjoint, parameters
        ctx.versions = [version(parameter) for parameter in parameters]
        ctx.set_materialize_grads(False)
        return tuple(local_tensor(parameter).view_as(local_tensor(parameter)) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        # A DTensor's in-place operators do not increase the version of its local tensor, so compare the DTensor's.
        now = [version(parameter) for parameter in ctx.parameters]
        changed = [name for name, was, is_ in zip(ctx.names, ctx.versions, now, strict=True) if was != is_]
        if changed:
            shown = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
            raise AutotpError(
                f"parameters were changed in place between the forward pass and its backward pass: {shown}; gradients "
                "computed from them would match neither the old nor the new values"
            )
        pairs = zip(gradients, ctx.parameters, strict=True)
        if torch.is_grad_enabled():
            return None, None, *(g if g is None else _differentiable(g, parameter) for g, parameter in pairs)
        return None, None, *(g if g is None else _plain(g if ctx.disjoint else _unshared(g), p) for g, p in pairs)


def _unshared(gradient: Tensor) -> Tensor:
    """Returns the gradient, or a copy if anyone else holds it or a view of it, as torch does for plain parameters.

    torch cannot detect that for a part's gradient, which is wrapped in a new ``DTensor``.
    """
    return gradient.clone() if held_elsewhere(gradient) else gradient


def _plain(part: Tensor, parameter: Any) -> DTensor:
    part = arranged(part, local_tensor(parameter).stride())
    return dtensor_of(part, parameter)


def _differentiable(part: Tensor, parameter: Any) -> DTensor:
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
