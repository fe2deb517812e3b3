"""Folding: one decision for all repetitions of a layer.

Operators of identical layers are *tied*: one representative stands for all of them, so the integer program does not grow
with depth. Tying never makes a plan wrong (the copies have the same rules and shapes); it only asks identical layers to be
sharded in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor, fx

from autotp.costs.model import Model

__all__ = ["apart", "fold", "folded"]

_LONGEST_PERIOD = 4096
_LEAST_SAVING = 6


def folded(model: Model) -> Model:
    """The model with identical operators tied, if their constraints, resting layouts and recomputation are equal too."""
    pins, recomputed, resting = model.pins, model.recomputed, model.resting
    marks = {n: (pins.get(n, ()), recomputed.get(n), resting.get(n)) for n in (*pins, *recomputed, *resting)}
    stands, layers = fold(model, marks)
    return replace(model, stands=stands, layers=layers)


def apart(model: Model) -> Model:
    """The model with nothing tied: every node stands for itself."""
    return replace(model, stands={node: node for node in model.stands}, layers=())


def fold(model: Model, marks: Mapping[fx.Node, object]) -> tuple[dict[fx.Node, fx.Node], list[tuple[int, int, int]]]:
    """Maps every operator, and every parameter that operators read, to the one that stands for it.

    Returns that map, and the sequences of identical layers, as in `Model.layers`.

    Args:
        model: analysed.
        marks: of operators and parameters; only nodes with equal marks are tied.
    """
    nodes, operands, placed = list(model.operators), model.operands, model.placed
    index: dict[object, int] = {}
    keys = [(model.kinds[n], marks.get(n), *(marks.get(o) for o in operands[n] if o.name in placed)) for n in nodes]
    codes = np.array([index.setdefault(key, len(index)) for key in keys])
    stands: dict[fx.Node, fx.Node] = {n: n for n in nodes}
    layers: list[tuple[int, int, int]] = []
    pending = [(0, len(nodes))]
    while pending:
        low, high = pending.pop()
        found = _repeat(codes[low:high])
        if found is None:
            continue
        start, period, count = found
        start += low
        layers.append((start, period, count))
        for copy in range(1, count):
            for k in range(period):
                stands[nodes[start + copy * period + k]] = nodes[start + k]
        pending += [(low, start), (start + period * count, high)]
    return stands | _tie_parameters(operands, stands, placed), layers


def _repeat(codes: np.ndarray) -> tuple[int, int, int] | None:
    """The tandem repeat (start, period, count) that saves most operators; None if no repeat saves enough."""
    best: tuple[int, int, int] | None = None
    saving = _LEAST_SAVING - 1
    for period in range(1, min(len(codes) // 2, _LONGEST_PERIOD) + 1):
        if len(codes) - period <= saving:
            break
        same = np.concatenate(([False], codes[:-period] == codes[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        if len(lengths) == 0:
            continue
        longest = int(lengths.argmax())
        copies = int(lengths[longest]) // period
        if copies * period > saving:
            saving = copies * period
            best = int(starts[longest]), period, copies + 1
    return best


def _tie_parameters(
    operands: Mapping[fx.Node, Sequence[fx.Node]], stands: Mapping[fx.Node, fx.Node], parameters: Collection[str]
) -> dict[fx.Node, fx.Node]:
    tied: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while tied.setdefault(node, node) is not node:
            node = tied[node]
        return node

    for node in operands:
        for mine, theirs in zip(operands[node], operands[stands[node]], strict=True):
            if mine.name in parameters and theirs.name in parameters and isinstance(mine.meta["val"], Tensor):
                tied[root(mine)] = root(theirs)
    return {node: root(node) for node in tied}
