"""The rule table: one line per operator.

``RULES`` maps an operator's name (``str(node.target)``, of ATen or of autotp's own library) to its ``Rule``.
An operator that is not here is replicated, and reported.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.rules import lowering as low
from passes.rules import shapes as by
from passes.rules.notation import OpRule, RuleError, instantiate

__all__ = ["RULES", "Rule", "bind", "kept_besides", "name_of", "rule_of", "saved_by"]

_log = logging.getLogger("autotp.passes")


@dataclass(frozen=True, slots=True)
class Rule:
    """One operator's rule and what a rewrite needs to know about it.

    Attributes:
        form: an expression of the notation, or a builder that makes one (or an ``OpRule``) from a node.
        inner: whole factors that ``lower`` can shard.
        additive, linear: see ``OpRule``.
        lower: builds the operator's sharded form when a factor in ``inner`` or a reduced factor is sharded.
        shape: position of an argument that is the result's shape, to be made local.
        divide: argument position -> factor whose shards divide it (``num_groups``, equal split sizes).
        flop: FLOP of the whole forward operator; the backward of such an operator costs twice that.
        statistics: how many numbers per row a lowering reduces over the axes of its inner factors, forward and backward.
        contiguous: factors whose lowering counts positions, so that a device must hold neighbouring ones.
        random: draws random numbers.
        saves: what the backward pass keeps: "operands"; "others", each operand for the others' gradients; "result"; "".
        extra: how many tensors of the first operand's size a lowering over inner axes keeps besides.
        view: moves no data.
        misreads: whether the node's kernel may take an operand, or its gradient, for one of another memory format where
            dims of size 1 leave that open: it is then given those in one that is beyond doubt.
        bounded: operand of indices -> the factor that they are indices into, checked by the operator itself unless that
            factor is sharded.
    """

    form: str | Callable[[fx.Node], OpRule | str | None]
    inner: tuple[str, ...] = ()
    additive: tuple[int, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    lower: Callable[..., Any] | None = None
    shape: int | None = None
    divide: Mapping[int, str] | None = None
    flop: Callable[[fx.Node], float] | None = None
    statistics: tuple[int, int] = (2, 2)
    contiguous: tuple[str, ...] = ()
    random: bool = False
    saves: str = "operands"
    extra: int = 0
    view: bool = False
    misreads: Callable[[fx.Node], bool] | None = None
    bounded: Mapping[int, str] | None = None


def name_of(node: fx.Node) -> str:
    """The key of a node's operator in ``RULES``."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a node's operator, or ``None``."""
    return RULES.get(name_of(node))


def saved_by(node: fx.Node) -> str:
    """What the backward pass of a node keeps of it: "operands", "result" or ""."""
    rule = rule_of(node) if node.op == "call_function" else None
    if rule is None:
        return ""
    if rule.saves == "others":
        return "operands" if len(by.operands_of(node)) > 1 else ""
    return rule.saves


def kept_besides(node: fx.Node) -> float:
    """Bytes that a lowering over inner axes keeps for the backward pass, per byte of the first operand.

    What it keeps is in the dtype that it computes in, float32 for halves; so is the operand itself.
    """
    rule = rule_of(node)
    if rule is None or not rule.extra:
        return 0.0
    dtype = by.operands_of(node)[0].meta["val"].dtype
    return (rule.extra + 1) * torch.promote_types(dtype, torch.float32).itemsize / dtype.itemsize - 1


def bind(node: fx.Node) -> OpRule | None:
    """The node's rule with its shapes; ``None`` if the operator has no rule or the rule has nothing to offer.

    A rule that does not fit the shapes offers nothing: the operator is replicated, and ``autotp.passes`` logs it.
    """
    rule = rule_of(node)
    if rule is None:
        return None
    try:
        return _bound(node, rule)
    except RuleError as error:
        _log.warning("%s (%s) is computed whole on every device: %s", node.name, name_of(node), error)
        return None


def _bound(node: fx.Node, rule: Rule) -> OpRule | None:
    form = rule.form if isinstance(rule.form, str) else rule.form(node)
    if form is None or isinstance(form, OpRule):
        return form
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    results = [tuple(t.shape) for t in by.results_of(node)]
    return instantiate(form, operands, results, inner=rule.inner, additive=rule.additive, linear=rule.linear)


def _contraction(weight: int) -> Callable[[fx.Node], float]:
    """2 · (elements of the result) · (length contracted): every weight element but the output dim's is one product."""

    def flop(node: fx.Node) -> float:
        result = math.prod(by.shape_of(node))
        operand = by.shape_of(by.operands_of(node)[weight])
        kind = name_of(node)
        if kind.startswith("aten.conv_transpose"):
            return 2.0 * math.prod(by.shape_of(by.operands_of(node)[0])) * math.prod(operand[1:])
        if kind.startswith("aten.conv"):
            return 2.0 * result * math.prod(operand[1:])
        return 2.0 * result * (operand[-1] if kind == "aten.linear.default" else operand[max(0, len(operand) - 2)])

    return flop


