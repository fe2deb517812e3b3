"""The seeds of the passes that draw random numbers, the same on every device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from costmodel.errors import AutotpError

__all__ = ["Seeds"]

#: Passes whose seeds are known, for those that do them again: more than lie between a pass and its backward pass.
_REMEMBERED = 65536


class Seeds:
    """A sequence of seeds, one for each pass.

    Attributes:
        repeated: the seed of the pass that is being run again; None: every pass is a new one.
    """

    def __init__(self) -> None:
        self.repeated: int | None = None
        self._sequence = torch.Generator()
        self._given: dict[int, int | None] = {}
        self.start(torch.initial_seed())

    def start(self, seed: int) -> None:
        """Starts the sequence; every device must be given the same."""
        self._sequence.manual_seed(seed % 2**63)

    @property
    def state(self) -> torch.Tensor:
        """Where the sequence stands, the same on every device; setting it continues from there."""
        return self._sequence.get_state()

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        self._sequence.set_state(state)

    def next(self) -> int:
        """The next seed, the same on every device.

        A pass within a backward pass does again what one did before (``torch.utils.checkpoint``), and is given the seed of
        that: the one that began where the program's own generator, whose state checkpoints restore, stands now.
        """
        if self.repeated is not None:
            return self.repeated
        place = int(torch.randint(2**62, (), device="cpu"))
        if torch._C._current_graph_task_id() != -1 and place in self._given:
            if (before := self._given[place]) is None:
                raise AutotpError(
                    "a checkpoint does a forward pass again, but several began at the same state of torch's generator, and "
                    "each dropped something else: do not seed it anew between them"
                )
            return before
        seed = int(torch.randint(2**62, (), generator=self._sequence))
        self._given[place] = None if place in self._given else seed
        if len(self._given) > _REMEMBERED:
            del self._given[next(iter(self._given))]
        return seed

    @contextmanager
    def repeating(self, seed: int) -> Iterator[None]:
        """A pass that was run before is run again, with its seed; the sequence does not go on."""
        before, self.repeated = self.repeated, seed
        try:
            yield
        finally:
            self.repeated = before
