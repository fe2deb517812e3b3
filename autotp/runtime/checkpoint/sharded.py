"""Lets ``torch.distributed.checkpoint`` store tensors whose dims are sharded block by block, in several chunks per rank.

torch 2.13 assumes that a rank's part of a ``DTensor`` is one chunk, wherever it reads, writes or broadcasts one. The state
that optimizers derive from parameters, and the copies that asynchronous checkpoints make, are instances of ``DTensor``
itself, not of a subclass of ours: therefore, the methods of ``DTensor`` are replaced.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autotp.errors import AutotpError
from autotp.runtime.agreement import everywhere
from autotp.runtime.checkpoint.parts import parts_of, resting
from autotp.runtime.state import distribute
from costmodel.errors import require
from passes.layouts.codes import fits, restorable
from passes.layouts.layout import Layout, blocks_of
from passes.torch_internals import distribute_tensors, set_distribute_tensors

__all__ = ["checkpoint_blocks", "redistribute", "storable"]

T = TypeVar("T")
Parts = tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...]

_torch_chunks: Any = DTensor.__create_chunk_list__
_torch_items: Any = DTensor.__create_write_items__
_torch_values: Any = DTensor.__get_tensor_shard__


def checkpoint_blocks() -> None:
    """Lets torch save, load and broadcast ``DTensor`` whose dims are sharded block by block; others are not affected."""
    tensors: Any = DTensor
    tensors.__create_chunk_list__ = _chunks
    tensors.__create_write_items__ = _items
    tensors.__get_tensor_shard__ = _values
    set_distribute_tensors(_distribute_parts)


def storable(state: T) -> T:
    """Returns ``state`` unchanged; kept for programs written for versions whose checkpoints needed a conversion.

    Args:
        state: state dict of a model or an optimizer.
    """
    return state


def redistribute(optimizer: Optimizer) -> None:
    """Redistributes an optimizer's state to the layouts of its parameters, in place; a collective call.

    State that ``torch.distributed.checkpoint`` loads has these layouts already. State that was taken from an optimizer of
    another plan, and passed to this one unchanged, does not, and fused optimizers would update a copy of it.

    Args:
        optimizer: of a distributed module's parameters.

    Raises:
        AutotpError: on every rank, if it is no optimizer, or has plain tensors as the state of a ``DTensor`` parameter.
    """
    with everywhere("cannot redistribute"):
        require(optimizer, Optimizer, "the optimizer", "one of torch.optim, of a distributed module's parameters")
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(parameter, DTensor) and type(value) is Tensor and value.shape == parameter.shape != ():
                    raise AutotpError(
                        f"the optimizer's {name} of a parameter of {tuple(parameter.shape)} is a plain tensor, as a plain "
                        "model's optimizer saves it: load it by torch.distributed.checkpoint.state_dict."
                        "set_optimizer_state_dict with StateDictOptions(full_state_dict=True)"
                    )
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, DTensor) and isinstance(parameter, DTensor) and value.placements != parameter.placements:
                state[name] = distribute(value.full_tensor(), parameter.placements, parameter.device_mesh)


def _parts(tensor: Any) -> Parts:
    """This rank's chunks of a tensor sharded by blocks, as slices of its part and of the whole; empty for other tensors."""
    if tensor.device_mesh.get_coordinate() is None:
        return ()
    shape, layout, mesh, coordinates = resting(tensor)
    return _in_blocks(tuple(shape), layout, mesh, tuple(coordinates))


@lru_cache(maxsize=4096)
def _in_blocks(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...], coordinates: tuple[int, ...]) -> Parts:
    if all(blocks_of(placement) == 1 for placement in layout) or any(placement.is_partial() for placement in layout):
        return ()
    if not fits(shape, layout, mesh) or not restorable(layout, mesh):
        return ()
    return tuple(parts_of(shape, layout, mesh, coordinates))


def _chunks(tensor: DTensor) -> list[ChunkStorageMetadata]:
    found = [
        ChunkStorageMetadata(torch.Size(s.start for s in there), torch.Size(s.stop - s.start for s in there))
        for _, there in _parts(tensor)
    ]
    return found or _torch_chunks(tensor)


def _items(tensor: DTensor, name: str, same: DTensor) -> list[WriteItem]:
    items: list[WriteItem] = _torch_items(tensor, name, same)
    if not _parts(tensor):
        return items
    return [
        replace(
            items[0],
            index=MetadataIndex(name, chunk.offsets),
            tensor_data=replace(items[0].tensor_data, chunk=chunk),  # type: ignore[type-var]
        )
        for chunk in _chunks(tensor)
    ]


def _values(tensor: DTensor, index: MetadataIndex) -> Tensor:
    local: Tensor = _torch_values(tensor, index)
    parts = _parts(tensor)
    for here, there in parts:
        if index.offset == torch.Size(s.start for s in there):
            return local[here]
    if parts:
        raise ValueError(f"this rank has no chunk of {index.fqn} at {index.offset}")
    return local


def _distribute_parts(state: dict[str, Any], names: list[str], device: torch.device, group: Any = None) -> None:
    """Copies this rank's parts of whole tensors; ``state`` has pairs of the tensor for the part and the whole tensor."""
    for name in names:
        pair = state.get(name)
        if isinstance(pair, tuple) and not pair[0].is_meta:  # torch replaces those on meta
            for here, there in _parts(pair[0]):
                pair[0].to_local()[here].copy_(pair[1][there])
                state[name] = pair[0]
    distribute_tensors(state, names, device, group)
