"""Compares two plans: what is sharded differently, and how the costs differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotp.errors import AutotpError
from autotp.plans.folded import fold_operators
from autotp.plans.options import require_plan
from autotp.plans.plan import Plan, PlannedOperator

__all__ = ["Change", "Difference", "difference"]

_FIGURES = ("step_seconds", "compute_seconds", "communication_seconds", "exposed_seconds", "memory_bytes")


@dataclass(frozen=True, slots=True)
class Change:
    """Operators that are identical except for the number of their layer, and are decided differently in two plans.

    Attributes:
        module: path of their module, with layer numbers as ``*``.
        target: the operator that they call.
        count: the number of operators.
        schemes, layouts: in the first plan and in the second.
        seconds: of all of them per step, in each plan.
        bytes: received by each device for all of them per step, in each plan.
    """

    module: str
    target: str
    count: int
    schemes: tuple[str, str]
    layouts: tuple[tuple[str, ...], tuple[str, ...]]
    seconds: tuple[float, float]
    bytes: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two plans of one model.

    Attributes:
        settings: name -> value in each plan, where they differ: mesh, family (``strategy``), topology and others.
        predicted: name -> each plan's prediction, in seconds or bytes.
        parameters: name -> resting layout in each plan, where they differ.
        operators: those that differ, with the largest difference in seconds first.
    """

    settings: Mapping[str, tuple[str, str]]
    predicted: Mapping[str, tuple[float, float]]
    parameters: Mapping[str, tuple[str, str]]
    operators: tuple[Change, ...]


def difference(first: Plan, second: Plan) -> Difference:
    """Compares two plans of one model.

    Raises:
        AutotpError: the plans are for different models, inputs or precisions.
    """
    require_plan(first)
    require_plan(second)
    if first.precision != second.precision:
        raise AutotpError(
            f"the plans are of different precisions, {first.precision!r} and {second.precision!r}, so their graphs differ; "
            "plan both with one"
        )
    if first.model_hash != second.model_hash:
        raise AutotpError(
            f"the plans are of different models or inputs: the graph of one is {first.model_hash}, of the other "
            f"{second.model_hash}; plan both with the same model and example inputs"
        )
    rows = {op.name for op in first.operators} ^ {op.name for op in second.operators}
    if rows or first.layouts.keys() != second.layouts.keys():
        raise AutotpError("the plans are of one model, but do not have the same operators and parameters; make them again")
    fields = {
        "mesh": (_mesh(first), _mesh(second)),
        "strategy": (first.strategy, second.strategy),
        "topology": (first.topology.name, second.topology.name),
        "schedule": (first.schedule, second.schedule),
        "compile": (str(first.compile), str(second.compile)),
        "chunks": (_pairs(first.chunks), _pairs(second.chunks)),
        "constraints": ("; ".join(first.constraints) or "none", "; ".join(second.constraints) or "none"),
        "mode": (first.mode, second.mode),
        "optimizer": (first.optimizer, second.optimizer),
        "accumulate": (str(first.accumulate), str(second.accumulate)),
        "recomputed": (f"{len(first.recomputed)} operators", f"{len(second.recomputed)} operators"),
        "gathered once": (f"{len(first.gathered_once)} parameters", f"{len(second.gathered_once)} parameters"),
    }
    predicted = {name: (getattr(first.predicted, name), getattr(second.predicted, name)) for name in _FIGURES}
    mine, other = first.parameters, second.parameters
    others = {op.name: op for op in second.operators}
    changed = [op for op in first.operators if _decided(op) != _decided(others[op.name])]
    changes = [
        Change(
            row.module,
            row.first.target,
            len(row.operators),
            (row.first.scheme, others[row.first.name].scheme),
            (row.first.layouts, others[row.first.name].layouts),
            (row.seconds, sum(others[op.name].seconds for op in row.operators)),
            (row.bytes_moved, sum(others[op.name].bytes_moved for op in row.operators)),
        )
        for row in fold_operators(changed)
    ]
    changes.sort(key=lambda change: -abs(change.seconds[1] - change.seconds[0]))
    return Difference(
        {name: both for name, both in fields.items() if both[0] != both[1]},
        predicted,
        {name: (mine[name], other[name]) for name in mine if mine[name] != other[name]},
        tuple(changes),
    )


def _decided(operator: PlannedOperator) -> tuple[object, ...]:
    return operator.strategy, operator.layouts, operator.panels, operator.recomputed


def _mesh(plan: Plan) -> str:
    return " × ".join(f"{name} {size}" for name, size in zip(plan.mesh_axes, plan.mesh_shape, strict=True))


def _pairs(chunks: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in chunks.items() if count > 1) or "none"
