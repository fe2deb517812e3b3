"""Traces a sharded graph into a joint graph: its forward and backward pass in ATen, with collectives as operators.

The sharded graph is run once on fake tensors, for one device of the mesh, in a world whose collectives are operators of the
library ``autotp``. The operators that autograd runs are recorded too, so the collectives of gradients are nodes like any
others, which later passes may move.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate as marking
from torch.fx.traceback import preserve_node_meta

from passes.graph import TRACING, annotate, differentiable, note_of
from passes.layouts.layout import local_shape
from passes.layouts.reshard import Step
from passes.overlap import primitives
from passes.overlap.primitives import COLLECTIVE_OF
from passes.rules.table import draws
from passes.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    OpOverload,
    schema,
    sequence_number,
    sequence_number_of,
)
from passes.world import ops
from passes.world.draws import Draw
from passes.world.pending import Pending
from passes.world.random_ops import DRAWN
from passes.world.world import Salt, World

__all__ = ["Joint", "Untraceable", "current_device", "trace", "undrawn"]

_aten = torch.ops.aten
#: Keys of torch's custom metadata, which tracing copies to nodes: the operator for which a collective runs, and the module.
_AT, _IN = "autotp_at", "autotp_in"


class Untraceable(Exception):
    """A graph does something that cannot be traced; it then runs as it is."""


class _TracedWorld(World):
    """The world of one device of a mesh. Its collectives, and all that depends on the device, are traced as operators."""

    def __init__(self, mesh_shape: tuple[int, ...], at: tuple[int, ...]) -> None:
        super().__init__(mesh_shape, [at])
        self.seed_value: Any = None

    def all_reduce(self, parts: Sequence[Tensor], axes: tuple[int, ...], op: str = "sum") -> Pending:
        return self._marked(primitives.all_reduce, parts[0], list(axes), op)

    def all_gather(self, parts: Sequence[Tensor], axis: int) -> Pending:
        return self._marked(primitives.all_gather, parts[0], axis, self.mesh_shape[axis])

    def reduce_scatter(self, parts: Sequence[Tensor], axis: int) -> Pending:
        return self._marked(primitives.reduce_scatter, parts[0], axis)

    def all_to_all(self, parts: Sequence[Tensor], axis: int) -> Pending:
        return self._marked(primitives.all_to_all, parts[0], axis)

    def _marked(self, collective: Any, *args: Any) -> Pending:
        with marking({_AT: self.whereabouts.at}):
            return Pending([collective(*args)])

    def next_seed(self, draws: Sequence[Draw | None]) -> Any:
        return self.seed_value

    def offset(self, size: int, axes: Sequence[int], like: Any = None) -> list[Any]:
        return [primitives.offset(size, list(axes), like)]

    def local(self, name: str, tensor: Tensor, *args: Any) -> Tensor:
        return getattr(primitives, name)(tensor, *args)

    def own(self, tensor: Tensor, step: Step, index: int) -> Tensor:
        (axis,) = step.axes
        return primitives.own(tensor, step.dim, step.blocks, axis, self.mesh_shape[axis], self.hosted[0][axis])

    def masked(self, tensor: Tensor, axes: Sequence[int], index: int) -> Tensor:
        return primitives.mask(tensor, list(axes))

    def seeded(
        self, seed: Any, salt: Salt, axes: Sequence[int], index: int, function: Callable, args: Any, kwargs: Any
    ) -> Any:
        def noise(like: Tensor, method: str, *by: float) -> Tensor:
            return primitives.draw(seed, list(salt), list(axes), like, method, list(by))

        if function not in DRAWN:
            raise Untraceable(f"{function} draws random numbers")
        return DRAWN[function](noise, *args, **kwargs)


class _Marking(fx.Interpreter):
    """Runs a sharded graph, and marks the nodes that are traced for each of its nodes, in both passes, with its module."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.place, self.begun = "", list[tuple[int, str]]()

    def run_node(self, n: fx.Node) -> Any:
        self.place = note_of(n).module or str(n.kwargs.get("at", ""))
        self.begun.append((sequence_number(), self.place))
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        with marking({_IN: self.place}):
            return super().call_function(target, args, kwargs)

    def mark_backward(self, ends: Iterable[Tensor]) -> None:
        """Adds hooks to the autograd nodes of these tensors that mark what they trace with the module of the forward node.

        The sequence numbers of autograd nodes, which are in the order of the forward pass, identify the forward node.
        """
        numbers = [number for number, _ in self.begun]
        for node in _behind(end.grad_fn for end in ends):
            place = self.begun[bisect.bisect_right(numbers, sequence_number_of(node)) - 1][1]
            mark = _Mark(place)
            node.register_prehook(mark.begin)
            node.register_hook(mark.end)


