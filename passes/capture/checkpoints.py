"""Marks the operators that a model's ``torch.utils.checkpoint`` recomputes in the backward pass.

``torch.export`` traces a checkpointed function like any other, without a record of it. While a model is captured, `marked`
puts the number of the checkpointed call on every node that is traced inside one, and `checkpoint_of` reads it when the
node's note is made. In models that were exported before, a checkpoint is an operator with a graph of its own; it is called
as the function that it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from passes.graph import Checkpoint
from passes.torch_internals import (
    CachingTorchDispatchMode,
    CheckpointFrame,
    TagActivationCheckpoint,
    checkpoint_hook,
    context_of,
)

__all__ = ["Regions", "checkpoint_of", "marked"]

_KEY = "checkpoint"  # in torch's ``node.meta["custom"]``, which export propagates
_SAVED = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class _Begun(NamedTuple):
    """A call of a checkpointed function that is being traced: its number, the graph, and the node before it."""

    number: int
    graph: fx.Graph | None
    last: fx.Node | None


class Regions:
    """Tracks the calls of checkpointed functions in one capture, and marks the nodes that are traced in them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: list[_Begun] = []

    def begin(self) -> None:
        """Opens the call of a checkpointed function."""
        mode = get_proxy_mode()
        graph = mode.tracer.graph if mode is not None else None
        self._open.append(_Begun(next(self._numbers), graph, _last(graph)))

    def reentrant(self, run: Callable, given: Sequence[Any]) -> Any:
        """Runs a reentrant checkpoint; as in torch, gradients are enabled only if an argument tensor requires one."""
        self.begin()
        try:
            with torch.set_grad_enabled(any(isinstance(one, Tensor) and one.requires_grad for one in given)):
                return run(*given)
        finally:
            self.end()

    def end(self) -> None:
        """Closes the call that was opened last, and marks all nodes that were traced since then."""
        begun = self._open.pop()
        node = _last(begun.graph)
        while node is not None and node is not begun.last and node.op != "root":
            _mark(node, Checkpoint(begun.number, checkpoint_of(node).kept))
            node = node.prev

    def asks(self, policy: Callable) -> Callable:
        """Wraps the policy of a selective checkpoint, so that operators whose results it saves are marked as kept."""

        def asked(context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            answer = policy(context, function, *args, **kwargs)
            node = _last(self._open[-1].graph) if self._open else None
            if node is not None and answer in _SAVED:
                _mark(node, Checkpoint(self._open[-1].number, kept=True))
            return answer

        return asked


def _last(graph: fx.Graph | None) -> fx.Node | None:
    return None if graph is None else next(reversed(graph.nodes), None)


def _mark(node: fx.Node, found: Checkpoint) -> None:
    node.meta["custom"] = {**node.meta.get("custom", {}), _KEY: found}


def checkpoint_of(node: fx.Node) -> Checkpoint:
    """The checkpointed call in which an exported node was traced; number 0 if none."""
    return (node.meta.get("custom") or {}).get(_KEY, Checkpoint())


@contextmanager
def marked() -> Iterator[Regions]:
    """Context manager that marks nodes traced in checkpointed functions; reentrant checkpoints call `Regions.reentrant`."""
    regions = Regions()
    hook, frame, caching = checkpoint_hook, CheckpointFrame, CachingTorchDispatchMode
    made, saves, tagged = caching.__init__, getattr(frame, "save_inputs", None), TagActivationCheckpoint.__call__

    def asking(self: Any, policy: Callable, *args: Any, **kwargs: Any) -> None:
        made(self, regions.asks(policy), *args, **kwargs)

    def run(self: Any, function: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=context_of(function))

    # All non-reentrant checkpoints enter this hook, wherever a model imported ``checkpoint`` from. Nothing is saved for the
    # backward pass: torch's hooks would, and those of an outer checkpoint make export take the inner one for no_grad.
    hook.__enter__ = lambda self: regions.begin()  # type: ignore[method-assign]
    hook.__exit__ = lambda self, *error: regions.end()  # type: ignore[method-assign]
    if saves is not None:  # torch 2.12 and later
        frame.save_inputs = lambda self, *args: None  # type: ignore[method-assign]
    caching.__init__ = asking  # type: ignore[method-assign, assignment]
    TagActivationCheckpoint.__call__ = run  # type: ignore[method-assign, assignment]
    try:
        yield regions
    finally:
        del hook.__enter__, hook.__exit__
        if saves is not None:
            frame.save_inputs = saves  # type: ignore[method-assign]
        caching.__init__ = made  # type: ignore[method-assign]
        TagActivationCheckpoint.__call__ = tagged  # type: ignore[method-assign]