def _einsum_flop(node: fx.Node) -> float:
    rule = by.einsum(node)
    return 2.0 * math.prod(rule.sizes.values()) if rule else 0.0


def _attention_flop(node: fx.Node) -> float:
    q, k, v = (by.shape_of(n) for n in by.operands_of(node)[:3])
    return 2.0 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _attention(node: fx.Node) -> OpRule:
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


def _convolution(node: fx.Node) -> OpRule:
    groups = by.argument(node, 6, "groups", 1)
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    batch = "n " if len(operands[0]) == len(operands[1]) else ""
    left, right = ("(g i)", "(g o)") if groups > 1 else ("i", "o")
    weight = f"{left} o *" if "transpose" in name_of(node) else f"{right} {'[i]' if groups > 1 else 'i'} *"
    form = f"{batch}{left} *, {weight}, {right} -> {batch}{right} *"
    sizes = {"g": groups} if groups > 1 else {}
    return instantiate(form, operands, [by.shape_of(node)], additive=(2,), sizes=sizes)


def _batch_norm(node: fx.Node) -> str:
    """By the batch's own statistics; without running ones, there are no new ones."""
    return "[n] c *, c, c, c, c -> [n] c *" + ", c, c" * (len(by.results_of(node)) == 3)


def _layer_norm(node: fx.Node) -> OpRule:
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    names = [f"h{i}" for i in range(len(node.args[1]))]  # type: ignore[arg-type]
    dims = " ".join(f"[{n}]" for n in names)
    form = f"… {dims}, {dims}, {dims} -> … {dims}"
    return instantiate(form, operands, [by.shape_of(node)], inner=names)


