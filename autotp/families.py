"""Families: the known schemes as restrictions of the one search space.

A family says which factors each mesh axis may serve, which uses of an axis a weight's operator should make if it can, and
how parameters rest. It never adds a strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotp.errors import AutotpError
from passes.factors import Factor, Operator
from passes.rules.table import rule_of
from passes.strategy import Strategy, strategies

__all__ = ["FAMILIES", "Family", "family", "restricted"]


@dataclass(frozen=True, slots=True)
class Family:
    """One scheme.

    Attributes:
        name: as the user writes it.
        summary: one line.
        axes: the greatest number of mesh axes that it has a use for.
        model_axes: given the number of axes, those that split the model; the others split the batch.
        sequence: the model axes may split tokens, outside contractions.
        both: with two model axes, a weight's operator uses one for its result and one for its reduction.
        whole_norms: normalisation sees the whole hidden dim.
        scatters: a partial sum may be reduced straight into shards; else it is all-reduced, as the scheme's authors do.
        rest: how parameters rest: "free", "whole" or "sharded".
    """

    name: str
    summary: str
    axes: int = 3
    model_axes: Callable[[int], Sequence[int]] | None = None
    sequence: bool = False
    both: bool = False
    whole_norms: bool = False
    scatters: bool = True
    rest: str = "free"

    def allows(self, operator: Operator, axis: int, factor: Factor | None, axes: int) -> bool:
        """Whether ``axis`` may serve ``factor`` of ``operator`` (None: pass partial sums through)."""
        if self.model_axes is None:
            return True
        if axis not in self.model_axes(axes):
            return factor is not None and factor.role == "batch"
        if factor is None:
            return True
        if factor.kind:
            return factor.kind in ("n", "k")
        if self.whole_norms and operator.rule is not None and factor.name in operator.rule.inner:
            return "cross_entropy" in str(operator.node.target)
        return factor.role == "feature" or (self.sequence and factor.role == "token")

    def score(self, operator: Operator, strategy: Strategy) -> int:
        """How far a strategy of an operator that reads a weight makes the uses of the axes that the family asks for."""
        if self.model_axes is None:
            return 0
        axes = len(strategy.assignment)
        model = list(self.model_axes(axes))
        served = [strategy.assignment[a] for a in range(axes)]
        used = sum(served[a] in operator.factors for a in range(axes) if a not in model)
        kinds = [operator.factors[served[a]].kind for a in model if served[a] in operator.factors]  # type: ignore[index]
        if self.both and len(model) > 1:
            return 2 * used + len(set(kinds))
        return 2 * used + len(kinds)


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("auto", "the whole space, per operator"),
        Family("data", "every axis splits the batch; parameters whole", 1, lambda n: (), rest="whole"),
        Family(
            "zero3",
            "every axis splits the batch; parameters sharded at rest",
            1,
            lambda n: (),
            rest="sharded",
        ),
        Family(
            "megatron-1d",
            "the last axis splits columns, then rows; the others the batch",
            2,
            lambda n: (n - 1,),
            scatters=False,
        ),
        Family("megatron-sp", "megatron-1d with the sequence split between", 2, lambda n: (n - 1,), sequence=True),
        Family(
            "tensor3d",
            "two axes split columns and rows, swapped in the next layer",
            3,
            lambda n: range(n)[-2:],
            both=True,
            scatters=False,
        ),
        Family(
            "atp",
            "tensor3d with norms that see the whole hidden dim",
            3,
            lambda n: range(n)[-2:],
            both=True,
            whole_norms=True,
            scatters=False,
        ),
    )
}


def family(name: str) -> Family:
    """The family of that name.

    Raises:
        AutotpError: for an unknown name; lists the known ones.
    """
    if name not in FAMILIES:
        raise AutotpError(f"strategy {name!r} is unknown; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def restricted(chosen: Family, operator: Operator, mesh: tuple[int, ...], reads_weight: bool) -> list[Strategy]:
    """The strategies of ``operator`` that the family allows; for an operator with a weight, those that fit it best."""
    found = list(strategies(operator, mesh, lambda axis, factor: chosen.allows(operator, axis, factor, len(mesh))))
    table = rule_of(operator.node)
    if chosen.model_axes is None or table is None or table.flop is None or not reads_weight:
        return found
    best = max(chosen.score(operator, s) for s in found)
    return [s for s in found if chosen.score(operator, s) == best]
