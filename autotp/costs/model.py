"""A captured model and its analysis: the properties that planning and prices need, whatever the mesh."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from autotp.plans.constraints import Requirement
from passes.capture import Captured
from passes.graph import differentiable, note_of, stays
from passes.layouts.layout import Layout
from passes.rules.factors import Operator, Value, value_of
from passes.rules.kept import NOTHING, Kept, in_turn, kept
from passes.rules.shapes import operands_of, results_of
from passes.rules.table import rule_of

__all__ = ["Model", "shown_by", "trained_values"]

T = TypeVar("T")


def _of_graph(make: Callable[[Model], T]) -> Any:
    """A property of the graph, computed once for all models of it: it depends on neither ``recomputed`` nor ``stands``."""

    def get(model: Model) -> T:
        if make.__name__ not in model.known:
            model.known[make.__name__] = make(model)
        found: T = model.known[make.__name__]
        return found

    return property(get, doc=make.__doc__)


@dataclass(frozen=True, eq=False)
class Model:
    """A captured model, analysed and folded: what planning needs on every mesh.

    Attributes:
        captured: the captured graph.
        operators: operator node -> its analysis.
        stands: operator or parameter node -> the node that represents it; copies in folded layers have the same.
        trained: tensors through which gradients flow.
        pins: operator or parameter node -> the requirements of constraints.
        resting: parameter or buffer node -> the layout that it must have at rest, on the mesh that is planned for.
        recomputed: operator that the backward pass recomputes -> whether it repeats the collectives that bring its results
            into other layouts.
        undecided: operator for which the planner decides whether it is recomputed, with all collectives -> the last
            operator of its block; a view among them is recomputed if and only if its base is.
        train: whether a step has a backward pass.
        compiled: whether the operators between collectives are compiled.
        layers: the sequences of identical layers that ``stands`` folds: the position of the first operator, the number of
            operators of a layer, and the number of layers.
        known: the cached properties of the graph.
    """

    captured: Captured
    operators: Mapping[fx.Node, Operator]
    stands: Mapping[fx.Node, fx.Node]
    trained: frozenset[Value]
    pins: Mapping[fx.Node, tuple[Requirement, ...]] = field(default_factory=dict)
    resting: Mapping[fx.Node, Layout] = field(default_factory=dict)
    recomputed: Mapping[fx.Node, bool] = field(default_factory=dict)
    undecided: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    train: bool = True
    compiled: bool = False
    layers: Sequence[tuple[int, int, int]] = ()
    known: dict[str, Any] = field(default_factory=dict)

    @property
    def parameter_bytes(self) -> float:
        """Bytes of all parameters, unsharded."""
        given = self.captured.placeholders
        return float(sum(given[name].nbytes for name in self.captured.parameters))

    @property
    def placed(self) -> Mapping[str, str]:
        """Placeholder -> name, of every parameter or buffer for which a plan has a layout at rest."""
        caches = self.captured.caches | {node.name for node in self.resting if node.name in self.captured.buffers}
        return {**self.captured.parameters, **{n: fqn for n, fqn in self.captured.buffers.items() if n in caches}}

    @_of_graph
    def operands(self) -> Mapping[fx.Node, Sequence[fx.Node]]:
        """Operator -> the tensors that it reads, in order."""
        return {node: operands_of(node) for node in self.operators}

    @_of_graph
    def results(self) -> Mapping[fx.Node, Sequence[Tensor]]:
        """Operator -> the (fake) tensors that it returns."""
        return {node: results_of(node) for node in self.operators}

    @_of_graph
    def kinds(self) -> Mapping[fx.Node, int]:
        """Operator -> a number; only operators with equal targets, shapes, arguments, factors and roles share one."""
        given = {*self.captured.parameters, *self.captured.buffers}
        numbers: dict[object, int] = {}
        return {node: numbers.setdefault(_kind(each, given), len(numbers)) for node, each in self.operators.items()}

    @_of_graph
    def shown(self) -> Mapping[fx.Node, Value]:
        """View -> its base, the tensor whose memory it aliases (`shown_by`)."""
        found = {node: shown_by(node) for node in self.operators}
        return {node: value for node, value in found.items() if value is not None}

    def root(self, value: Value) -> Value:
        """The tensor that owns the storage of a tensor: its base, through all views."""
        while value[0] in self.shown:
            value = self.shown[value[0]]
        return value

    @_of_graph
    def depth(self) -> int:
        """The number of operators with a weight, a parameter of two dims or more; at least 1."""
        weights = {name for name in self.captured.parameters if self.captured.placeholders[name].dim() > 1}
        return max(1, sum(any(n.name in weights for n in operands) for operands in self.operands.values()))

    @_of_graph
    def returned(self) -> list[fx.Node]:
        """The tensors that the graph returns."""
        leaves: Sequence = self.captured.graph_module.graph.output_node().args[0]  # type: ignore[assignment]
        return [leaf for leaf in leaves if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), Tensor)]

    @_of_graph
    def written(self) -> Sequence[tuple[fx.Node, fx.Node]]:
        """(New value of a parameter or cache, its placeholder): the value is resharded to the placeholder's layout."""
        graph, captured = self.captured.graph_module.graph, self.captured
        given = {node.name: node for node in graph.find_nodes(op="placeholder")}
        made: Sequence = graph.output_node().args[0][captured.returned :]  # type: ignore[index, assignment]
        pairs = zip(made, captured.mutations, strict=True)
        return [(value, given[name]) for value, name in pairs if name in captured.caches or name in captured.parameters]

    @_of_graph
    def outputs(self) -> list[fx.Node]:
        """The returned tensors that are replicated: all but those that may stay sharded, and the values in ``written``."""
        left = Counter(value for value, _ in self.written)
        leaves = [leaf for leaf in self.returned if not stays(leaf)]
        return [*(Counter(leaves) - left).elements()]

    @_of_graph
    def observed(self) -> frozenset[fx.Node]:
        """The returned tensors that are for hooks of observed modules only; they are assumed to have no gradient."""
        leaves: Any = self.captured.graph_module.graph.output_node().args[0]
        return frozenset(leaves[self.captured.outputs : self.captured.returned])

    @_of_graph
    def readers(self) -> Mapping[Value, Sequence[tuple[fx.Node, int]]]:
        """Tensor -> its consumers as (node, operand position), in order; the output and written placeholders are some."""
        found: dict[Value, list[tuple[fx.Node, int]]] = defaultdict(list)
        for node, operands in self.operands.items():
            for position, operand in enumerate(operands):
                found[value_of(operand)].append((node, position))
        for leaf in self.outputs:
            found[value_of(leaf)].append((leaf.graph.output_node(), 0))
        for leaf, cache in self.written:
            found[value_of(leaf)].append((cache, 0))
        return dict(found)

    @_of_graph
    def named(self) -> Mapping[Value, fx.Node]:
        """Tensor that is read or returned -> a node with its value."""
        read = itertools.chain.from_iterable(self.operands.values())
        return {value_of(node): node for node in (*read, *self.returned)}

    @_of_graph
    def differentiated(self) -> frozenset[fx.Node]:
        """Operators and parameters through which gradients flow."""
        return frozenset(node for node, _ in self.trained)

    @cached_property
    def saved(self) -> Mapping[fx.Node, frozenset[Value]]:
        """Operator -> the tensors, computed in the step, that the backward pass reads for it (`read_back`)."""
        return {node: frozenset(self.read_back(node, node in self.recomputed)) for node in self.operators}

    def read_back(self, node: fx.Node, recomputed: bool) -> list[Value]:
        """Tensors, computed in the step, that the backward pass reads for an operator's gradients or to recompute it."""
        operands = self.operands[node]
        found = [value_of(n) for position, n in enumerate(operands) if self.reads_operand_back(node, position, recomputed)]
        if self.kept(node).results or self.kept(node).besides:  # a mask, for example, is computed with the results
            found += [(node, i) for i in range(len(self.results[node]))]
        return found

    def reads_operand_back(self, node: fx.Node, position: int, recomputed: bool) -> bool:
        """Whether an operand is computed in the step, and the backward pass reads it; see ``read_back``."""
        made = value_of(self.operands[node][position])[0].op != "placeholder"
        return made and (recomputed or position in self.kept(node).operands)

    @_of_graph
    def turns(self) -> Mapping[fx.Node, Sequence[tuple[int, bool]]]:
        """Operator -> (operand position, whether its gradient reads the other operands), in the order of the gradients.

        Empty if one formula computes all gradients.
        """
        return {
            node: [(i, i not in rule.additive and value_of(self.operands[node][i]) in self.trained) for i in in_turn(node)]
            for node in self.operators
            if (rule := rule_of(node)) is not None
        }

    def reads_back(self, node: fx.Node, value: Value) -> bool:
        """Whether the backward pass reads a tensor as an operand of a node, for the node's gradients or to recompute it."""
        operands = self.operands.get(node, ())  # an output of the model has none
        positions = range(len(operands)) if node in self.recomputed else self.kept(node).operands if operands else ()
        return any(value_of(operands[position]) == value for position in positions)

    def kept(self, node: fx.Node) -> Kept:
        """What the gradients of an operator's operands read, if none of its inner factors is sharded."""
        known = self._kept
        if node not in known:
            trained = [value_of(operand) in self.trained for operand in self.operands[node]]
            known[node] = kept(node, trained) if node in self.differentiated else NOTHING
        return known[node]

    @_of_graph
    def _kept(self) -> dict[fx.Node, Kept]:
        return {}


