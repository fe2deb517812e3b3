"""The gradients that a backward pass holds, several of which may share memory.

The gradient of the operand of a view or of a sum uses the memory of the result's gradient. A second gradient of the same
tensor is added to the first one, in its memory if no other gradient uses that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

__all__ = ["Gradients"]


class _Memory:
    __slots__ = ("size", "users")

    def __init__(self, size: float) -> None:
        self.size, self.users = size, 0


class Gradients:
    """The gradients held, by slot. A slot is that of a tensor's gradient, or of its part from some of its consumers.

    Args:
        reach: called with the bytes that are held temporarily in addition to ``total``.

    Attributes:
        total: bytes held.
    """

    def __init__(self, reach: Callable[[float], None]) -> None:
        self.reach, self.total = reach, 0.0
        self.held: dict[Hashable, _Memory] = {}

    def __contains__(self, slot: Hashable) -> bool:
        return slot in self.held

    def items(self) -> Iterator[tuple[Hashable, float]]:
        """(Slot, bytes) of the gradients held; memory that several share is listed once."""
        seen: set[int] = set()
        for slot, memory in self.held.items():
            if id(memory) not in seen:
                seen.add(id(memory))
                yield slot, memory.size

    def arrive(self, slot: Hashable, size: float, source: Hashable | None = None) -> None:
        """Add a gradient of ``size`` bytes to a slot; if ``source`` is given, it shares the memory of that slot."""
        memory = _Memory(size) if source is None else self.held[source]
        self._use(memory)
        there = self.held.get(slot)
        if there is None:
            self.held[slot] = memory
            return
        if there.users > 1:  # shared with other gradients: the sum needs memory of its own
            result = _Memory(there.size)
            self._use(result)
            self.held[slot] = result
            self._leave(there)
        self._leave(memory)

    def move(self, slot: Hashable, target: Hashable, size: float, passing: float = 0.0, *, in_place: bool = False) -> None:
        """Move a gradient to another slot, as ``size`` bytes, with ``passing`` temporary bytes. ``in_place``: it may reuse
        its memory, unless that is shared.
        """
        if in_place and self.held[slot].users == 1:
            self.hand_on(slot, target)
            return
        self.reach(size + passing)
        self.arrive(target, size)
        self.fall(slot)

    def hand_on(self, slot: Hashable, target: Hashable) -> None:
        """Move a gradient to another slot, with its memory."""
        self.arrive(target, self.held[slot].size, slot)
        self.fall(slot)

    def fall(self, slot: Hashable) -> None:
        """Release the gradient of a slot, if there is one."""
        memory = self.held.pop(slot, None)
        if memory is not None:
            self._leave(memory)

    def _use(self, memory: _Memory) -> None:
        if not memory.users:
            self.total += memory.size
        memory.users += 1
        self.reach(0.0)

    def _leave(self, memory: _Memory) -> None:
        memory.users -= 1
        if not memory.users:
            self.total -= memory.size
