"""Rules, FLOP and kernels of single operators: attention, convolutions, norms, losses.

As in `passes.rules.shapes`, a builder takes a node and returns its ``OpRule``, an expression of the notation, or ``None``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from passes.rules import shapes as by
from passes.rules.notation import Dim, OpRule, instantiate, pointwise
from passes.rules.rule import Product

__all__ = [
    "kept_by_attention",
    "addmm",
    "always",
    "attention",
    "attention_flop",
    "bags",
    "compared",
    "batch_norm",
    "convolution",
    "convolution_flop",
    "cross_entropy",
    "distances_flop",
    "einsum_flop",
    "embedding",
    "group_norm",
    "in_float64",
    "kept_places",
    "layer_norm",
    "loss",
    "matmul",
    "nll_loss",
    "product_flop",
    "ragged_bags",
    "softmax",
    "weight_norm",
]

_SINGLE = 4  # bytes of a float32
_PLACE = 8  # bytes of an index
_LARGEST = 2  # embedding_bag's number of the mode "max"


def product_flop(where: Product) -> Callable[[fx.Node], float]:
    """FLOP of a matrix product: 2 · (elements of the result) · (contracted length)."""

    def flop(node: fx.Node) -> float:
        weight = by.shape_of(by.operands_of(node)[where.weight])
        return 2.0 * math.prod(by.shape_of(node)) * weight[-1 if where.transposed else max(0, len(weight) - 2)]

    return flop


def convolution_flop(node: fx.Node, *, transposed: bool) -> float:
    """FLOP: 2 · (elements of the result or, if transposed, of the data) · (elements of the weight per index of dim 0)."""
    data, weight = map(by.shape_of, by.operands_of(node)[:2])
    return 2.0 * math.prod(data if transposed else by.shape_of(node)) * math.prod(weight[1:])


def einsum_flop(node: fx.Node) -> float:
    """FLOP of an einsum: 2 · (the product of all sizes)."""
    rule = by.einsum(node)
    return 2.0 * math.prod(rule.sizes.values()) if rule else 0.0


def attention_flop(node: fx.Node) -> float:
    """FLOP of both products; half of it if scores are causal, as kernels skip the masked ones."""
    q, k, v = (by.shape_of(n) for n in by.operands_of(node)[:3])
    causal = bool(by.argument(node, 5, "is_causal", False))
    return (1.0 if causal else 2.0) * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def attention(node: fx.Node) -> OpRule:
    """Keys and values are sharded by batch and heads only; query heads that share a key head are a factor ``g``."""
    operands = by.operands_of(node)
    q, k = by.shape_of(operands[0]), by.shape_of(operands[1])
    grouped = q[:-2] != k[:-2]
    batch = [f"b{i}" for i in range(len(q) - 3)]
    heads, kv = ("(h g)", "h") if grouped else ("h", "h")
    lead, lead_kv = (
        " ".join([*batch, heads] if len(q) > 2 else []),
        " ".join([*batch, kv] if len(q) > 2 else []),
    )
    form = f"{lead} s [d], {lead_kv} [t] [d], {lead_kv} [t] [e]"
    sizes = dict(zip(batch, q, strict=False)) | {"h": k[-3]} if len(q) > 2 else {}
    if len(operands) > 3:
        mask = by.shape_of(operands[3])
        names = [*batch, heads, "s", "[t]"][-len(mask) :]
        form += ", " + " ".join("1" if n == 1 else name for n, name in zip(mask, names, strict=True))
    shapes = [by.shape_of(n) for n in operands]
    return instantiate(f"{form} -> {lead} s [e]", shapes, [by.shape_of(node)], sizes=sizes)


def kept_by_attention(node: fx.Node) -> list[tuple[int, float]]:
    """Saved: a logarithm per row, and a boolean mask converted to numbers; with dropout, torch's formula in float32.

    Its tensors are the scaled queries and keys, the values, the weights before and after dropout, and the dropout's mask.
    """
    operands = by.operands_of(node)
    q, k = by.shape_of(operands[0]), by.shape_of(operands[1])
    if by.argument(node, 4, "dropout_p", 0.0):
        weights = (2 * _SINGLE + 1) * k[-2] / max(1, q[-1])
        return [(0, _SINGLE + weights), (1, _SINGLE), (2, _SINGLE)]
    found = [(0, _SINGLE / max(1, q[-1]))]
    if len(operands) > 3 and operands[3].meta["val"].dtype == torch.bool:
        found.append((3, float(operands[0].meta["val"].element_size())))
    return found


def convolution(node: fx.Node, *, transposed: bool) -> OpRule:
    """Channels are in groups ``g``; the weight's dim 0, output or, if transposed, input channels, has all groups."""
    groups = by.argument(node, 6, "groups", 1)
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    batch = "n " if len(operands[0]) == len(operands[1]) else ""
    left, right = ("(g i)", "(g o)") if groups > 1 else ("i", "o")
    weight = f"{left} o *" if transposed else f"{right} {'[i]' if groups > 1 else 'i'} *"
    form = f"{batch}{left} *, {weight}, {right} -> {batch}{right} *"
    sizes = {"g": groups} if groups > 1 else {}
    return instantiate(form, operands, [by.shape_of(node)], additive=(2,), sizes=sizes)


