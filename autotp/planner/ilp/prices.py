"""The price of memory: problems with bytes counted as seconds, and which price to try next."""

from __future__ import annotations

import math
from dataclasses import replace

from autotp.planner.ilp.problem import Problem

__all__ = ["next_price", "priced"]


def priced(problem: Problem, price: float) -> Problem:
    """The problem with ``price`` seconds added per resting byte."""
    if not price:
        return problem
    nodes = tuple(replace(node, cost=node.cost + price * node.memory) for node in problem.nodes)
    tensors = tuple(replace(t, cost=t.cost + price * t.memory) for t in problem.tensors)
    return replace(problem, nodes=nodes, tensors=tensors)


def next_price(lines: list[tuple[float, float]], price: float) -> float | None:
    """Where ``min over lines of seconds + price * slope`` is greatest; the price to raise to when no line
    falls.
    """
    falling = [line for line in lines if line[1] <= 0]
    rising = [line for line in lines if line[1] > 0]
    if not rising:
        return price / 16 if price > 0 else None
    if not falling:
        return price * 8 if price > 0 else None
    best, at = -math.inf, 0.0
    candidates = [0.0] + [(f[0] - r[0]) / (r[1] - f[1]) for f in falling for r in rising]
    for candidate in candidates:
        if candidate >= 0:
            value = min(line[0] + candidate * line[1] for line in lines)
            if value > best:
                best, at = value, candidate
    return at
