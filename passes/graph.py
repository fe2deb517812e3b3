"""Helpers for ``torch.fx`` graphs that all passes use: nodes with fake values, notes, dependencies, debug logs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Placement

from passes.torch_internals import schema, storage_id, tree_leaves

__all__ = [
    "RECOMPUTE",
    "TRACING",
    "Cast",
    "Checkpoint",
    "Note",
    "above",
    "annotate",
    "are_wrapped",
    "arguments_of",
    "below",
    "cast_of",
    "differentiable",
    "dump",
    "emit",
    "graphs_of",
    "made_of",
    "note_of",
    "place_of",
    "stays",
    "where",
]


#: Lock of the thread that traces a model or a graph: while it traces, torch replaces functions for the whole process.
TRACING = threading.RLock()

_KEY = "note"
#: Operators through which no gradient flows.
_DETACHED = frozenset(getattr(torch.ops.aten, name).default for name in ("detach", "detach_", "detach_copy"))
#: torch's own key in ``node.meta`` of nodes that the backward pass recomputes. Tracing copies it to the traced nodes.
RECOMPUTE = "recompute"


class Cast(NamedTuple):
    """The dtypes of a tensor at rest, in use and in gradient reduction (see `passes.capture.precision`).

    Attributes:
        rests: the dtype of the tensor at rest, and of the gradient that is returned for it.
        used: the dtype in which the tensor is communicated and read; that of its node's fake value.
        reduced: the dtype in which its gradient is reduced.
    """

    rests: torch.dtype
    used: torch.dtype
    reduced: torch.dtype

    @property
    def there(self) -> bool:
        """Whether the tensor is cast before it is communicated."""
        return self.rests != self.used

    @property
    def changes(self) -> bool:
        """Whether the tensor or its gradient is cast."""
        return self.there or self.back

    @property
    def back(self) -> bool:
        """Whether the gradient is cast before it is reduced."""
        return self.used != self.reduced


class Checkpoint(NamedTuple):
    """How ``torch.utils.checkpoint`` treats an operator of a model.

    Attributes:
        number: the number, in call order, of the outermost checkpointed call that runs the operator; 0 outside all of them.
        kept: whether the policy of a selective checkpoint saves the operator's results.
    """

    number: int = 0
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """Annotations of a node that passes leave for later passes, in addition to torch's own ``node.meta``.

    Attributes:
        module, source: path of the model's module that made the node, and the source line.
        grad: whether gradients were enabled where the node ran (while capturing).
        checkpoint: the model's own checkpoint that the node ran in, if any.
        loose: whether a ``contiguous()`` of it left no node because it copied nothing; with other strides, it copies.
        cast: for a parameter at rest in another dtype than its consumers read, or with a gradient reduced in another dtype.
        operator: the captured operator whose results the node has. This and all fields below, except those of the last
            line, describe nodes of sharded graphs.
        tensor: the captured tensor that the node reshards or checks.
        have: the layout of a reshard's operand; None if the node is not a reshard.
        layouts: the layouts of the node's results.
        gradient: the layout of the gradient that a reshard receives.
        chunk: the chunk that the node works on; None before each chunk has nodes of its own.
        values: for the graph's output: the fake values of the unsharded outputs.
        at: for a traced collective: the operator for which it runs.
        held, within: for an input of a backward graph: the bytes that it holds, and the name of the input whose memory it
            shares, if any.
        collective, traced: the collective that the node launches; the node of the traced graph that the node of a scheduled
            graph stands for.
    """

    module: str = ""
    source: str | None = None
    grad: bool = True
    checkpoint: Checkpoint = Checkpoint()
    loose: bool = False
    cast: Cast | None = None
    operator: str = ""
    tensor: str = ""
    have: tuple[Placement, ...] | None = None
    layouts: tuple[tuple[Placement, ...], ...] = ()
    gradient: tuple[Placement, ...] | None = None
    chunk: tuple[int, ...] | None = None
    values: tuple[Any, ...] = ()
    at: str = ""
    held: float = 0.0
    within: str = ""
    collective: fx.Node | None = None
    traced: fx.Node | None = None

    @property
    def moves(self) -> bool:
        """Whether the node is a reshard."""
        return self.have is not None


def note_of(node: fx.Node) -> Note:
    """The note of a node; an empty note if passes have left none."""
    return node.meta.get(_KEY, _EMPTY)


def graphs_of(module: fx.GraphModule) -> list[fx.Graph]:
    """The graphs of a module and of its regions."""
    return [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]


def annotate(node: fx.Node, **changes: Any) -> None:
    """Changes fields of a node's note; the other fields stay as they are."""
    node.meta[_KEY] = replace(note_of(node), **changes)


