"""Propagates writes through views to the base, and determines strides on which the result of a write depends."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes.capture.builder import Builder, CaptureError, operator_name, outer_order
from passes.capture.functional import batch_norm_train
from passes.graph import annotate, arguments_of, note_of, where
from passes.rules.table import draws
from passes.torch_internals import FakeTensor, FakeTensorMode, schema, storage_id, tree_leaves

__all__ = [
    "PERMUTES",
    "RESHAPES",
    "SPLITS",
    "as_computed",
    "by_strides",
    "computed",
    "draws_as_laid",
    "laid_as_inputs",
    "lay_as_computed",
    "note_unmoved",
    "put_back",
    "refuse_unsure",
    "with_views",
]

aten = torch.ops.aten
#: Operators whose CPU kernels return contiguous results, while their fake kernels keep the operand's strides.
_CONTIGUOUS_ON_CPU = frozenset({
    aten.log_sigmoid.default, aten.batch_norm.default, aten.rrelu.default,
    aten.angle.default,  # of complex numbers
})  # fmt: skip
#: Operators whose kernels keep the operands' strides, while their fake kernels return contiguous results.
_LIKE_OPERANDS = frozenset({
    aten.copysign.Tensor, aten.floor_divide.default, aten.xlogy.Tensor, aten.roll.default, aten.channel_shuffle.default,
    aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default,
})  # fmt: skip


def _named(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


RESHAPES = _named("view reshape _unsafe_view _reshape_alias flatten unflatten view_as reshape_as ravel")
"""Operators that only change the shape, all dims in order."""

PERMUTES = _named("t transpose permute movedim moveaxis swapaxes swapdims numpy_T mT matrix_H adjoint mH")
"""Operators that only change the order of dims (of real tensors)."""

SPLITS = _named("split split_with_sizes chunk tensor_split unsafe_split unsafe_split_with_sizes unsafe_chunk")
"""Operators that split one dim into parts."""

_SAME = _named(
    "detach alias lift_fresh contiguous to expand slice type_as expand_as positive resolve_conj resolve_neg broadcast_to "
    "_to_copy"
)


_DROPOUTS = _named("dropout feature_dropout alpha_dropout feature_alpha_dropout")

COPIES = _named("reshape flatten reshape_as ravel contiguous to")
"""Operators that return a view or a copy, depending on the strides of their operand."""

_LAID_ANEW = _named("linear mm addmm bmm baddbmm embedding contiguous")
"""Operators whose result is contiguous, whatever the strides of their operands."""

_IN_PLACE = _named("squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_")


def with_views(graph: fx.Graph) -> fx.Graph:
    """Replaces operators that change the dims of a tensor in place by views, which later nodes use; returns the graph.

    Earlier views of the tensor keep their dims. Operators on inputs and state stay, since the caller would see the change.
    Dropout that drops nothing becomes an alias: it returns its operand itself, which torch's fake kernel copies.
    """
    for node in graph.nodes:
        if operator_name(node.target) in _DROPOUTS:
            given = arguments_of(node, node.args, dict(node.kwargs))
            if given["p"] == 0 or not given["train"]:
                node.target, node.args, node.kwargs = aten.alias.default, (given["input"],), {}
    for node in [n for n in graph.nodes if operator_name(n.target) in _IN_PLACE]:
        known: Any = node.args[0]
        names = [known]
        while known.op == "call_function" and operator_name(known.target).endswith("_"):
            known = known.args[0]
            names.append(known)
        if known.op != "call_function":
            continue
        takes = [(a.name, str(a.type)) for a in schema(node.target).arguments]  # type: ignore[union-attr]
        packet = getattr(aten, operator_name(node.target).removeprefix("aten::").removesuffix("_"))
        forms = (getattr(packet, name) for name in packet.overloads())
        node.target = next(f for f in forms if [(a.name, str(a.type)) for a in schema(f).arguments] == takes)
        later = set(itertools.takewhile(partial(operator.is_not, node), reversed(graph.nodes)))
        for name in names:
            name.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    return graph


def put_back(build: Builder, view: fx.Node, source: fx.Node, new: fx.Node, like: fx.Node) -> fx.Node:
    """The new value of a view's source after a write to the view.

    Args:
        build: builder of the new graph.
        view: the node of the old graph that made the view, or ``getitem`` of a list of views.
        source: the source's value in the new graph.
        new: the view's new value.
        like: the writing node, for its place in the model.

    Raises:
        CaptureError: writes through this kind of view are not supported.
    """
    old, made = source.meta["val"], new.meta["val"]
    item: Any = None
    if getattr(view.target, "__name__", "") == "getitem":
        view, item = view.args[0], view.args[1]  # type: ignore[assignment]
    name = operator_name(view.target)
    given = arguments_of(view, view.args, dict(view.kwargs)) if name.startswith("aten::") else {}
    if item is not None and name == "aten::unbind":
        return _scattered(build, aten.select_scatter.default, source, new, given["dim"], item, like=like)
    if item is not None and name in SPLITS:
        dim = given.get("dim", 0) % old.dim()
        ends = list(itertools.accumulate(v.shape[dim] for v in view.meta["val"]))
        start = ends[item] - made.shape[dim]
        return _scattered(build, aten.slice_scatter.default, source, new, dim, start, ends[item], like=like)
    if name in RESHAPES and view.target is not aten.view.dtype or name in ("aten::unsqueeze", "aten::squeeze"):
        return build.emit(aten.reshape.default, (new, list(old.shape)), like=like)
    if name in PERMUTES and not old.is_complex():
        others = dict(list(given.items())[1:])
        order = outer_order(view.target, old.dim(), others)
        inverse = [order.index(d) for d in range(old.dim())]
        return build.emit(aten.permute.default, (new, inverse), like=like)
    if name in _SAME and old.shape == made.shape and old.dtype == made.dtype:
        return new
    if name == "aten::slice":
        dim, start, end, step = given["dim"], given["start"], given["end"], given["step"]
        return _scattered(build, aten.slice_scatter.default, source, new, dim, start, end, step, like=like)
    if name == "aten::narrow":
        dim = given["dim"] % old.dim()
        start = given["start"] % old.shape[dim] if isinstance(given["start"], int) else None
        if start is not None:
            end = start + given["length"]
            return _scattered(build, aten.slice_scatter.default, source, new, dim, start, end, like=like)
    if name == "aten::select":
        return _scattered(build, aten.select_scatter.default, source, new, given["dim"], given["index"], like=like)
    if name == "aten::diagonal":
        places = (given["offset"], given["dim1"], given["dim2"])
        return build.emit(aten.diagonal_scatter.default, (source, new, *places), like=like)
    raise CaptureError(
        f"{where(like)}: an in-place operator writes through {view.target}; "
        "use the out-of-place form (for example torch.where, torch.cat or x = x + y) in the model"
    )


def _scattered(
    build: Builder, scatter: Any, source: fx.Node, new: fx.Node, dim: int, *places: Any, like: fx.Node
) -> fx.Node:
    """``scatter`` along a dim; for complex tensors on their real view, since torch has no complex derivative of it."""
    dim %= source.meta["val"].dim()
    if not source.meta["val"].is_complex():
        return build.emit(scatter, (source, new, dim, *places), like=like)
    parts = (build.emit(aten.resolve_conj.default, (n,), like=like) for n in (source, new))
    pairs = (build.emit(aten.view_as_real.default, (n,), like=like) for n in parts)
    written = build.emit(scatter, (*pairs, dim, *places), like=like)
    return build.emit(aten.view_as_complex.default, (written,), like=like)


def as_computed(target: Any, args: Sequence[Any], value: Any) -> Any:
    """The fake result of an operator, with the strides of the real kernel's result."""
    real = target is aten.angle.default and not args[0].is_complex()
    if target not in _CONTIGUOUS_ON_CPU or value.device.type != "cpu" or real:
        return value
    last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return value if last and target is aten.batch_norm.default else value.contiguous()


