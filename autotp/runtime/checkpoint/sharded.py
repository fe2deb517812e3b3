"""``torch.distributed.checkpoint`` and tensors whose dims are split block by block, of which a rank has several chunks.

torch 2.13 takes what a rank has of a ``DTensor`` for one chunk, wherever it reads, writes or broadcasts one. Optimizers
make state of parameters, and asynchronous checkpoints copies of it, all of them ``DTensor`` itself and not a class of
ours: so it is its methods that learn about blocks.
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
    """Lets torch save, load and broadcast every ``DTensor`` whose dims are split block by block; no other changes."""
    tensors: Any = DTensor
    tensors.__create_chunk_list__ = _chunks
    tensors.__create_write_items__ = _items
    tensors.__get_tensor_shard__ = _values
    set_distribute_tensors(_distribute_parts)


def storable(state: T) -> T:
    """The state itself. Checkpoints hold every state as it is; this is for programs that were written when they did not.

    Args:
        state: of a model or an optimizer.
    """
    return state


def redistribute(optimizer: Optimizer) -> None:
    """Brings an optimizer's state into the layouts of its parameters, where it has others; a collective call.

    What ``torch.distributed.checkpoint`` loads has them already. State that was taken from an optimizer of another plan and
    given to this one as it is does not, and fused optimizers would update a copy of it.

    Args:
        optimizer: of a distributed module's parameters.

    Raises:
        AutotpError: on every rank, when it is no optimizer, or has a plain model's state of a parameter that is divided.
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
    """What this rank has of a tensor in blocks, as slices of its part and of the whole tensor; none of another tensor."""
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
    """Takes each rank's parts of whole tensors; ``state`` has pairs of the tensor for the part and the whole one."""
    for name in names:
        pair = state.get(name)
        if isinstance(pair, tuple) and not pair[0].is_meta:  # torch makes others of those that are
            for here, there in _parts(pair[0]):
                pair[0].to_local()[here].copy_(pair[1][there])
                state[name] = pair[0]
    distribute_tensors(state, names, device, group)
