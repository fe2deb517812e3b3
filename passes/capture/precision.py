"""Mixed precision: parameters rest in one dtype, are communicated and used in another, with gradients reduced in a third.

A model is captured as it runs under a ``MixedPrecisionPolicy`` of torch, with the semantics of
``fully_shard(model, mp_policy=...)``: the model sees its parameters in ``param_dtype``, the arguments of a call are cast to
it, and buffers stay as they are. Each parameter's placeholder then has a `passes.graph.Cast`: the sharding pass casts a
parameter's shard before it is gathered, and its gradient before it is reduced. The cost model counts bytes by these dtypes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from costmodel.errors import AutotpError, shown
from passes.capture.builder import CaptureError
from passes.graph import Cast, where
from passes.rules.shapes import operands_of
from passes.rules.table import kind_of, name_of, rule_of
from passes.torch_internals import BatchNorm, reparametrize_module, tree_map

__all__ = ["PRECISIONS", "Precision", "cast_parameters", "check_dtypes", "policy_of", "precision_name", "under"]

#: A precision: None, a name, a policy, or a policy as text, as `precision_name` writes it.
Precision = str | MixedPrecisionPolicy | None

#: Name -> policy.
PRECISIONS: Mapping[str, MixedPrecisionPolicy] = {
    "bf16-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16-mixed": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
}

_FIELDS = tuple(field.name for field in fields(MixedPrecisionPolicy))
_SINGLE = 4


def policy_of(precision: Precision) -> MixedPrecisionPolicy | None:
    """The policy of a precision; None if it changes no dtypes.

    Raises:
        AutotpError: there is no such precision, or the policy has a dtype that is not a floating-point one.
    """
    if precision is None or (isinstance(precision, str) and precision in ("none", "None")):
        return None
    found = (PRECISIONS.get(precision) or _read(precision)) if isinstance(precision, str) else precision
    if not isinstance(found, MixedPrecisionPolicy):
        names = ", ".join(map(repr, PRECISIONS))
        raise AutotpError(
            f"precision {shown(precision)} is unknown; choose {names}, None, or a "
            "torch.distributed.fsdp.MixedPrecisionPolicy"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(found, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise AutotpError(
                f"precision: {name} is {dtype!r}; give a floating-point dtype such as torch.bfloat16, or None"
            )
    if not isinstance(found.cast_forward_inputs, bool):
        raise AutotpError(f"precision: cast_forward_inputs is {found.cast_forward_inputs!r}; give True or False")
    return None if found == MixedPrecisionPolicy(cast_forward_inputs=found.cast_forward_inputs) else found


def precision_name(precision: Precision) -> str | None:
    """A precision as text that `policy_of` reads: its name, or fields such as ``param_dtype=bfloat16``; None for none."""
    policy = policy_of(precision)
    if policy is None:
        return None
    for name, known in PRECISIONS.items():
        if policy == known:
            return name
    given = [(name, getattr(policy, name)) for name in _FIELDS if getattr(policy, name) != getattr(_PLAIN, name)]
    return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in given)


_PLAIN = MixedPrecisionPolicy()


def _read(text: str) -> MixedPrecisionPolicy | None:
    """The inverse of `precision_name` for policies without a name; None for any other text."""
    given: dict[str, Any] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        if name not in _FIELDS or not value:
            return None
        known = {"True": True, "False": False, "None": None} if name == "cast_forward_inputs" else {"None": None}
        given[name] = known[value] if value in known else getattr(torch, value, value)
    return MixedPrecisionPolicy(**given) if given else None


def cast_parameters(model: nn.Module, policy: MixedPrecisionPolicy) -> dict[str, Cast]:
    """Parameter name -> its dtypes, for each parameter that the policy affects.

    A batch norm with running statistics keeps the dtype of its parameters: torch's kernels require that of the statistics.
    FSDP2 does the same if such a module is wrapped by itself, with a policy without ``param_dtype``.

    Args:
        model: the model, before capture.
        policy: the policy.

    Raises:
        AutotpError: a parameter rests in a dtype that is too narrow for the policy.
    """
    found: dict[str, Cast] = {}
    apart = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, BatchNorm) and module.track_running_stats
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        rests = parameter.dtype
        if not rests.is_floating_point:
            continue
        used = rests if policy.param_dtype is None or id(parameter) in apart else policy.param_dtype
        if policy.param_dtype is not None and rests.itemsize < _SINGLE:
            raise AutotpError(
                f"precision: parameter {name} is {_short(rests)} already, so the optimizer has no wider one to update "
                f"besides those in {_short(policy.param_dtype)}: call model.float() first, or leave precision out to train "
                "in the model's own dtypes (to reduce in float32: MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )
        reduced = policy.reduce_dtype or used
        if used is not rests or reduced is not rests:
            found[name] = Cast(rests, used, reduced)
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def under(model: nn.Module, policy: MixedPrecisionPolicy, casts: Mapping[str, Cast]) -> Iterator[None]:
    """Context manager under which the model runs by the policy, with empty parameters in the dtypes of ``casts``."""
    tensors = dict(model.named_parameters())
    swapped: dict[str, Tensor] = {
        name: nn.Parameter(torch.empty_like(tensors[name], dtype=cast.used), requires_grad=tensors[name].requires_grad)
        for name, cast in casts.items()
        if cast.there
    }
    hooks = []
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        before = _cast_to(policy.param_dtype)
        hooks.append(
            model.register_forward_pre_hook(
                lambda _, args, kwargs: (before(args), before(kwargs)), prepend=True, with_kwargs=True
            )
        )
    if policy.output_dtype is not None:
        after = _cast_to(policy.output_dtype)
        hooks.append(model.register_forward_hook(lambda _, __, outputs: after(outputs)))
    try:
        with reparametrize_module(model, swapped, tie_weights=True):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def check_dtypes(graph: fx.Graph, policy: MixedPrecisionPolicy | None) -> None:
    """Checks that the operators of a captured graph have kernels for their operands' dtypes, which fake tensors do not.

    Raises:
        CaptureError: there is no kernel; under a policy, because it casts one operand and not another.
    """
    for node in graph.nodes:
        dtypes = _contrary(node) if node.op == "call_function" and rule_of(node) is not None else []
        if not dtypes:
            continue
        found = f"{node.target} reads {', '.join(map(_short, dtypes))}"
        if policy is None:
            raise CaptureError(f"{where(node)}: {found}, for which torch has no kernel: cast the inputs, or the model")
        raise CaptureError(
            f"{where(node)}: precision {precision_name(policy)!r} and the model contradict each other: {found}. "
            "Try: cast_forward_inputs=True, so that inputs have the parameters' dtype; .to(weight.dtype) where the "
            "model makes a tensor of a dtype of its own; or no precision"
        )


def _contrary(node: fx.Node) -> list[torch.dtype]:
    """The dtypes of an operator's operands if its kernels do not support this combination; else an empty list."""
    name, kind = name_of(node).split(".")[1], kind_of(node)
    dtypes = [operand.meta["val"].dtype for operand in operands_of(node)]
    if name in _CLASSES:
        return [] if dtypes[1].is_floating_point or dtypes[1] in (torch.int64, torch.uint8) else dtypes[:2]
    if kind not in _UNIFORM and name not in _NORMS:
        return []
    if kind != "product" or name.startswith("_"):  # masks, offsets and scales may have other dtypes
        dtypes = [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1]
    # A norm may have float32 weights with narrower activations, if all of its weights are float32.
    beside = name in _NORMS and set(dtypes[1:]) == {torch.float32} and dtypes[0].itemsize < _SINGLE
    return dtypes if len(set(dtypes)) > 1 and not beside else []


#: Kinds of operators whose kernels require one dtype for all operands, norms that do, and losses with int64 classes.
_UNIFORM = ("product", "convolution", "attention")
_NORMS = ("layer_norm", "group_norm", "batch_norm", "batch_norm_train", "instance_norm")
_CLASSES = ("cross_entropy_loss", "nll_loss_nd")


def _cast_to(dtype: torch.dtype) -> Any:
    """A function that casts the floating-point tensors of a tree."""

    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return lambda tree: tree_map(one, tree)
