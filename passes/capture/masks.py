"""Evaluates constants of a model: how many elements a mask selects, and which attention masks are causal or hide nothing.

To ``torch.export``, the number of elements that a mask selects depends on data, even if the mask is a constant of the
model. During export, transformers materialises every attention mask, since it cannot inspect one: attention with an
explicit mask takes two to three times as long as with ``is_causal``, and saves the mask.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, MutableMapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate, map_arg

from passes.capture.builder import Builder, CaptureError, is_symbolic, operator_name
from passes.capture.functional import writes
from passes.rules.table import draws
from passes.torch_internals import OpOverload, schema, tree_leaves, tree_map

__all__ = ["Constants", "recognise_masks"]

aten = torch.ops.aten
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
#: Most elements of a value that is computed to inspect a mask: about as many bytes and nanoseconds.
_MOST = 2**30
#: Most elements of all computed values that are kept for later use: at most a few times as many bytes.
_KEPT = 2**28
#: Pointwise operators that torch does not tag as such.
_UNTAGGED = ("aten::__and__", "aten::__or__", "aten::where")


class Constants:
    """Evaluates values that depend on constants alone, to find the sizes of calls in a graph that is being built.

    Args:
        builder: builder of the graph, which may write in place.
        given: placeholder name -> tensor, for the graph's constants; new ones are added. Parameters among them do not count
            as constants, since they are trained.
        inputs: names of the placeholders that follow the constants.
    """

    def __init__(self, builder: Builder, given: MutableMapping[str, Tensor], inputs: Collection[str]) -> None:
        self.builder, self.given, self.inputs = builder, given, inputs
        self._values: dict[fx.Node, Any] = {}
        self._seen: set[fx.Node] = set()
        self._made: dict[fx.Node, Tensor] = {}
        self._room = _KEPT
        self._lost: list[Any] = []  # kept alive, so that their memory is not reused

    def decided(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Rebuilds a call with symbolic sizes on new arguments, with concrete sizes; returns nodes, numbers, or both.

        Raises:
            CaptureError: sizes depend on data.
        """
        if _repeats(node) and self._known((args, kwargs)):
            return tree_map(lambda leaf: self._constant(leaf, node), self._run(node.target, args, kwargs))
        emit = functools.partial(self.builder.emit, like=node)
        name = operator_name(node.target)
        if name == "aten::index":
            args = (args[0], [place for index in args[1] for place in self._places(index, node)])
        elif name == "aten::masked_select" and self._known(args[1]):
            shape = list(torch.broadcast_shapes(*(each.meta["val"].shape for each in args)))
            x, mask = (emit(aten.expand.default, (each, shape)) for each in args)
            return emit(aten.index.Tensor, (x, self._places(mask, node)))
        elif name == "aten::repeat_interleave" and self._known(args[1]):
            x, dim, *_ = *args[:1], *args[2:], None
            x, dim = (x, dim) if dim is not None else (emit(aten.flatten.using_ints, (x,)), 0)
            times = self._run(aten.expand.default, (args[1], [x.meta["val"].shape[dim]]), {})
            return emit(aten.index_select.default, (x, dim, self._constant(torch.repeat_interleave(times), node)))
        elif not isinstance(node.meta["val"], Tensor | tuple | list):
            found = self.builder.run(node.target, *map_arg((args, kwargs), lambda n: n.meta["val"]))
            return self.builder.copy(node, args, kwargs) if is_symbolic(found) else found
        return emit(node.target, args, kwargs)

    def _places(self, index: Any, node: fx.Node) -> list[Any]:
        """The indices, one per dim, at which a constant mask is true; any other index as it is."""
        mask = isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)
        if not mask or not self._known(index):
            return [index]
        return [self._constant(each, node) for each in self._run(aten.where.default, (index,), {})]

    def _constant(self, value: Any, like: fx.Node) -> Any:
        """A clone of a constant of the graph that holds a tensor; numbers are returned as they are."""
        if not isinstance(value, Tensor):
            return value
        same = [node for node, made in self._made.items() if made.dtype == value.dtype and torch.equal(made, value)]
        return self.builder.emit(aten.clone.default, (same[0] if same else self._placed(value, like),), like=like)

    def _placed(self, value: Tensor, like: fx.Node) -> fx.Node:
        device = next(n.meta["val"].device for n in (like, *like.all_input_nodes) if isinstance(n.meta.get("val"), Tensor))
        behind = next(each for each in self.builder.graph.nodes if each.op != "placeholder" or each.name in self.inputs)
        with self.builder.graph.inserting_before(behind), self.builder.mode:
            node = self.builder.placeholder("constant", torch.empty(value.shape, dtype=value.dtype, device=device))
        node.target = node.name
        self.given[node.name] = self._made[node] = self._values[node] = value.contiguous()
        self._seen.add(node)
        return node

    def _known(self, value: Any) -> bool:
        """Whether all nodes in ``value`` depend on constants alone; first evaluates the nodes added since the last call."""
        for node in self.builder.graph.nodes:
            if node not in self._seen:
                self._seen.add(node)
                self._look(node)
        return all(leaf in self._values for leaf in tree_leaves(value) if isinstance(leaf, fx.Node))

    def _look(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            tensor = self.given.get(node.name)
            if tensor is not None and not tensor.is_meta and not isinstance(tensor, nn.Parameter):
                self._values[node] = tensor.detach().cpu().clone()
            return
        size = sum(leaf.numel() for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor))
        size = 0 if getattr(node.target, "is_view", True) else size
        if _repeats(node) and size <= self._room and all(each in self._values for each in node.all_input_nodes):
            try:
                self._values[node] = self._run(node.target, node.args, node.kwargs)
                self._room -= size
                return
            except CaptureError:
                pass
        for place in writes(node.target):
            name = schema(node.target).arguments[place].name
            for each in tree_leaves(node.args[place] if place < len(node.args) else node.kwargs.get(name)):
                if each in self._values:
                    self._forget(self._values[each])

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        with torch.device("cpu"), torch.no_grad():
            args, kwargs = map_aggregate((args, dict(kwargs)), lambda leaf: _real(leaf, self._values))
            try:
                return target(*args, **kwargs)
            except Exception as error:  # there may be no such kernel on the CPU
                raise CaptureError(f"{target} of constants, whose result a shape depends on: {error}") from error

    def _forget(self, written: Tensor) -> None:
        """Drops all values that share the memory of ``written``, as it was overwritten with an unknown value."""
        self._lost.append(written)
        memory = written.untyped_storage().data_ptr()
        for node, value in list(self._values.items()):
            if any(isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() == memory for leaf in tree_leaves(value)):
                del self._values[node]


