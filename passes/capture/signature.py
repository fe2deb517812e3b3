"""The calling convention of a model: checks calls against the example call, and flattens them in the same way."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from costmodel.errors import AutotpError
from passes.capture.attributes import faked
from passes.capture.builder import CaptureError
from passes.tensors import as_it_lies, require_dense, require_memory
from passes.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "CallSignature",
    "Leaf",
    "advice",
    "bind",
    "dense",
    "example",
    "flat",
    "in_call_order",
    "path_of",
    "refusal",
]

_MOST = 10_000  # most positional arguments of a call


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the example call.

    Args:
        path: its argument's name and its path inside the argument, such as ``batch['ids']``.
        shape: a tensor's shape; None for any other value.
        dtype: a tensor's dtype; None for any other value.
        value: the value itself if it is not a tensor.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    value: Any


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The calling convention of a captured model.

    Args:
        parameters: the signature of ``model.forward``.
        in_spec: the tree of the example call's bound arguments, defaults included.
        leaves: the leaves of that tree.
        out_spec: the tree of the model's outputs.
    """

    parameters: inspect.Signature
    in_spec: TreeSpec
    leaves: tuple[Leaf, ...]
    out_spec: TreeSpec

    @classmethod
    def of(
        cls, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out_spec: TreeSpec
    ) -> CallSignature:
        """The calling convention of an example call."""
        parameters = inspect.signature(forward)
        bound = bind(parameters, args, kwargs)
        paths, spec = tree_flatten_with_path(bound)
        leaves = [
            Leaf(path_of(path), tuple(v.shape), v.dtype, None)
            if isinstance(v, Tensor)
            else Leaf(path_of(path), None, None, v)
            for path, v in paths
        ]
        return cls(parameters, spec, tuple(leaves), out_spec)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[Tensor]:
        """The tensors of a call, in the order of the captured graph's inputs.

        Args:
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.

        Raises:
            TypeError: the arguments do not fit the model's signature, or a leaf is a tensor in only one of the two calls.
            AutotpError: structure, shape, dtype or a constant differs from the example call's.
        """
        bound = bind(self.parameters, args, kwargs or {})
        leaves, spec = tree_flatten(bound)
        if spec != self.in_spec:
            raise AutotpError(self._structure(bound))
        tensors = []
        for leaf, value in zip(self.leaves, leaves, strict=True):
            if leaf.shape is None:
                _check_constant(leaf, value)
                continue
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"argument {leaf.path}: the example call had a tensor {list(leaf.shape)} here, this call "
                    f"has {value!r}; pass a tensor, or plan again with example inputs of this kind"
                )
            if tuple(value.shape) != leaf.shape or value.dtype != leaf.dtype:
                raise AutotpError(
                    f"argument {leaf.path}: expected {list(leaf.shape)} of {leaf.dtype} as in the example "
                    f"call, got {list(value.shape)} of {value.dtype}; plan again with example inputs like these"
                )
            tensors.append(dense(value))
        return tensors

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The model's output in its own structure, from its flat leaves.

        Args:
            outputs: the user's output leaves, in the captured order.
        """
        return tree_unflatten(list(outputs), self.out_spec)

    def _structure(self, bound: dict[str, Any]) -> str:
        example = tree_unflatten(range(len(self.leaves)), self.in_spec)
        for name in self.parameters.parameters:
            old, new = tree_flatten(example[name])[1], tree_flatten(bound[name])[1]
            if old != new:
                return (
                    f"argument {name}: its structure differs from the example call's: expected {old}, "
                    f"got {new}; plan again with example inputs of this kind"
                )
        return "the call's structure differs from the example call's; plan again with example inputs of this kind"


def dense(tensor: Tensor, example: bool = False) -> Tensor:
    """A tensor with conjugate and negative bits resolved: kernels that read real parts ignore these bits.

    Raises:
        AutotpError: see `require_dense` and `require_memory`; or it is on the meta device, and not an ``example``.
    """
    require_dense(tensor, "a call has")
    require_memory({"an input": tensor})
    if tensor.is_meta and not example:
        raise AutotpError("a call has a tensor on the meta device, which holds no numbers: pass it on the module's device")
    return tensor.resolve_conj().resolve_neg()


def example(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the example inputs: ``torch.export`` silently merges a tensor that is given twice into one placeholder."""
    if not args and not kwargs:
        kwargs = dummy if isinstance(dummy := getattr(model, "dummy_inputs", None), Mapping) else {}
        given = inspect.signature(model.forward).parameters.values()
        if not kwargs and any(each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in given):
            raise AutotpError(f"{type(model).__name__}: no example inputs; pass args=(...) or kwargs={{...}} as in a call")
    if len(args) > _MOST:
        raise AutotpError(f"args has {len(args):,} positional arguments: give those of one call, such as (x,)")
    try:
        parameters = inspect.signature(model.forward)
        args, kwargs = _with_defaults(parameters, args, kwargs or {})
        flat(parameters, args, kwargs)
    except TypeError as error:
        raise AutotpError(f"{type(model).__name__}: the example inputs do not fit forward: {error}") from None
    meta = any(p.is_meta for p in model.parameters())

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(leaf, DTensor):  # only its global shape matters
            leaf = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)
        leaf = dense(leaf, example=True)
        copy = leaf.detach().to("meta") if meta and not leaf.is_meta else as_it_lies(leaf.detach())
        return copy.requires_grad_(leaf.requires_grad)

    return tree_map(own, tuple(args)), tree_map(own, dict(kwargs or {}))


