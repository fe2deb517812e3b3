"""Families: the known schemes as restrictions of the one search space.

A family determines which factors each mesh axis may shard, how an operator with a weight should use the axes where it can,
and the layouts of parameters at rest. It only removes strategies from the search space and never adds one.
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
    """A scheme, as a restriction of the strategies that the planner searches.

    Each mesh axis has a role, a letter: ``b`` splits the batch; ``m`` splits rows (batch or tokens); ``d``, depth, splits
    rows and leaves parameters replicated; ``n`` splits columns; ``w`` splits columns or rows of the weight, as the planner
    chooses for each operator. In operators that are not contractions, axes that split columns split features.

    Attributes:
        name: the value of ``strategy=`` that selects the family.
        summary: a description in one line.
        axes: the greatest number of mesh axes that the scheme uses, and ``least`` the smallest that shows the scheme.
        roles: number of mesh axes -> the combinations of roles to try, each a string with a letter per axis; None: any axis
            may have any use.
        between: roles of factors that ``w`` axes may split in operators other than contractions, besides features.
        both: with two ``w`` axes, an operator with a weight uses one for its columns and one for its reduction.
        whole_norms: normalisations are not split along the hidden dim.
        scatters: a partial sum may be reduce-scattered; otherwise it is all-reduced, as by the scheme's authors.
        fills: every operator uses as many axes as it can, so that all tensors are sharded as in the scheme; otherwise only
            operators with a weight do.
        rest: the layouts of parameters at rest: "free", "whole" or "sharded".
        gathers: how often parameters are gathered: "once", and kept until the backward pass has read them; "twice", again
            for the backward pass; or "free": the planner decides for each parameter.
        merges: collectives of gradients are priced as merged, even if the schedule does not merge them.
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
        """The restrictions to try on a mesh of ``axes`` axes; the plan of the family is the best plan under any of them."""
        return [Restriction(self, roles) for roles in ([None] if self.roles is None else self.roles(axes))]


@dataclass(frozen=True, slots=True)
class Restriction:
    """A family with a role for each mesh axis; ``roles`` is None if the family does not restrict the uses of the axes."""

    family: Family
    roles: str | None = None

    def allows(self, operator: Operator, axis: int, factor: Factor | None) -> bool:
        """Whether ``axis`` may shard ``factor`` of ``operator`` (None: pass on partial sums along the axis)."""
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
            return factor.base in _vocabularies(operator)  # a loss, not a norm
        return factor.role == "feature" or (role == "w" and factor.role in self.family.between)

    def prefers(self, weight: bool) -> bool:
        """Whether only the strategies of the highest score are allowed; ``weight``: the operator multiplies by a weight."""
        return self.roles is not None and (weight or self.family.fills)

    def score(self, operator: Operator, assignment: Sequence[str | None]) -> int:
        """How well an operator's assignment of factors to axes matches the family's roles; higher is better."""
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
        """The layout of parameters at rest along an axis: "free", "whole" or "sharded"."""
        return "whole" if self.roles is not None and self.roles[axis] == "d" else self.family.rest


def _vocabularies(operator: Operator) -> Collection[str]:
    rule = rule_of(operator.node)
    return rule.bounded.values() if rule is not None and rule.bounded else ()


def _roles(*tails: str) -> Callable[[int], list[str]]:
    """A function for `Family.roles`: the tails that have a letter for each mesh axis, in every order.

    If the mesh has more axes than the longest tail has letters, its outer axes split the batch.
    """

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
"""Name -> family: the values of ``strategy=``."""


def family(name: str) -> Family:
    """The family of a name.

    Raises:
        AutotpError: the name is unknown; lists the known names.
    """
    if name not in tuple(FAMILIES):
        raise AutotpError(f"strategy {shown(name)} is unknown; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[name]