def _kind(operator: Operator, given: Set[str]) -> object:
    node = operator.node
    factors = tuple((f.name, f.size, f.role, f.offered) for f in operator.factors.values())
    operands = tuple((tuple(n.meta["val"].shape), n.name in given, note_of(n).cast) for n in operands_of(node))
    results = tuple((tuple(t.shape), str(t.dtype)) for t in results_of(node))
    args = fx.node.map_aggregate(node.args, lambda a: "·" if isinstance(a, fx.Node) else repr(a))
    return str(node.target), operands, results, str(args), factors


def shown_by(node: fx.Node) -> Value | None:
    """The base of a view, whose memory it aliases; None if the operator is not a view.

    A reshape that has to copy, for example of a permuted or expanded tensor, is not a view.
    """
    rule, operands = rule_of(node), operands_of(node)
    if rule is None or not rule.view or not operands:
        return None
    source, result = operands[0].meta["val"], results_of(node)[0]
    shows = not rule.copies or _viewable(tuple(source.shape), source.stride(), tuple(result.shape))
    return value_of(operands[0]) if shows else None


@lru_cache(maxsize=4096)
def _viewable(shape: tuple[int, ...], stride: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape and stride can be reshaped without a copy."""
    try:
        torch.empty_strided(shape, stride, device="meta").view(into)
    except RuntimeError:
        return False
    return True


def trained_values(captured: Captured, operators: Mapping[fx.Node, Operator]) -> frozenset[Value]:
    """The tensors through which gradients flow to a parameter."""
    trained: set[Value] = set()
    for node in captured.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in captured.parameters:
            trained.add((node, 0))
    for node in operators:
        rule = rule_of(node)
        if (rule is not None and rule.detaches) or not any(value_of(n) in trained for n in operands_of(node)):
            continue
        trained |= {(node, i) for i, t in enumerate(results_of(node)) if differentiable(t)}
    return frozenset(trained)
