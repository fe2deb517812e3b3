"""A collective in progress, and the local work on its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

__all__ = ["Pending"]


class Pending:
    """A collective in progress; ``wait`` returns the hosted devices' results.

    Args:
        parts: the tensors that the collective fills, one per hosted device.
        work: torch's handle; None if nothing is in progress.
        sent: tensors that must stay alive until the collective ends.
    """

    def __init__(self, parts: Iterable[Tensor], work: Any = None, sent: Any = None) -> None:
        self._parts, self._work, self._sent = list(parts), work, sent
        self._then: list[Callable[[list[Tensor]], list[Tensor]]] = []

    def then(self, function: Callable[[list[Tensor]], list[Tensor]]) -> Pending:
        """Adds local work on the results, which ``wait`` runs; returns this object."""
        self._then.append(function)
        return self

    def whenever_done(self, call: Callable[[Any], Any]) -> None:
        """Calls a function when the collective is done; at once if nothing is in progress."""
        if self._work is None:
            call(None)
        else:
            self._work.get_future().add_done_callback(call)

    def wait(self) -> list[Tensor]:
        """Waits for the collective, and returns the results."""
        if self._work is not None:
            self._arrive(self._work)
        for function in self._then:
            self._parts = function(self._parts)
        self._work, self._sent, self._then = None, None, []
        return self._parts

    def _arrive(self, work: Any) -> None:
        work.wait()
