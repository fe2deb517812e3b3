"""State for ``torch.distributed.checkpoint``: each rank's parts, as a checkpoint can hold them."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map

__all__ = ["storable"]

T = TypeVar("T")


def storable(state: T) -> T:
    """The state with every tensor split, if at all, in neighbouring rows or columns, as checkpoints hold them.

    A plan may split the blocks of a dim instead, as with a fused query-key-value weight, of which each device has whole
    heads: ``torch.distributed.checkpoint`` mistakes such parts for overlapping ones. Along those mesh axes the tensor is
    gathered, a collective call; all others stay as they are, and nothing is copied. To load, pass the result to ``load``
    then to ``set_state_dict``, whatever plan wrote the checkpoint.

    Args:
        state: of a model or an optimizer, such as ``torch.distributed.checkpoint.state_dict.get_state_dict`` returns.
    """

    def change(value: Any) -> Any:
        if not isinstance(value, DTensor) or all(type(p) in (Shard, Replicate) for p in value.placements):
            return value
        return value.redistribute(placements=[p if type(p) is Shard else Replicate() for p in value.placements])

    return tree_map(change, state)
