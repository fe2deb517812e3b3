"""Shared by the capturing passes: their error, and a builder of graphs whose nodes have fake values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from costmodel.errors import AutotpError
from passes.capture.checkpoints import checkpoint_of
from passes.graph import Note, annotate, are_wrapped, note_of, where
from passes.rules.table import draws
from passes.torch_internals import (
    DisableTorchFunction,
    FakeTensorMode,
    OpOverload,
    enable_python_dispatcher,
    schema,
    tree_leaves,
)

__all__ = ["Builder", "CaptureError", "is_symbolic", "operator_name", "outer_order"]

aten = torch.ops.aten
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)


class CaptureError(AutotpError, RuntimeError):
    """A model cannot be captured; the message says where and what to try."""


def operator_name(target: Any) -> str:
    """The name of an operator in its schema, such as ``aten::add_``; for other targets, the function's name."""
    if isinstance(target, OpOverload):
        return schema(target).name
    return getattr(target, "__name__", str(target))


def is_symbolic(value: Any) -> bool:
    """Whether a node's value contains symbolic numbers, or tensors with symbolic sizes or strides."""
    numbers: list[Any] = []
    for leaf in tree_leaves(value):
        numbers += [*leaf.shape, *leaf.stride()] if isinstance(leaf, Tensor) and leaf.layout is torch.strided else [leaf]
    return any(isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool) for each in numbers)


def outer_order(target: Any, rank: int, arguments: dict[str, Any]) -> list[int]:
    """The permutation of dims that a transposing operator performs.

    Found by running the operator on a tensor whose dims have different strides, so that all such operators
    (``t``, ``transpose``, ``movedim``, ``mT``, ...) are correct by construction.

    Args:
        target: an operator that only permutes dims.
        rank: the number of dims of its operand.
        arguments: its other arguments by name.
    """
    probe = torch.empty([2] * rank, device="meta")
    with DisableTorchFunction():
        strides = target(probe, **arguments).stride()
    return [probe.stride().index(s) for s in strides]


def _origin(trace: str | None) -> str | None:
    """``file.py:LINE`` of the innermost frame of a stack trace that is not in torch."""
    frames = [(f, line) for f, line in _FRAME.findall(trace or "") if not f.startswith(_TORCH)]
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else None


def _module(stack: dict[str, tuple[str, Any]] | None) -> str:
    """The dotted path of the innermost module; a second call of one module has the same path."""
    return list(stack.values())[-1][0].split("@")[0] if stack else ""


class Builder:
    """Builds an ``fx.Graph``; the fake value of every new node is found by calling its target on fake values.

    Args:
        mode: the fake mode of all values in the graph.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.graph = fx.Graph()
        self.mode = mode

    def placeholder(self, name: str, value: Any) -> fx.Node:
        """A placeholder with a fake value."""
        node = self.graph.create_node("placeholder", name, name=name)
        node.meta["val"] = value
        return node

    def run(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs ``target`` on fake values, as torch.export does; whatever the caller's grad mode, modes and autocast."""
        with DisableTorchFunction(), torch.no_grad(), enable_python_dispatcher(), self.mode:
            return target(*args, **kwargs)

    def emit(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None, *, like: fx.Node) -> fx.Node:
        """Adds a call that replaces ``like``, with the module, source and stack trace of ``like``.

        Raises:
            CaptureError: the target fails on these arguments.
        """
        kwargs = kwargs or {}
        try:
            value = self.run(target, *map_arg((tuple(args), kwargs), lambda n: n.meta["val"]))
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"{where(like)}: cannot put {target} in its place: {error}") from error
        name = operator_name(target).rpartition("::")[2]
        node = self.graph.create_node("call_function", target, tuple(args), kwargs, name=name)
        return self._describe(node, like, value)

    def copy(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """Adds a copy of ``node`` with new arguments, which have the shapes and dtypes of the old ones."""
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
        return self._describe(new, node, node.meta.get("val"))

    def finish(self, output: Sequence[Any], *, functional: bool = True) -> fx.Graph:
        """Adds a tuple as the output; if the graph is functional, removes all unused calls.

        Calls that draw random numbers stay, since later draws depend on them.
        """
        self.graph.output(tuple(output))
        for node in reversed(list(self.graph.nodes)):
            if functional and node.op == "call_function" and not node.users and not draws(node):
                self.graph.erase_node(node)
        self.graph.lint()
        return self.graph

    @staticmethod
    def _describe(node: fx.Node, like: fx.Node, value: Any) -> fx.Node:
        node.meta = {k: v for k, v in like.meta.items() if k != "tensor_meta"}
        node.meta["val"] = value
        if replace(note_of(node), loose=False) == Note():
            module, source = _module(like.meta.get("nn_module_stack")), _origin(like.meta.get("stack_trace"))
            annotate(node, module=module, source=source, checkpoint=checkpoint_of(like))
        if are_wrapped(tree_leaves(value)):
            raise CaptureError(
                f"{where(node)}: derivatives that forward takes by torch.func (vjp, grad, jvp) have no graph; compute them "
                "yourself, or in a torch.autograd.Function"
            )
        if is_symbolic(value):
            raise CaptureError(
                f"{where(node)}: {node.target} has a shape or value that depends on data; "
                "rewrite that part of the model with static shapes (for example masks, not indexing)"
            )
        return node
