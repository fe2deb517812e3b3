"""Makes a functional graph canonical: removes operators that compute nothing, and replaces synonyms by one operator.

The planner chooses strategies for the remaining operators. Views become ``reshape``, ``permute``, ``expand``,
``squeeze.dims``, ``unsqueeze``, ``slice``, ``select`` and ``split_with_sizes``, all with concrete sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx

from passes.capture.builder import Builder, operator_name
from passes.capture.canonical_views import VIEWS, Arguments, Handler, source_of
from passes.capture.functional import embedding_bag
from passes.graph import arguments_of, graphs_of
from passes.tensors import overlaps_itself
from passes.torch_internals import FakeTensorMode, OpOverload, tree_map

__all__ = ["drop_checks", "normalise"]

aten = torch.ops.aten

_CHECKS = ("aten::_assert", "aten::sym_constrain", "aten::_functional_assert", "aten::_functional_sym")
_NUMBERS = (bool, int, float, SymBool, SymInt, SymFloat)


def drop_checks(module: fx.GraphModule) -> None:
    """Erases assertions in all regions, and the numbers that only they read from tensors (``.item()``), in place.

    Also erases the copies that ``torch.export`` appends for assigned buffers, which it names like no others: each buffer
    is changed in place already (`passes.capture.attributes.in_place`), and for a new buffer, torch writes to another one.
    """
    for graph in graphs_of(module):
        for node in graph.nodes:  # torch 2.13 loses users of a masked size if a region has its own grad mode
            for operand in node.all_input_nodes:
                operand.users.setdefault(node)
        for node in reversed(graph.nodes):
            number = node.op == "call_function" and isinstance(node.meta.get("val"), _NUMBERS)
            assigned = node.target is aten.copy_.default and node.name.startswith("copy__default")
            if not node.users and (number or assigned or operator_name(node.target).startswith(_CHECKS)):
                graph.erase_node(node)


def normalise(
    graph: fx.Graph, mode: FakeTensorMode, mutated: Collection[str] = (), shown: Collection[int] = ()
) -> fx.Graph:
    """Rewrites a graph in canonical operators.

    Args:
        graph: a flat functional graph whose nodes have fake values.
        mode: the fake mode of these values.
        mutated: names of placeholders that the caller of the graph will overwrite; clones of them are kept.
        shown: indices of outputs that nobody writes to; these need not be copies.

    Returns:
        A new graph with the same placeholders and outputs.
    """
    build = Builder(mode)
    new: dict[fx.Node, Any] = {}
    folded: set[fx.Node] = set()

    def mapped(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [mapped(v) for v in value] if isinstance(value, list) else tuple(mapped(v) for v in value)
        return tree_map(lambda v: new[v] if isinstance(v, fx.Node) else v, value)

    for node in graph.nodes:
        if node in new:
            continue
        if node.op == "placeholder":
            new[node] = build.placeholder(node.name, node.meta["val"])
        elif node.op == "output":
            leaves: Any = enumerate(node.args[0])  # type: ignore[arg-type]
            return build.finish(tuple(_copied(build, leaf, new, () if i in shown else folded) for i, leaf in leaves))
        elif operator_name(node.target) == "aten::clone" and _origin(new[node.args[0]]).name in mutated:
            new[node] = build.copy(node, mapped(node.args), mapped(dict(node.kwargs)))
        else:
            new[node] = _rewrite(build, node, mapped(node.args), mapped(dict(node.kwargs)))
            if operator_name(node.target) in _COPIES and new[node] in [new[n] for n in node.all_input_nodes]:
                folded.add(node)
        # Emit one detach right after its operand: within the first of many layers, it would set that layer apart.
        for user in [user for user in node.users if operator_name(user.target) == "aten::detach"]:
            first = next(iter(n for n in node.users if n in new and operator_name(n.target) == "aten::detach"), None)
            new[user] = build.copy(user, mapped(user.args), {}) if first is None else new[first]
    raise ValueError("the graph has no output node")


def _copied(build: Builder, leaf: Any, new: dict[fx.Node, Any], folded: Collection[fx.Node]) -> Any:
    """An output; if a copy of it was folded into its source, a new copy, since the caller may write to outputs."""
    if not isinstance(leaf, fx.Node):
        return leaf
    if _origin(leaf) in folded:
        return build.emit(aten.clone.default, (new[leaf],), like=leaf)
    return new[leaf]


def _origin(node: fx.Node) -> fx.Node:
    """The base of a chain of views and detaches."""
    while node.op == "call_function" and (operator_name(node.target) in VIEWS or node.target is aten.detach.default):
        node = node.all_input_nodes[0]
    return node


def _rewrite(build: Builder, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if node.target is operator.getitem and isinstance(args[0], (list, tuple)):
        return args[0][args[1]]
    handler = _HANDLERS.get(operator_name(node.target)) if isinstance(node.target, OpOverload) else None
    value = handler(build, node, arguments_of(node, args, kwargs)) if handler is not None else None
    return build.copy(node, args, kwargs) if value is None else value


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device


def _first(build: Builder, node: fx.Node, given: Arguments) -> Any:
    """Folds a copy into its source: without writes, both are equal, unless conjugate or negative bits were resolved."""
    source = source_of(given)
    old, new = source.meta["val"], node.meta["val"]
    ready = old.is_conj() == new.is_conj() and old.is_neg() == new.is_neg()
    return source if ready and _same(old, new) else None


def _one_hot(build: Builder, node: fx.Node, given: Arguments) -> Any:
    """Scatters ones, as torch does where it checks the classes; its traced form compares them, and accepts any class."""
    source = source_of(given)
    nothing = build.emit(aten.new_zeros.default, (source, list(node.meta["val"].shape)), like=node)
    places = build.emit(aten.unsqueeze.default, (source, -1), like=node)
    return build.emit(aten.scatter.value, (nothing, -1, places, 1), like=node)


def _cast(build: Builder, node: fx.Node, given: Arguments) -> Any:
    source, value = source_of(given), node.meta["val"]
    if not isinstance(source, fx.Node):  # torch.vmap converts numbers to tensors by it
        return build.emit(aten.scalar_tensor.default, (source,), {"dtype": value.dtype, "device": value.device}, like=node)
    if _same(source.meta["val"], value):
        return source
    if source.meta["val"].device == value.device:
        return build.emit(aten.to.dtype, (source, value.dtype), like=node)
    return None


def _dropout(build: Builder, node: fx.Node, given: Arguments) -> Any:
    return given["input"] if given["p"] == 0 or not given["train"] else None


def _neutral(element: float) -> Handler:
    """The handler of a binary operator that returns its first operand if the second is the number ``element``."""

    def handle(build: Builder, node: fx.Node, given: Arguments) -> Any:
        source, other = given["self"], given["other"]
        if isinstance(other, (int, float)) and other == element and isinstance(source, fx.Node):
            plain = given.get("rounding_mode") is None and _same(source.meta["val"], node.meta["val"])
            return source if plain else None
        return None

    return handle


def _embedding(build: Builder, node: fx.Node, given: Arguments) -> Any:
    """Drops ``sparse``: gradients of shards are dense, with the same values."""
    if not given["sparse"]:
        return None
    rest = (given[name] for name in ("weight", "indices", "padding_idx", "scale_grad_by_freq"))
    return build.emit(aten.embedding.default, tuple(rest), like=node)


def _embedding_bag(build: Builder, node: fx.Node, given: Arguments) -> Any:
    """Uses `embedding_bag` for bags of equal size, as ``nn.EmbeddingBag`` makes of 2-dim ids, if only result 0 is used."""
    ids, offsets, padding = given["indices"], given["offsets"], given.get("padding_idx")
    used = {user.args[1] for user in node.users if user.users}
    plain = padding is None and not given["scale_grad_by_freq"] and not given["include_last_offset"]
    even = used <= {0} and plain and offsets.target is aten.arange.start_step and ids.meta["val"].dim() == 1
    bags, count = offsets.meta["val"].shape[0], ids.meta["val"].shape[0]
    if not even or offsets.args[0] != 0 or bags * offsets.args[2] != count:
        bag = aten.embedding_bag.padding_idx
        whole = build.emit(bag, (*given.values(), *[None] * ("padding_idx" not in given)), like=node)
        items = [build.emit(operator.getitem, (whole, i), like=node) for i in range(len(node.meta["val"]))]
        return [items[0], _bag_of_each(build, node, given), *items[2:]] if 1 in used else items
    square, factors = [bags, offsets.args[2]], given["per_sample_weights"]
    ids, factors = (None if n is None else build.emit(aten.reshape.default, (n, square), like=node) for n in (ids, factors))
    return [build.emit(embedding_bag, (given["weight"], ids, factors, given["mode"]), like=node), None, None, None]


def _bag_of_each(build: Builder, node: fx.Node, given: Arguments) -> fx.Node:
    """The bag that each index is in; an empty tensor if the model's kernel returns none.

    The choice of kernel depends on strides, which a reshard changes; for bfloat16, torch's fake kernel is wrong.
    """
    old, kept = arguments_of(node, node.args, node.kwargs), node.meta["val"][1]
    weight, factors = old["weight"].meta["val"], old["per_sample_weights"]
    single = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    adjacent = weight.stride(1) == 1 and (factors is None or factors.meta["val"].stride(0) == 1)
    if single and adjacent and given["mode"] == 0 and given.get("padding_idx") is None:
        return build.emit(aten.new_zeros.default, (given["offsets"], [0]), {"dtype": kept.dtype}, like=node)
    places = build.emit(aten.arange.default, kept.shape, {"dtype": kept.dtype, "device": kept.device}, like=node)
    small = {"out_int32": kept.dtype == torch.int32, "right": True}
    found = build.emit(aten.bucketize.Tensor, (places, given["offsets"]), small, like=node)
    return build.emit(aten.sub.Tensor, (found, 1), like=node)


def _instance_norm(build: Builder, node: fx.Node, given: Arguments) -> Any:
    """A group norm with one channel per group; with running statistics, a batch norm in evaluation mode."""
    x, weight, bias, eps = (given[name] for name in ("input", "weight", "bias", "eps"))
    if given["use_input_stats"]:
        channels = x.meta["val"].shape[1]
        return build.emit(aten.group_norm.default, (x, channels, weight, bias, eps, False), like=node)
    running = given["running_mean"], given["running_var"]
    return build.emit(aten.batch_norm.default, (x, weight, bias, *running, False, 0.0, eps, False), like=node)


def _cdist(build: Builder, node: fx.Node, given: Arguments) -> Any:
    """Fixes the kernel, which torch chooses by the numbers of rows: that for shards' rows may not support the dtype."""
    if given["p"] != 2 or given.get("compute_mode"):
        return None
    one, other = given["x1"], given["x2"]
    kernel = 1 if max(one.meta["val"].shape[-2], other.meta["val"].shape[-2]) > _FEW_ROWS else 2
    return build.emit(aten.cdist.default, (one, other, 2.0, kernel), like=node)


