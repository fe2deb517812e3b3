"""Rules of recurrent networks and their cells: only the batch can be sharded; weights, steps and features are whole."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from passes.rules.notation import Dim, OpRule
from passes.rules.shapes import named, op_rule, operands_of, results_of, shape_of, shapes_of
from passes.torch_internals import schema

__all__ = ["cell", "cell_flop", "kept_by_network", "network", "network_flop"]

#: The number of tensors of the state's size that are saved per step, besides the state itself.
_GATES = {"lstm": 7, "gru": 5}


def _states(given: dict[str, Any]) -> list[fx.Node]:
    hx = given["hx"]
    return list(hx) if isinstance(hx, (list, tuple)) else [] if hx is None else [hx]


def network(node: fx.Node) -> OpRule:
    """lstm, gru, rnn_tanh, rnn_relu on dense batches. Dim 0 of states are the layers, dim 1 is the batch."""
    given = named(node)
    return _of_batch(node, 0 if given["batch_first"] else 1, 1, len(_states(given)))


def cell(node: fx.Node) -> OpRule:
    """lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell."""
    return _of_batch(node, 0, 0, len(_states(named(node))))


def _of_batch(node: fx.Node, outer: int, inner: int, states: int) -> OpRule:
    """A rule in which the batch is dim ``outer`` of the input and of the first result, and dim ``inner`` of all states."""
    operands, results = shapes_of(node)
    batch = operands[0][outer]

    def dims(rank: int, where: int | None) -> list[Dim]:
        return [("b",) if d == where and batch > 1 else () for d in range(rank)]

    places = [outer, *[inner] * states, *[None] * (len(operands) - 1 - states)]
    left = [dims(len(shape), where) for shape, where in zip(operands, places, strict=True)]
    right = [dims(len(shape), inner if i else outer) for i, shape in enumerate(results)]
    return op_rule(left, right, {"b": batch})


def network_flop(node: fx.Node) -> float:
    """FLOP: every element of every weight matrix is multiplied and added once per step of each sequence."""
    steps = math.prod(shape_of(operands_of(node)[0])[:2])
    return 2.0 * steps * sum(math.prod(shape_of(n)) for n in named(node)["params"] if len(shape_of(n)) == 2)


def cell_flop(node: fx.Node) -> float:
    """FLOP of one step; see `network_flop`."""
    given = named(node)
    return 2.0 * shape_of(given["input"])[0] * sum(math.prod(shape_of(given[name])) for name in ("w_ih", "w_hh"))


def kept_by_network(node: fx.Node) -> list[tuple[int, float]]:
    """The saved gates of every step and layer, as ``Rule.besides``."""
    name = schema(node.target).name.removeprefix("aten::")  # type: ignore[union-attr]
    gates, layers = _GATES.get(name.removesuffix("_cell"), 1), named(node).get("num_layers", 1)
    return [(-1, float(gates * layers * results_of(node)[0].element_size() if layers else 0))]
