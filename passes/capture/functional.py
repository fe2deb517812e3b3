"""Operators without side effects that replace torch's operators with side effects.

Those in the ``autotp`` library are registered operators, not functions, so that their names in plans do not depend on where
they are defined.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from passes.capture.builder import Builder, CaptureError, operator_name
from passes.graph import differentiable, note_of, where
from passes.torch_internals import OpOverload, schema, storage_id, tree_leaves

__all__ = [
    "Data",
    "Flow",
    "Written",
    "batch_norm_train",
    "copying",
    "diagonal_filled",
    "embedding_bag",
    "is_statistic",
    "is_write",
    "no_form",
    "out_of_place",
    "renewed",
    "writes",
]

aten = torch.ops.aten
#: Operators that read only the shape of a tensor.
_SHAPED = re.compile(r"^aten::(\w+_like|new_\w+)$")
_RENAMED = {
    ("aten::bernoulli_", "float"): aten.bernoulli.p,
    ("aten::normal_", ""): aten.normal_functional.default,
}


_LIBRARY = torch.library.Library("autotp", "FRAGMENT")


def _batch_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Batch normalisation by the batch's own statistics, which also returns the new running statistics.

    Args:
        x: ``[batch, channels, ...]``.
        weight: scale per channel, or None.
        bias: shift per channel, or None.
        running_mean: running mean per channel, or None if none is kept.
        running_var: running unbiased variance per channel, or None.
        momentum: weight of this batch in the running statistics.
        eps: added to the variance.

    Returns:
        The normalised ``x``, and both new running statistics (never with a gradient), as in
        ``torch.nn.BatchNorm2d``: ``(1 - momentum) * old + momentum * batch's``, the variance over ``n - 1``.
    """
    out = torch.nn.functional.batch_norm(x, None, None, weight, bias, True, momentum, eps)
    if running_mean is None or running_var is None:
        return out, running_mean, running_var
    if x.numel() == 0:  # no statistics to add
        return out, running_mean.clone(), running_var.clone()
    dims = [d for d in range(x.dim()) if d != 1]
    # For half-precision inputs, torch's kernel computes the statistics in float32, and rounds the updated ones once.
    wide = torch.promote_types(torch.promote_types(x.dtype, running_mean.dtype), torch.float32)
    var, mean = torch.var_mean(x.detach().to(wide), dims, correction=1)
    new_mean = (1 - momentum) * running_mean.detach().to(wide) + momentum * mean
    new_var = (1 - momentum) * running_var.detach().to(wide) + momentum * var
    return out, new_mean.to(running_mean.dtype), new_var.to(running_var.dtype)


def _embedding_bag(weight: Tensor, ids: Tensor, factors: Tensor | None, mode: int) -> Tensor:
    """Reduces the embeddings of bags of equal size, without the auxiliary results of ``aten.embedding_bag``.

    Args:
        weight: ``[words, embedding]``.
        ids: ``[bags, words of a bag]``.
        factors: per-sample weights of the embeddings, in the shape of ``ids``, or None.
        mode: torch's code of the reduction: 0 for sum, 1 for mean, 2 for max.

    Returns:
        ``[bags, embedding]``.
    """
    name = ("sum", "mean", "max")[mode]
    return torch.nn.functional.embedding_bag(ids, weight, mode=name, per_sample_weights=factors)


