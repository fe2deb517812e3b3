"""The sharding pass: a captured graph and a strategy per operator become the graph that every device runs.

Parameters and buffers enter as their local parts. Where a consumer wants a tensor in another layout than it has, one
``reshard`` node stands on the edge; all consumers that want the same layout and return the same gradient layout share it,
so their gradients are added locally and reduced once. Arguments that are shapes become local shapes. An operator whose
sharded factor needs collectives inside is replaced by its lowering.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial

from passes.graph import annotate, arguments_of, differentiable, where
from passes.layouts.layout import Layout, even_chunk, is_shard, local_shape, splits
from passes.layouts.reshard import Step, steps
from passes.rules.factors import Operator, Value, value_of
from passes.rules.rule import Rule
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import draws, rule_of
from passes.sharding.panel_loop import Operand, panelled
from passes.strategies.strategy import LINEAR_PREFIX, Strategy, Want, gradient_of, whole_layout
from passes.world import ops
from passes.world.world import LocalWorld

__all__ = ["Sharding", "place_constants", "shard", "used_groups"]


@dataclass(frozen=True, slots=True)
class Sharding:
    """What the pass needs to know.

    Attributes:
        mesh: sizes of the mesh axes.
        strategies: operator name -> strategy.
        resting: placeholder name -> layout (whole if absent).
        parameters: names of the placeholders that are parameters.
    """

    mesh: tuple[int, ...]
    strategies: Mapping[str, Strategy]
    resting: Mapping[str, Layout]
    parameters: frozenset[str]


def shard(
    module: fx.GraphModule,
    operators: Mapping[fx.Node, Operator],
    sharding: Sharding,
    mutations: Mapping[str, str],
) -> fx.GraphModule:
    """Rewrites ``module`` for one device; its ``world`` attribute is to be set before it runs.

    Args:
        module: a captured graph; placeholders are parameters, buffers, constants and inputs.
        operators: the analysis of that graph.
        sharding: the plan for it.
        mutations: buffer placeholder -> name of the node with its new value.

    Returns:
        A graph with the same placeholders (local parts) and the same outputs (whole; new buffer values as they rest).
    """
    return _Rewriter(module, operators, sharding, mutations).run()


def used_groups(module: fx.GraphModule) -> set[tuple[int, ...]]:
    """The sets of mesh axes over which the graph communicates, and those that stages of it do (`passes.overlap.stage`)."""
    found: set[tuple[int, ...]] = set()
    real = len(module.world.mesh_shape)  # type: ignore[union-attr, arg-type]
    for node in module.graph.nodes:
        if node.target is ops.reshard or node.target is ops.gather:
            found |= {Step(*step).axes for step in (*node.args[2], *node.args[3])}
        elif node.target is ops.reshard_chunks:
            found |= {tuple(a for a in Step(*step).axes if a < real) for step in (*node.args[2], *node.args[3])} - {()}
        elif node.target is panelled:
            for operand in map(Operand.of, node.args[3]):
                found |= {step.axes for stage in operand[2:] for step in stage}
        elif node.target is ops.all_sum or node.target is ops.all_reduce or node.target is ops.all_max:
            found.add(tuple(node.args[2]))
    return {part for axes in found for n in range(1, len(axes) + 1) for part in (axes[:n], axes[n - 1 : n])}


def place_constants(graph: fx.Graph, device: torch.device) -> None:
    """Points operators that make tensors anew (``arange``, masks) to ``device``, wherever the model was captured."""

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
        self.mesh = sharding.mesh
        self.whole = whole_layout(len(self.mesh))
        self.graph = fx.Graph()
        self.tracer = fx.proxy.GraphAppendingTracer(self.graph)
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.layouts: dict[Value, Layout] = {}
        self.edges: dict[tuple[Value, Want], fx.Node] = {}
        #: Partial sums, before they are rounded to a half.
        self.wide: dict[Value, fx.Node] = {}
        self.seed: fx.Node | None = None
        self.bounds = self._bounds()
        self.salt = 0

    def run(self) -> fx.GraphModule:
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.nodes[node] = self.graph.placeholder(node.name)
                self.nodes[node].meta = dict(node.meta)
                self.layouts[(node, 0)] = self.sharding.resting.get(node.name, self.whole)
        self.world = self.graph.get_attr("world")
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
        """The node that gives ``node``'s tensor in the wanted layout."""
        value = value_of(node)
        have = self.layouts[value]
        shape = tuple(node.meta["val"].shape)
        forward = steps(shape, have, want.layout, self.mesh)
        backward = steps(shape, want.gradient, gradient_of(have), self.mesh) if differentiable(node.meta["val"]) else ()
        if not forward and not backward:
            return self.nodes[node]
        wide = None if any(isinstance(p, Partial) for p in want.layout) else self.wide.get(value)
        key = value, want
        if key not in self.edges:
            parameter = value[0].name in self.sharding.parameters
            regather = parameter and any(step.kind == "all_gather" for step in forward)
            target = ops.gather if regather else ops.reshard
            args: Any = (self.world, wide or self.nodes[node], tuple(map(tuple, forward)), tuple(map(tuple, backward)))
            self.edges[key] = self.graph.call_function(target, args)
            self.edges[key].meta = {"val": node.meta["val"]}
            annotate(self.edges[key], tensor=node.name, have=have, layouts=(want.layout,), gradient=want.gradient)
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
        table = rule_of(node)
        new = self._emit(node, table, strategy, args, kwargs)
        new.meta = dict(node.meta)
        annotate(new, operator=node.name, layouts=strategy.results)
        self.nodes[node] = new
        self._within(node)

    def _emit(self, node: fx.Node, table: Rule | None, strategy: Strategy, args: list, kwargs: dict) -> fx.Node:
        if table is None:
            return self.random(node.target, (), args, kwargs) if draws(node) else self._call(node.target, args, kwargs)
        at = _At(self, node, strategy)
        for position, factor in (table.divide or {}).items():
            _divide(args, position, at.ways(factor))
        if table.lower is not None and (at.inner or at.reduced):
            proxied: Any = fx.node.map_aggregate([args, kwargs], self._proxy)  # type: ignore[arg-type]
            result = table.lower(at, *proxied[0], **proxied[1])
            if isinstance(result, tuple):
                result = self._call(_pack, [r.node if isinstance(r, fx.Proxy) else r for r in result], {})
                return result
            return result.node
        if table.shape is not None:
            args[table.shape] = self._local_sizes(node, strategy.results[0])
        if draws(node):
            return self.random(node.target, at.sharded, args, kwargs)
        if table.misreads is not None and table.misreads(node):
            return self._in_one_format(node, args, kwargs)
        return self._call(node.target, args, kwargs)

    def _in_one_format(self, node: fx.Node, args: list, kwargs: dict) -> fx.Node:
        """The operator between operands, and a gradient of its first result, that its kernel cannot misread."""

        def clear(argument: Any, value: Any) -> Any:
            tensor = isinstance(value, torch.Tensor)
            return self._call(ops.in_one_format, [self.world, argument], {}) if tensor else argument

        given = [clear(new, n.meta.get("val") if isinstance(n, fx.Node) else None) for new, n in zip(args, node.args)]  # noqa: B905
        result = self._call(node.target, given, kwargs)
        value = node.meta["val"]
        result.meta = {"val": value}
        if isinstance(value, torch.Tensor):
            return clear(result, value)
        items = [self._call(operator.getitem, [result, i], {}) for i in range(len(value))]
        return self._call(_pack, [clear(items[0], value[0]), *items[1:]], {})

    def _bounds(self) -> dict[Value, list[tuple[fx.Node, int, int | None]]]:
        """Indices -> the operators that look them up in a factor that no device has whole, its size, what they ignore.

        Each device looks up its own ones only, so an index that is nobody's would be passed over by all of them.
        """
        found: dict[Value, list[tuple[fx.Node, int, int | None]]] = {}
        for node in self.operators:
            rule, at = rule_of(node), _At(self, node, self.sharding.strategies[node.name])
            for position, factor in (rule.bounded or {}).items() if rule is not None else ():
                if at.axes(factor):
                    ignored = arguments_of(node, node.args, node.kwargs).get("ignore_index")
                    ids = value_of(operands_of(node)[position])
                    found.setdefault(ids, []).append((node, at.size(factor), ignored))
        return found

    def _within(self, node: fx.Node) -> None:
        """Puts one check behind a node that produces indices, for all that look them up.

        Those of a batch that every device is given are whole there, so that all come to the same end without a word.
        """
        value = value_of(node)
        bounds = self.bounds.get(value)
        if not bounds or not isinstance(node.meta.get("val"), torch.Tensor):
            return
        sharded = tuple(axis for axis, placement in enumerate(self.layouts[value]) if is_shard(placement))
        limits = [(size, ignored) for _, size, ignored in bounds]
        outside = self._call(_outside, [self.nodes[node], limits], {})
        if sharded:
            outside = self._call(ops.all_max, [self.world, outside, sharded], {})
        readers = "; ".join(f"{where(reader)} takes 0 to {size - 1}" for reader, size, _ in bounds)
        message = f"index out of range: {readers}"
        self.nodes[node] = self._call(ops.within, [self.world, self.nodes[node], outside, message], {})
        self.nodes[node].meta = {"val": node.meta["val"]}
        annotate(self.nodes[node], tensor=node.name)

    def _proxy(self, argument: Any) -> Any:
        return fx.Proxy(argument, self.tracer) if isinstance(argument, fx.Node) else argument

    def random(self, function: Any, axes: tuple[int, ...], args: list, kwargs: dict) -> fx.Node:
        """A node that draws random numbers, alike on devices that do not differ on ``axes``."""
        if self.seed is None:
            self.seed = self.graph.call_function(ops.next_seed, (self.world,))
        self.salt += 1
        return self._call(ops.seeded, [self.world, self.seed, self.salt, axes, function, *args], kwargs)

    def _call(self, target: Any, args: list, kwargs: dict) -> fx.Node:
        return self.graph.call_function(target, tuple(args), kwargs)

    def _local_sizes(self, node: fx.Node, layout: Layout) -> list[int]:
        shape = tuple(node.meta["val"].shape)
        sizes = list(local_shape(shape, layout, self.mesh))
        for d, size in enumerate(shape):
            ways = 1
            for part in splits(layout, d, self.mesh):
                ways *= self.mesh[part.axis]
            if even_chunk(size, ways) * ways != size:
                sizes[d] = -1  # devices differ here; the strategy allows one such dim
        return sizes

    def output(self, node: fx.Node) -> None:
        leaves = list(node.args[0])  # type: ignore[arg-type]
        given = leaves.copy()
        mutated = len(leaves) - len(self.mutations)
        resting = [self.sharding.resting.get(name, self.whole) for name in self.mutations]
        results = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor):
                layout = self.whole if index < mutated else resting[index - mutated]
                leaf = self.edge(leaf, Want(layout, gradient_of(layout)))
            elif isinstance(leaf, fx.Node):
                leaf = self.nodes[leaf]
            results.append(leaf)
        values = tuple(leaf.meta.get("val") if isinstance(leaf, fx.Node) else None for leaf in given)
        annotate(self.graph.output(tuple(results)), values=values)


