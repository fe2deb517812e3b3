"""The rule table: one line per operator.

``RULES`` maps an operator's name (``str(node.target)``, of ATen or of autotp's own library) to its ``Rule``. An operator
that is not in it is replicated, and reported.
"""

from __future__ import annotations

import cmath
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from passes.graph import arguments_of
from passes.rules import indexing, recurrent, views
from passes.rules import lowering as low
from passes.rules import operators as of
from passes.rules import shapes as by
from passes.rules.elementwise import ELEMENTWISE
from passes.rules.kinds import KERNELS
from passes.rules.notation import OpRule, RuleError, instantiate
from passes.rules.rule import Product, Rule
from passes.torch_internals import OpOverload

__all__ = ["RULES", "bind", "draws", "flop_of", "kept_besides", "kind_of", "name_of", "rule_of"]

_log = logging.getLogger("autotp.passes")


def name_of(node: fx.Node) -> str:
    """The key of a node's operator in ``RULES``."""
    return _name(node.target)


@cache
def _name(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def rule_of(node: fx.Node) -> Rule | None:
    """The rule of a node's operator, or ``None``."""
    return RULES.get(name_of(node))


def kind_of(node: fx.Node) -> str:
    """The one of ``costmodel.KINDS`` to which an operator of a captured or traced graph belongs."""
    name = name_of(node)
    rule = RULES.get(name)
    return rule.kind if rule is not None else KERNELS.get(name, "pointwise")


def flop_of(node: fx.Node) -> float:
    """FLOP of a node's whole forward operator."""
    rule = rule_of(node)
    return rule.flop(node) if rule is not None and rule.flop is not None else 0.0


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = arguments_of(node, node.args, node.kwargs)
    if not given.get("train", given.get("training", True)):
        return False
    # Attention and recurrent networks have this tag because of a dropout that most calls do not use.
    return bool(given.get("dropout_p", given.get("dropout", True)))


def kept_besides(node: fx.Node) -> float:
    """Bytes that a lowering over inner axes saves beyond the first operand, per byte of the first operand.

    The saved tensors, including the operand itself, have the dtype of the computation: float32 for half precision.
    """
    rule = rule_of(node)
    if rule is None or rule.extra is None:
        return 0.0
    dtype = by.operands_of(node)[0].meta["val"].dtype
    return (rule.extra + 1) * torch.promote_types(dtype, torch.float32).itemsize / dtype.itemsize - 1


def bind(node: fx.Node) -> OpRule | None:
    """Binds a node's rule to its shapes; ``None`` if the operator has no rule, or the rule does not apply to the node.

    If the rule does not fit the shapes, the operator is replicated, and the logger ``autotp.passes`` warns.
    """
    rule = rule_of(node)
    if rule is None:
        return None
    try:
        bound = _bound(node, rule)
    except RuleError as error:
        _log.warning("%s (%s) is computed whole on every device: %s", node.name, name_of(node), error)
        return None
    if bound is None or not bound.linear:
        return bound
    numbers = [each for each in (*node.args, *node.kwargs.values()) if isinstance(each, (float, complex))]
    # Scaled by a number that is not finite, partial sums may become infinite, with different signs.
    return bound if all(map(cmath.isfinite, numbers)) else replace(bound, linear=())


def _bound(node: fx.Node, rule: Rule) -> OpRule | None:
    form = rule.form if isinstance(rule.form, str) else rule.form(node)
    if form is None or isinstance(form, OpRule):
        return form
    operands = [by.shape_of(n) for n in by.operands_of(node)]
    results = [tuple(t.shape) for t in by.results_of(node)]
    return instantiate(form, operands, results, inner=rule.inner, additive=rule.additive, linear=rule.linear)


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten.{name if '.' in name else f'{name}.default'}": rule for name in names.split()}


_PLAIN, _ADDED = Product(), Product(data=1, weight=2, bias=0)


def _product(form: str | Callable[[fx.Node], str | None], additive: tuple[int, ...] = (), where: Product = _PLAIN) -> Rule:
    return Rule(form, "product", additive=additive, flop=of.product_flop(where), product=where, saves="others")


def _convolution(order: torch.memory_format | None = None, *, transposed: bool = False) -> Rule:
    return Rule(
        partial(of.convolution, transposed=transposed),
        "convolution",
        divide={6: "g"},
        flop=partial(of.convolution_flop, transposed=transposed),
        channels_last=order,
        misreads=of.in_float64,
        saves="others",
    )


def _recurrent(name: str) -> dict[str, Rule]:
    kept: dict[str, Any] = {"saves": "all", "besides": recurrent.kept_by_network}
    return {
        f"aten.{name}.input": Rule(recurrent.network, "product", flop=recurrent.network_flop, **kept),
        f"aten.{name}_cell.default": Rule(recurrent.cell, "product", flop=recurrent.cell_flop, **kept),
    }


def _norm(form: str | Callable[[fx.Node], OpRule | str], **known: Any) -> Rule:
    return Rule(form, "norm", extra=1, **known)


def _softmax(lower: Callable[..., Any]) -> Rule:
    return Rule(of.softmax, "softmax", lower=lower, extra=0, statistics=(2, 1), saves="result")


_CONVOLUTION, _TRANSPOSED = _convolution(), _convolution(transposed=True)
_IMAGES, _VOLUMES = _convolution(torch.channels_last), _convolution(torch.channels_last_3d)

RULES: Mapping[str, Rule] = {
    **ELEMENTWISE,
    # contractions
    "aten.linear.default": _product("… k, n k, n -> … n", (2,), Product(bias=2, transposed=True)),
    "aten.matmul.default": _product(of.matmul),
    "aten.mm.default": _product("r k, k c -> r c"),
    "aten.outer.default": Rule("r, c -> r c", saves="others"),
    "aten.bmm.default": _product("b r k, b k c -> b r c"),
    "aten.addmm.default": _product(of.addmm, (0,), _ADDED),
    "aten.baddbmm.default": _product("b r c, b r k, b k c -> b r c", (0,), _ADDED),
    "aten.einsum.default": Rule(by.einsum, "product", flop=of.einsum_flop, saves="others"),
    "aten.conv1d.default": _CONVOLUTION,
    "aten.conv2d.default": _IMAGES,
    "aten.conv3d.default": _VOLUMES,
    "aten.conv1d.padding": _CONVOLUTION,
    "aten.conv2d.padding": _IMAGES,
    "aten.conv3d.padding": _VOLUMES,
    "aten.conv_transpose1d.default": _TRANSPOSED,
    "aten.conv_transpose2d.input": _TRANSPOSED,
    "aten.conv_transpose3d.input": _TRANSPOSED,
    "aten.scaled_dot_product_attention.default": Rule(
        of.attention,
        "attention",
        lower=low.attention,
        flop=of.attention_flop,
        backward=2.5,  # it computes the scores once more: FlashAttention-2, arXiv 2307.08691, section 4.1
        contiguous=("s",),
        saves="all",
        besides=of.kept_by_attention,
    ),
    # recurrent networks
    **_recurrent("lstm"),
    **_recurrent("gru"),
    **_recurrent("rnn_tanh"),
    **_recurrent("rnn_relu"),
    # normalisation, softmax, losses
    "aten.layer_norm.default": _norm(of.layer_norm, lower=low.layer_norm),
    "aten.rms_norm.default": _norm(of.layer_norm, lower=low.rms_norm, statistics=(1, 1), rereads=True),
    "aten.group_norm.default": _norm(of.group_norm, lower=low.group_norm, divide={1: "g"}, misreads=of.always),
    "autotp.batch_norm_train.default": _norm(of.batch_norm, inner=("n",), lower=low.batch_norm, misreads=of.always),
    "aten.batch_norm.default": Rule("n c *, c, c, c, c -> n c *", "norm", misreads=of.always),
    "aten.softmax.int": _softmax(low.softmax),
    "aten.log_softmax.int": _softmax(low.log_softmax),
    "aten._softmax.default": _softmax(low.softmax),
    "aten._log_softmax.default": _softmax(low.log_softmax),
    "aten.cross_entropy_loss.default": Rule(
        of.cross_entropy,
        "softmax",
        lower=low.cross_entropy,
        extra=0,
        saves="copy",
        statistics=(3, 0),
        contiguous=("v",),
        bounded={1: "v"},
    ),
    "aten.nll_loss_nd.default": Rule(of.nll_loss, "gather", lower=low.nll_loss, saves=""),
    **_each("mse_loss l1_loss smooth_l1_loss huber_loss kl_div", Rule(of.loss, lower=low.mean_loss)),
    "aten.binary_cross_entropy.default": Rule(of.loss, lower=low.weighted_loss),
    "aten.binary_cross_entropy_with_logits.default": Rule(of.loss, lower=low.loss_with_logits),
    "aten._weight_norm.default": Rule(of.weight_norm, "norm"),
    # lookup
    "aten.embedding.default": Rule(
        of.embedding, "gather", lower=low.embedding, contiguous=("v",), saves="", bounded={1: "v"}
    ),
    "autotp.renewed.default": Rule(by.elementwise(), saves=""),
    "autotp.embedding_bag.default": Rule(of.bags, "gather", lower=low.bags, contiguous=("v",), saves="", bounded={1: "v"}),
    "aten.embedding_bag.padding_idx": Rule(of.ragged_bags, "gather", saves=""),
    "aten.index.Tensor": Rule(indexing.index, "gather", saves=""),
    "aten.index_put.default": Rule(indexing.index_put, "gather", saves=""),
    "aten.index_select.default": Rule(indexing.index_select, "gather", saves=""),
    "aten.select_scatter.default": Rule(indexing.select_scatter, "gather", saves=""),
    "aten.slice_scatter.default": Rule(by.along(linear=(0, 1)), "gather", saves=""),
    **_each("gather scatter.value index_fill.int_Scalar index_fill.int_Tensor", Rule(by.along(), "gather", saves="")),
    **_each("scatter.src index_copy take_along_dim", Rule(by.along(), "gather", saves="")),
    **_each("scatter_add index_add", Rule(by.along(linear=(0, 2)), "gather", saves="")),
    "aten.scatter_reduce.two": Rule(by.along(), "gather", saves="all"),
    # reductions
    **_each("sum sum.dim_IntList", Rule(by.reduction(linear=True), lower=low.total, saves="")),
    **_each("mean mean.dim", Rule(by.reduction(linear=True), lower=low.mean, saves="")),
    **_each("amax amin", Rule(by.reduction(linear=False))),
    **_each("argmax argmin any.dim any.dims all.dim all.dims", Rule(by.reduction(linear=False), saves="")),
    **_each("max.dim min.dim median.dim kthvalue", Rule(by.reduction(linear=False), saves="", besides=of.kept_places)),
    **_each("var.dim var.correction var_mean.correction", Rule(by.reduction(linear=False))),
    **_each("std.dim std.correction std_mean.correction", Rule(by.reduction(linear=False), saves="all")),
    **_each("logsumexp prod.dim_int", Rule(by.reduction(linear=False), saves="all")),
    **_each("linalg_vector_norm linalg_norm norm.ScalarOpt_dim", Rule(by.reduction(linear=False), "norm", saves="all")),
    # along a dim
    **_each("cumsum diff", Rule(by.along(), saves="")),
    **_each("cumprod logcumsumexp", Rule(by.along(), saves="all")),
    **_each("topk sort sort.stable cummax cummin", Rule(by.along(), saves="", besides=of.kept_places)),
    **_each("argsort argsort.stable fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", Rule(by.along(), saves="")),
    **_each("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn", Rule(by.along(), saves="")),
    **_each("fft_rfftn fft_irfftn fft_fftshift fft_ifftshift", Rule(by.along(), saves="")),
    **_each("cosine_similarity pairwise_distance", Rule(of.compared)),
    "aten.cdist.default": Rule("… r [k], … c [k] -> … r c", "product", flop=of.distances_flop, saves="all"),
    "aten.linalg_cross.default": Rule(by.along()),
    "aten.bucketize.Tensor": Rule("…, 1 -> …", saves=""),
    "aten.glu.default": Rule(views.glu),
    # views and layout changes
    "aten.reshape.default": Rule(views.reshape, shape=1, saves="", view=True, copies=True),
    "aten.expand.default": Rule(views.expand, shape=1, saves="", view=True),
    "aten.permute.default": Rule(views.permute, saves="", view=True),
    "aten.unsqueeze.default": Rule(views.unsqueeze, saves="", view=True),
    "aten.squeeze.default": Rule(views.squeeze, saves="", view=True),
    "aten.squeeze.dim": Rule(views.squeeze, saves="", view=True),
    "aten.squeeze.dims": Rule(views.squeeze, saves="", view=True),
    "aten.clone.default": Rule(by.elementwise((0,)), saves=""),
    "aten.alias.default": Rule(by.elementwise(), saves="", view=True),
    "aten.detach.default": Rule(by.elementwise((0,)), saves="", view=True, detaches=True),
    "aten.neg.default": Rule(by.elementwise((0,)), saves=""),
    "aten.slice.Tensor": Rule(by.along(linear=(0,)), "copy", saves="", view=True),
    "aten.select.int": Rule(views.select, saves="", view=True),
    "aten.split_with_sizes.default": Rule(views.split, divide={1: "rest"}, saves="", view=True),
    "aten.repeat.default": Rule(by.repeat, "copy", saves=""),
    "aten.cat.default": Rule(by.cat, "copy", saves=""),
    "aten.stack.default": Rule(by.stack, "copy", saves=""),
    "aten.constant_pad_nd.default": Rule(by.pad, saves=""),
    "aten.pad.default": Rule(by.pad, "copy", saves=""),
    "aten.flip.default": Rule(by.along("dims", linear=(0,)), "copy", saves=""),
    "aten.roll.default": Rule(by.along("dims", linear=(0,)), "copy", saves=""),
    "aten.unfold.default": Rule(views.unfold, saves="", view=True),
    "aten.repeat_interleave.self_int": Rule(views.repeat_interleave, "copy", saves=""),
    "aten.repeat_interleave.self_Tensor": Rule(views.repeat_interleave, "copy", saves=""),
    **_each("pixel_shuffle pixel_unshuffle", Rule(views.pixel_shuffle, "copy", saves="")),
    "aten.tril.default": Rule("… 1 1 -> … 1 1", saves="", linear=((0,),)),
    "aten.triu.default": Rule("… 1 1 -> … 1 1", saves="", linear=((0,),)),
    # selection and masks
    "aten.where.self": Rule(by.elementwise((1, 2)), saves=""),
    **_each("where.ScalarOther where.ScalarSelf where.Scalar", Rule(by.elementwise(), saves="")),
    **_each("masked_fill.Scalar masked_fill.Tensor fill.Scalar fill.Tensor", Rule(by.elementwise(), saves="")),
    **_each("max.other min.other addcmul addcdiv lerp.Tensor", Rule(by.elementwise())),
    "aten.lerp.Scalar": Rule(by.elementwise((0, 1))),
    # complex numbers
    "aten.complex.default": Rule(by.elementwise(), saves=""),
    "aten.polar.default": Rule(by.elementwise(), saves="all"),
    **_each("resolve_conj resolve_neg", Rule(by.elementwise(), saves="")),
    **_each("real imag", Rule(by.elementwise(), saves="", view=True)),
    "aten.view_as_real.default": Rule("… -> … 1", saves="", view=True),
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
    "aten.grid_sampler.default": Rule("n c *, n * -> n c *", "gather"),
    # random
    "aten.dropout.default": Rule(by.elementwise(), saves="mask"),
    "aten.rand_like.default": Rule(by.elementwise(), saves=""),
    "aten.randn_like.default": Rule(by.elementwise(), saves=""),
    "aten.alpha_dropout.default": Rule(by.elementwise()),
    "aten.feature_dropout.default": Rule("n c * -> n c *"),
    "aten.feature_alpha_dropout.default": Rule("n c * -> n c *"),
    # created from shapes alone
    "aten.new_ones.default": Rule("_ -> _", saves=""),
    "aten.new_zeros.default": Rule("_ -> _", saves=""),
    "aten.new_full.default": Rule("_ -> _", saves=""),
    "aten.zeros_like.default": Rule(by.elementwise(), saves=""),
    "aten.ones_like.default": Rule(by.elementwise(), saves=""),
    "aten.full_like.default": Rule(by.elementwise(), saves=""),
}
"""Name of an operator -> its rule."""
