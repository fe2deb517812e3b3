"""Outputs that other outputs are made of.

A model's hidden states are on the way to its loss: a hook on one, or ``retain_grad``, sees everything that flows through
it. The outputs of a distributed module lie side by side, each made whole by itself, so what flows from one output into
another is not seen there. Asking for it is an error, rather than a wrong number.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autotp.errors import AutotpError
from passes.graph import above, stays

__all__ = ["guard", "made_of"]

_aten = torch.ops.aten
_DETACHED = frozenset({_aten.detach.default, _aten.detach_.default, _aten.detach_copy.default})


def made_of(graph: fx.Graph, count: int, *, shown: bool = False) -> dict[int, frozenset[int]]:
    """Number of an output -> the numbers of other outputs that are made of it, and hand gradients on to it.

    Args:
        graph: a captured or sharded graph.
        count: how many of its outputs are returned.
        shown: whether an output that stays sharded counts as the tensor that it shows. Nothing is computed from itself.
    """
    leaves: Any = graph.output_node().args[0]
    sources = [leaf.args[0] if shown and stays(leaf) else leaf for leaf in leaves[:count]]
    nodes = [(i, leaf) for i, leaf in enumerate(sources) if isinstance(leaf, fx.Node)]
    reached = {i: above([leaf], _DETACHED) for i, leaf in nodes}
    found = {i: frozenset(j for j, _ in nodes if j != i and leaf in reached[j]) for i, leaf in nodes}
    return {i: others for i, others in found.items() if others}


def guard(outputs: Sequence[Any], others: Mapping[int, frozenset[int]], said: Callable[[int], str]) -> None:
    """Lets the backward pass check whether the user reads the gradient of an output from which others are computed.

    Args:
        outputs: of a call, flat.
        others: as ``made_of`` gives it.
        said: number of an output -> what it is.

    Raises:
        AutotpError: in the backward pass.
    """
    watched: dict[Any, list[tuple[int, int, int, weakref.ref[Tensor]]]] = defaultdict(list)
    for i, dependents in others.items():
        for j in dependents:
            if all(isinstance(outputs[k], Tensor) and outputs[k].grad_fn is not None for k in (i, j)):
                watched[outputs[j].grad_fn].append((outputs[j].output_nr, i, j, weakref.ref(outputs[i])))
    for node, entries in watched.items():
        node.register_prehook(_looking(entries, said))


def _looking(
    entries: Sequence[tuple[int, int, int, weakref.ref[Tensor]]], said: Callable[[int], str]
) -> Callable[[Sequence[Tensor | None]], None]:
    def look(gradients: Sequence[Tensor | None]) -> None:
        for place, i, j, reference in entries:
            output = reference()
            if output is not None and gradients[place] is not None and (output._backward_hooks or output.retains_grad):
                raise AutotpError(
                    f"{said(i)} has a hook or retains its gradient, and {said(j)} is computed from it inside the model: "
                    f"here, outputs are independent in autograd, so the gradient of {said(i)} would lack the part that "
                    f"comes from {said(j)}. Compute {said(j)} outside the model from {said(i)}, or remove the hook"
                )

    return look