def batch_norm(node: fx.Node) -> str:
    """Batch norm with the batch's statistics; it returns new running statistics only if it has running statistics."""
    return "[n] c *, c, c, c, c -> [n] c *" + ", c, c" * (len(by.results_of(node)) == 3)


def layer_norm(node: fx.Node) -> OpRule:
    """layer_norm, rms_norm: over the trailing dims of a given shape, which their lowerings can shard."""
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    names = [f"h{i}" for i in range(len(node.args[1]))]  # type: ignore[arg-type]
    dims = " ".join(f"[{n}]" for n in names)
    form = f"… {dims}, {dims}, {dims} -> … {dims}"
    return instantiate(form, operands, [by.shape_of(node)], inner=names)


def group_norm(node: fx.Node) -> OpRule:
    """Channels are groups ``g`` of ``c`` channels; the lowering can shard ``c``."""
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    groups: int = node.args[1]  # type: ignore[assignment]
    sizes = {f: n for f, n in {"g": groups, "c": operands[0][1] // groups}.items() if n > 1}
    whole = instantiate("n (g c) *, (g c), (g c) -> n (g c) *", operands, [by.shape_of(node)], sizes=sizes)
    return OpRule(whole.operands, whole.results, whole.sizes, inner=frozenset({"c"} & set(whole.sizes)))


def softmax(node: fx.Node) -> OpRule:
    """softmax, log_softmax: their lowerings can shard the dim along which they run."""
    (shape,) = [by.shape_of(n) for n in by.operands_of(node)]
    where = by.argument(node, 1, "dim") % max(1, len(shape))
    names = [f"[v{i}]" if i == where else f"d{i}" for i in range(len(shape))]
    text = " ".join(names)
    return instantiate(f"{text} -> {text}", [shape], [shape], inner=[f"v{where}"])


def cross_entropy(node: fx.Node) -> OpRule | None:
    """Without class weights, label smoothing and further dims, the lowering can shard the classes ``v``."""
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    logits, target = operands[:2]
    if len(logits) < 2 or len(target) != len(logits) - 1:
        return None
    plain = len(operands) == 2 and not by.argument(node, 5, "label_smoothing", 0.0)
    result = "m *" if by.argument(node, 3, "reduction", 1) == 0 else ""
    inner = ["v"] if plain and len(logits) == 2 else []
    return instantiate(f"m [v] *, m *, [v] -> {result}", operands, [by.shape_of(node)], inner=inner)


def matmul(node: fx.Node) -> str:
    """matmul: a product of matrices in batches, or of vectors."""
    data, weight = ("" if len(by.shape_of(n)) == 1 else name for n, name in zip(by.operands_of(node), "rc", strict=True))
    batch = "…" if data and weight or max(len(by.shape_of(n)) for n in by.operands_of(node)) > 2 else ""
    left = f"{batch} {data} k" if data else "k"
    right = f"{batch} k {weight}" if weight else "k"
    return f"{left}, {right} -> {batch} {data} {weight}"


def compared(node: fx.Node) -> OpRule | None:
    """cosine_similarity, pairwise_distance: the dim of the vectors is whole; it is the last if none is named."""
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    given, (result,) = by.named(node), [tuple(t.shape) for t in by.results_of(node)]
    shape = tuple(torch.broadcast_shapes(*operands))
    where = given.get("dim", -1) % max(1, len(shape))
    if len(shape) - (not given.get("keepdim", False)) != len(result):
        return None
    rule = pointwise(operands, shape)
    busy = {f for f in rule.sizes if f == f"d{where}"}

    def left(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(() if busy & {*dim} else dim for dim in dims)

    kept = [dim for i, dim in enumerate(left(rule.results[0])) if given.get("keepdim", False) or i != where]
    return by.op_rule([left(dims) for dims in rule.operands], [kept], dict(rule.sizes))


def addmm(node: fx.Node) -> str | None:
    """addmm; no rule if ``alpha`` or ``beta`` is not 1."""
    if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    bias = by.shape_of(by.operands_of(node)[0])
    return ("c" if len(bias) == 1 else "r c") + ", r k, k c -> r c"


def embedding(node: fx.Node) -> str | None:
    """embedding; no rule with ``scale_grad_by_freq``, which counts words of the whole batch."""
    return None if by.argument(node, 3, "scale_grad_by_freq", False) else "v h, … -> … h"


def bags(node: fx.Node) -> str:
    """Bags that are sums, weighted or not, or means, whose lowering can shard the vocabulary; or maxima, which cannot."""
    vocabulary = "[v]" if by.named(node)["mode"] == _LARGEST else "v"
    return f"{vocabulary} h, b [n], b [n] -> b h"


def ragged_bags(node: fx.Node) -> OpRule:
    """embedding_bag with bags of any size: only the embedding's dim can be sharded; results that locate bags are whole."""
    operands, results = by.shapes_of(node)
    h = operands[0][1]
    whole: Dim = ()
    dim: Dim = ("h",) if h > 1 else whole
    left = [[whole, dim], *([whole] * len(shape) for shape in operands[1:])]
    right = [[whole, dim] if i in (0, 3) and len(s) == 2 else [whole] * len(s) for i, s in enumerate(results)]
    return by.op_rule(left, right, {"h": h})


def distances_flop(node: fx.Node) -> float:
    """FLOP of cdist: a difference, a power and a sum for each coordinate of each pair."""
    return 3.0 * math.prod(by.shape_of(node)) * by.shape_of(by.operands_of(node)[0])[-1]


def nll_loss(node: fx.Node) -> OpRule | None:
    """nll_loss: as `cross_entropy`, but classes are whole."""
    rule = cross_entropy(node)
    return None if rule is None else replace(rule, whole=rule.whole | rule.inner, inner=frozenset())


def loss(node: fx.Node) -> OpRule | None:
    """An element-wise loss of two tensors of one shape, reduced or not; weights broadcast to that shape."""
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    shape = operands[0]
    if operands[1] != shape or torch.broadcast_shapes(*operands) != torch.Size(shape):
        return None
    rule = pointwise(operands, shape)
    return rule if by.named(node)["reduction"] == 0 else replace(rule, results=((),))


def weight_norm(node: fx.Node) -> OpRule | None:
    """_weight_norm: norms over all dims but one, which can be sharded."""
    direction, length = (by.shape_of(n) for n in by.operands_of(node))
    where = by.named(node)["dim"]
    if len(length) != len(direction) or where == -1:
        return None
    dims, sizes = by.dims_of(direction)
    dims = [d if i == where % len(dims) else () for i, d in enumerate(dims)]
    return by.op_rule([dims, dims], [dims], sizes)


def kept_places(_: fx.Node) -> list[tuple[int, float]]:
    """Saved: an index for each element of the first result, as ``Rule.besides``."""
    return [(-1, float(_PLACE))]


def always(_: fx.Node) -> bool:
    """``Rule.misreads`` of kernels that misread in every dtype."""
    return True


def in_float64(node: fx.Node) -> bool:
    """``Rule.misreads`` of convolutions: for other dtypes than float64, oneDNN computes them on CPU, in any format."""
    return by.results_of(node)[0].dtype == torch.float64
