"""Shards a model's graph by a plan: the result is the graph that every device runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.tensor import Replicate

from autotp.errors import AutotpError, PlanMismatchError
from autotp.plans.options import require_plan
from autotp.plans.plan import Plan, fingerprint
from costmodel.errors import require, shown
from costmodel.memory import state_bytes
from passes.capture import Captured, capture
from passes.graph import cast_of, dump, note_of, stays
from passes.layouts.codes import fits, restorable
from passes.layouts.layout import Layout, local_shape, place
from passes.rules.factors import Operator, analyse, value_of
from passes.rules.table import name_of
from passes.sharding.chunk import in_chunks
from passes.sharding.panel import Loop, loops, panel
from passes.sharding.shard import Sharding, shard
from passes.sharding.uneven import lone, uneven
from passes.sharding.unroll import unroll
from passes.strategies.space import strategies
from passes.strategies.strategy import LINEAR_PREFIX, Strategy, whole_layout

__all__ = ["Rewritten", "apply", "batch_of", "checked", "panelled", "parts_of", "rewrite", "trained_bytes"]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A sharded graph, and what it was made from.

    Attributes:
        captured: the captured graph.
        sharding: how it was sharded.
        graph_module: the sharded graph.
        chunks: sizes of its virtual axes, one per kind of chunks.
    """

    captured: Captured
    sharding: Sharding
    graph_module: fx.GraphModule
    chunks: tuple[int, ...] = ()

    @property
    def ways(self) -> int:
        """The number of parts into which the batch is split; each device is given one."""
        return math.prod(self.sharding.mesh[axis] for axis in self.sharding.split)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the inputs that each device is given, in order."""
        given, mesh = self.captured.placeholders, self.sharding.mesh
        return [local_shape(tuple(given[name].shape), self.resting(name), mesh) for name in self.captured.inputs]

    @property
    def even(self) -> bool:
        """Whether every tensor's parts have the same shape on all devices, so that all devices share one graph."""
        return next(uneven(self.captured.graph_module.graph, self.sharding), None) is None

    @property
    def saves_same(self) -> bool:
        """Whether autograd saves the same tensors on all devices."""
        return not lone(self.captured.graph_module.graph, self.sharding)

    @property
    def whole(self) -> Layout:
        """The fully replicated layout."""
        return whole_layout(len(self.sharding.mesh))

    def returned(self, number: int) -> Layout | None:
        """The layout in which an output of the graph, a tensor, stays sharded; None if it does not."""
        leaves: Any = self.captured.graph_module.graph.output_node().args[0]
        kept = self.sharding.kept and stays(leaves[number])
        return self.sharding.strategies[leaves[number].name].results[0] if kept else None

    @property
    def placed(self) -> dict[str, Layout]:
        """Name of a parameter or cache -> the layout in which it rests."""
        state, layouts = {**self.captured.parameters, **self.captured.buffers}, self.sharding.resting
        return {fqn: layouts[name] for name, fqn in state.items() if name in layouts}

    def resting(self, name: str) -> Layout:
        """The layout in which a placeholder's value rests."""
        return self.sharding.resting.get(name, self.whole)


