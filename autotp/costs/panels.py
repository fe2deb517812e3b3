"""Choose the number of panels of each product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotp.costs.prices import Prices
from autotp.costs.runs import Run
from costmodel import pipeline
from passes.layouts.reshard import COMMUNICATING, Step, moves
from passes.rules.factors import Operator
from passes.rules.table import flop_of
from passes.sharding.panel import Loop
from passes.strategies.strategy import Strategy, gradient_of

__all__ = ["MOST", "choose_panels"]

#: The maximum number of panels that the planner chooses for a product.
MOST = 16


def choose_panels(
    found: Sequence[Loop],
    operators: Mapping,
    strategies: Mapping[str, Strategy],
    prices: Prices,
    panels: int | None,
) -> dict[str, int]:
    """Operator name -> number of panels, for the products with several.

    Args:
        found: the possible loops.
        operators: the analysis of the graph, by node.
        strategies: operator name -> strategy.
        prices: the prices on the mesh.
        panels: the number of panels of every product with a loop that it divides; None: the fastest above 1.
    """
    chosen: dict[str, int] = {}
    for loop in found:
        if panels is None:
            possible = [n for n in range(2, MOST + 1) if loop.most % n == 0]
            count = min(possible, key=lambda n: loop_seconds(loop, operators, strategies, prices, n), default=1)
        else:
            count = panels if loop.most % panels == 0 else 1
        if count > 1:
            chosen |= {node.name: count for node in loop.members}
    return chosen


def loop_seconds(loop: Loop, operators: Mapping, strategies: Mapping[str, Strategy], prices: Prices, panels: int) -> float:
    """Seconds of a loop of ``panels`` panels, forward and (in training) backward, whose communication is overlapped."""
    fetch = before = scatter = after = 0.0
    for operand, (shape, cast, have, want) in zip(loop.operands, loop.values, strict=True):
        used, reduced = cast.used.itemsize, cast.reduced.itemsize
        gathers = {m.step: m.elements * used for m in moves(shape, have, want.layout, prices.mesh)}
        mirrors = {m.step: m.elements * reduced for m in moves(shape, want.gradient, gradient_of(have), prices.mesh)}
        fetch += _seconds(operand.loop, gathers, prices, panels)
        before += _seconds(operand.before, gathers, prices, 1)
        scatter += _seconds(operand.scatter, mirrors, prices, panels)
        after += _seconds(operand.after, mirrors, prices, 1)
    work = 0.0
    for node in loop.members:
        operator: Operator = operators[node]
        one = prices.operator(operator, strategies[node.name], flop_of(node), Run(gradient=False))
        launch = prices.topology.device.launch
        work += (one.compute - launch) / panels + launch
    total = before + float(pipeline.seconds(fetch, work, panels))
    if prices.train:
        total += before + float(pipeline.seconds(fetch + scatter, 2 * work, panels)) + after
    return total


def _seconds(chosen: Sequence[Step], volumes: Mapping[Step, float], prices: Prices, panels: int) -> float:
    return sum(
        prices.collective(step.kind, step.axes, volumes[step] / panels)[0] for step in chosen if step.kind in COMMUNICATING
    )
