"""Families: the known schemes as restrictions of the one search space.

A family says which factors each mesh axis may serve, which uses of an axis a weight's operator should make if it can, and
how parameters rest. It never adds a strategy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from autotp.errors import AutotpError
from costmodel.errors import shown
from passes.rules.factors import Factor, Operator
from passes.rules.table import rule_of

__all__ = ["FAMILIES", "Family", "Restriction", "family"]


@dataclass(frozen=True, slots=True)
class Family:
    """One scheme.

    Each mesh axis has a role, a letter: ``b`` splits the batch; ``m`` splits rows (batch or tokens); ``d``, depth, splits
    rows and leaves parameters whole; ``n`` splits columns; ``w`` splits columns or rows of the weight, as each operator
    likes. What no contraction decides follows: columns are features.

    Attributes:
        name: as the user writes it.
        summary: one line.
        axes: the greatest number of mesh axes that it has a use for, and ``least`` the smallest that shows the scheme.
        roles: given the number of axes, the roles of all of them to try, a string each; None leaves every axis free.
        between: what ``w`` axes may split outside contractions besides features: roles of factors.
        both: with two ``w`` axes, a weight's operator uses one for its result and one for its reduction.
        whole_norms: normalisation sees the whole hidden dim.
        scatters: a partial sum may be reduced straight into shards; else it is all-reduced, as the scheme's authors do.
        fills: every operator uses as many axes as it can, so that all tensors rest as the scheme says; else only those
            with a weight do.
        rest: how parameters rest: "free", "whole" or "sharded".
        gathers: how often parameters are gathered: "once", and kept until the backward pass has read them; "twice", also
            for the backward pass; or "free": the planner decides for each.
        merges: gradients travel together, even without a schedule that lets them.
    """

    name: str
    summary: str
    axes: int = 3
    least: int = 1
    roles: Callable[[int], Sequence[str]] | None = None
    between: frozenset[str] = frozenset()
    both: bool = False
    whole_norms: bool = False
    scatters: bool = True
    fills: bool = False
    rest: str = "free"
    gathers: str = "free"
    merges: bool = False

    def restrictions(self, axes: int) -> list[Restriction]:
        """The restrictions to try on a mesh of so many axes; the best plan of all is the family's."""
        return [Restriction(self, roles) for roles in ([None] if self.roles is None else self.roles(axes))]


@dataclass(frozen=True, slots=True)
class Restriction:
    """A family on a mesh whose axes have their roles; ``roles`` is None where the family leaves them free."""

    family: Family
    roles: str | None = None

    def allows(self, operator: Operator, axis: int, factor: Factor | None) -> bool:
        """Whether ``axis`` may serve ``factor`` of ``operator`` (None: pass partial sums through)."""
        if self.roles is None:
            return True
        role = self.roles[axis]
        if role == "b":
            return factor is not None and factor.role == "batch"
        if factor is None:
            return True
        if role in "md":
            return factor.role in ("batch", "token") and factor.kind in ("", "m")
        if factor.kind:
            return factor.kind in ("n" if role == "n" else "nk")
        if self.family.whole_norms and operator.rule is not None and factor.name in operator.rule.inner:
            return factor.base in _vocabularies(operator)  # a loss, no norm
        return factor.role == "feature" or (role == "w" and factor.role in self.family.between)

    def prefers(self, weight: bool) -> bool:
        """Whether only the best strategies of an operator are the family's; ``weight``: it multiplies by one."""
        return self.roles is not None and (weight or self.family.fills)

    def score(self, operator: Operator, assignment: Sequence[str | None]) -> int:
        """How far a strategy makes the uses of the axes that the family asks for."""
        if self.roles is None:
            return 0
        score, kinds = 0, []
        for role, served in zip(self.roles, assignment, strict=True):
            if served is not None and served in operator.factors:
                score += 2
                if role == "w":
                    kinds.append(operator.factors[served].kind)
        return score + len(set(kinds) if self.family.both else kinds)

    def rests(self, axis: int) -> str:
        """How parameters rest along an axis: "free", "whole" or "sharded"."""
        return "whole" if self.roles is not None and self.roles[axis] == "d" else self.family.rest


def _vocabularies(operator: Operator) -> Collection[str]:
    rule = rule_of(operator.node)
    return rule.bounded.values() if rule is not None and rule.bounded else ()


def _roles(*tails: str) -> Callable[[int], list[str]]:
    """By number of axes: the given roles of that number, in every order; any axes outside them split the batch."""

    def roles(axes: int) -> list[str]:
        length = min(axes, max(map(len, tails)))
        orders = {"".join(order) for tail in tails if len(tail) == length for order in itertools.permutations(tail)}
        return ["b" * (axes - length) + order for order in sorted(orders)]

    return roles


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("auto", "the whole space, per operator"),
        Family("data", "every axis splits the batch; parameters whole", 1, roles=_roles("b"), rest="whole"),
        Family(
            "zero3",
            "every axis splits the batch; parameters sharded at rest",
            1,
            roles=_roles("b"),
            rest="sharded",
            gathers="twice",
        ),
        Family(
            "megatron-1d",
            "the last axis splits columns, then rows; the others the batch",
            2,
            roles=_roles("w"),
            scatters=False,
        ),
        Family(
            "megatron-sp",
            "megatron-1d with the sequence split between",
            2,
            roles=_roles("w"),
            between=frozenset({"token"}),
        ),
        Family(
            "tensor3d",
            "two axes split columns and rows, swapped in the next layer",
            roles=_roles("w", "ww"),
            both=True,
            scatters=False,
        ),
        Family(
            "atp",
            "tensor3d with norms that see the whole hidden dim",
            roles=_roles("w", "ww"),
            both=True,
            whole_norms=True,
            scatters=False,
        ),
        Family(
            "summa-2d",
            "one axis splits rows, one columns; operands are gathered panel by panel",
            least=2,
            roles=_roles("m", "mn"),
            fills=True,
            rest="sharded",
            gathers="twice",
        ),
        Family(
            "tesseract-2.5d",
            "summa-2d in each of several layers of depth that share the weights and split the batch",
            least=3,
            roles=_roles("m", "mn", "dmn"),
            fills=True,
            rest="sharded",
            gathers="twice",
        ),
        Family(
            "3d",
            "one axis each splits rows, columns and the reduction; every operand rests on all three",
            least=3,
            roles=_roles("w", "mw", "mww"),
            between=frozenset({"batch", "token"}),
            both=True,
            fills=True,
            rest="sharded",
            gathers="twice",
        ),
    )
}
"""Name -> family: what ``strategy=`` may be."""


def family(name: str) -> Family:
    """The family of that name.

    Raises:
        AutotpError: for an unknown name; lists the known ones.
    """
    if name not in tuple(FAMILIES):
        raise AutotpError(f"strategy {shown(name)} is unknown; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]
