"""Tensors that share no memory: what changes one of several in place must leave the others as they are."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Disjoint"]


class Disjoint:
    """Memory that tensors have taken.

    Several may lie in one storage, as those do that travelled together. Between a tensor's first and last element all
    counts as its own.

    Args:
        taken: tensors whose memory is nobody else's.
    """

    def __init__(self, taken: Iterable[Tensor] = ()) -> None:
        # Tensors may go meanwhile; while a weak reference is kept, no other storage is taken for theirs.
        self._spans: dict[StorageWeakRef, list[tuple[int, int]]] = defaultdict(list)
        for tensor in taken:
            self._take(tensor)

    def own(self, tensor: Tensor) -> Tensor:
        """The tensor, which takes its memory, or a copy of it where another has taken some."""
        return tensor if self._take(tensor) else tensor.clone()

    def _take(self, tensor: Tensor) -> bool:
        """Takes a tensor's memory, unless another has some of it."""
        if tensor.numel() == 0:
            return True
        first = tensor.storage_offset()
        last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        size = tensor.element_size()  # views may be of other dtypes
        span = int(first) * size, int(last + 1) * size
        spans = self._spans[StorageWeakRef(tensor.untyped_storage())]
        place = bisect.bisect_left(spans, span)
        if (place and spans[place - 1][1] > span[0]) or (place < len(spans) and spans[place][0] < span[1]):
            return False
        spans.insert(place, span)
        return True