class _Renewed(torch.autograd.Function):
    """The new value of a leaf after a write that autograd does not record; its gradient goes to the leaf unchanged."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, new: Tensor) -> Tensor:  # type: ignore[override]
        return new.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


_LIBRARY.define(
    "batch_norm_train(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, float momentum, "
    "float eps) -> (Tensor, Tensor?, Tensor?)"
)
# Composite: autograd, tracing and devices see the operators that the function calls.
_LIBRARY.impl("batch_norm_train", _batch_norm_train, "CompositeImplicitAutograd")

_LIBRARY.define("embedding_bag(Tensor weight, Tensor ids, Tensor? factors, int mode) -> Tensor")
_LIBRARY.impl("embedding_bag", _embedding_bag, "CompositeImplicitAutograd")

_LIBRARY.define("renewed(Tensor leaf, Tensor new) -> Tensor")
_LIBRARY.impl("renewed", lambda leaf, new: _Renewed.apply(leaf, new), "CompositeImplicitAutograd")

batch_norm_train = torch.ops.autotp.batch_norm_train.default
embedding_bag = torch.ops.autotp.embedding_bag.default
renewed = torch.ops.autotp.renewed.default


def is_statistic(node: fx.Node) -> bool:
    """Whether a node is one of the results of ``batch_norm_train`` that never have a gradient."""
    return node.target is operator.getitem and node.all_input_nodes[0].target is batch_norm_train and node.args[1] in (1, 2)


@dataclass(frozen=True, slots=True)
class Written:
    """The in-place changes of a graph.

    Attributes:
        places: placeholder -> index of its new value among the outputs; the new values follow the model's own outputs.
        frozen: parameters that are changed while gradients are enabled, which torch allows if they require none.
        carried: buffers whose new value has a gradient; the gradient ends with the call.
        strided: whether what is changed or read depends on the strides of inputs.
        drawn: whether random numbers depend on the strides of inputs, if they are drawn as on one device.
    """

    places: Mapping[str, int] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    carried: frozenset[str] = frozenset()
    strided: bool = False
    drawn: bool = False


def is_write(node: fx.Node) -> bool:
    """Whether a node writes to one of its arguments in place."""
    return bool(writes(node.target))


def writes(target: Any) -> list[int]:
    """Positions of the arguments that an operator writes to."""
    arguments = schema(target).arguments if isinstance(target, OpOverload) else ()
    return [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


class Flow:
    """Determines which values of a graph may propagate a gradient to a parameter or an input.

    Args:
        kinds: see `passes.capture.writes.functionalise`.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.kinds = kinds
        self.known: dict[tuple[bool, bool], dict[fx.Node, bool]] = {}

    def reaches(self, node: Any, *, flat: bool = False, inputs: bool = True) -> bool:
        """Whether a value may propagate a gradient.

        Args:
            node: the value; False for values that are not nodes.
            flat: ignore the model's blocks without gradients, which the flat graph does not have.
            inputs: whether gradients to inputs and to frozen parameters count too.
        """
        if not isinstance(node, fx.Node):
            return False
        known, pending = self.known.setdefault((flat, inputs), {}), [node]
        while pending:
            unknown = [n for n in pending[-1].all_input_nodes if n not in known]
            pending += unknown
            if not unknown:
                found = pending.pop()
                known[found] = self._carries(found, known, flat, inputs)
        return known[node]

    def _carries(self, node: fx.Node, known: Mapping[fx.Node, bool], flat: bool, inputs: bool) -> bool:
        if node.op == "placeholder":
            kind, value = self.kinds.get(node.name), node.meta["val"]
            return (
                (kind in ("parameter", "input") and differentiable(value))
                if inputs
                else kind == "parameter" and value.requires_grad
            )
        ends = node.target is aten.detach.default or _SHAPED.search(operator_name(node.target))
        if ends or is_statistic(node) or not any(map(differentiable, tree_leaves(node.meta["val"]))):
            return False
        return (flat or note_of(node).grad) and any(known[n] for n in node.all_input_nodes)


