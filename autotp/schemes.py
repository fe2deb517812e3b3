"""Names: which known scheme an operator's strategy is, read off its assignment of axes to factors."""

from __future__ import annotations

from collections.abc import Sequence

from passes.factors import Operator
from passes.layout import Layout, is_shard
from passes.strategy import Strategy

__all__ = ["scheme"]


def scheme(operator: Operator, strategy: Strategy, weights: Sequence[Layout]) -> str:
    """The scheme's name.

    Args:
        operator: the operator.
        strategy: its strategy.
        weights: resting layouts of the parameters that it reads.
    """
    axes: dict[str, list[int]] = {"batch": [], "token": [], "n": [], "k": [], "feature": [], "partial": []}
    for axis, chosen in enumerate(strategy.assignment):
        if chosen is None:
            continue
        factor = operator.factors.get(chosen)
        if factor is None:
            axes["partial"].append(axis)
        elif factor.kind in ("n", "k"):
            axes[factor.kind].append(axis)
        else:
            axes[factor.role].append(axis)
    if not any(axes.values()):
        return "replicated"
    parts = []
    if axes["batch"]:
        zero = any(is_shard(layout[a]) for layout in weights for a in axes["batch"])
        parts.append("ZeRO-3" if zero else "data")
    if axes["token"]:
        parts.append("sequence")
    if axes["n"] and axes["k"]:
        parts.append("2D Tensor3D")
    elif axes["n"]:
        parts.append("1D column")
    elif axes["k"]:
        parts.append("1D row")
    if axes["feature"]:
        parts.append("feature")
    if axes["partial"]:
        parts.append("partial")
    return " + ".join(parts)
