"""State for ``torch.distributed.checkpoint``: each rank's parts, as a checkpoint can hold them."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from autotp.runtime.state import distribute

__all__ = ["redistribute", "storable"]

T = TypeVar("T")


def storable(state: T) -> T:
    """The state with every tensor split, if at all, in neighbouring rows or columns, as checkpoints hold them.

    A plan may split the blocks of a dim instead, as with a fused query-key-value weight, of which each device has whole
    heads: ``torch.distributed.checkpoint`` mistakes such parts for overlapping ones. Along those mesh axes the tensor is
    gathered, a collective call; all others stay as they are, and nothing is copied. To load, pass the result to ``load``
    then to ``set_state_dict``, whatever plan wrote the checkpoint, and the optimizer to ``redistribute``.

    Args:
        state: of a model or an optimizer, such as ``torch.distributed.checkpoint.state_dict.get_state_dict`` returns.
    """

    def change(value: Any) -> Any:
        if not isinstance(value, DTensor) or all(type(p) in (Shard, Replicate) for p in value.placements):
            return value
        return value.redistribute(placements=[p if type(p) is Shard else Replicate() for p in value.placements])

    return tree_map(change, state)


def redistribute(optimizer: Optimizer) -> None:
    """Brings an optimizer's state into the layouts of its parameters; a collective call, to be made after loading.

    State that was loaded through ``storable`` lies whole where its parameter is split block by block, and fused optimizers
    would update a copy of it.

    Args:
        optimizer: of a distributed module's parameters.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, DTensor) and isinstance(parameter, DTensor) and value.placements != parameter.placements:
                state[name] = distribute(value.full_tensor(), parameter.placements, parameter.device_mesh)
