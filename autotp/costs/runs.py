"""How a step runs each operator: whether it has gradients, is recomputed, and what of it stays inside a compiled kernel."""

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

#: Kinds of operators that a compiler makes one kernel of, where one reads what another gives.
_FUSING = frozenset({"pointwise", "norm", "softmax", "copy"})


class Fused(NamedTuple):
    """How often what an operator reads and makes goes through memory where it is compiled with the operators beside it.

    In the forward pass a kernel reads what is made outside it, once, and writes what is read outside it, or in the
    backward pass. There it reads the gradients of what is read outside, and what was kept, once, and writes the gradients
    of what was made outside; and of what is recomputed, what is read outside.

    Attributes:
        operands: for each operand, times in the forward pass, and in the backward pass its gradient included.
        results: the same for each result.
        besides: what is written for the backward pass and read there: (an operand, or -1 for the first result; how many
            times as large it is).
        ends: whether something is read outside the kernel that it is in; kernels are counted where they end.
    """

    operands: tuple[tuple[int, int], ...]
    results: tuple[int, int]
    besides: tuple[tuple[int, float], ...] = ()
    ends: bool = True

    def moved(self, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, Any]:
        """Bytes in the forward and in the backward pass, given those of every operand and result."""
        tensors = [*zip(operands, self.operands, strict=True), *((each, self.results) for each in results)]
        kept = sum([*operands, *results[:1]][position] * larger for position, larger in self.besides)
        ahead, behind = (sum(each * times[i] for each, times in tensors) for i in (0, 1))
        return ahead + kept, behind + kept


class Run(NamedTuple):
    """How a step runs an operator.

    Attributes:
        gradient: gradients flow through it.
        recomputed: the backward pass runs it again.
        fused: what goes through memory for it where it is compiled with the operators beside it; None where it is not.
    """

    gradient: bool
    recomputed: bool = False
    fused: Fused | None = None

    def passes(self, node: fx.Node) -> float:
        """Times the operator's work is done in a step."""
        rule = rule_of(node)
        return 1.0 + self.gradient * (2.0 if rule is None else rule.backward) + self.recomputed

    def kernels(self, node: fx.Node) -> float:
        """Its kernels in a step; one of several fused operators counts where it ends, and recomputes in its gradients'."""
        if self.fused is None:
            return self.passes(node)
        return self._replace(recomputed=False).passes(node) if self.fused.ends else 0.0

    def sums(self, node: fx.Node) -> tuple[int, int]:
        """Times that collectives inside it run in either pass, if there are any."""
        rule = rule_of(node)
        forward, backward = (1, 0) if rule is None else rule.statistics
        return forward, self.gradient * backward + self.recomputed * forward


class Runs:
    """How a step runs the operators of a model; what is undecided, as if its results were kept, or as if not."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def run(self, node: fx.Node) -> Run:
        """How a step runs an operator, if nothing undecided is recomputed."""
        if not self.model.train:
            return Run(False, False, self._fused.get(node))
        return Run(node in self.model.differentiated, node in self.model.recomputed, self._fused.get(node))

    def rerun(self, node: fx.Node) -> Run | None:
        """How it runs an undecided operator, if all of those are recomputed; None for others."""
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
    """Operator of a kind that a compiler fuses -> what goes through memory for it, wherever collectives are.

    Two of them are in one kernel if one reads what the other makes, or both read the same, unless something that is not
    fused lies on another way from one to the other. In the backward pass, what is recomputed is in the kernel of its
    gradients.

    Args:
        model: analysed; without ``compiled``, nothing is fused.
        recomputed: what the backward pass recomputes, if it reads it.
    """
    if not model.compiled:
        return {}
    depth: dict[fx.Node, int] = {}  # how many changes between what is fused and what is not lie before an operator
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
    read: set[Value] = set()  # by it; and in another kernel than where it was made
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