_EMPTY = Note()


def cast_of(node: fx.Node) -> Cast:
    """The `Cast` of a captured tensor; if no precision applies to it, all three dtypes are that of its fake value."""
    return note_of(node).cast or _one(node.meta["val"].dtype)


@cache
def _one(dtype: torch.dtype) -> Cast:
    return Cast(dtype, dtype, dtype)


def emit(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Inserts a call of an operator at the graph's insertion point, and computes its ``val`` from those of its operands.

    Raises:
        ValueError: no operand has a fake tensor.
    """
    node = graph.call_function(target, args)
    value = fx.node.map_aggregate(args, lambda a: a.meta["val"] if isinstance(a, fx.Node) else a)
    with _mode_of(value):
        node.meta["val"] = target(*value)  # type: ignore[misc]
    return node


def _mode_of(values: Any) -> Any:
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and hasattr(value, "fake_mode"):
            return value.fake_mode
    raise ValueError("no operand has a fake tensor")


def are_wrapped(values: Iterable[Any]) -> bool:
    """Whether any value is a tensor that a torch transform such as ``vmap`` has wrapped; such a tensor has no storage."""
    try:
        for value in values:
            if isinstance(value, Tensor) and value.layout is torch.strided:
                storage_id(value)
    except NotImplementedError:
        return True
    return False


def above(leaves: Iterable[Any], without: Set[Any] = frozenset()) -> set[fx.Node]:
    """The leaves that are nodes, and all nodes that they depend on.

    Args:
        leaves: nodes of one graph, and other values.
        without: targets of nodes that are left out, along with the nodes that only they depend on.
    """
    found: set[fx.Node] = set()
    pending = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in found and node.target not in without:
            found.add(node)
            pending += node.all_input_nodes
    return found


def made_of(leaves: Sequence[Any]) -> dict[int, frozenset[int]]:
    """Number of an output -> the numbers of the other outputs that are computed from it and pass gradients to it.

    Args:
        leaves: outputs of a graph. An output does not count as computed from itself.
    """
    nodes = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    reached = {i: above([leaf], _DETACHED) for i, leaf in nodes}
    found = {i: frozenset(j for j, _ in nodes if j != i and leaf in reached[j]) for i, leaf in nodes}
    return {i: others for i, others in found.items() if others}


def below(nodes: Iterable[fx.Node], sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The sources, and the nodes (in topological order) that depend on any of them, except the graph's output."""
    found = set(sources)
    for node in nodes:
        if node.op != "output" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def differentiable(value: Any) -> bool:
    """Whether a value is a tensor of floating-point or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def stays(leaf: Any) -> bool:
    """Whether an output of a captured graph may stay sharded: such an output is an ``aten.alias`` with its own strategy."""
    return isinstance(leaf, fx.Node) and leaf.target is torch.ops.aten.alias.default


def where(node: fx.Node) -> str:
    """A node's location for messages: its name, its module and the line of the model that made it."""
    place = f"node '{node.name}'"
    note = note_of(node)
    if note.module:
        place += f" in module '{note.module}'"
    if note.source:
        place += f" ({note.source})"
    return place


def place_of(node: fx.Node) -> str:
    """A node's name and module: the label (``Note.at``) of the collectives that run for it."""
    module = note_of(node).module
    return f"{node.name} in {module}" if module else node.name


def arguments_of(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``node.target`` by their names in its schema, defaults filled in."""
    named: dict[str, Any] = {}
    for position, argument in enumerate(schema(node.target).arguments):  # type: ignore[union-attr]
        if position < len(args):
            named[argument.name] = args[position]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value if argument.has_default_value() else None
    return named


_log = logging.getLogger("autotp.passes")


def dump(stage: str, graph: fx.Graph) -> None:
    """Logs a graph as Python code, after the pass that ``stage`` names; does nothing unless DEBUG logging is enabled."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s: %d nodes\n%s", stage, len(graph.nodes), graph.python_code("self").src)
