"""How a step runs each operator: if it has gradients, if it is recomputed, and what stays inside compiled kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch import fx

from autotp.costs.model import Model
from passes.rules.factors import Value, value_of
from passes.rules.kept import NOTHING
from passes.rules.shapes import results_of
from passes.rules.table import rule_of

__all__ = ["Fused", "Run", "Runs"]

#: Kinds of operators that a compiler fuses into one kernel if one reads the result of another.
_FUSING = frozenset({"pointwise", "norm", "softmax", "copy"})


class Fused(NamedTuple):
    """How often operands and results pass through memory if an operator is compiled together with its neighbours.

    In the forward pass, a kernel reads the tensors made outside it, once, and writes those read outside it or in the
    backward pass. In the backward pass, it reads the gradients of the tensors read outside, and the saved tensors, once,
    and writes the gradients of the tensors made outside, and the recomputed tensors that are read outside.

    Attributes:
        operands: for each operand, the times in the forward pass, and those in the backward pass, its gradient included.
        results: the same for each result.
        besides: other tensors, written for the backward pass and read there: (an operand, or -1 for the first result; the
            size relative to it).
        ends: whether its result is read outside its kernel; kernels are counted where they end.
    """

    operands: tuple[tuple[int, int], ...]
    results: tuple[int, int]
    besides: tuple[tuple[int, float], ...] = ()
    ends: bool = True

    def moved(self, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, Any]:
        """Bytes read and written in the forward and in the backward pass, given those of every operand and result."""
        tensors = [*zip(operands, self.operands, strict=True), *((each, self.results) for each in results)]
        kept = sum([*operands, *results[:1]][position] * larger for position, larger in self.besides)
        ahead, behind = (sum(each * times[i] for each, times in tensors) for i in (0, 1))
        return ahead + kept, behind + kept


class Run(NamedTuple):
    """How a step runs an operator.

    Attributes:
        gradient: whether gradients flow through it.
        recomputed: whether the backward pass runs it again.
        fused: how often its tensors pass through memory, if it is compiled together with its neighbours; else None.
    """

    gradient: bool
    recomputed: bool = False
    fused: Fused | None = None

    def passes(self, node: fx.Node) -> float:
        """The operator's work in a step, as a multiple of that of its forward pass."""
        rule = rule_of(node)
        return 1.0 + self.gradient * (2.0 if rule is None else rule.backward) + self.recomputed

    def kernels(self, node: fx.Node) -> float:
        """The number of its kernels in a step. A fused operator counts only if it ends one; recomputation adds none."""
        if self.fused is None:
            return self.passes(node)
        return self._replace(recomputed=False).passes(node) if self.fused.ends else 0.0

    def sums(self, node: fx.Node) -> tuple[int, int]:
        """How often collectives inside it run in the forward and in the backward pass, if there are any."""
        rule = rule_of(node)
        forward, backward = (1, 0) if rule is None else rule.statistics
        return forward, self.gradient * backward + self.recomputed * forward


class Runs:
    """How a step runs the operators of a model, if its undecided operators are not recomputed, and if they are."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def run(self, node: fx.Node) -> Run:
        """How a step runs an operator, if no undecided operator is recomputed."""
        if not self.model.train:
            return Run(False, False, self._fused.get(node))
        return Run(node in self.model.differentiated, node in self.model.recomputed, self._fused.get(node))

    def rerun(self, node: fx.Node) -> Run | None:
        """How a step runs an undecided operator, if all of these are recomputed; None for other operators."""
        if not self.model.train or node not in self.model.undecided:
            return None
        return Run(node in self.model.differentiated, True, self._refused.get(node))

    @cached_property
    def _fused(self) -> Mapping[fx.Node, Fused]:
        return _fused(self.model, self.model.recomputed)

    @cached_property
    def _refused(self) -> Mapping[fx.Node, Fused]:
        return _fused(self.model, {**self.model.undecided, **self.model.recomputed})


def _fused(model: Model, recomputed: Collection[fx.Node]) -> Mapping[fx.Node, Fused]:
    """Operator of a kind that a compiler fuses -> how often its tensors pass through memory, wherever collectives are.

    Two such operators are in one kernel if one reads a result of the other, or both read the same tensor, unless an
    operator that is not fused lies on another path between them. In the backward pass, a recomputed operator is in the
    kernel of its gradients.

    Args:
        model: the analysed model; nothing is fused unless it is ``compiled``.
        recomputed: operators that the backward pass recomputes if it reads their results.
    """
    if not model.compiled:
        return {}
    depth: dict[fx.Node, int] = {}  # the most edges to or from nodes that are not fused, on a path to an operator
    fusing = {node for node in model.operators if (rule := rule_of(node)) is not None and rule.kind in _FUSING}
    fusing -= model.shown.keys()
    shown = {node: [model.root(value_of(n)) for n in operands] for node, operands in model.operands.items()}
    inside: dict[fx.Node, list[bool]] = {}
    leaves = {model.root(value_of(leaf)) for leaf in model.returned}
    for node, values in shown.items():
        depth[node] = max((depth.get(n, 0) + (not {n, node} <= fusing) for n, _ in values), default=0)
        inside[node] = [{made, node} <= fusing and depth[made] == depth[node] for made, _ in values]
        if node not in model.shown:
            leaves |= {value for value, within in zip(values, inside[node], strict=True) if not within}
    back: dict[fx.Node, Collection[int]] = {}  # the operands that the backward pass reads
    read: set[Value] = set()  # tensors that it reads; `outside`: those made in another kernel
    outside: set[Value] = set()
    again: set[fx.Node] = set()
    for node, values in reversed(shown.items()):
        if node in model.shown:
            continue
        kept = model.kept(node) if model.train else NOTHING
        read |= {(node, 0)} if kept.results else set()
        if node in recomputed and not read.isdisjoint((node, i) for i in range(len(model.results[node]))):
            again.add(node)
        back[node] = range(len(values)) if node in again else kept.operands
        read |= {values[position] for position in back[node]}
        outside |= {values[position] for position in back[node] if not inside[node][position]}
    once: set[tuple[str, int, Value]] = set()

    def first(what: str, node: fx.Node, value: Value) -> bool:
        known = len(once)
        once.add((what, depth[node], value))
        return len(once) > known

    found: dict[fx.Node, Fused] = {}
    for node in shown:
        if node not in fusing:
            continue
        kept, operands = model.kept(node) if model.train else NOTHING, []
        for position, (value, within) in enumerate(zip(shown[node], inside[node], strict=True)):
            ahead = not within and first("read", node, value)
            made = within and value[0] in again
            behind = position in back[node] and not made and first("kept", node, value)
            returns = model.train and not within and value in model.trained and first("gradient", node, value)
            operands.append((int(ahead), behind + returns))
        besides: tuple[tuple[int, float], ...] = ()
        own, ends = (node, 0), (node, 0) in leaves or (node, 0) not in model.readers
        if node in again:
            results = int(ends), ends + (own in outside)
        else:
            behind = kept.results and first("kept", node, own)
            tensors = [*(n.meta["val"] for n in model.operands[node]), *results_of(node)[:1]]
            results = int(ends or own in read), (model.train and ends) + behind
            besides = tuple((position, size / tensors[position].element_size()) for position, size in kept.besides)
        found[node] = Fused(tuple(operands), results, besides, ends)
    return {node: found[stand] for node in model.operators if (stand := model.stands.get(node, node)) in found}