@functools.cache
def copying(target: Any) -> Any:
    """A functional version of a custom operator that writes to arguments: it writes to copies, and returns these too.

    For torch's own operators see `out_of_place`; no naming convention guarantees an out-of-place form for others.

    Returns:
        The operator, which returns the results and then the copies; None if a written argument or a result is not a single
        tensor, or a result aliases an argument.
    """
    described = schema(target)
    written = [described.arguments[i].name for i in writes(target)]
    kinds = [str(a.type) for a in (*(described.arguments[i] for i in writes(target)), *described.returns)]
    if set(kinds) != {"Tensor"} or any(a.alias_info is not None for a in described.returns):
        return None
    names = [a.name for a in described.arguments]

    def copies(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given |= {name: given[name].clone() for name in written}
        returned = target(**given)
        own = returned if isinstance(returned, tuple) else [returned] * len(described.returns)
        found = *own, *(given[name] for name in written)
        return found if len(found) > 1 else found[0]

    name = f"copying_{re.sub(r'[^a-zA-Z0-9]+', '_', str(target))}"
    taken = re.sub(r"\(\w+!\)", "", str(described).partition("(")[2].rpartition(" -> ")[0])
    returns = ", ".join(["Tensor"] * len(kinds))
    made = torch.library.custom_op(
        f"autotp::{name}", copies, mutates_args=(), schema=f"({taken} -> ({returns})", tags=list(target.tags)
    )
    made.register_fake(copies)
    return getattr(torch.ops.autotp, name).default


def out_of_place(target: Any) -> Any:
    """The out-of-place form of an in-place or ``out=`` operator of torch, or ``None``."""
    name, overload = schema(target).name, schema(target).overload_name
    if (name, overload) in _RENAMED:
        return _RENAMED[name, overload]
    short = name.removeprefix("aten::")
    plain = f"__{short[3:]}" if short.startswith("__i") else short.removesuffix("_")
    packet = getattr(aten, plain, None)
    found = _without_writes(packet, target)
    if found is None and plain != short:
        found = getattr(packet, overload or "default", None)
    return found


def diagonal_filled(build: Builder, x: Any, fill_value: Any, wrap: bool = False, *, like: fx.Node) -> fx.Node:
    """An out-of-place ``fill_diagonal_``: in contiguous memory, diagonal elements are a constant step apart."""
    emit, of = functools.partial(build.emit, like=like), x.meta["val"]
    step, count = 1, of.numel()
    for size in of.shape[:0:-1]:
        step = step * size + 1
    places = emit(aten.arange.default, (count,), {"device": of.device})
    mask = emit(aten.eq.Scalar, (emit(aten.remainder.Scalar, (places, step)), 0))
    if not wrap or of.dim() > 2:
        mask = emit(aten.logical_and.default, (mask, emit(aten.lt.Scalar, (places, step * min(of.shape)))))
    return emit(aten.masked_fill.Scalar, (x, emit(aten.reshape.default, (mask, list(of.shape))), fill_value))


def no_form(node: fx.Node) -> CaptureError:
    """The error for a write that has no out-of-place form."""
    return CaptureError(f"{where(node)}: {node.target} has no out-of-place form; use an out-of-place operator")


def _without_writes(packet: Any, target: Any) -> Any:
    """The overload without writes that takes the same arguments, such as ``div.Tensor`` for ``div.out``."""
    wanted = [(a.name, str(a.type)) for a in schema(target).arguments if not a.is_out]
    every = (getattr(packet, overload) for overload in packet.overloads()) if packet is not None else ()
    taken = {each: [(a.name, str(a.type)) for a in schema(each).arguments] for each in every if not writes(each)}
    return next((each for each, arguments in taken.items() if arguments == wanted), None)


class Data:
    """Tracks uses of ``x.data`` in ``forward``, which a graph represents as ``x.detach()``.

    Unlike writes to ``x.detach()``, writes to ``x.data`` do not bump the version of ``x``: if autograd has saved ``x``, the
    backward pass would use the new values, which a graph does not reproduce. Such writes are refused.
    """

    #: The functions that read and set ``x.data``.
    ACCESS = frozenset((Tensor.data.__get__, Tensor.data.__set__))  # type: ignore[attr-defined]

    def __init__(self) -> None:
        self._made, self._read = dict[int, Tensor](), dict[int, Tensor]()  # by storage id, which they keep in use
        self._computed: set[int] = set()

    def access(self, x: Tensor, *to: Tensor) -> Tensor | None:
        """Reads ``x.data``; or sets it to the same memory, as in-place operators do (``x.data *= 2``).

        Raises:
            CaptureError: it is set to other memory, or with another dtype, shape or strides.
        """
        if not to:
            made = x.detach()
            self._made |= self._memory(made)
            self._computed.update(self._memory(x) if x.requires_grad and not x.is_leaf else ())
            return made
        lies = [(storage_id(each), each.dtype, each.shape, each.stride(), each.storage_offset()) for each in (x, *to)]
        if lies[0] != lies[1]:
            raise CaptureError(
                "forward sets the data of a tensor (x.data = y), which a graph does not: use y, or write it into x "
                "with x.copy_(y) under torch.no_grad()"
            )
        return None

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, in_place: bool) -> None:
        """Records which memory a called function has read if its result requires a gradient.

        Raises:
            CaptureError: the function has written to ``x.data`` whose memory may have been saved for the backward pass.
        """
        written = [*(args[:1] if in_place or kwargs.get("inplace") is True else ()), kwargs.get("out")]
        if self._made and self._made.keys() & self._memory(written) & (self._read.keys() | self._computed):
            raise CaptureError(
                "forward writes to x.data where x is computed, or has been used: gradients would be those of the new "
                "values. Compute another tensor, or write before x is used"
            )
        if any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(result)):
            self._read |= self._memory((args, kwargs))

    @staticmethod
    def _memory(values: Any) -> dict[int, Tensor]:
        found = (each for each in tree_leaves(values) if isinstance(each, Tensor) and each.layout is torch.strided)
        with suppress(NotImplementedError):  # tensors wrapped by a transform such as vmap have no storage
            return {storage_id(each): each for each in found}
        return {}