def computed(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Runs an operator on fake values; its result has the strides of the real kernel's result.

    A ``view`` that these strides do not allow becomes a ``reshape`` again: inside transformed functions, ``torch.export``
    decomposes ``reshape`` by the strides of fake kernels.
    """
    if node.target is aten.view.default:
        try:
            return build.run(node.target, args, kwargs)
        except (RuntimeError, ValueError):
            node.target = aten.reshape.default
    return as_computed(node.target, args, build.run(node.target, args, kwargs))


def lay_as_computed(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Corrects the strides of fake values where those of ``torch.export`` differ from those of the real kernels."""
    build, changed = Builder(mode), set[fx.Node]()
    for node in graph.nodes:
        norm = node.target is operator.getitem and node.args[0].target is batch_norm_train and node.args[1] == 0
        target = aten.batch_norm.default if norm else node.target
        otherwise = target in _CONTIGUOUS_ON_CPU or target in _LIKE_OPERANDS
        if node.op != "call_function" or not (otherwise or changed.intersection(node.all_input_nodes)):
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        value = as_computed(target, args, computed(build, node, args, kwargs))
        value = _like_operands(build, target, args, value)
        if _strides(value) != _strides(node.meta["val"]):
            node.meta["val"] = value
            changed.add(node)


def _like_operands(build: Builder, target: Any, args: Sequence[Any], value: Any) -> Any:
    """The fake result of an operator in `_LIKE_OPERANDS`, with the strides of an ``add`` or ``cat`` of its operands."""
    operands = [leaf for leaf in args if isinstance(leaf, torch.Tensor)]
    if target not in _LIKE_OPERANDS or value.device.type != "cpu" or (target is aten.roll.default and not any(args[2:])):
        return value
    how, given = (aten.cat.default, (operands, 0)) if len(operands) == 1 else (aten.add.Tensor, operands)
    return value.new_empty_strided(value.shape, build.run(how, given, {}).stride())


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [leaf.stride() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def note_unmoved(unmoved: Sequence[torch.Tensor], graphs: Iterable[fx.Graph]) -> None:
    """Sets ``Note.loose`` of nodes whose values share storage with a result of `checks.Seen.unmoved`."""
    storages = {storage_id(tensor) for tensor in unmoved}
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
        if isinstance(value := node.meta.get("val"), FakeTensor) and storage_id(value) in storages:
            annotate(node, loose=True)


def by_strides(written: fx.Node, like: fx.Node, values: Mapping[fx.Node, Any], inputs: Collection[str]) -> bool:
    """Whether the strides of inputs determine which values a write changes.

    Args:
        written: the node that is written to.
        like: the operator that writes.
        values: node -> its ``source``, of which it is a view; None if it has memory of its own.
        inputs: the names of inputs, whose memory is the caller's.
    """

    def shown(node: fx.Node) -> fx.Node | None:
        """The node of which another is a view, or would be with other strides."""
        source: fx.Node | None = values[node].source
        return node.all_input_nodes[0] if source is None and _may_copy(node) else source

    def copies(node: fx.Node | None) -> list[fx.Node]:
        found = []
        while node is not None:
            found += [node] if _may_copy(node) else []
            node = shown(node)
        return found

    root, mine = written, copies(written)
    loose = note_of(written).loose
    while (source := shown(root)) is not None:
        root = source
        loose |= note_of(root).loose
    found, todo = root.name in inputs and (loose or bool(mine)), [root]
    while todo and not found:
        node = todo.pop()
        found = (loose and bool(like.users)) or (copies(node) != mine and any(like < user for user in node.users))
        todo += [user for user in node.users if user < like and user in values and shown(user) is node]
    return found and laid_as_inputs(root, inputs)


def draws_as_laid(graph: fx.Graph, inputs: Collection[str]) -> bool:
    """Whether an operator draws random numbers for a tensor whose strides may follow those of an input."""
    return any(draws(node) and laid_as_inputs(node, inputs) for node in graph.nodes)


def laid_as_inputs(node: fx.Node, inputs: Collection[str]) -> bool:
    """Whether the strides of a value may follow those of an input."""
    todo, seen = [node], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node.name in inputs and node.op == "placeholder":
            return True
        if node not in seen and operator_name(node.target) not in _LAID_ANEW:
            todo += node.all_input_nodes
        seen.add(node)
    return False


def _may_copy(node: fx.Node) -> bool:
    """Whether the operand's strides determine if an operator returns a copy or a view."""
    name = operator_name(node.target)
    if name != "aten::to":
        return name in COPIES
    return arguments_of(node, node.args, dict(node.kwargs)).get("memory_format") is not None


def refuse_unsure(node: fx.Node, written: fx.Node, root: fx.Node) -> None:
    """Refuses a write to a value of which it is not known whether it is a copy, as export assumes wrong strides.

    Args:
        node: the write.
        written: the node that it writes to.
        root: the node that owns its memory, according to the fake values.

    Raises:
        CaptureError: the value may be a copy in the model.
    """
    value = root.meta["val"]
    permuted = root.target in _LIKE_OPERANDS and not all(n.meta["val"].is_contiguous() for n in root.all_input_nodes)
    given = map_arg(root.args, lambda n: n.meta["val"])
    if as_computed(root.target, given, value) is value and not permuted:
        return
    if permuted or len(root.users) > 1 or written is not root:  # contiguous() leaves no node if it seems to copy nothing
        raise CaptureError(
            f"{where(node)}: {node.target} writes to a result of {root.target}, or to a copy of it: torch.export is wrong "
            "about its strides, so it is not known whether contiguous() or reshape() copied; use an out-of-place "
            "operator, or clone()"
        )
