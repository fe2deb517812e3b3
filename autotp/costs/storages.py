"""The storages of a plan's step: which tensors share one, and which operator reads each last."""

from __future__ import annotations

from torch import fx

from autotp.costs.priced import Priced
from passes.graph import cast_of
from passes.layouts.layout import Layout
from passes.rules.factors import Value, value_of

__all__ = ["CAST", "Key", "Storages", "casts"]

#: A tensor in a layout.
Key = tuple[Value, Layout]
#: As the number of a parameter's result: what it is cast to.
CAST = 1


class Storages:
    """What lies where.

    Attributes:
        operands, results: of every operator.
        read: operator -> the storages of its operands, as it wants them.
        roots: a view's result -> the storage that it has.
        last: storage -> the last operator of the forward pass to read it.
    """

    def __init__(self, priced: Priced) -> None:
        self.strategies, self.layouts = priced.strategies, priced.layouts
        self.operands, self.results, self.shown = priced.model.operands, priced.model.results, priced.model.shown
        self.roots: dict[Value, Key] = {}
        self.read: dict[fx.Node, list[Key]] = {}
        self.last = self._readers()

    def key(self, value: Value, layout: Layout) -> Key:
        """The storage that holds a tensor in a layout: where nothing moved, that of the tensor it is a view of.

        What a parameter is cast to is a tensor of its own, beside what rests.
        """
        if casts(value):
            return (value[0], CAST), layout
        return self.roots.get(value, (value, layout)) if layout == self.layouts[value] else (value, layout)

    def _readers(self) -> dict[Key, fx.Node]:
        """The last operator to read each storage; a reshard reads when the first who wants its result does."""
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

    def _alias(self, node: fx.Node) -> None:
        """A view has the storage of what it views, where that is."""
        value = self.shown.get(node)
        if value is not None:
            root = self.key(value, self.strategies[node.name].wants[0].layout)
            for i in range(len(self.results[node])):
                self.roots[node, i] = root


def casts(value: Value) -> bool:
    """Whether it is a parameter that is cast before it is moved or used."""
    return value[0].op == "placeholder" and cast_of(value[0]).there
