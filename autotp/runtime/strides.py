"""Keeps the values of scheduled graphs in the strides with which they were traced.

A kernel's result may have other strides than its fake tensor: layer norm's gradient is contiguous, whatever the strides of
its input. Copies that tracing omitted as redundant are then missing, and some kernels assume that their operands are
contiguous. The first run checks every value, and inserts a copy where strides differ.

Also compares the strides of a call's inputs, which may determine what a model copies and draws (see ``Written``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autotp.runtime.interpreter import Interpreter, named
from passes.capture import Captured
from passes.torch_internals import is_profiling

__all__ = ["Arranged", "arranged", "as_traced", "laid_as", "lying", "order_of"]

_log = logging.getLogger("autotp.schedule")


def as_traced(node: fx.Node, value: Any) -> Any:
    """Returns a node's value, copied if its strides differ from those of the node's fake tensor."""
    traced = node.meta.get("val")
    if not (isinstance(value, Tensor) and isinstance(traced, Tensor)):
        return value
    return value if value.shape != traced.shape else arranged(value, traced.stride())


def arranged(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Returns the tensor with the given strides: itself if it has them (except in dims of size 1), else a copy."""
    if tensor.stride() == strides or tensor.numel() == 0:
        return tensor
    longer = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    if all(tensor.stride(dim) == strides[dim] for dim in longer):
        return tensor
    return laid_like(tensor, strides)


def laid_like(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Returns a copy of a tensor with the given strides."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def laid_as(tensor: Tensor, example: Tensor) -> Tensor:
    """Returns the tensor with its dims in an example's memory order: itself if they are, else a copy. Sizes may differ."""
    if tensor.stride() == example.stride() or tensor.dim() != example.dim():
        return tensor
    order = order_of(example)
    if order[:1] == (-1,) or order_of(tensor) == order:
        return tensor
    strides, step = [0] * tensor.dim(), 1
    for dim in sorted(reversed(range(tensor.dim())), key=example.stride):
        strides[dim], step = step, step * tensor.shape[dim]
    return arranged(tensor, tuple(strides))


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """The memory order of the dims of size > 1, outermost first; if a tensor has gaps or overlaps, -1 and their strides."""
    dims = [d for d, size in enumerate(tensor.shape) if size > 1]
    if not torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
        return (-1, *(tensor.stride(d) for d in dims))
    return tuple(sorted(dims, key=tensor.stride, reverse=True))


def lying(inputs: Sequence[Tensor], known: Sequence[Captured], *, drawn: bool) -> tuple[tuple[int, ...], ...]:
    """The memory order of each input (see ``order_of``); empty if no known graph depends on it, or if it is the first's.

    With ``drawn``, graphs whose random numbers depend on it count, too.
    """
    if not any(each.written.strided or (drawn and each.written.drawn) for each in known):
        return ()
    found = tuple(map(order_of, inputs))
    return () if found == tuple(order_of(known[0].placeholders[name]) for name in known[0].inputs) else found


class Arranged:
    """Runs a scheduled graph. Takes a list of its inputs, which it clears.

    Attributes:
        module: the graph module; after the first run, with the copies that were missing.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._run: Callable[[list[Any]], Sequence[Any]] = self._first

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Runs the graph and returns its outputs; under a profiler, nodes run one by one, labelled with their modules."""
        if self._run is self.module and is_profiling():
            return Interpreter(self.module, named).boxed_run(inputs)
        return self._run(inputs)

    def _first(self, inputs: list[Any]) -> Sequence[Any]:
        otherwise: list[fx.Node] = []

        def look(node: fx.Node, run: Callable[[], Any]) -> Any:
            value = named(node, run)
            found = as_traced(node, value) if node.op == "call_function" else value
            if found is not value:
                otherwise.append(node)
            return found

        found = Interpreter(self.module, look).boxed_run(inputs)
        for node in otherwise:
            with self.module.graph.inserting_after(node):
                copy = self.module.graph.call_function(laid_like, (node, node.meta["val"].stride()))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy)
            copy.update_arg(0, node)
        if otherwise:
            _log.info("copied, to lie in memory as traced: %s", ", ".join(map(str, otherwise)))
            self.module.recompile()
        self._run = self.module
        return found