def _cat(build: Builder, node: fx.Node, given: Arguments) -> Any:
    """Drops tensors of shape ``(0,)``, which torch accepts next to tensors of any rank."""
    value, tensors = node.meta["val"], given["tensors"]
    some = [n for n in tensors if value.dim() == 1 or n.meta["val"].shape != (0,)]
    if len(some) == 1 and _same(some[0].meta["val"], value):
        return some[0]
    alike = all(n.meta["val"].dtype == value.dtype for n in some)
    return build.emit(aten.cat.default, (some, given["dim"]), like=node) if alike and 0 < len(some) < len(tensors) else None


def _scatter(build: Builder, node: fx.Node, given: Arguments) -> Any:
    """Copies an operand whose elements share memory, if a copy of it was folded: the kernels would keep its strides."""
    source = source_of(given)
    old, new = node.all_input_nodes[0].meta["val"], source.meta["val"]
    if overlaps_itself(old) or not overlaps_itself(new):
        return None
    copy = build.emit(aten.clone.default, (source,), like=node)
    return build.emit(node.target, (copy, *list(given.values())[1:]), like=node)


def _range(build: Builder, node: fx.Node, given: Arguments) -> Any:
    """Detaches tensor arguments, as ``torch.linspace`` does; the derivative of its operator would raise an error."""
    ended = {k: build.emit(aten.detach.default, (v,), like=node) if isinstance(v, fx.Node) else v for k, v in given.items()}
    args = tuple(ended.pop(name) for name in ("start", "end", "steps", "base") if name in ended)
    return build.copy(node, args, ended)


