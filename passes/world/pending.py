"""A collective that was begun, and what is done with its results once they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

__all__ = ["Pending"]


class Pending:
    """A collective under way: the hosted devices' results, to be had by ``wait``.

    Args:
        parts: the tensors that the collective fills, one per hosted device.
        work: torch's handle, None when nothing is under way.
        sent: tensors that must live until the end.
    """

    def __init__(self, parts: Iterable[Tensor], work: Any = None, sent: Any = None) -> None:
        self._parts, self._work, self._sent = list(parts), work, sent
        self._then: list[Callable[[list[Tensor]], list[Tensor]]] = []

    def then(self, function: Callable[[list[Tensor]], list[Tensor]]) -> Pending:
        """The same with local work on the results, done when they are waited for."""
        self._then.append(function)
        return self

    def whenever_done(self, call: Callable[[Any], Any]) -> None:
        """Calls a function when the collective is done: at once when nothing is under way."""
        if self._work is None:
            call(None)
        else:
            self._work.get_future().add_done_callback(call)

    def wait(self) -> list[Tensor]:
        """The results, when they are there."""
        if self._work is not None:
            self._arrive(self._work)
        for function in self._then:
            self._parts = function(self._parts)
        self._work, self._sent, self._then = None, None, []
        return self._parts

    def _arrive(self, work: Any) -> None:
        work.wait()
