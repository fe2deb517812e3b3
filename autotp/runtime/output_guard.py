"""Relations between outputs: views of other outputs, and outputs that are computed from others.

An output that is a view of another, or the same tensor, is recreated from that one, so that an in-place change of one
changes both. All other outputs are independent in autograd. A model's hidden states lie on the path to its loss, and a hook
or ``retain_grad`` on one sees the whole gradient. A distributed module gathers each output by itself, so a hook on one
misses the gradient that comes from outputs computed from it. Asking for it raises an error, rather than giving a wrong
number.
"""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from autotp.errors import AutotpError
from autotp.runtime.strides import laid_as
from passes.capture import Captured
from passes.graph import are_wrapped, made_of, stays
from passes.torch_internals import has_gradient_hooks, storage_id, tree_map

__all__ = ["Relations"]

#: Number of an output -> the number of the output that it is a view of, and the operators that make the view, in order.
Views = Mapping[int, tuple[int, tuple[fx.Node, ...]]]
#: Number of an output -> the numbers of the outputs that are computed from it.
Flows = Mapping[int, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Relations:
    """How the outputs of a graph depend on each other.

    Attributes:
        graph: the captured graph.
        views: the outputs that are views of others, or the same tensor as an earlier one.
        made_of: the outputs that are computed from others (see `made_of`), if the graph is scheduled.
        made_apart: the same if it is not scheduled: gradients then flow through outputs that need no gathering.
    """

    graph: fx.Graph
    views: Views
    made_of: Flows
    made_apart: Flows

    @classmethod
    def of(cls, captured: Captured, sharded: fx.Graph, rows: Collection[int], apart: Collection[int]) -> Relations:
        """Determines the relations of a graph's outputs.

        Args:
            captured: the captured graph.
            sharded: the sharded graph.
            rows: numbers of the outputs of which each rank returns its own rows.
            apart: numbers of the outputs that stay sharded.
        """
        graph, count = captured.graph_module.graph, captured.returned
        leaves: Any = graph.output_node().args[0]
        parts: Any = sharded.output_node().args[0]
        views = _views(graph, {*rows, *apart, *range(count, len(leaves))})
        through = {i: others for i, others in made_of(parts[:count]).items() if i not in rows}
        # An output that may stay sharded is an alias (see `stays`), and counts as the tensor that it aliases.
        flows = made_of([leaf.args[0] if stays(leaf) else leaf for leaf in leaves[:count]])
        flows = {
            i: frozenset(
                j
                for j in flows.get(i, frozenset()) | captured.flows.get(i, frozenset())
                if j not in views and views.get(i, (i,))[0] != j
            )
            for i in range(count)
        }
        return cls(graph, views, flows, {i: others - through.get(i, frozenset()) for i, others in flows.items()})

    def between(self, outputs: Sequence[Any], said: Callable[[int], str], *, scheduled: bool) -> list[Any]:
        """Returns a call's outputs, guarded (see `guard`): dims in memory as the model's are for the example inputs, and
        views recreated from the outputs that they are views of.

        Args:
            outputs: the graph's outputs, flat.
            said: number of an output -> its description, for messages.
            scheduled: whether a scheduled graph ran.
        """
        leaves: Any = self.graph.output_node().args[0]
        found = [
            laid_as(value, leaf.meta["val"]) if type(value) is Tensor and isinstance(leaf, fx.Node) else value
            for value, leaf in zip(outputs, leaves, strict=False)
        ]
        for i, (base, chain) in self.views.items():
            value = found[base]
            if value.stride() == leaves[base].meta["val"].stride():  # with other strides, a view may be a copy
                for node in chain:
                    args: Any = tree_map(lambda leaf, shown=value: shown if isinstance(leaf, fx.Node) else leaf, node.args)
                    value = node.target(*args, **node.kwargs)  # type: ignore[operator]
                found[i] = value
        guard(found, self.made_of if scheduled else self.made_apart, said)
        return found


def _views(graph: fx.Graph, apart: Collection[int]) -> Views:
    leaves: Any = graph.output_node().args[0]
    whole = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and i not in apart}
    first = {leaf: i for i, leaf in reversed(whole.items())}
    found = {}
    for i, node in whole.items():
        chain = list[fx.Node]()
        while True:
            if first.get(node, i) != i:
                found[i] = first[node], tuple(reversed(chain))
            if node.op != "call_function" or len(node.all_input_nodes) != 1 or not _aliases(node, *node.all_input_nodes):
                break
            chain.append(node)
            (node,) = node.all_input_nodes
    return found


def _aliases(node: fx.Node, source: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    made, of = (each.meta["val"] for each in (node, source))
    made = made[0] if isinstance(made, (list, tuple)) else made
    both = isinstance(made, Tensor) and isinstance(of, Tensor)
    return both and storage_id(made) == storage_id(of)


def guard(outputs: Sequence[Any], others: Flows, said: Callable[[int], str]) -> None:
    """Registers checks for the backward pass: gradients must not be batched by `torch.vmap`, and the user must not observe
    the gradient of an output from which others are computed.

    Args:
        outputs: the outputs of a call, flat.
        others: see ``made_of``.
        said: number of an output -> its description, for messages.

    Raises:
        AutotpError: in the backward pass, if a check fails.
    """
    watched: dict[Any, list[tuple[int, int, int, weakref.ref[Tensor]]]] = defaultdict(list)
    for i, dependents in others.items():
        for j in dependents:
            if all(isinstance(outputs[k], Tensor) and outputs[k].grad_fn is not None for k in (i, j)):
                watched[outputs[j].grad_fn].append((outputs[j].output_nr, i, j, weakref.ref(outputs[i])))
    for node in {each.grad_fn for each in outputs if isinstance(each, Tensor) and each.grad_fn is not None}:
        node.register_prehook(_looking(watched.get(node, ()), said))


def _looking(
    entries: Sequence[tuple[int, int, int, weakref.ref[Tensor]]], said: Callable[[int], str]
) -> Callable[[Sequence[Tensor | None]], None]:
    def look(gradients: Sequence[Tensor | None]) -> None:
        if are_wrapped(gradients):
            raise AutotpError(
                "batches of gradients (is_grads_batched=True, vectorize=True) cannot go through what is sharded: take them "
                "one by one"
            )
        for place, i, j, reference in entries:
            output = reference()
            if output is not None and gradients[place] is not None and (has_gradient_hooks(output) or output.retains_grad):
                raise AutotpError(
                    f"{said(i)} has a hook or retains its gradient, and {said(j)} is computed from it inside the model: "
                    f"here, outputs are independent in autograd, so the gradient of {said(i)} would lack the part that "
                    f"comes from {said(j)}. Compute {said(j)} outside the model from {said(i)}, or remove the hook"
                )

    return look