class _Mark:
    """Two hooks of an autograd node, between which traced nodes are marked as ``marking`` does.

    If the autograd node fails, the second hook is not called. A context manager left open would then be closed by the
    garbage collector, and remove the mark of whatever is traced at that time. The mark that this class leaves does no harm:
    it is in metadata that is dropped at the end of the trace.
    """

    def __init__(self, place: str) -> None:
        self.place, self.before = place, dict[str, Any]()

    def begin(self, _: Any) -> None:
        self.before = traceback.current_meta.get("custom", {})
        traceback.current_meta["custom"] = self.before | {_IN: self.place}

    def end(self, *_: Any) -> None:
        traceback.current_meta["custom"] = self.before


def undrawn(graph: fx.Graph) -> list[str]:
    """Names of the nodes of a captured graph that draw random numbers in a way that tracing does not support."""
    return [node.name for node in graph.nodes if node.op == "call_function" and draws(node) and node.target not in DRAWN]


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph.

    Attributes:
        graph: inputs of the sharded graph, a seed, gradients of ``tangents``, then of ``waiting`` -> outputs, then the
            gradients of ``trained``.
        constants: name of an attribute that the graph reads -> its tensor.
        inputs: names of the sharded graph's placeholders.
        trained: positions of the inputs whose gradients are returned.
        regathered: positions of the parameters that are gathered before use, and again for the backward pass.
        outputs: how many outputs the sharded graph has.
        tangents: positions of the outputs that have a gradient.
        reached: per gradient, from which of ``tangents`` and ``waiting``, numbered together, autograd reaches its input.
        waiting: names of inner values that also receive a gradient from outside; it comes after those of the outputs.
    """

    graph: fx.Graph
    constants: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    trained: tuple[int, ...]
    regathered: tuple[int, ...]
    outputs: int
    tangents: tuple[int, ...]
    reached: tuple[frozenset[int], ...]
    waiting: tuple[str, ...] = ()


def trace(
    sharded: fx.GraphModule,
    mesh: tuple[int, ...],
    at: tuple[int, ...],
    inputs: Mapping[str, Tensor],
    trained: frozenset[str],
    waiting: Mapping[str, Tensor] | None = None,
) -> Joint:
    """Traces a sharded graph for the device at ``at``.

    Args:
        sharded: see ``passes.sharding.shard.shard``; its ``world`` is replaced.
        mesh: sizes of the mesh axes.
        at: the device's coordinates.
        inputs: placeholder -> a tensor with the shape, strides, dtype and device of this device's part; its elements are
            not read.
        trained: placeholders whose gradients are wanted; if empty, the graph is the forward pass alone.
        waiting: name -> a tensor like it, for the values that the graph returns after its outputs and that also receive
            gradients from outside (see ``passes.sharding.deferral.Deferred.last``).

    Raises:
        Untraceable: the graph reads values of tensors while it runs, or draws random numbers in an unsupported way.
    """
    names = tuple(str(n.target) for n in sharded.graph.nodes if n.op == "placeholder")
    wanted = tuple(i for i, name in enumerate(names) if name in trained)
    world = _TracedWorld(mesh, at)
    tangents: list[int] = []
    inside = dict(waiting or {})
    awaited: list[str] = []
    reached: list[frozenset[int]] = [frozenset()] * len(wanted)

    # The layouts of the outputs give their shapes, and those of their gradients, before the graph has run.
    *_, output = sharded.graph.nodes
    layouts = note_of(output).layouts
    floating = [i for i, value in enumerate(note_of(output).values) if wanted and differentiable(value)]

    def joint(*flat: Tensor) -> list[Any]:
        values, seed, gradients = flat[: len(names)], flat[len(names)], flat[len(names) + 1 :]
        gradients, others = gradients[: len(floating)], dict(zip(inside, gradients[len(floating) :], strict=True))
        with torch.set_grad_enabled(bool(wanted)):
            live = [v.detach().requires_grad_(i in wanted) for i, v in enumerate(values)]
            world.seed_value = seed
            interpreter = _Marking(sharded)  # it keeps the nodes' marks, and calls no module hooks
            outputs = list(interpreter.run(*live))
            cuts = dict(zip(inside, outputs[len(outputs) - len(inside) :], strict=True))
            del outputs[len(outputs) - len(inside) :]
            found: Sequence[Any] = ()
            tangents[:] = [i for i in floating if outputs[i].requires_grad]
            awaited[:] = [name for name, value in cuts.items() if value.requires_grad]
            if tangents:
                ends = [*(outputs[i] for i in tangents), *(cuts[name] for name in awaited)]
                interpreter.mark_backward(ends)
                reached[:] = _reached(ends, [live[i] for i in wanted])
                given = [gradients[floating.index(i)].to(outputs[i].dtype) for i in tangents]
                given += [others[name].to(cuts[name].dtype) for name in awaited]
                found = torch.autograd.grad(ends, [live[i] for i in wanted], given, allow_unused=True)
        return [*(o.detach() if isinstance(o, Tensor) else o for o in outputs), *found]

    def traced() -> fx.GraphModule:
        with (
            current_device(inputs.values()),
            torch.autograd.set_detect_anomaly(False),
            FakeTensorMode(allow_non_fake_inputs=True),
            preserve_node_meta(),
        ):
            parts = [_like(inputs[name]) for name in names]
            seed = torch.empty((), dtype=torch.int64)
            values = [note_of(output).values[i] for i in floating]
            shapes = [
                local_shape(v.shape, layouts[i][: len(mesh)] if layouts else (), mesh, at)
                for i, v in zip(floating, values, strict=True)
            ]
            values += inside.values()
            shapes += [tuple(v.shape) for v in inside.values()]
            ends = zip(shapes, values, strict=True)
            flat = [*parts, seed, *(torch.empty(shape, dtype=v.dtype, device=parts[0].device) for shape, v in ends)]
            module = make_fx(joint)(*flat)
            if any(_mutates(node) for node in module.graph.nodes):
                module = make_fx(torch.func.functionalize(fx.Interpreter(module).run))(*flat)
        return module

    previous = sharded.world
    sharded.recompile()
    sharded.world = world
    try:
        with TRACING, ThreadPoolExecutor(1) as apart:  # a thread of its own: the caller's hooks and modes do not apply
            module = apart.submit(traced).result()
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
    ) as error:
        raise Untraceable(f"it reads values while it runs ({type(error).__name__}: {error})") from error
    finally:
        sharded.world = previous
    if next(iter(module.graph.find_nodes(op="call_function", target=_aten.mkldnn_rnn_layer_backward.default)), None):
        # Its forward kernel creates the workspace only if autograd itself runs it.
        raise Untraceable("oneDNN's recurrent layers keep a workspace for the backward pass that only autograd's have")
    spare = [n for n in module.graph.nodes if n.op == "placeholder"][len(names) + 1 :]
    for end, node in zip((*floating, *inside), spare, strict=True):
        if end not in tangents and end not in awaited:
            module.graph.erase_node(node)
    _tidy(module.graph)
    for node in module.graph.nodes:
        marks = node.meta.get("custom", {})
        annotate(node, module=marks.get(_IN, ""), at=marks.get(_AT, "") if node.target in COLLECTIVE_OF else "")
    regathered = tuple(names.index(name) for name in _gathered(sharded) if name in names)
    constants = {str(n.target): getattr(module, str(n.target)) for n in module.graph.nodes if n.op == "get_attr"}
    outputs = len(note_of(output).values)
    ends = tuple(tangents), tuple(reached), tuple(awaited)
    return Joint(module.graph, constants, names, wanted, regathered, outputs, *ends)


def current_device(tensors: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """A context that makes the device of the first tensor the current one; torch has a current device per thread."""
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _reached(ends: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[frozenset[int]]:
    """Per leaf, the numbers of the ends from which autograd reaches it."""
    found: dict[int, set[int]] = {}
    for number, end in enumerate(ends):
        if end.grad_fn is None:
            found.setdefault(id(end), set()).add(number)
        for node in _behind([end.grad_fn]):
            if (variable := getattr(node, "variable", None)) is not None:
                found.setdefault(id(variable), set()).add(number)
    return [frozenset(found.get(id(leaf), ())) for leaf in leaves]


def _behind(roots: Iterable[Any]) -> Iterator[Any]:
    """The given autograd nodes, and all that are reachable from them."""
    waiting, seen = [*roots], {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting.extend(before for before, _ in node.next_functions)


def _like(tensor: Tensor) -> Tensor:
    """An empty (here: fake) tensor like a given one; a tensor on the meta device stands for one on a CPU."""
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _gathered(sharded: fx.GraphModule) -> list[str]:
    """Names of the placeholders that `passes.world.ops.gather` reads."""
    sources: Iterable[Any] = (node.args[1] for node in sharded.graph.nodes if node.target is ops.gather)
    return [str((n.args[0] if n.target is ops.ending else n).target) for n in sources]


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema(node.target).is_mutable


def _tidy(graph: fx.Graph) -> None:
    """Removes nodes that have no effect without autograd (``detach`` and aliases), and dead code."""
    for node in graph.nodes:
        if node.target in (_aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default):
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
