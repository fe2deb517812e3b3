"""Which tensors can be inputs and state of a captured model, and where they lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.masked import MaskedTensor

from costmodel.errors import AutotpError
from passes.torch_internals import FakeTensor

__all__ = ["as_it_lies", "overlap", "overlaps_itself", "reach", "require_dense", "require_memory"]

_COUNTED = 2**22  # most elements in memory for which `overlap` is exact


def require_dense(tensor: Tensor, what: str) -> None:
    """Refuses sparse, nested and masked tensors; ``what`` begins the message."""
    if tensor.layout is not torch.strided or tensor.is_nested or isinstance(tensor, MaskedTensor):
        kind = "nested" if tensor.is_nested else "masked" if isinstance(tensor, MaskedTensor) else "sparse"
        layout = f", with layout {tensor.layout}" if kind == "sparse" else ""
        raise AutotpError(
            f"{what} a {kind} tensor{layout}; graphs are planned for dense ones: pass its parts, such as indices and values"
        )


def require_memory(tensors: Mapping[str, Tensor]) -> None:
    """Refuses plain tensors whose storages are too small for their elements: kernels would read past them.

    Args:
        tensors: name, for the message -> tensor.
    """
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
            continue
        with suppress(NotImplementedError):  # a tensor within torch.vmap has no storage
            end = (tensor.storage_offset() + _span(tensor)) * tensor.element_size()
            if tensor.untyped_storage().nbytes() < end:
                raise AutotpError(
                    f"the memory of {name} was freed (untyped_storage().resize_(0)), as FSDP frees that of parameters: "
                    "give it memory and values again, or use the model before it is wrapped"
                )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory; for large ones, or different element sizes, whether they may."""
    (begin, end), (first, last) = reach(one), reach(other)
    if one.device != other.device or begin >= last or first >= end:
        return False
    size, start = one.element_size(), min(begin, first)
    elements = (max(end, last) - start) // size
    if other.element_size() != size or (begin - first) % size or elements > _COUNTED:
        return True
    taken = torch.zeros(elements, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), (begin - start) // size).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), (first - start) // size).any())


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements share memory as those of overlapping windows (``unfold``) do.

    Torch's kernels recognise expanded tensors, with a stride of 0, and copy them before they write; these they do not.
    """
    span, dims = 1, zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size > 1):
        if stride < span:
            return stride > 0
        span += (size - 1) * stride
    return False


def _span(tensor: Tensor) -> int:
    """The number of elements from a tensor's first one in memory to its last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def reach(tensor: Tensor) -> tuple[int, int]:
    """The address range of a tensor: of its first byte, and one past its last; (0, 0) if it has no memory."""
    with suppress(NotImplementedError):  # a tensor within torch.vmap has none
        held = tensor.layout is torch.strided and tensor.numel() and tensor.untyped_storage().size()
        if held and not (tensor.is_meta or isinstance(tensor, FakeTensor)):
            return tensor.data_ptr(), tensor.data_ptr() + _span(tensor) * tensor.element_size()
    return 0, 0


def as_it_lies(tensor: Tensor) -> Tensor:
    """A copy with the same strides, including 0: they determine what ``contiguous`` and ``reshape`` copy.

    Raises:
        AutotpError: torch cannot copy tensors of this kind.
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return tensor.clone()
    try:
        memory = tensor.as_strided((_span(tensor),), (1,), tensor.storage_offset()).clone()
    except (NotImplementedError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise AutotpError(
            f"a call has a {type(tensor).__name__} of {tensor.dtype}, which torch cannot copy ({reason}): pass another"
        ) from error
    return memory.as_strided(tensor.shape, tensor.stride())
