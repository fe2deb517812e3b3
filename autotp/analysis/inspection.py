"""What a plan does, operator by operator: layouts, collectives and their cost, work, memory; folded as in the planner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from autotp.costs.priced import Moved, Priced
from autotp.errors import AutotpError
from autotp.plans.plan import Plan
from passes.graph import cast_of, note_of
from passes.layouts.layout import describe
from passes.layouts.reshard import COMMUNICATING, moves
from passes.rules.shapes import results_of
from passes.rules.table import flop_of
from passes.strategies.strategy import gradient_of

__all__ = ["Filters", "Reshard", "Row", "inspect_plan", "named", "reshard_steps", "reshards_of"]


@dataclass(frozen=True, slots=True)
class Reshard:
    """One step of a tensor's reshard, or of the opposite reshard of its gradient: a collective or a local operation.

    Attributes:
        tensor: name of the captured node that produces the tensor.
        change: the layouts before and after the whole reshard, as text.
        gradient: whether it is a step of the gradient's reshard.
        kind, axes: the kind of the step, and the names of its mesh axes.
        bytes: of the larger of its input and output on one device.
        seconds: of one execution.
        times: executions per step (a parameter may be gathered again for the backward pass).
        shared: the number of operators among which its cost is divided.
        hidden: whether it moves a parameter or its gradient, and the plan's schedule overlaps it with computation.
    """

    tensor: str
    change: str
    gradient: bool
    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    times: int
    shared: int
    hidden: bool


@dataclass(frozen=True, slots=True)
class Row:
    """Operators of a plan that are decided together.

    Attributes:
        name, target, module, source: of the first operator; ``source`` is the line in the user's model.
        count: the number of operators.
        scheme: the name of their strategy.
        operands, results: layouts, as text.
        reshards: the steps of the reshards that are charged to the first operator.
        compute_seconds, communication_seconds: of each operator, per step.
        flop: FLOP of each operator's forward pass on one device.
        bytes: of each operator's results on one device.
        replicated: whether the operator has no rule, so that every device computes it whole.
        whole: why it is not cut into the plan's chunks although its operands are, or could be; else "".
        seconds: of all operators together, per step.
    """

    name: str
    target: str
    module: str
    source: str | None
    count: int
    scheme: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    reshards: tuple[Reshard, ...]
    compute_seconds: float
    communication_seconds: float
    flop: float
    bytes: float
    replicated: bool
    whole: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Filters:
    """Selects rows to show.

    Attributes:
        op, module: patterns of the operator's name or kind, and of its module's path.
        collectives: whether to show only rows that communicate.
        unsharded: whether to show only rows that every device computes whole.
        top: the number of rows to show, the most expensive first; None for all.
    """

    op: str | None = None
    module: str | None = None
    collectives: bool = False
    unsharded: bool = False
    top: int | None = None

    def __call__(self, rows: Iterable[Row]) -> list[Row]:
        """The selected rows in their order or, with ``top``, the most expensive first.

        Raises:
            AutotpError: no operator, or no module, matches.
        """
        inside = [row for row in rows if self._inside(row)]
        if not inside and self.module is not None:
            raise AutotpError(f"no operator is in a module {self.module!r}; `autotp inspect` without it shows all modules")
        found = [row for row in named(self.op, inside) if self._passes(row)]
        return found if self.top is None else sorted(found, key=lambda row: -row.seconds)[: self.top]

    def _inside(self, row: Row) -> bool:
        return self.module is None or any(fnmatchcase(row.module, f"{self.module}{rest}") for rest in ("", ".*"))

    def _passes(self, row: Row) -> bool:
        moving = row.communication_seconds > 0 or any(step.seconds for step in row.reshards)
        return (moving or not self.collectives) and (row.scheme == "replicated" or not self.unsharded)


def named(pattern: str | None, rows: Sequence[Any]) -> list[Any]:
    """The rows whose ``name`` matches a pattern, or whose ``target`` contains a match; all rows for None.

    Raises:
        AutotpError: no row matches.
    """
    if pattern is None:
        return [*rows]
    found = [row for row in rows if fnmatchcase(row.name, pattern) or fnmatchcase(row.target, f"*{pattern}*")]
    if not found:
        names = {row.name for row in rows}
        near = get_close_matches(pattern, names, 3) or sorted(names)[:8]
        raise AutotpError(f"no operator has the name or kind {pattern!r}; there are {', '.join(near)}, …")
    return found


def inspect_plan(plan: Plan, priced: Priced) -> list[Row]:
    """A plan's operators in the order of the graph, with one row for all operators that are decided together."""
    model, prices = priced.model, priced.prices
    entries = {op.name: op for op in plan.operators}
    copies: dict[fx.Node, list[str]] = defaultdict(list)
    for node in model.operators:
        copies[model.stands[node]].append(node.name)
    rows = []
    for node in model.operators:
        if model.stands[node] is not node:
            continue
        entry, strategy = entries[node.name], priced.strategies[node.name]
        results = results_of(node)
        rows.append(
            Row(
                name=node.name,
                target=entry.target,
                module=entry.module,
                source=note_of(node).source,
                count=len(copies[node]),
                scheme=entry.scheme,
                operands=entry.layouts[: len(strategy.wants)],
                results=entry.layouts[len(strategy.wants) :],
                reshards=reshards_of(plan, priced, node),
                compute_seconds=priced.costs[node].own.compute,
                communication_seconds=priced.costs[node].communication,
                flop=flop_of(node) / strategy.ways(plan.mesh_shape),
                bytes=sum(prices.bytes(t, layout) for t, layout in zip(results, strategy.results, strict=True)),
                replicated=entry.replicated,
                whole=next((plan.whole[name] for name in copies[node] if name in plan.whole), ""),
                seconds=sum(entries[name].seconds for name in copies[node]),
            )
        )
    return rows


def reshards_of(plan: Plan, priced: Priced, node: fx.Node) -> tuple[Reshard, ...]:
    """The steps of all reshards that are charged to an operator."""
    charged = priced.costs[node].charged
    return tuple(step for moved, shared in charged for step in reshard_steps(plan, priced, moved, shared))


def reshard_steps(plan: Plan, priced: Priced, moved: Moved, shared: int) -> Sequence[Reshard]:
    """The steps of a tensor's reshard and, if it has a gradient, of the gradient's reshard.

    Args:
        plan: the plan.
        priced: its prices.
        moved: the tensor and the layout that is required.
        shared: the number of operators among which the cost is divided.
    """
    model, prices, names = priced.model, priced.prices, plan.mesh_axes
    value, number = moved.value
    tensor = results_of(value)[number] if value in model.operators else value.meta["val"]
    have, want, cast = priced.layouts[moved.value], moved.want, cast_of(model.named[moved.value])
    ways = [(have, want.layout, False)]
    if prices.train and moved.value in model.trained:
        ways.append((want.gradient, gradient_of(have), True))
    twice = priced.twice(moved.value, moved.users)
    found = []
    for source, target, back in ways:
        change = f"{describe(source, names)} → {describe(target, names)}"
        for step, elements in moves(tuple(tensor.shape), source, target, prices.mesh):
            size = float(elements * (cast.reduced if back else cast.used).itemsize)
            travels = step.kind in COMMUNICATING
            seconds = prices.collective(step.kind, step.axes, size, moved.parameter)[0] if travels else 0.0
            times = 2 if twice and not back and prices.train else 1
            hidden = moved.parameter and plan.schedule == "overlap"
            axes = tuple(names[a] for a in step.axes)
            found.append(Reshard(value.name, change, back, step.kind, axes, size, seconds, times, shared, hidden))
    return found
