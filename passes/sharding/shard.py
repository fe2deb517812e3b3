"""The sharding pass: turns a captured graph and a strategy per operator into the graph that every device runs.

Parameters and buffers enter as their local parts. If a consumer wants a tensor in another layout than it has, a ``reshard``
node is inserted on the edge. All consumers that want the same layout and return the same gradient layout share it, so their
gradients are summed locally and reduced once. Arguments that are shapes become local shapes. An operator whose sharded
factor needs collectives inside is replaced by its lowering.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial

from passes.graph import RECOMPUTE, annotate, cast_of, differentiable, note_of, place_of, stays
from passes.layouts.layout import Layout, even_chunk, is_shard, local_shape, place, splits
from passes.layouts.reshard import COMMUNICATING, GATHERING, Step, steps
from passes.rules.factors import Operator, Value, value_of
from passes.rules.rule import Rule
from passes.rules.shapes import operands_of
from passes.rules.table import draws, rule_of
from passes.sharding.emitter import Emitter, pack
from passes.sharding.guards import bounds, cleared, in_one_format, relies_on_copies, within
from passes.sharding.panel_loop import Operand, panelled
from passes.sharding.site import Site
from passes.strategies.strategy import Strategy, Want, gradient_of, whole_layout
from passes.world import ops
from passes.world.draws import Draw
from passes.world.world import LocalWorld

__all__ = ["Sharding", "draws_of", "place_constants", "shard", "used_groups"]


@dataclass(frozen=True, slots=True)
class Sharding:
    """The properties of a plan that the sharding pass uses.

    Attributes:
        mesh: sizes of the mesh axes.
        strategies: operator name -> strategy.
        resting: placeholder name -> layout at rest (whole if absent).
        parameters: names of the placeholders that are parameters.
        recomputed: operator name -> whether the backward pass, which recomputes its results, also repeats the collectives
            that bring them into other layouts; operators that are not named are not recomputed.
        gathered_once: names of the parameters whose gathered copies are kept until the backward pass has read them.
        split: the axes that split dim 0 of the inputs that each device is given.
        rows: positions of the outputs that are split in the same way: each device returns the rows that it was given.
        kept: the number of axes, from the first on, along which outputs stay sharded if they may; else they are whole.
    """

    mesh: tuple[int, ...]
    strategies: Mapping[str, Strategy]
    resting: Mapping[str, Layout]
    parameters: frozenset[str]
    recomputed: Mapping[str, bool] = field(default_factory=dict)
    gathered_once: frozenset[str] = frozenset()
    split: tuple[int, ...] = ()
    rows: frozenset[int] = frozenset()
    kept: int = 0


def shard(
    module: fx.GraphModule,
    operators: Mapping[fx.Node, Operator],
    sharding: Sharding,
    mutations: Mapping[str, str],
) -> fx.GraphModule:
    """Rewrites ``module`` for one device; the ``world`` attribute of the result must be set before it runs.

    Args:
        module: a captured graph; placeholders are parameters, buffers, constants and inputs.
        operators: the analysis of that graph.
        sharding: the plan for it.
        mutations: buffer placeholder -> name of the node with its new value.

    Returns:
        A graph with the same placeholders (local parts) and the same outputs: whole, or as ``Sharding.rows`` and ``kept``
        say; new buffer values in their layouts at rest.
    """
    return _Rewriter(module, operators, sharding, mutations).run()


def used_groups(module: fx.GraphModule) -> set[tuple[int, ...]]:
    """The sets of mesh axes over which the graph communicates, including those of its stages (`passes.overlap.stage`)."""
    found: set[tuple[int, ...]] = set()
    real = len(module.world.mesh_shape)  # type: ignore[union-attr, arg-type]
    for node in module.graph.nodes:
        if node.target is ops.reshard or node.target is ops.gather:
            found |= {Step(*step).axes for step in (*node.args[2], *node.args[3])}
        elif node.target is ops.reshard_chunks:
            found |= {tuple(a for a in Step(*step).axes if a < real) for step in (*node.args[2], *node.args[3])} - {()}
        elif node.target is panelled:
            for operand in map(Operand.of, node.args[3]):
                found |= {step.axes for stage in operand.stages for step in stage}
        elif node.target is ops.all_sum or node.target is ops.all_reduce or node.target is ops.all_max:
            found.add(tuple(node.args[2]))
    return {part for axes in found for n in range(1, len(axes) + 1) for part in (axes[:n], axes[n - 1 : n])}


def draws_of(module: fx.GraphModule) -> tuple[Draw | None, ...]:
    """What the graph's random operators draw, in the model's order."""
    found: Any = next((node.args[1] for node in module.graph.nodes if node.target is ops.next_seed), ())
    return tuple(found)


def place_constants(graph: fx.Graph, device: torch.device) -> None:
    """Sets the device of operators that create tensors (``arange``, masks), in place, wherever the model was captured."""

    def move(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            node.args = fx.node.map_aggregate(node.args, move)
            node.kwargs = fx.node.map_aggregate(node.kwargs, move)


class _Rewriter:
    def __init__(
        self,
        module: fx.GraphModule,
        operators: Mapping[fx.Node, Operator],
        sharding: Sharding,
        mutations: Mapping[str, str],
    ) -> None:
        self.module, self.operators, self.sharding, self.mutations = module, operators, sharding, mutations
        self.mesh, self.recomputed = sharding.mesh, sharding.recomputed
        self.whole = whole_layout(len(self.mesh))
        self.emitter = Emitter()
        self.graph = self.emitter.graph
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.layouts: dict[Value, Layout] = {}
        self.edges: dict[tuple[Value, Want], fx.Node] = {}
        self.bounds = bounds(operators, sharding.strategies)

    def run(self) -> fx.GraphModule:
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.nodes[node] = self.graph.placeholder(node.name)
                self.nodes[node].meta = {**node.meta, "val": _resting(node)}
                self.layouts[(node, 0)] = self.sharding.resting.get(node.name, self.whole)
        self.emitter.world = self.graph.get_attr("world")
        for node in list(self.nodes):
            self._within(node)
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                raise ValueError(
                    f"node {node.name} reads the attribute {node.target}; capture lifts all state to placeholders"
                )
            if node.op == "call_function":
                self.operator(node)
            elif node.op == "output":
                self.output(node)
        root = torch.nn.Module()
        root.world = LocalWorld((1,) * len(self.mesh))
        result = fx.GraphModule(root, self.graph, class_name="Sharded")
        result.graph.lint()
        return result

    def edge(self, node: fx.Node, want: Want) -> fx.Node:
        """The node that returns ``node``'s tensor in the wanted layout, which is created if there is none."""
        value = value_of(node)
        have = self.layouts[value]
        shape = tuple(node.meta["val"].shape)
        forward = steps(shape, have, want.layout, self.mesh)
        backward = steps(shape, want.gradient, gradient_of(have), self.mesh) if differentiable(node.meta["val"]) else ()
        cast = note_of(value[0]).cast
        if not forward and not backward and cast is None:
            return self.nodes[node]
        wide = None if any(isinstance(p, Partial) for p in want.layout) else self.emitter.wide.get(value)
        key = value, want
        if key not in self.edges:
            parameter = value[0].name in self.sharding.parameters
            copied = any(step.kind in GATHERING for step in forward) or (cast is not None and cast.there)
            regathered = parameter and copied and value[0].name not in self.sharding.gathered_once
            target = ops.gather if regathered else ops.reshard
            ways: tuple[Any, ...] = tuple(map(tuple, forward)), tuple(map(tuple, backward))
            if cast is not None:
                ways += ((cast.used, cast.reduced),)
            edge = self.edges[key] = self.emitter.call(
                target, self.emitter.world, wide or self.nodes[node], *ways, at=place_of(value[0])
            )
            edge.meta = {"val": node.meta["val"]}
            annotate(edge, tensor=node.name, have=have, layouts=(want.layout,), gradient=want.gradient)
            communicates = any(step.kind in COMMUNICATING for step in forward)
            if value[0].name in self.recomputed and (self.recomputed[value[0].name] or not communicates):
                edge.meta[RECOMPUTE] = True
            if wide is not None:
                self.edges[key] = self.graph.call_method("to", (self.edges[key], node.meta["val"].dtype))
        return self.edges[key]

    def operator(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self.nodes[node] = self.graph.call_function(
                operator.getitem,
                (self.nodes[node.args[0]], node.args[1]),  # type: ignore[index]
            )
            self._within(node)
            return
        strategy = self.sharding.strategies[node.name]
        operands = operands_of(node)
        local = {}
        wanted = iter(zip(operands, strategy.wants, strict=True))

        def localise(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                if operands and isinstance(argument.meta.get("val"), torch.Tensor):
                    operand, want = next(wanted)
                    assert operand is argument
                    local[argument] = self.edge(argument, want)
                    return local[argument]
                return self.nodes[argument]
            if isinstance(argument, (list, tuple)):
                return type(argument)([localise(a) for a in argument])
            return argument

        args = [localise(a) for a in node.args]
        kwargs = {k: localise(a) for k, a in node.kwargs.items()}
        for index, layout in enumerate(strategy.results):
            self.layouts[(node, index)] = layout
        table, before = rule_of(node), next(iter(reversed(self.graph.nodes)))
        new = self._emit(node, table, strategy, args, kwargs)
        new.meta = dict(node.meta)
        annotate(new, operator=node.name, layouts=strategy.results)
        if node.name in self.recomputed:
            for made in itertools.takewhile(lambda n: n is not before, reversed(self.graph.nodes)):
                made.meta[RECOMPUTE] = True
        self.nodes[node] = new
        self._within(node)

    def _within(self, node: fx.Node) -> None:
        """Adds a check after a node if it produces indices that need one."""
        limits = self.bounds.get(value_of(node))
        if limits and isinstance(node.meta.get("val"), torch.Tensor):
            layout = self.layouts[value_of(node)]
            sharded = tuple(axis for axis, placement in enumerate(layout) if is_shard(placement))
            self.nodes[node] = within(self.emitter, node, self.nodes[node], limits, sharded)

    def _emit(self, node: fx.Node, table: Rule | None, strategy: Strategy, args: list, kwargs: dict) -> fx.Node:
        emitter, site = self.emitter, Site(self.emitter, self.operators[node], strategy, self.mesh)
        if table is not None:
            for position, factor in (table.divide or {}).items():
                _divide(args, position, site.ways(factor))
            if table.lower is not None and (site.inner or site.reduced):
                return self._lowered(site, table.lower, args, kwargs)
            if table.shape is not None:
                args[table.shape] = self._local_sizes(node, strategy.results[0])
        if draws(node):
            return emitter.random(node, strategy, self.mesh, args, kwargs)
        if table is not None and table.misreads is not None and table.misreads(node):
            return in_one_format(emitter, node, args, kwargs)
        if relies_on_copies(node):
            args = cleared(emitter, node, args)
        return emitter.call(node.target, *args, **kwargs)

    def _lowered(self, site: Site, lower: Callable[..., Any], args: list, kwargs: dict) -> fx.Node:
        proxied: Any = fx.node.map_arg([args, kwargs], self.emitter.proxy)  # type: ignore[arg-type]
        result = lower(site, *proxied[0], **proxied[1])
        if isinstance(result, tuple):
            return self.emitter.call(pack, *(r.node if isinstance(r, fx.Proxy) else r for r in result))
        return result.node

    def _local_sizes(self, node: fx.Node, layout: Layout) -> list[int]:
        shape = tuple(node.meta["val"].shape)
        sizes = list(local_shape(shape, layout, self.mesh))
        for d, size in enumerate(shape):
            ways = math.prod(self.mesh[part.axis] for part in splits(layout, d, self.mesh))
            if even_chunk(size, ways) * ways != size:
                sizes[d] = -1  # sizes differ between devices; the strategy allows one such dim
        return sizes

    def output(self, node: fx.Node) -> None:
        leaves = list(node.args[0])  # type: ignore[arg-type]
        given = leaves.copy()
        mutated = len(leaves) - len(self.mutations)
        resting = [self.sharding.resting.get(name, self.whole) for name in self.mutations]
        rows = tuple(place(0) if axis in self.sharding.split else whole for axis, whole in enumerate(self.whole))
        results, layouts = [], []
        for index, leaf in enumerate(leaves):
            layout = self.whole
            if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor):
                have, kept = self.layouts[value_of(leaf)], self.sharding.kept * stays(leaf)
                layout = have[:kept] + self.whole[kept:] if index < mutated else resting[index - mutated]
                layout = rows if index in self.sharding.rows else layout
                leaf = self.edge(leaf, Want.of(layout))
            elif isinstance(leaf, fx.Node):
                leaf = self.nodes[leaf]
            results.append(leaf)
            layouts.append(layout)
        values = tuple(leaf.meta.get("val") if isinstance(leaf, fx.Node) else None for leaf in given)
        annotate(self.graph.output(tuple(results)), values=values, layouts=tuple(layouts))


def _resting(node: fx.Node) -> Any:
    """The fake value of a placeholder, in the dtype in which it rests."""
    value = node.meta.get("val")
    if note_of(node).cast is None:
        return value
    with value.fake_mode:  # type: ignore[union-attr]
        return value.to(cast_of(node).rests)  # type: ignore[union-attr]


def _divide(args: list, position: int, ways: int) -> None:
    if ways > 1 and position < len(args):
        value = args[position]
        args[position] = [n // ways for n in value] if isinstance(value, (list, tuple)) else value // ways