def _with_defaults(
    parameters: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments, with defaults that are tensors filled in, so that these become inputs like others."""
    bound = parameters.bind(*args, **kwargs)
    defaults = {name: each.default for name, each in parameters.parameters.items() if isinstance(each.default, Tensor)}
    left = defaults.keys() - bound.arguments.keys()
    if not left:
        return args, kwargs
    bound.arguments |= {name: defaults[name] for name in left}
    return bound.args, bound.kwargs


def bind(parameters: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with defaults filled in; ``**kwargs`` keep their order, since a model may iterate over them."""
    bound = parameters.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def refusal(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], error: BaseException) -> CaptureError:
    """The error to raise if ``torch.export`` fails: says whether a plain call fails too, or else what may help."""
    essence, name = _essence(error), type(model).__name__
    if essence.startswith("Unsupported input type"):
        paths, _ = tree_flatten_with_path(bind(inspect.signature(model.forward), args, kwargs))
        odd = [f"{path_of(path)} is a {type(leaf).__name__}" for path, leaf in paths if f" {type(leaf)}." in essence]
        return CaptureError(
            f"{name}: argument {', '.join(odd)}, and torch.export takes tensors, numbers and text, also in lists and "
            "dicts: make it an attribute of the model, or an argument that forward has already (functools.partial)"
        )
    tried = advice(model)
    if unknown_class := re.match("Found <class '(.+?)'> in output", essence):
        instead = "tensors in lists, tuples and dicts, or use torch.export.register_dataclass; of a cache: use_cache=False"
        return CaptureError(f"{name}: forward returns a {unknown_class[1]}. Return {instead}")
    try:
        with faked(model, args, kwargs) as call:
            call()
    except KeyboardInterrupt:
        raise
    except BaseException as own:  # models may end the process
        unknown = isinstance(own, (DataDependentOutputException, DynamicOutputShapeException))
        if type(own) is type(error) and _essence(own)[:40] == essence[:40] and not unknown:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            given = ", ".join(f"{str(x.dtype)[6:]}{[*x.shape]} on {x.device}" for x in tensors)
            tried = f"So does a plain call, on tensors without values: check its inputs, {given}."
    return CaptureError(f"torch.export failed on {name}: {type(error).__name__}: {essence}\n{tried}")


def advice(model: nn.Module) -> str:
    """Suggestions for the message if ``torch.export`` fails on a model."""
    found = (
        "Try: no Python control flow that depends on tensor values; no x.data = y in forward; "
        "parameters changed under torch.no_grad() alone; parameters, buffers and inputs on one device; under a precision, "
        "no two dtypes in one operator"
    )
    if any(isinstance(each, (nn.TransformerEncoder, nn.TransformerDecoder)) for each in model.modules()):
        found += "; is_causal=True or False beside the mask of nn.Transformer, which else compares its values"
    if any(type(each).__module__.startswith("transformers.") for each in model.modules()):
        found += "; use_cache=False for causal language models; experts_implementation='batched_mm' for mixtures of experts"
    return found


def _essence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r" Caused by: \(passes/capture/[^)]*\)", "", " ".join(lines[:3]))[:400]


def flat(parameters: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], TreeSpec]:
    """The leaves of the arguments as `bind` returns them, and their tree.

    Raises:
        AutotpError: arguments contain themselves.
    """
    try:
        return tree_flatten(bind(parameters, args, kwargs))
    except RecursionError:
        raise AutotpError("arguments of the model contain themselves") from None


def path_of(path: Sequence[Any]) -> str:
    """An argument's name, followed by the path of a leaf inside it."""
    return f"{path[0].key}{keystr(tuple(path[1:]))}"


def in_call_order(
    model: nn.Module, names: Sequence[str | None], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str]:
    """The names of inputs in the order of the signature, from ``names`` in that of the example call; matches tensors by id.

    Raises:
        CaptureError: export made another number of inputs than the call has leaves.
    """
    leaves = tree_leaves((args, kwargs))
    if len(leaves) != len(names):
        raise CaptureError(
            f"{type(model).__name__}: export made {len(names)} inputs of {len(leaves)} argument leaves; "
            "pass plain tensors, numbers, lists and dicts"
        )
    holder = {id(leaf): name for leaf, name in zip(leaves, names, strict=True) if isinstance(leaf, Tensor)}
    given = tree_leaves(bind(inspect.signature(model.forward), args, kwargs))
    return [str(holder[id(leaf)]) for leaf in given if isinstance(leaf, Tensor)]


def _check_constant(leaf: Leaf, value: Any) -> None:
    if isinstance(value, Tensor):
        raise TypeError(
            f"argument {leaf.path}: the example call had {leaf.value!r} here, this call has a tensor "
            f"{list(value.shape)}; plan again with example inputs of this kind"
        )
    if value is not leaf.value and (type(value) is not type(leaf.value) or value != leaf.value):
        raise AutotpError(
            f"argument {leaf.path}: the graph was captured for the value {leaf.value!r}, this call has "
            f"{value!r}; plan again with example inputs that have it"
        )