def _pack(*values: Any) -> tuple:
    return values


def _outside(ids: torch.Tensor, limits: list[tuple[int, int | None]]) -> torch.Tensor:
    """1 if, for some limit and what it ignores, some of ``ids`` are neither below the limit nor ignored; else 0."""
    found = ids.new_zeros(ids.shape, dtype=torch.bool)
    for size, ignored in limits:
        outside = (ids < 0) | (ids >= size)
        found = found | (outside if ignored is None else outside & (ids != ignored))
    return found.any().to(torch.int64)


def _divide(args: list, position: int, ways: int) -> None:
    if ways > 1 and position < len(args):
        value = args[position]
        args[position] = [n // ways for n in value] if isinstance(value, (list, tuple)) else value // ways


class _At:
    """See ``passes.rules.lowering.At``."""

    def __init__(self, rewriter: _Rewriter, node: fx.Node, strategy: Strategy) -> None:
        self._rewriter, self._node, self._strategy = rewriter, node, strategy
        self._operator = rewriter.operators[node]

    @property
    def target(self) -> Any:
        return self._node.target

    def _names(self, *factors: str) -> tuple[str, ...]:
        return tuple(f.name for f in self._operator.factors.values() if f.base in factors)

    def axes(self, *factors: str) -> tuple[int, ...]:
        return self._strategy.axes(*self._names(*factors))

    def ways(self, *factors: str) -> int:
        count = 1
        for axis in self.axes(*factors):
            count *= self._rewriter.mesh[axis]
        return count

    def size(self, factor: str) -> int:
        size = 1
        for f in self._operator.factors.values():
            size *= f.size if f.base == factor else 1
        return size

    @property
    def sharded(self) -> tuple[int, ...]:
        return tuple(
            a for a, f in enumerate(self._strategy.assignment) if f is not None and not f.startswith(LINEAR_PREFIX)
        )

    @property
    def inner(self) -> tuple[int, ...]:
        rule = self._operator.rule
        return self._strategy.axes(*rule.inner) if rule else ()

    @property
    def reduced(self) -> tuple[int, ...]:
        rule = self._operator.rule
        contiguous = rule_of(self._node).contiguous if rule_of(self._node) else ()  # type: ignore[union-attr]
        located = self.axes(*contiguous) if contiguous else ()
        return tuple(sorted({*self._strategy.axes(*rule.reduced), *located})) if rule else ()

    def whole(self, operand: int) -> tuple[int, ...]:
        return tuple(operands_of(self._node)[operand].meta["val"].shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype = self._result.dtype
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype

    @property
    def _result(self) -> torch.Tensor:
        return results_of(self._node)[0]

    def wide(self, value: fx.Proxy) -> fx.Proxy:
        return value if operands_of(self._node)[0].meta["val"].dtype == self.dtype else value.to(self.dtype)

    def rounded(self, value: fx.Proxy) -> fx.Proxy:
        return value if self._result.dtype == self.dtype else value.to(self._result.dtype)

    def partial(self, value: fx.Proxy) -> fx.Proxy:
        rounded = self.rounded(value)
        if rounded is not value:
            self._rewriter.wide[(self._node, 0)] = value.node
        return rounded

    def _collective(self, op: Any, value: fx.Proxy, axes: tuple[int, ...]) -> fx.Proxy:
        if not axes:
            return value
        node = self._rewriter.graph.call_function(op, (self._rewriter.world, value.node, axes))
        return fx.Proxy(node, self._rewriter.tracer)

    def sum(self, value: fx.Proxy, axes: tuple[int, ...]) -> fx.Proxy:
        return self._collective(ops.all_sum, value, axes)

    def reduce(self, value: fx.Proxy, axes: tuple[int, ...]) -> fx.Proxy:
        return self._collective(ops.all_reduce, value, axes)

    def max(self, value: fx.Proxy, axes: tuple[int, ...]) -> fx.Proxy:
        return self._collective(ops.all_max, value, axes)

    def offset(self, size: int, axes: tuple[int, ...], like: fx.Proxy) -> fx.Proxy:
        node = self._rewriter.graph.call_function(ops.offset, (self._rewriter.world, size, axes, like.node))
        return fx.Proxy(node, self._rewriter.tracer)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Proxy:
        plain = fx.node.map_aggregate([args, kwargs], lambda a: a.node if isinstance(a, fx.Proxy) else a)
        node = self._rewriter.graph.call_function(function, tuple(plain[0]), dict(plain[1]))  # type: ignore[index]
        return fx.Proxy(node, self._rewriter.tracer)

    def random(self, function: Any, draws: bool, *args: Any) -> fx.Proxy:
        if not draws:
            return self.call(function, *args)
        plain = [a.node if isinstance(a, fx.Proxy) else a for a in args]
        return fx.Proxy(self._rewriter.random(function, self.sharded, plain, {}), self._rewriter.tracer)
