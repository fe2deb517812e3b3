"""The cost of a step if one operator and its copies change strategy: equivalent tensors are priced once, and counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping

from torch import fx

from autotp.costs.priced import Moved, Priced
from autotp.costs.step import Sums
from passes.graph import cast_of
from passes.layouts.layout import Layout
from passes.rules.factors import Value
from passes.strategies.strategy import Strategy, Want, whole_layout

__all__ = ["TensorClasses"]


class TensorClasses:
    """The tensors of a priced plan without chunks, in classes whose reshards cost the same for all choices of strategies.

    With folded layers, most tensors are copies of a few others: a change in a plan of thousands of operators is priced by
    a handful of tensors.
    """

    def __init__(self, priced: Priced) -> None:
        self.priced, self.sums = priced, priced.sums
        model = priced.model
        self.copies = Counter(model.stands[node] for node in model.operators)
        classes: dict[Hashable, list[Value]] = defaultdict(list)
        for value in model.readers:
            classes[self._class(value)].append(value)
        self.beside: dict[fx.Node, list[tuple[Value, int]]] = defaultdict(list)
        for values in classes.values():
            first = values[0]
            near = [first[0], *(node for node, _ in model.readers[first])]
            for stand in {model.stands[node] for node in near if node in model.operators}:
                self.beside[stand].append((first, len(values)))

    def _class(self, value: Value) -> Hashable:
        """The class of a tensor: equal for tensors that are produced and read in the same way."""
        model, (node, number) = self.priced.model, value
        if node in model.operators:
            made: Hashable = model.stands[node], number
        else:
            held = model.named[value].meta["val"]
            parameter = node.name in model.captured.parameters
            made = self.priced.layouts[value], tuple(held.shape), cast_of(node), parameter, value in model.trained
        regathered = self.priced.regathered
        read = Counter(
            (model.stands.get(user, user), place, (value, user) in regathered) for user, place in model.readers[value]
        )
        return made, frozenset(read.items())

    def changed(self, node: fx.Node, strategy: Strategy) -> Sums:
        """The plan's sums with another strategy for an operator and all its copies; everything else is unchanged."""
        stand = self.priced.model.stands[node]
        found, copies = self.sums, self.copies[stand]
        found = found.plus(self.priced.alone(stand, self.priced.strategies[stand.name]), times=-copies)
        found = found.plus(self.priced.alone(stand, strategy), times=copies)
        for value, count in self.beside[stand]:
            for sign, other in ((-1, None), (1, (stand, strategy))):
                for moved in self._moved(value, other):
                    found = found.plus(moved.price, parameter=moved.parameter, times=sign * count)
                    if moved.reduction is not None:
                        found = found.reducing(moved.reduction, sign * count)
        return found

    def _moved(self, value: Value, other: tuple[fx.Node, Strategy] | None) -> list[Moved]:
        """The reshards of one tensor; ``other`` is a node and another strategy for it and its copies."""
        model = self.priced.model

        def strategy_of(node: fx.Node) -> Strategy:
            if other is not None and model.stands[node] is other[0]:
                return other[1]
            return self.priced.strategies[node.name]

        wants: Mapping[Want, list[fx.Node]] = defaultdict(list)
        whole = whole_layout(len(self.priced.prices.mesh))
        for user, place in model.readers[value]:
            if user.op == "output":
                wants[Want.of(whole)] += []
            elif user.op == "placeholder":
                wants[Want.of(self.priced.layouts[user, 0])] += []
            else:
                wants[strategy_of(user).wants[place]].append(user)
        have: Layout = self.priced.layouts[value]
        if value[0] in model.operators:
            have = strategy_of(value[0]).results[value[1]]
        return [self.priced.moved(value, have, want, users) for want, users in wants.items()]
