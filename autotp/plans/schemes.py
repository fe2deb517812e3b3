"""Names the known scheme that a strategy matches, derived from its map from factors to axes and from the layouts at rest.

For a weight's operator ``C[m,n] = A[m,k] B[k,n]``: axes that split m alone are data parallel, or ZeRO-3 where B rests
sharded along them; n alone is a column split, k alone a row split, both Tensor3D. Rows and columns with B sharded along
the rows' axis *and* A's k sharded along the columns' is SUMMA; with further row axes that leave B whole (depth), 2.5D. All
three of m, n and k with B sharded along m's axis and A along n's is 3D.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.layouts.layout import Layout, is_shard
from passes.rules.factors import Operator
from passes.strategies.strategy import LINEAR_PREFIX, Strategy

__all__ = ["scheme"]


def scheme(operator: Operator, strategy: Strategy, have: Sequence[Layout], parameters: Sequence[bool]) -> str:
    """The name of the known scheme that a strategy matches; names of several at once are joined by ``+``.

    Args:
        operator: the operator.
        strategy: its strategy.
        have: layouts of its operands before any reshard.
        parameters: for each operand, whether it is a parameter.
    """
    axes = _axes_by_use(operator, strategy)
    if not any(axes.values()):
        return "replicated"
    rows = axes["batch"] + axes["token"]
    weights = [layout for layout, is_parameter in zip(have, parameters, strict=True) if is_parameter]
    zero = [a for a in rows if any(is_shard(layout[a]) for layout in weights)]
    if weights and axes["n"] and rows:
        whole = _combined(operator, strategy, have, parameters, axes, rows, zero)
        if whole is not None:
            return whole
    parts = []
    if axes["batch"]:
        parts.append("ZeRO-3" if set(zero) & set(axes["batch"]) else "data")
    if axes["token"]:
        parts.append("sequence-parallel")
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
    mixed = len(parts) > 2 or ("sequence-parallel" in parts and "ZeRO-3" in parts)
    return f"mixed ({' + '.join(parts)})" if mixed else " + ".join(parts)


def _axes_by_use(operator: Operator, strategy: Strategy) -> dict[str, list[int]]:
    axes: dict[str, list[int]] = {"batch": [], "token": [], "n": [], "k": [], "feature": [], "partial": []}
    for axis, chosen in enumerate(strategy.assignment):
        if chosen is None:
            continue
        if chosen.startswith(LINEAR_PREFIX):
            axes["partial"].append(axis)
        else:
            factor = operator.factors[chosen]
            axes[factor.kind if factor.kind in ("n", "k") else factor.role].append(axis)
    return axes


def _combined(
    operator: Operator,
    strategy: Strategy,
    have: Sequence[Layout],
    parameters: Sequence[bool],
    axes: dict[str, list[int]],
    rows: list[int],
    zero: list[int],
) -> str | None:
    """``2D SUMMA``, ``2.5D`` or ``3D`` if the layouts at rest are those of the scheme; otherwise None."""
    rule = operator.rule
    assert rule is not None
    data = next((i for i, is_parameter in enumerate(parameters) if not is_parameter), None)
    if data is None or not zero:
        return None
    dims = rule.operands[data]
    reduced = {d for d, dim in enumerate(dims) for f in dim if operator.factors[f].kind == "k"}
    gathered = [a for a in axes["n"] if is_shard(have[data][a]) and not is_shard(strategy.wants[data].layout[a])]
    if axes["k"]:
        return "3D" if gathered and len(zero) == len(rows) else None
    if not any(have[data][a].dim in reduced for a in gathered):  # type: ignore[attr-defined]
        return None
    return "2D SUMMA" if len(zero) == len(rows) else "2.5D"
