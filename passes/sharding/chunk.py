"""Chunking: chooses the operators that a virtual mesh axis cuts into chunks, and the factors along which it cuts them.

There are two kinds of chunks, which can be combined as two virtual axes. *Batch*: every operator that can be cut works on a
part of the batch at a time (Tensor3D's overdecomposition); chunks pass from the inputs from operator to operator, and are
joined where an operator cannot be cut. *Rows*: cuts the rows of single matrix products whose operands, results or gradients
communicate (ATP's chunks).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from passes.layouts.layout import is_shard, place, splits
from passes.rules.factors import Factor, Operator, value_of
from passes.rules.shapes import operands_of, results_of
from passes.sharding.shard import Sharding
from passes.strategies.space import strategies
from passes.strategies.strategy import LINEAR_PREFIX, Strategy

__all__ = ["CHUNKS", "Chunked", "in_chunks"]

#: The kinds of chunks, in the order of their virtual axes.
CHUNKS = ("batch", "rows")

#: Operator name -> the factor that a virtual axis cuts, a linear pseudo-factor (partial sums are passed through), or None.
_Cuts = Mapping[str, str | None]
_Options = Mapping[fx.Node, Sequence[Strategy]]


@dataclass(frozen=True, slots=True)
class Chunked:
    """A sharding with which devices work in chunks.

    Attributes:
        sharding: the sharding, with a virtual axis after the mesh axes for each of ``counts``.
        counts: kind of chunks -> number of chunks, for the kinds that cut an operator.
        cut: kind of chunks -> names of the operators that it cuts.
        whole: name of an operator that is not cut although it reads chunks, or was to be cut -> the reason.
    """

    sharding: Sharding
    counts: Mapping[str, int]
    cut: Mapping[str, tuple[str, ...]]
    whole: Mapping[str, str]


def in_chunks(
    graph: fx.Graph,
    operators: Mapping[fx.Node, Operator],
    sharding: Sharding,
    inputs: Collection[str],
    chunks: Mapping[str, int],
    stands: Mapping[fx.Node, fx.Node] | None = None,
) -> Chunked:
    """Extends a sharding by virtual axes for the given numbers of chunks.

    Args:
        graph: a captured graph.
        operators: its analysis.
        sharding: the sharding for the mesh, without virtual axes.
        inputs: names of the placeholders that are the user's inputs.
        chunks: kind of `CHUNKS` -> number of chunks.
        stands: operator -> an identical one, with the same strategy; operators that are not in it stand for themselves.
    """
    made = sharding
    counts: dict[str, int] = {}
    cut: dict[str, tuple[str, ...]] = {}
    whole: dict[str, str] = {}
    for kind in CHUNKS:
        count = chunks.get(kind, 1)
        if count < 2:
            continue
        talking = _communicating(operators, sharding) if kind == "rows" else []
        if kind == "rows" and not talking:
            continue
        # Once cut by one kind of chunks, operators that were identical may no longer be.
        options = _options(operators, made, count, {} if counts else stands or {})
        if kind == "batch":
            cuts = _by_batch(graph, operators, options, inputs, count)
            left = _reading(operators, inputs, cuts)
        else:
            cuts = {n.name: _rows(one, options[n]) if n.name in talking else None for n, one in operators.items()}
            left = [node for node in operators if node.name in talking and cuts[node.name] is None]
        for node in left:
            whole[node.name] = f"{kind}: {_why(operators[node], options[node], kind)}"
        if any(cuts.values()):
            made = _extended(options, made, cuts, count)
            counts[kind] = count
            cut[kind] = tuple(name for name, factor in cuts.items() if factor is not None)
    return Chunked(made, counts, cut, whole)


def _reading(operators: Mapping[fx.Node, Operator], inputs: Collection[str], cuts: _Cuts) -> list[fx.Node]:
    """The operators that are not cut although they read chunks or the batch itself, and have a batch factor or no rule."""

    def cut(operand: fx.Node) -> bool:
        source = value_of(operand)[0]
        return source.name in inputs if source.op == "placeholder" else cuts.get(source.name) is not None

    found = []
    for node, operator in operators.items():
        batch = operator.rule is None or any(factor.role == "batch" for factor in operator.factors.values())
        if batch and cuts[node.name] is None and any(map(cut, operands_of(node))):
            found.append(node)
    return found


def _why(operator: Operator, options: Sequence[Strategy], kind: str) -> str:
    """The reason why an operator with these options is not cut."""
    if operator.rule is None:
        return "it has no rule"
    batch = {factor.name for factor in operator.factors.values() if factor.role == "batch"}
    if kind == "batch" and any(strategy.assignment[-1] in batch for strategy in options):
        return "what else it works on is whole"
    if kind == "batch" and batch & operator.rule.inner:
        return "it needs the whole batch at once"
    return "its parts would be uneven"


def _options(
    operators: Mapping[fx.Node, Operator], sharding: Sharding, chunks: int, stands: Mapping[fx.Node, fx.Node]
) -> _Options:
    """Per operator, the strategies that extend its own by a virtual axis; for identical operators, they are found once."""
    found: dict[fx.Node, list[Strategy]] = {}
    for node in operators:
        stand = stands.get(node, node)
        if stand not in found:
            found[stand] = _extending(operators[stand], sharding, chunks)
        found[node] = found[stand]
    return found


def _by_batch(
    graph: fx.Graph, operators: Mapping[fx.Node, Operator], options: _Options, inputs: Collection[str], chunks: int
) -> _Cuts:
    """The factor of each operator that a virtual axis cuts if the batch is processed in ``chunks`` chunks."""
    whole: Placement = Replicate()
    have: dict[object, Placement | None] = {}  # None: can be whole or cut
    for node in graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            splits = node.name in inputs and isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] % chunks == 0
            have[(node, 0)] = None if splits else whole
    found: dict[str, str | None] = {}
    for node in operators:
        best, least = options[node][0], float("inf")
        flows = any(have.get(value_of(operand)) != whole for operand in operands_of(node))
        for strategy in options[node]:
            cost = _cost(node, strategy, have)
            if cost < least or (cost == least and best.assignment[-1] is None and flows):
                best, least = strategy, cost
        found[node.name] = best.assignment[-1]
        for i, layout in enumerate(best.results):
            have[(node, i)] = layout[-1]
    return found


def _cost(node: fx.Node, strategy: Strategy, have: Mapping[object, Placement | None]) -> float:
    """Cost of a strategy: the bytes of operands that are joined or cut again, and half of those of partial sums."""
    cost = 0.0
    for operand, want in zip(operands_of(node), strategy.wants, strict=True):
        value: Tensor = operand.meta["val"]
        mine, wanted = have.get(value_of(operand)), want.layout[-1]
        free = mine is None and (wanted == Replicate() or (is_shard(wanted) and wanted == place(0)))
        if not free and mine != wanted:
            cost += value.nbytes
    for result, layout in zip(results_of(node), strategy.results, strict=True):
        if isinstance(layout[-1], Partial):
            cost += 0.5 * result.nbytes
    return cost


def _extending(operator: Operator, sharding: Sharding, chunks: int) -> list[Strategy]:
    """The strategies that extend an operator's own by a virtual axis, even parts only; the first leaves it whole."""
    mine = sharding.strategies[operator.node.name].assignment
    mesh = (*sharding.mesh, chunks)
    axis = len(sharding.mesh)
    inner = frozenset(operator.rule.inner) if operator.rule is not None else frozenset()

    def allow(at: int, factor: Factor | None) -> bool:
        if at == axis:
            return factor is None or (factor.name not in inner and factor.size % chunks == 0)
        if factor is None:
            return (mine[at] or "").startswith(LINEAR_PREFIX)
        return mine[at] == factor.name

    return [s for s in strategies(operator, mesh, allow) if s.assignment[:-1] == mine and _even(operator.node, s, mesh)]