def _repeats(node: fx.Node) -> bool:
    """Whether a node is deterministic: an ATen operator that draws no random numbers, or ``getitem``."""
    ours = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
    return (ours and not draws(node)) or node.target is operator.getitem


def recognise_masks(graph: fx.Graph) -> None:
    """Replaces masks that are causal or hide nothing by ``is_causal`` or None, in place; erases their unused nodes."""
    constant: dict[fx.Node, set[fx.Node]] = {}  # a mask -> all nodes that it is computed from
    said: dict[fx.Node, str] = {}
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        given: Any = (*node.args, *(None, 0.0, False)[len(node.args) - 3 :])
        q, k, v, mask, dropout, causal = given
        if not isinstance(mask, fx.Node) or causal or "is_causal" in node.kwargs:
            continue
        if mask not in said:
            constant[mask] = _constants(mask)
            said[mask] = _meaning(graph, mask, constant[mask]) if constant[mask] else ""
        if said[mask]:
            node.args = (q, k, v, None, dropout, said[mask] == "causal")
    behind = {node for mask, nodes in constant.items() if said[mask] for node in nodes}
    for node in reversed(graph.nodes):
        if node in behind and not node.users:
            graph.erase_node(node)


def _constants(mask: fx.Node) -> set[fx.Node]:
    """All nodes that a mask is computed from, and itself; empty if it depends on a placeholder or cannot be evaluated."""
    needed, stack = {mask}, [mask]
    while stack:
        node = stack.pop()
        target = node.target
        if not isinstance(target, OpOverload) or target.namespace != "aten" or schema(target).is_mutable:
            return set()
        if torch.Tag.nondeterministic_seeded in target.tags or not isinstance(node.meta.get("val"), Tensor):
            return set()
        fresh = set(node.all_input_nodes) - needed
        needed |= fresh
        stack += fresh
    return needed