def rewrite(model: nn.Module, plan: Plan, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Rewritten:
    """Captures ``model`` again and shards the graph by ``plan``.

    Raises:
        PlanMismatchError: when the plan was made for another model or other inputs.
    """
    return apply(capture(model, args, kwargs, plan.precision, plan.outputs, plan.observe), plan)


def apply(
    captured: Captured,
    plan: Plan,
    split: Sequence[int] | None = (),
    parts: Sequence[bool] | None = None,
    rows: frozenset[int] | None = None,
    *,
    kept: bool = False,
    joined: bool = False,
) -> Rewritten:
    """Shards a captured graph by ``plan``.

    Args:
        captured: the graph.
        plan: a plan for it.
        split: the mesh axes that split dim 0 of the inputs that devices are given, and of the outputs whose dim 0 is the
            batch; None: the axes over which the plan splits the batch.
        parts: for every input, whether devices are given parts of it; by default, see `parts_of`.
        rows: numbers of the outputs whose dim 0 is the batch, if known; by default, derived from the operators' rules.
        kept: whether outputs that may stay in the plan's layouts do so; otherwise, all are gathered on every device.
        joined: whether ranks have gathered their parts of the batch, and take their own rows of outputs whose dim 0 is the
            batch.

    Raises:
        PlanMismatchError: see ``checked``.
        AutotpError: see there, or an input cannot be split, or the plan has both panels and chunks.
    """
    operators, chosen, resting = checked(captured, plan)
    panels, found = panelled(plan, operators, chosen, resting)
    if panels and any(count > 1 for count in plan.chunks.values()):
        raise AutotpError(f"the plan has panels and chunks ({dict(plan.chunks)}); plan with panels=1, or without chunks")
    split = tuple(map(plan.mesh_axes.index, plan.batch_axes)) if split is None else tuple(split)
    shapes = [tuple(captured.placeholders[name].shape) for name in captured.inputs]
    cut = list(itertools.compress(captured.inputs, parts_of(shapes) if parts is None else parts))
    resting |= _input_layouts(captured, cut, split, plan.mesh_shape)
    once = frozenset(name for name, fqn in captured.parameters.items() if fqn in plan.gathered_once)
    apart = joined or math.prod(plan.mesh_shape[axis] for axis in split) > 1
    if not apart:
        rows = frozenset()
    elif rows is None:
        rows = _rows(captured, cut, operators)
    sharding = Sharding(
        plan.mesh_shape,
        chosen,
        resting,
        frozenset(captured.parameters),
        plan.repeated,
        once,
        split,
        rows,
        len(plan.mesh_shape) * kept,
    )
    dump("captured", captured.graph_module.graph)
    sharded, virtual = _sharded(captured, operators, sharding, plan.chunks)
    if panels:
        sharded = panel(sharded, found, panels)
        dump("panelled", sharded.graph)
    return Rewritten(captured, sharding, sharded, virtual)


def panelled(
    plan: Plan, operators: Mapping[fx.Node, Operator], chosen: Mapping[str, Strategy], resting: Mapping[str, Layout]
) -> tuple[Mapping[str, int], Sequence[Loop]]:
    """Operator -> its number of panels in the plan, and the graph's possible loops over panels; both empty without panels.

    Raises:
        PlanMismatchError: an operator cannot have the plan's number of panels.
    """
    panels = {op.name: op.panels for op in plan.operators if op.panels > 1}
    if not panels:
        return {}, []
    found = loops(operators, chosen, resting, plan.mesh_shape)
    known = {node.name: loop.most for loop in found for node in loop.members}
    for name, count in panels.items():
        if known.get(name, 1) % count:
            raise PlanMismatchError(f"operator {name}: it cannot have the plan's {count} panels; make a new plan")
    return panels, found


def checked(captured: Captured, plan: Plan) -> tuple[Mapping[fx.Node, Operator], dict[str, Strategy], dict[str, Layout]]:
    """Checks a plan against a captured graph. Returns the graph's operators, and the plan's strategies and resting layouts.

    Raises:
        PlanMismatchError: the plan was made for another model or other inputs.
        AutotpError: the plan is inconsistent, or an argument has the wrong type.
    """
    require(captured, Captured, "the model", "what passes.capture.capture returns")
    require_plan(plan)
    plan.check()
    if fingerprint(captured) != plan.model_hash:
        raise PlanMismatchError(
            "the plan was made for another model, or for inputs of other shapes: "
            f"the plan's graph is {plan.model_hash}, this model's {fingerprint(captured)}; make a new plan with autotp.plan"
        )
    operators = analyse(captured.graph_module.graph, captured.inputs)
    rows = {(op.name, op.target, op.module) for op in plan.operators}
    strange = rows ^ {(node.name, name_of(node), note_of(node).module) for node in operators}
    if strange:
        raise PlanMismatchError(f"the plan has not the model's operators ({shown(min(strange)[0])}); make a new plan")
    # The plan may have layouts of caches of an earlier program, which this one only reads.
    known = {*captured.parameters.values(), *captured.unused}
    others = known - plan.layouts.keys() | (plan.layouts.keys() - known - {*captured.buffers.values()})
    if others:
        raise PlanMismatchError(f"the plan has not the model's parameters ({shown(min(others))}); make a new plan")
    return operators, {node.name: _strategy(operators[node], plan) for node in operators}, _resting(captured, plan)


def _sharded(
    captured: Captured, operators: Mapping[fx.Node, Operator], sharding: Sharding, chunks: Mapping[str, int]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """The sharded graph, with every device's chunks unrolled into nodes, and the number of chunks of each kind."""
    made = in_chunks(captured.graph_module.graph, operators, sharding, captured.inputs, chunks)
    virtual = tuple(made.counts.values())
    sharded = shard(captured.graph_module, operators, made.sharding, captured.mutations)
    dump("sharded", sharded.graph)
    if virtual:
        sharded = unroll(sharded, sharding.mesh, virtual)
        dump("chunks unrolled", sharded.graph)
    return sharded, virtual


def batch_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """The length of the batch: dim 0 of the first input that has dims; 0 if none has."""
    return next((shape[0] for shape in shapes if shape), 0)


def parts_of(shapes: Sequence[tuple[int, ...]]) -> tuple[bool, ...]:
    """For every input, whether it is a part of the batch: its dim 0 is as long as the batch (`batch_of`), or a multiple."""
    batch = batch_of(shapes)
    return tuple(bool(shape) and (shape[0] == batch or 0 < batch < shape[0] and shape[0] % batch == 0) for shape in shapes)


def _input_layouts(
    captured: Captured, parts: Sequence[str], axes: Sequence[int], mesh: tuple[int, ...]
) -> dict[str, Layout]:
    """The layouts of the inputs that are parts of the batch: dim 0 sharded over ``axes``. Empty if there is one part."""
    layout = tuple(place(0) if axis in axes else Replicate() for axis in range(len(mesh)))
    ways = math.prod(mesh[axis] for axis in axes)
    if ways == 1:
        return {}
    for name in parts:
        shape = tuple(captured.placeholders[name].shape)
        if shape[0] % ways:
            raise AutotpError(
                f"inputs='local': dim 0 of input {name!r} of shape {shape} is not divisible by the {ways} ways "
                "in which the plan splits the batch; use inputs='global'"
            )
    return dict.fromkeys(parts, layout)


def _rows(captured: Captured, parts: Sequence[str], operators: Mapping[fx.Node, Operator]) -> frozenset[int]:
    """Numbers of the outputs whose dim 0 is the batch, as far as operators' rules relate it to dim 0 of the inputs."""
    given, found = captured.placeholders, set()
    sizes = {given[name].shape[0] for name in parts}
    leaves: Any = captured.graph_module.graph.output_node().args[0]
    for number, leaf in enumerate(leaves[: captured.outputs]):
        if not isinstance(leaf, fx.Node) or stays(leaf) or not isinstance(leaf.meta.get("val"), Tensor):
            continue
        node, index = value_of(leaf)
        operator, size = operators.get(node), (*leaf.meta["val"].shape, 1)[0]
        dims = operator.rule.results[index] if operator is not None and operator.rule is not None else ()
        leading = operator.factors[dims[0][0]].role if operator is not None and dims and dims[0] else ""
        if node.name in parts or (leading == "batch" and any(size % whole == 0 for whole in sizes)):
            found.add(number)
    return frozenset(found)


def trained_bytes(captured: Captured, plan: Plan) -> float:
    """Bytes that a device holds between steps in training only: gradients and the optimizer's state. 0 for inference."""
    if plan.mode != "train":
        return 0.0
    total = 0.0
    for node in captured.graph_module.graph.find_nodes(op="placeholder"):
        if node.name in captured.parameters:
            part = local_shape(tuple(node.meta["val"].shape), plan.resting(captured.parameters[node.name]), plan.mesh_shape)
            sizes = math.prod(part), cast_of(node).rests.itemsize, plan.optimizer
            total += float(state_bytes(*sizes)) - float(state_bytes(*sizes, train=False))
    return total


def _strategy(operator: Operator, plan: Plan) -> Strategy:
    name = operator.node.name
    wanted = plan.assignments[name]

    def allow(axis: int, factor: Any) -> bool:
        return wanted[axis] == factor.name if factor is not None else (wanted[axis] or "").startswith(LINEAR_PREFIX)

    for strategy in strategies(operator, plan.mesh_shape, allow):
        if strategy.assignment == wanted:
            return strategy
    raise PlanMismatchError(f"operator {name}: the plan's strategy {wanted} does not exist for it; make a new plan")


def _resting(captured: Captured, plan: Plan) -> dict[str, Layout]:
    resting = {}
    shapes = {name: tuple(value.shape) for name, value in captured.placeholders.items()}
    caches = {name: fqn for name, fqn in captured.buffers.items() if fqn in plan.layouts}
    for name, fqn in {**captured.parameters, **caches}.items():
        layout = plan.resting(fqn)
        if not fits(shapes[name], layout, plan.mesh_shape):
            raise PlanMismatchError(f"{fqn} of shape {shapes[name]} cannot rest in the plan's layout {layout}")
        if not restorable(layout, plan.mesh_shape):
            raise PlanMismatchError(
                f"{fqn} rests as {layout}, whose parts torch's DTensor joins in a wrong order; make a new plan"
            )
        resting[name] = layout
    return resting
