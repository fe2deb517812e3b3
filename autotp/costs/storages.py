"""The storages of a plan's step: which tensors share one, and which operator reads each last."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autotp.costs.priced import Priced
from passes.graph import cast_of
from passes.layouts.layout import Layout
from passes.layouts.reshard import steps
from passes.rules.factors import Value, value_of

__all__ = ["CAST", "Key", "Storages", "casts"]

#: A storage: a tensor in a layout.
Key = tuple[Value, Layout]
#: In the place of a result number: the cast copy of a parameter.
CAST = 1


class Storages:
    """The storages of the tensors of a plan's step.

    Args:
        priced: the plan's strategies and layouts.
        traced: whether a traced graph runs the step (`passes.overlap`).

    Attributes:
        operands, results: operator -> its operands, and its results.
        read: operator -> the storages of its operands, in the layouts that it requires.
        roots: result of a view -> its storage, that of its base.
        last: storage -> the last operator of the forward pass to read it.
        sliced: operator -> (result, storage) for the slices that are all that is read of a result; a traced graph takes
            them at once, and frees the result.
    """

    def __init__(self, priced: Priced, *, traced: bool) -> None:
        self.strategies, self.layouts = priced.strategies, priced.layouts
        self.operands, self.results, self.shown = priced.model.operands, priced.model.results, priced.model.shown
        self.roots: dict[Value, Key] = {}
        self.read: dict[fx.Node, list[Key]] = {}
        self.last = self._readers()
        self.sliced = self._sliced(priced) if traced else {}

    def key(self, value: Value, layout: Layout) -> Key:
        """The storage of a tensor in a layout; without a reshard, that of the base if the tensor is a view.

        The cast copy of a parameter is a tensor of its own, in addition to the parameter at rest.
        """
        if casts(value):
            return (value[0], CAST), layout
        return self.roots.get(value, (value, layout)) if layout == self.layouts[value] else (value, layout)

    def _readers(self) -> dict[Key, fx.Node]:
        """Storage -> the last operator to read it; a reshard reads its source when its first consumer runs."""
        last: dict[Key, fx.Node] = {}
        for node in self.operands:
            self.read[node] = []
            for operand, want in zip(self.operands[node], self.strategies[node.name].wants, strict=True):
                value = value_of(operand)
                key = self.key(value, want.layout)
                self.read[node].append(key)
                if key not in last and want.layout != self.layouts[value]:
                    last[self.key(value, self.layouts[value])] = node
                last[key] = node
            self._alias(node)
            for i, layout in enumerate(self.strategies[node.name].results):
                last.setdefault(self.key((node, i), layout), node)
        return last

    def _sliced(self, priced: Priced) -> dict[fx.Node, list[tuple[int, Key]]]:
        """See ``sliced``; sets ``last`` of these results."""
        wanted: dict[Value, dict[Key, None]] = defaultdict(dict)
        for node, operands in self.operands.items():
            for operand, key in zip(operands, self.read[node], strict=True):
                wanted[value_of(operand)][key] = None
        found: dict[fx.Node, list[tuple[int, Key]]] = defaultdict(list)
        left_out = {value_of(leaf) for leaf in priced.model.returned}
        for value, keys in wanted.items():
            node, number = value
            if node.op == "placeholder" or value in left_out or value in self.roots:
                continue
            own, shape = self.layouts[value], tuple(self.results[node][number].shape)
            ways = [steps(shape, own, layout, priced.prices.mesh) for (_, layout) in keys]
            if all(way and all(step.kind == "slice" for step in way) for way in ways):
                found[node] += [(number, key) for key in keys]
                self.last[value, own] = node
        return found

    def _alias(self, node: fx.Node) -> None:
        """Give the results of a view the storage of its base, in the layout in which the view reads that."""
        value = self.shown.get(node)
        if value is not None:
            root = self.key(value, self.strategies[node.name].wants[0].layout)
            for i in range(len(self.results[node])):
                self.roots[node, i] = root


def casts(value: Value) -> bool:
    """Whether a tensor is a parameter that is cast before it is resharded or used."""
    return value[0].op == "placeholder" and cast_of(value[0]).there
