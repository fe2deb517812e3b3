"""What every pass uses of ``torch.fx``: new nodes with fake values, what depends on what, and graphs as logs."""

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


#: Held by the thread that traces a model or a graph: torch replaces functions of the whole process meanwhile.
TRACING = threading.RLock()

_KEY = "note"
#: What ends gradients.
_DETACHED = frozenset(getattr(torch.ops.aten, name).default for name in ("detach", "detach_", "detach_copy"))
#: torch's own key of ``node.meta``, which tracing copies to the nodes that a node becomes: the backward pass runs it again.
RECOMPUTE = "recompute"


class Cast(NamedTuple):
    """The dtypes of a tensor that is cast on its way: of a parameter under a precision (see `passes.capture.precision`).

    Attributes:
        rests: in which it rests, and its gradient is handed on.
        used: in which it is moved and read; that of its node's fake value.
        reduced: in which its gradient is summed.
    """

    rests: torch.dtype
    used: torch.dtype
    reduced: torch.dtype

    @property
    def there(self) -> bool:
        """Whether it is cast before it is moved."""
        return self.rests != self.used

    @property
    def changes(self) -> bool:
        """Whether it, or its gradient, is cast on the way."""
        return self.there or self.back

    @property
    def back(self) -> bool:
        """Whether its gradient is cast before it is summed."""
        return self.used != self.reduced


class Checkpoint(NamedTuple):
    """What ``torch.utils.checkpoint`` says of an operator of a model.

    Attributes:
        number: of the outermost call of a checkpointed function that runs it, in the order of calls; 0 outside of all.
        kept: the policy of a selective checkpoint keeps its results.
    """

    number: int = 0
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """What passes leave on a node for later ones, beside torch's own ``node.meta``.

    Attributes:
        module, source: path of the model's module that made the node, and the line.
        grad: whether gradients were on where it ran (while capturing).
        checkpoint: the model's own, if it ran in one.
        loose: a ``contiguous()`` of it left no node, as it copied nothing; where it lies otherwise, it copies.
        cast: of a parameter that rests in another dtype than its readers see, or whose gradient is summed in another.
        operator: the captured operator whose results it has (in sharded graphs, as all that follows but the last line).
        tensor: the captured tensor that it brings into another layout, or checks.
        have: the layout in which a reshard is given the tensor; None for what is no reshard.
        layouts: those of its results.
        gradient: the layout in which a reshard is given the gradient.
        chunk: which of the chunks it works on; None before chunks have nodes of their own.
        values: of the graph's output, the whole fake values.
        at: of a traced collective, for which operator it runs.
        held, within: bytes that an input of a backward graph holds; the name of the input in whose memory it lies, if any.
        collective, traced: the collective of which a node is the launch; the node of the traced graph that a scheduled one
            stands for.
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
    """What passes have left on a node; an empty note where that is nothing."""
    return node.meta.get(_KEY, _EMPTY)


def graphs_of(module: fx.GraphModule) -> list[fx.Graph]:
    """The graphs of a module and of its regions."""
    return [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]


def annotate(node: fx.Node, **changes: Any) -> None:
    """Leaves something on a node; the rest of its note stays."""
    node.meta[_KEY] = replace(note_of(node), **changes)


_EMPTY = Note()


def cast_of(node: fx.Node) -> Cast:
    """The dtypes in which a captured tensor rests, moves and has its gradient summed: one, but under a precision."""
    return note_of(node).cast or _one(node.meta["val"].dtype)


@cache
def _one(dtype: torch.dtype) -> Cast:
    return Cast(dtype, dtype, dtype)


def emit(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A node that calls an operator, where the graph's insertion point is; its ``val`` is found from its operands'.

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
    """Whether a transform of torch, such as ``vmap``, has wrapped a tensor among some values, which then has no memory."""
    try:
        for value in values:
            if isinstance(value, Tensor) and value.layout is torch.strided:
                storage_id(value)
    except NotImplementedError:
        return True
    return False


def above(leaves: Iterable[Any], without: Set[Any] = frozenset()) -> set[fx.Node]:
    """The leaves that are nodes, and the nodes that they depend on.

    Args:
        leaves: of a graph.
        without: targets of nodes that are left out, with what only they depend on.
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
    """Number of an output -> the numbers of other outputs that are made of it, and hand gradients on to it.

    Args:
        leaves: outputs of a graph. Nothing is computed from itself.
    """
    nodes = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    reached = {i: above([leaf], _DETACHED) for i, leaf in nodes}
    found = {i: frozenset(j for j, _ in nodes if j != i and leaf in reached[j]) for i, leaf in nodes}
    return {i: others for i, others in found.items() if others}


def below(nodes: Iterable[fx.Node], sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The sources and, of the nodes, which are in the graph's order, those that depend on one; not the graph's output."""
    found = set(sources)
    for node in nodes:
        if node.op != "output" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def differentiable(value: Any) -> bool:
    """Whether a value is a tensor of floating-point or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def stays(leaf: Any) -> bool:
    """Whether an output of a captured graph may stay sharded: it is then a view, an operator with a strategy of its own."""
    return isinstance(leaf, fx.Node) and leaf.target is torch.ops.aten.alias.default


def where(node: fx.Node) -> str:
    """A node's place for messages: its name, its module and the line of the model that made it."""
    place = f"node '{node.name}'"
    note = note_of(node)
    if note.module:
        place += f" in module '{note.module}'"
    if note.source:
        place += f" ({note.source})"
    return place


def place_of(node: fx.Node) -> str:
    """A node's name and its module, in a few words: what the collectives that are written for it run for."""
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
    """Logs a graph as Python code, with what was done last; costs nothing while nobody listens."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s: %d nodes\n%s", stage, len(graph.nodes), graph.python_code("self").src)
