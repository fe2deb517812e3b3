"""Captures custom ``torch.autograd.Function`` classes and ``torch.func`` transforms as operators of a graph.

``torch.export`` traces through the forward of a ``torch.autograd.Function``, and silently loses the gradient that the model
defines for it. While a model is captured, `kept_whole` makes every such function one operator, ``autotp::function``, which
calls the function: under autograd, it has the model's gradient. The operator has no factors, so it is computed whole on
every device.

Torch's own functions are traced through; a checkpoint becomes the operators that it runs. If a function is given modules,
as reversible layers are, their parameters and buffers become operands too: what the function's backward accumulates in the
``grad`` of a parameter is the operator's gradient. A function that is given any other callable is refused, since the
parameters that the callable reads are unknown.

Export supports no transform but ``vmap``, and that only as operators on single elements between markers. `kept_whole` runs
a transform untraced, records the ATen operators that it executes, and runs these in its place.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from itertools import chain, compress, count
from threading import get_ident
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.utils.checkpoint import CheckpointFunction

from costmodel.errors import AutotpError
from passes.capture.checkpoints import Regions
from passes.capture.functional import out_of_place, writes
from passes.torch_internals import (
    DisableTorchFunction,
    PyTree,
    TorchDispatchMode,
    TreeSpec,
    enter_inference_mode,
    functions_replaced,
    is_saving,
    reparametrize_module,
    transforming,
    transforms_replaced,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    version,
)

__all__ = ["Lost", "kept_whole"]

_LIBRARY = torch.library.Library("autotp", "FRAGMENT")


#: Placeholder for a tensor among the leaves of arguments or results.
_HERE = Enum("_HERE", "TENSOR").TENSOR  # type: ignore[attr-defined]


class Lost(AutotpError):
    """The model does something that affects its backward pass and that a captured graph cannot represent."""


class _Call:
    """A function and its arguments in one call, without the tensors among them."""

    def __init__(self, apply: Callable, function: type, leaves: Sequence[Any], spec: TreeSpec) -> None:
        self.spec = spec
        self.apply, self.function = apply, function
        self.leaves = [_HERE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        modules = nn.ModuleList(leaf for leaf in self.leaves if isinstance(leaf, nn.Module))
        self.modules, self.state = modules, [name for name, _ in chain(modules.named_parameters(), modules.named_buffers())]
        self.returned: PyTree = None
        self.checked = False

    @property
    def name(self) -> str:
        """The function's qualified name and a digest of its arguments; the same in every process."""
        text = re.sub(" at 0x[0-9a-f]+", "", repr((self.spec, self.leaves)))
        return f"{self.function.__module__}.{self.function.__qualname__} {hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def same(self, other: _Call) -> bool:
        """Whether both call the same function with equal non-tensor arguments."""
        alike = self.function is other.function and self.spec == other.spec
        return alike and all(
            a is b or (type(a) is type(b) and a == b) for a, b in zip(self.leaves, other.leaves, strict=True)
        )

    @property
    def operands(self) -> list[Tensor]:
        """The parameters and buffers of the modules among the function's arguments."""
        return [*self.modules.parameters(), *self.modules.buffers()]

    def __call__(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Calls the function and returns the tensors among its results.

        Args:
            operands: the function's tensor arguments, then the parameters and buffers of its modules.

        Raises:
            Lost: it changes an operand in place, or draws random numbers.
        """
        versions = [version(operand) for operand in operands]
        results = list(_WithState.apply(self, *operands)) if self.state else self.run(operands)
        if versions != [version(operand) for operand in operands]:
            raise Lost(
                f"{self.function.__qualname__} changes its input, or a buffer, in place; return a new tensor instead"
            )
        return results

    @contextmanager
    def having(self, operands: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yields the function's tensor arguments, while its modules use the parameters and buffers that follow them."""
        own = len(operands) - len(self.state)
        state = dict(zip(self.state, operands[own:], strict=True))
        with reparametrize_module(self.modules, state, tie_weights=True):  # under all their names
            yield operands[:own]

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Calls the function on its tensor arguments and returns the tensors among its results."""
        given = iter(operands)
        leaves = [next(given) if leaf is _HERE else leaf for leaf in self.leaves]
        with nullcontext() if self.checked else _NoDraws(self.function):
            args, kwargs = tree_unflatten(leaves, self.spec)
            returned = self.apply(*args, **kwargs)
        self.returned, self.checked = tree_map(lambda leaf: _HERE if isinstance(leaf, Tensor) else leaf, returned), True
        return [result for result in tree_leaves(returned) if isinstance(result, Tensor)]

    def whole(self, results: Sequence[Tensor]) -> PyTree:
        """The function's result with its tensors replaced by ``results``."""
        given = iter(results)
        return tree_map(lambda leaf: next(given) if leaf is _HERE else leaf, self.returned)


class _WithState(torch.autograd.Function):
    """Returns the gradients that a function's backward accumulates in its modules' parameters as gradients of operands."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *operands: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_(one.requires_grad) for one in operands]
            with call.having(leaves) as given:
                results = call.run(given)
        ctx.call, ctx.leaves, ctx.results = call, leaves, results
        ctx.mark_non_differentiable(*(one for one in results if not one.requires_grad))
        return tuple(one.detach() for one in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        for leaf in ctx.leaves:
            leaf.grad = None
        wanted = [one.requires_grad for one in ctx.results]
        with ctx.call.having(ctx.leaves):  # the backward pass may call them again
            torch.autograd.backward(
                list(compress(ctx.results, wanted)), list(compress(gradients, wanted)), retain_graph=True
            )
        return None, *(leaf.grad for leaf in ctx.leaves)


class _NoDraws(TorchDispatchMode):
    """Refuses random operators: their results would differ between devices."""

    def __init__(self, function: type) -> None:
        super().__init__()
        self.function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Lost(
                f"{self.function.__qualname__} draws random numbers ({func}); draw them in the module and pass them to it"
            )
        return func(*args, **(kwargs or {}))


class _Earlier(int):
    """The index of the recorded call that made a tensor; stands for the tensor's value before a later write."""


class _Transforms(TorchDispatchMode):
    """Replaces each transform by the operators that it executes.

    All operators of the model are recorded, as ``torch.autograd.grad`` reads tensors that earlier ones have saved. A tensor
    that autograd detaches to save it, or unpacks with its history, counts as the original tensor. A write to a tensor that
    nothing has read is recorded as an out-of-place operator on a recomputed operand. ``running``: a transform is running.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.running, self._thread = False, get_ident()
        # Tensors are identified by id, which stays unique as long as the recorded calls hold them.
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any, bool]] = []
        self._made: dict[int, int] = {}
        self._outside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._efficientzerotensor.default:  # fake tensors cannot be added to it
            func = torch.ops.aten.zeros.default
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._new_zeros_with_same_feature_meta.default:  # tangents are written to it
            func, args, kwargs = torch.ops.aten.new_zeros.default, (args[1], [*result.shape]), {}
        alone = not self.running and writes(func) == [0] and result is args[0] and self._untouched(result)
        if alone and (functional := out_of_place(func)) is not None:
            func, args = functional, (_Earlier(self._made[id(result)]), *args[1:])
        made = {id(tensor): len(self._calls) for tensor in _tensors(result)}
        if made or writes(func):
            self._made |= made
            self._calls.append((None if is_saving(func) else func, args, kwargs or {}, result, torch.is_grad_enabled()))
        return result

    def of(self, function: Callable) -> Callable:
        """Wraps a torch function that implements a transform, or a function that such a function has returned."""

        def carried_out(*args: Any, **kwargs: Any) -> Any:
            own = self.running or get_ident() != self._thread
            return function(*args, **kwargs) if own else self._run(function, args, kwargs)

        return carried_out

    def _run(self, function: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first, self.running = len(self._calls), True
        try:
            with DisableTorchFunction(), disable_proxy_modes_tracing():
                result = function(*args, **kwargs)
        finally:
            self.running = False
        live, places = {*map(id, _tensors(result))}, list[int]()
        for place in reversed(range(first, len(self._calls))):
            func, operands, options, made, _ = self._calls[place]
            if writes(func) or live.intersection(map(id, _tensors(made))):
                live.update(map(id, _tensors((operands, options))))
                places.append(place)
        for place in reversed(places):
            self._again(place)
        return tree_map_only(Tensor, self._of, tree_map_only(FunctionType, self.of, result))

    def _untouched(self, tensor: Tensor) -> bool:
        """Whether a recorded call made the tensor, not as a view, and no later one has read it."""
        place = self._made.get(id(tensor))
        if place is None or getattr(self._calls[place][0], "is_view", True):
            return False
        return not any(tensor is one for call in self._calls[place + 1 :] for one in _tensors(call[1:3]))

    def _again(self, place: int) -> None:
        outside = self._replayed(place)
        self._outside.update(zip(map(id, _tensors(self._calls[place][3])), _tensors(outside), strict=True))

    def _replayed(self, place: int) -> Any:
        func, args, kwargs, _, gradients = self._calls[place]
        args, kwargs = tree_map_only((Tensor, _Earlier), self._of, (args, kwargs))  # the tensors outside the transform
        with nullcontext() if gradients == torch.is_grad_enabled() else torch.set_grad_enabled(gradients):
            return func(*args, **kwargs) if func else args[0]

    def _of(self, tensor: Tensor | _Earlier) -> Tensor:
        if isinstance(tensor, _Earlier):
            return self._replayed(tensor)
        place, graph = self._made.get(id(tensor)), get_proxy_mode()
        if not (id(tensor) in self._outside or place is None or (graph and tensor in graph.tracer.tensor_tracker)):
            func = self._calls[place][0]
            if writes(func) or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
                raise Lost(f"torch.autograd.grad needs what {func} has saved, once more: call torch.func.grad")
            self._again(place)
        return self._outside.get(id(tensor), tensor)


def _tensors(tree: PyTree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


#: Name -> call, for all calls in captured graphs.
_CALLS: dict[str, _Call] = {}


def _registered(call: _Call) -> str:
    names = chain([call.name], (f"{call.name} {number}" for number in count(2)))
    name = next(name for name in names if name not in _CALLS or call.same(_CALLS[name]))
    _CALLS.setdefault(name, call)
    return name


_LIBRARY.define("function(Tensor[] operands, str name) -> Tensor[]")
# Composite: autograd, tracing and devices see the operators that the function calls.
_LIBRARY.impl("function", lambda operands, name: _CALLS[name](operands), "CompositeImplicitAutograd")


@contextmanager
def kept_whole(regions: Regions) -> Iterator[None]:
    """Context manager under which each custom autograd function becomes one operator, and gradient hooks are refused.

    Blocks in ``torch.inference_mode``, which export does not record, run under ``torch.no_grad`` instead.

    Args:
        regions: records reentrant checkpoints.

    Raises:
        Lost: within the context, where a captured graph would lose something that changes gradients.
    """
    transforms, thread, own = _Transforms(), get_ident(), torch.autograd.backward

    def applied(cls: type, apply: Callable, early: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given, spec = tree_flatten((list(args), dict(kwargs)))
        call = _Call(apply, cls, given, spec)
        if transforms.running and not transforming():
            name = cls.__name__.removeprefix("Vmapped")
            raise Lost(f"a transform of torch.func hides the gradient of {name}, an autograd.Function: call it outside")
        if cls is CheckpointFunction:  # runs the function without gradients, and again with them
            if early:
                raise Lost("CheckpointFunction.apply was taken from its class: call torch.utils.checkpoint.checkpoint")
            return regions.reentrant(args[0], args[2:])
        if cls.__module__.partition(".")[0] == "torch" or cls is _WithState or _HERE not in call.leaves:
            return apply(*args, **kwargs)
        if any(callable(leaf) and not isinstance(leaf, nn.Module) for leaf in call.leaves):
            raise Lost(
                f"{cls.__qualname__}, a torch.autograd.Function, is given a callable, whose gradient a captured graph does "
                "not know; make checkpoints by torch.utils.checkpoint, and give functions tensors, modules, numbers and "
                "strings"
            )
        name = _registered(call)
        operands = [*(leaf for leaf in given if isinstance(leaf, Tensor)), *call.operands]
        return _CALLS[name].whole(torch.ops.autotp.function(operands, name))

    def refused(tensor: Tensor, hook: Any) -> Any:
        raise Lost(
            f"the model, or a mode around it such as FlopCounterMode, registers a hook on a tensor's gradient ({hook}), "
            "which a captured graph does not call"
        )

    def begun(self: Any) -> None:
        enter_inference_mode(self, torch.no_grad() if self.mode else None)

    def backward(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:
            return own(*args, **kwargs)
        raise Lost("forward calls backward(), and a captured graph changes no gradients: call torch.autograd.grad")

    with (
        patch.object(Tensor, "register_hook", refused), patch.object(torch.autograd, "backward", backward),
        patch.object(torch.inference_mode, "__enter__", begun),
        functions_replaced(applied), transforms_replaced(transforms.of), transforms,
    ):  # fmt: skip
        yield