def _group_norm(node: fx.Node) -> OpRule:
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    groups: int = node.args[1]  # type: ignore[assignment]
    sizes = {f: n for f, n in {"g": groups, "c": operands[0][1] // groups}.items() if n > 1}
    whole = instantiate("n (g c) *, (g c), (g c) -> n (g c) *", operands, [by.shape_of(node)], sizes=sizes)
    return OpRule(whole.operands, whole.results, whole.sizes, inner=frozenset({"c"} & set(whole.sizes)))


def _softmax(node: fx.Node) -> OpRule:
    (shape,) = [by.shape_of(n) for n in by.operands_of(node)]
    where = by.argument(node, 1, "dim") % max(1, len(shape))
    names = [f"[v{i}]" if i == where else f"d{i}" for i in range(len(shape))]
    text = " ".join(names)
    return instantiate(f"{text} -> {text}", [shape], [shape], inner=[f"v{where}"])


def _cross_entropy(node: fx.Node) -> OpRule | None:
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    logits, target = operands[:2]
    if len(logits) < 2 or len(target) != len(logits) - 1:
        return None
    plain = len(operands) == 2 and not by.argument(node, 5, "label_smoothing", 0.0)
    result = "m *" if by.argument(node, 3, "reduction", 1) == 0 else ""
    inner = ["v"] if plain and len(logits) == 2 else []
    return instantiate(f"m [v] *, m *, [v] -> {result}", operands, [by.shape_of(node)], inner=inner)


def _addmm(node: fx.Node) -> str | None:
    if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    bias = by.shape_of(by.operands_of(node)[0])
    return ("c" if len(bias) == 1 else "r c") + ", r k, k c -> r c"


def _embedding(node: fx.Node) -> str | None:
    """Gradients by how often a word is met count words of the whole batch."""
    return None if by.argument(node, 3, "scale_grad_by_freq", False) else "v h, … -> … h"


def _loss(node: fx.Node) -> OpRule | None:
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    if len(set(operands)) != 1:
        return None
    text = " ".join(f"d{i}" for i in range(len(operands[0])))
    result = text if by.argument(node, 2, "reduction", 1) == 0 else ""
    return instantiate(", ".join([text] * len(operands)) + f" -> {result}", operands, [by.shape_of(node)])


def _words(text: str) -> list[str]:
    return text.split()


_UNARY = _words(
    """
abs acos acosh asin asinh atan atanh bitwise_not ceil celu clamp clamp_min clamp_max cos cosh elu erf erfc exp
exp2 expm1 floor frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu log log10 log1p log2 log_sigmoid
logical_not mish nan_to_num reciprocal relu relu6 round rsqrt sgn sigmoid sign silu sin sinh softplus sqrt square tan tanh
threshold trunc pow selu tanhshrink softsign hardshrink softshrink logit erfinv lgamma digamma _to_copy to type_as
"""
)
_BINARY = _words(
    """
atan2 bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ eq ne lt le gt ge fmod remainder floor_divide
maximum minimum logical_and logical_or logical_xor hypot xlogy pow copysign prelu_ rsub
"""
)
_OVERLOADS = (
    "default",
    "Tensor",
    "Scalar",
    "Tensor_Scalar",
    "Scalar_Tensor",
    "Tensor_Tensor",
    "Tensor_mode",
    "Scalar_mode",
)
_CASTS = ("dtype", "dtype_layout", "device", "other")


def _elementwise() -> dict[str, Rule]:
    plain, cheap = Rule(by.elementwise()), Rule(by.elementwise(), saves="result")
    table = {f"aten.{op}.{overload}": plain for op in (*_UNARY, *_BINARY) for overload in (*_OVERLOADS, *_CASTS)}
    for op in ("tanh", "sigmoid", "exp", "relu", "sqrt", "rsqrt", "reciprocal"):
        table[f"aten.{op}.default"] = cheap
    for overload in ("Tensor", "Scalar", "default"):
        table[f"aten.add.{overload}"] = table[f"aten.sub.{overload}"] = Rule(by.broadcast, saves="")
        table[f"aten.mul.{overload}"] = Rule(by.scaled, saves="others")
        table[f"aten.div.{overload}"] = Rule(by.scaled, saves="others")
    return {name: rule for name, rule in table.items() if _exists(name)}


def _exists(name: str) -> bool:
    _, op, overload = name.split(".")
    if not hasattr(torch.ops.aten, op) or overload not in getattr(torch.ops.aten, op).overloads():
        return False
    schema = getattr(getattr(torch.ops.aten, op), overload)._schema
    takes = [str(a.type) for a in schema.arguments]
    return "Tensor" in takes and [str(r.type) for r in schema.returns] == ["Tensor"] and "Device" not in takes[:1]


def _always(_: fx.Node) -> bool:
    return True


def _in_float64(node: fx.Node) -> bool:
    """On CPU, oneDNN computes convolutions of other dtypes, and takes any format."""
    return by.results_of(node)[0].dtype == torch.float64


_CONVOLUTION = Rule(_convolution, divide={6: "g"}, flop=_contraction(1), misreads=_in_float64)

RULES: Mapping[str, Rule] = {
    **_elementwise(),
    # contractions
    "aten.linear.default": Rule("… k, n k, n -> … n", additive=(2,), flop=_contraction(1)),
    "aten.matmul.default": Rule("… r k, … k c -> … r c", flop=_contraction(1)),
    "aten.mm.default": Rule("r k, k c -> r c", flop=_contraction(1)),
    "aten.bmm.default": Rule("b r k, b k c -> b r c", flop=_contraction(1)),
    "aten.addmm.default": Rule(_addmm, additive=(0,), flop=_contraction(2)),
    "aten.baddbmm.default": Rule("b r c, b r k, b k c -> b r c", additive=(0,), flop=_contraction(2)),
    "aten.einsum.default": Rule(by.einsum, flop=_einsum_flop),
    "aten.conv1d.default": _CONVOLUTION,
    "aten.conv2d.default": _CONVOLUTION,
    "aten.conv3d.default": _CONVOLUTION,
    "aten.conv1d.padding": _CONVOLUTION,
    "aten.conv2d.padding": _CONVOLUTION,
    "aten.conv3d.padding": _CONVOLUTION,
    "aten.conv_transpose1d.default": _CONVOLUTION,
    "aten.conv_transpose2d.input": _CONVOLUTION,
    "aten.conv_transpose3d.input": _CONVOLUTION,
    "aten.scaled_dot_product_attention.default": Rule(
        _attention, lower=low.attention, flop=_attention_flop, random=True, contiguous=("s",)
    ),
    # normalisation, softmax, losses
    "aten.layer_norm.default": Rule(_layer_norm, lower=low.layer_norm, extra=1),
    "aten.rms_norm.default": Rule(_layer_norm, lower=low.rms_norm, extra=1, statistics=(1, 1)),
    "aten.group_norm.default": Rule(_group_norm, lower=low.group_norm, extra=1, divide={1: "g"}, misreads=_always),
    "autotp.batch_norm_train.default": Rule(_batch_norm, inner=("n",), lower=low.batch_norm, extra=1, misreads=_always),
    "aten.batch_norm.default": Rule("n c *, c, c, c, c -> n c *", misreads=_always),
    "aten.softmax.int": Rule(_softmax, lower=low.softmax, extra=1, statistics=(2, 1), saves="result"),
    "aten.log_softmax.int": Rule(_softmax, lower=low.log_softmax, extra=1, statistics=(2, 1), saves="result"),
    "aten._softmax.default": Rule(_softmax, lower=low.softmax, extra=1, statistics=(2, 1), saves="result"),
    "aten._log_softmax.default": Rule(_softmax, lower=low.log_softmax, extra=1, statistics=(2, 1), saves="result"),
    "aten.cross_entropy_loss.default": Rule(
        _cross_entropy, lower=low.cross_entropy, extra=2, statistics=(3, 0), contiguous=("v",), bounded={1: "v"}
    ),
    "aten.mse_loss.default": Rule(_loss, lower=low.mean_loss),
    "aten.l1_loss.default": Rule(_loss, lower=low.mean_loss),
    "aten.smooth_l1_loss.default": Rule(_loss, lower=low.mean_loss),
    # lookup
    "aten.embedding.default": Rule(_embedding, lower=low.embedding, contiguous=("v",), saves="", bounded={1: "v"}),
    "aten.gather.default": Rule(by.gather),
    "aten.index.Tensor": Rule(by.index),
    # reductions
    "aten.sum.default": Rule(by.reduction(linear=True), lower=low.total, saves=""),
    "aten.sum.dim_IntList": Rule(by.reduction(linear=True), lower=low.total, saves=""),
    "aten.mean.default": Rule(by.reduction(linear=True), lower=low.mean, saves=""),
    "aten.mean.dim": Rule(by.reduction(linear=True), lower=low.mean, saves=""),
    "aten.amax.default": Rule(by.reduction(linear=False)),
    "aten.amin.default": Rule(by.reduction(linear=False)),
    "aten.argmax.default": Rule(by.reduction(linear=False), saves=""),
    "aten.any.dim": Rule(by.reduction(linear=False), saves=""),
    "aten.all.dim": Rule(by.reduction(linear=False), saves=""),
    # views and layout changes
    "aten.reshape.default": Rule(by.reshape, shape=1, saves="", view=True),
    "aten.expand.default": Rule(by.expand, shape=1, saves="", view=True),
    "aten.permute.default": Rule(by.permute, saves="", view=True),
    "aten.unsqueeze.default": Rule(by.unsqueeze, saves="", view=True),
    "aten.squeeze.default": Rule(by.squeeze, saves="", view=True),
    "aten.squeeze.dim": Rule(by.squeeze, saves="", view=True),
    "aten.squeeze.dims": Rule(by.squeeze, saves="", view=True),
    "aten.clone.default": Rule(by.elementwise((0,)), saves=""),
    "aten.detach.default": Rule(by.elementwise((0,)), saves="", view=True),
    "aten.neg.default": Rule(by.elementwise((0,)), saves=""),
    "aten.slice.Tensor": Rule(by.along(1, linear=True), saves="", view=True),
    "aten.select.int": Rule(by.select, saves="", view=True),
    "aten.split_with_sizes.default": Rule(by.split, divide={1: "rest"}, saves="", view=True),
    "aten.repeat.default": Rule(by.repeat, saves=""),
    "aten.cat.default": Rule(by.cat, saves=""),
    "aten.stack.default": Rule(by.stack, saves=""),
    "aten.constant_pad_nd.default": Rule(by.pad, saves=""),
    "aten.pad.default": Rule(by.pad, saves=""),
    "aten.flip.default": Rule(by.along(1, "dims", linear=True), saves=""),
    "aten.roll.default": Rule(by.roll, saves=""),
    "aten.cumsum.default": Rule(by.along(1, linear=True), saves=""),
    "aten.diff.default": Rule(by.along(2), saves=""),
    "aten.tril.default": Rule("… 1 1 -> … 1 1", saves="", linear=((0,),)),
    "aten.triu.default": Rule("… 1 1 -> … 1 1", saves="", linear=((0,),)),
    # selection and masks
    "aten.where.self": Rule(by.elementwise((1, 2)), saves=""),
    "aten.masked_fill.Scalar": Rule(by.elementwise(), saves=""),
    "aten.masked_fill.Tensor": Rule(by.elementwise(), saves=""),
    "aten.addcmul.default": Rule(by.elementwise()),
    "aten.lerp.Scalar": Rule(by.elementwise((0, 1))),
    # images
    "aten.max_pool1d.default": Rule("… 1 -> … 1"),
    "aten.max_pool2d.default": Rule("… 1 1 -> … 1 1"),
    "aten.avg_pool1d.default": Rule("… 1 -> … 1", linear=((0,),), saves=""),
    "aten.avg_pool2d.default": Rule("… 1 1 -> … 1 1", linear=((0,),), saves=""),
    "aten.adaptive_avg_pool1d.default": Rule("… 1 -> … 1", linear=((0,),), saves=""),
    "aten.adaptive_avg_pool2d.default": Rule("… 1 1 -> … 1 1", linear=((0,),), saves=""),
    "aten.adaptive_max_pool2d.default": Rule("… 1 1 -> … 1 1, … 1 1"),
    "aten.upsample_nearest2d.vec": Rule("n c * -> n c *", linear=((0,),), saves=""),
    "aten.upsample_nearest2d.default": Rule("n c * -> n c *", linear=((0,),), saves=""),
    "aten.upsample_bilinear2d.vec": Rule("n c * -> n c *", linear=((0,),), saves=""),
    "aten.upsample_bicubic2d.vec": Rule("n c * -> n c *", linear=((0,),), saves=""),
    # random
    "aten.dropout.default": Rule(by.elementwise(), random=True, saves="result"),
    "aten.rand_like.default": Rule(by.elementwise(), random=True, saves=""),
    "aten.randn_like.default": Rule(by.elementwise(), random=True, saves=""),
    "aten.alpha_dropout.default": Rule(by.elementwise(), random=True),
    "aten.feature_dropout.default": Rule("n c * -> n c *", random=True),
    "aten.feature_alpha_dropout.default": Rule("n c * -> n c *", random=True),
    # made anew from shapes alone
    "aten.new_ones.default": Rule("_ -> _", saves=""),
    "aten.new_zeros.default": Rule("_ -> _", saves=""),
    "aten.new_full.default": Rule("_ -> _", saves=""),
    "aten.zeros_like.default": Rule(by.elementwise(), saves=""),
    "aten.ones_like.default": Rule(by.elementwise(), saves=""),
    "aten.full_like.default": Rule(by.elementwise(), saves=""),
}
"""Name of an operator -> its rule."""
