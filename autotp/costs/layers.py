"""Identical layers: what a step holds is linear in their number, so simulating models with few of them suffices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import fx

from autotp.costs.model import Model
from autotp.costs.step import Moment
from passes.rules.factors import value_of

__all__ = ["held_in_layers"]

_FEW = 4  # layers of the shorter of two models: two at each end


def held_in_layers(model: Model, simulate: Callable[[Model], Mapping[Moment, float]]) -> Mapping[Moment, float]:
    """The bytes that a step holds at every moment, except those of most layers of the longest sequence of identical ones.

    They are extrapolated from two models with few layers: the first two and the last two, where memory peaks, are in both.

    Args:
        model: folded.
        simulate: returns the bytes of a model, which may have fewer layers, at every moment.
    """
    start, period, count = max(model.layers, key=lambda each: each[1] * each[2], default=(0, 0, 0))
    if count <= 2 * _FEW + 1:
        return simulate(model)
    try:
        few, more = (simulate(_shortened(model, start, period, count, left)) for left in (_FEW, _FEW + 1))
    except LookupError:
        return simulate(model)
    middle, others, found = start + _FEW // 2 * period, count - _FEW, {}
    for moment, held in few.items():
        last = moment.at >= middle
        longer = more.get(moment._replace(at=moment.at + last * period), held)
        found[moment._replace(at=moment.at + last * others * period)] = held + others * (longer - held)
    return found


def _shortened(model: Model, start: int, period: int, count: int, left: int) -> Model:
    """The model with the first ``left`` of ``count`` identical layers; what follows reads the results of the last of them.

    Raises:
        LookupError: what follows reads results of other layers than the last two.
    """
    nodes, key = list(model.operators), f"{left} of {count} layers of {period} operators from {start} on"
    first, end = start + left * period, start + count * period
    if key not in model.known:
        instead = dict(zip(nodes[end - 2 * period : end], nodes[first - 2 * period : first], strict=True))
        model.known[key] = _graph(model, nodes[:first], nodes[end:], {*nodes[start:end]}, instead)
    operators = {node: model.operators[node] for node in nodes[:first] + nodes[end:]}
    return replace(model, operators=operators, known=model.known[key])


def _graph(
    model: Model,
    before: Sequence[fx.Node],
    after: Sequence[fx.Node],
    layers: Set[fx.Node],
    instead: Mapping[fx.Node, fx.Node],
) -> dict[str, Any]:
    """The properties of the graph of a shortened model from which the others in `Model.known` follow.

    Args:
        before, after: the operators up to those that are left out, and from there on.
        layers: the operators of all layers.
        instead: operator of the last layers -> the one whose results ``after`` reads instead.
    """

    def seen(node: fx.Node) -> fx.Node:
        producer, number = value_of(node)
        return model.named[instead[producer], number] if producer in layers else node

    operands = {node: model.operands[node] for node in before}
    operands |= {node: [seen(operand) for operand in model.operands[node]] for node in after}
    shown = {node: model.shown[node] for node in before if node in model.shown}
    shown |= {node: value_of(seen(model.named[model.shown[node]])) for node in after if node in model.shown}
    returned = [seen(leaf) for leaf in model.returned]
    written = [(seen(value), given) for value, given in model.written]
    return {"operands": operands, "shown": shown, "returned": returned, "written": written}