def _even(node: fx.Node, strategy: Strategy, mesh: tuple[int, ...]) -> bool:
    """Whether all dims that the last axis, the virtual one, cuts are split evenly."""
    axis = len(mesh) - 1
    tensors = [(n.meta["val"], want.layout) for n, want in zip(operands_of(node), strategy.wants, strict=True)]
    tensors += zip(results_of(node), strategy.results, strict=True)
    for tensor, layout in tensors:
        for dim, size in enumerate(tensor.shape):
            cutting = [part.axis for part in splits(layout, dim, mesh)]
            if axis in cutting and size % math.prod(mesh[a] for a in cutting):
                return False
    return True


def _communicating(operators: Mapping[fx.Node, Operator], sharding: Sharding) -> list[str]:
    """Names of the matrix products whose operands, results or activations' gradients communicate."""
    found = []
    for node, operator in operators.items():
        kinds = {factor.kind for factor in operator.factors.values()}
        if not {"m", "n", "k"} <= kinds:
            continue
        strategy = sharding.strategies[node.name]
        data = strategy.wants[0]
        partial = [*(p for layout in strategy.results for p in layout), *data.gradient]
        if any(isinstance(p, Partial) for p in partial):
            found.append(node.name)
    return found


def _rows(operator: Operator, options: Sequence[Strategy]) -> str | None:
    """The factor of a product's rows that a virtual axis can cut, by its strategies; None if there is none."""
    rows = {factor.name for factor in operator.factors.values() if factor.kind == "m"}
    return next((s.assignment[-1] for s in options if s.assignment[-1] in rows), None)


def _extended(options: _Options, sharding: Sharding, cuts: _Cuts, chunks: int) -> Sharding:
    """The sharding with another virtual axis, along which all placeholders are whole."""
    chosen = {node.name: next(s for s in each if s.assignment[-1] == cuts[node.name]) for node, each in options.items()}
    resting = {name: (*layout, Replicate()) for name, layout in sharding.resting.items()}
    return replace(sharding, mesh=(*sharding.mesh, chunks), strategies=chosen, resting=resting)
