"""What a model's own constants decide: how many elements a mask selects, and attention masks that are causal, or nothing.

To ``torch.export``, what a mask selects has a size that depends on data, even if the model writes the mask out. There,
transformers writes every mask out, since it cannot look at one: an attention with a mask of its own runs two to
three times as long as one that a kernel knows to be causal, and saves the mask.
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
#: Elements beyond which nobody looks, of what has to be computed: about as many bytes and nanoseconds.
_MOST = 2**30
#: Elements of all values that are kept, as some of them may be asked for: at most a few times as many bytes.
_KEPT = 2**28
#: Operators on every element that torch does not tag so.
_UNTAGGED = ("aten::__and__", "aten::__or__", "aten::where")


class Constants:
    """Calls in a graph that is being built whose sizes constants decide.

    Args:
        builder: of the graph, which may write in place.
        given: placeholder name -> its tensor, of the graph's constants; new ones are added. Parameters among them are none,
            as they are trained.
        inputs: placeholders that follow the constants.
    """

    def __init__(self, builder: Builder, given: MutableMapping[str, Tensor], inputs: Collection[str]) -> None:
        self.builder, self.given, self.inputs = builder, given, inputs
        self._values: dict[fx.Node, Any] = {}
        self._seen: set[fx.Node] = set()
        self._made: dict[fx.Node, Tensor] = {}
        self._room = _KEPT
        self._lost: list[Any] = []  # kept, so that nothing else gets their memory

    def decided(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call of a node of which export does not know all sizes, on new arguments: a node, numbers, or both.

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
        """Where a mask is true, dim by dim; any other index as it is."""
        mask = isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)
        if not mask or not self._known(index):
            return [index]
        return [self._constant(each, node) for each in self._run(aten.where.default, (index,), {})]

    def _constant(self, value: Any, like: fx.Node) -> Any:
        """A copy of a tensor that is a constant of the graph; numbers are what they are."""
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
        """Whether what a call is given depends on constants alone, as all that stands before it does or does not."""
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
        """Nothing is known any more of memory that is written with what is not."""
        self._lost.append(written)
        memory = written.untyped_storage().data_ptr()
        for node, value in list(self._values.items()):
            if any(isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() == memory for leaf in tree_leaves(value)):
                del self._values[node]


def _repeats(node: fx.Node) -> bool:
    """Whether a node gives the same whenever it runs on the same arguments."""
    ours = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
    return (ours and not draws(node)) or node.target is operator.getitem


def recognise_masks(graph: fx.Graph) -> None:
    """Replaces masks in place; what computes a mask that nothing reads any more is left out."""
    constant: dict[fx.Node, set[fx.Node]] = {}  # a mask -> all that it is computed of
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
    """What a mask is computed of, itself included; nothing if it depends on an input or is not worth looking at."""
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
    """``causal``, ``nothing`` where it hides nothing, or empty for any other mask."""
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
    """A value takes too long to look at."""


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Tensor:
    """What an operator gives on the CPU, with stride 0 along the dims that repeat: sequences of a batch are all alike."""
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
    return _shrunk(made, _repeated(made, made.dim())).clone().expand(shape)  # what it was made in is as large as a batch


def _repeated(value: Tensor, rank: int) -> set[int]:
    """The dims, counted from the last, along which a value of some rank is the same everywhere."""
    own = range(-value.dim(), 0)
    return {d for d in range(-rank, 0) if d not in own or value.shape[d] == 1 or value.stride(d) == 0}


def _shrunk(value: Tensor, dims: set[int]) -> Tensor:
    """The first element along some dims, as many as there are."""
    for dim in dims.intersection(range(-value.dim(), 0)):
        value = value.narrow(dim, 0, min(1, value.shape[dim]))
    return value


def _real(leaf: Any, values: dict[fx.Node, Any]) -> Any:
    """An argument for a run on the CPU: the model may be on meta."""
    if isinstance(leaf, fx.Node):
        return values[leaf]
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