def _meaning(graph: fx.Graph, mask: fx.Node, needed: set[fx.Node]) -> str:
    """``causal``; ``nothing`` if the mask hides nothing; the empty string for any other mask."""
    rows, columns = mask.meta["val"].shape[-2:]
    if rows != columns:
        return ""
    values: dict[fx.Node, Any] = {}
    try:
        with torch.device("cpu"):
            for node in graph.nodes:
                if node in needed:
                    values[node] = _value(node, values)
    except (RuntimeError, _TooLarge):  # there is no such kernel on the CPU
        return ""
    found = _shrunk(values[mask], _repeated(values[mask], values[mask].dim()))
    if found.dtype != torch.bool:
        shown = found == 0
        if not (shown | (found <= torch.finfo(found.dtype).min)).all():
            return ""
        found = shown
    if found.all():
        return "nothing"
    return "causal" if (found == torch.ones(rows, columns, dtype=torch.bool, device="cpu").tril()).all() else ""


class _TooLarge(Exception):
    """A value has too many elements to compute."""


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Tensor:
    """Runs an operator on the CPU; the result has stride 0 along dims that repeat, such as the batch of a mask."""
    target: Any = node.target
    shape = node.meta["val"].shape
    args: Any
    kwargs: Any
    args, kwargs = (map_aggregate(each, lambda leaf: _real(leaf, values)) for each in (node.args, dict(node.kwargs)))
    repeated: set[int] = set()
    if torch.Tag.pointwise in target.tags or schema(target).name in _UNTAGGED:
        given = [values[n] for n in node.all_input_nodes]
        repeated = set.intersection(*(_repeated(value, len(shape)) for value in given)) if given else set()
        args, kwargs = (
            map_aggregate(each, lambda leaf: _shrunk(leaf, repeated) if isinstance(leaf, Tensor) else leaf)
            for each in (args, kwargs)
        )
    if not target.is_view and math.prod(n for d, n in enumerate(shape) if d - len(shape) not in repeated) > _MOST:
        raise _TooLarge
    made: Tensor = target(*args, **kwargs)
    if repeated or target.is_view:
        return made.expand(shape)
    for dim in range(made.dim()):
        first = made.narrow(dim, 0, min(1, made.shape[dim])).expand_as(made)
        if made.stride(dim) and torch.equal(first, made):
            made = first
    return _shrunk(made, _repeated(made, made.dim())).clone().expand(shape)  # the uncloned one holds a whole batch


def _repeated(value: Tensor, rank: int) -> set[int]:
    """The dims, counted from the last, along which a value broadcast to ``rank`` dims repeats (size 1 or stride 0)."""
    own = range(-value.dim(), 0)
    return {d for d in range(-rank, 0) if d not in own or value.shape[d] == 1 or value.stride(d) == 0}


def _shrunk(value: Tensor, dims: set[int]) -> Tensor:
    """A view of the first element along the given dims; a dim without elements stays empty."""
    for dim in dims.intersection(range(-value.dim(), 0)):
        value = value.narrow(dim, 0, min(1, value.shape[dim]))
    return value


def _real(leaf: Any, values: dict[fx.Node, Any]) -> Any:
    """An argument for a run on the CPU: nodes become their values, and devices the CPU (the model may be on meta)."""
    if isinstance(leaf, fx.Node):
        return values[leaf]
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