#: Up to this number of rows, torch computes distances from differences of coordinates; above, by a matrix product.
_FEW_ROWS = 25
#: Operators that always return a new tensor, even if its values equal an operand's.
_COPIES = frozenset(
    f"aten::{name}" for name in ("clone", "lift_fresh_copy", "_to_copy", "add", "sub", "mul", "div", "true_divide", "cat")
)
_HANDLERS: dict[str, Handler] = {
    **VIEWS,
    **dict.fromkeys(
        ("aten::alias", "aten::clone", "aten::contiguous", "aten::lift_fresh", "aten::lift_fresh_copy",
         "aten::positive", "aten::resolve_conj", "aten::resolve_neg"), _first,
    ),
    **dict.fromkeys(("aten::to", "aten::_to_copy", "aten::type_as"), _cast),
    **dict.fromkeys(("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout"), _dropout),
    **dict.fromkeys(("aten::linspace", "aten::logspace"), _range),
    **dict.fromkeys(("aten::add", "aten::sub"), _neutral(0)),
    **dict.fromkeys(("aten::mul", "aten::div", "aten::true_divide"), _neutral(1)),
    **dict.fromkeys(
        ("aten::slice_scatter", "aten::select_scatter", "aten::diagonal_scatter", "aten::as_strided_scatter"), _scatter,
    ),
    "aten::cat": _cat,
    "aten::cdist": _cdist,
    "aten::embedding": _embedding,
    "aten::embedding_bag": _embedding_bag,
    "aten::instance_norm": _instance_norm,
    "aten::one_hot": _one_hot,
}  # fmt: skip
