"""The most bytes that a device holds at once: a training step walked through, storage by storage.

Parameters, buffers, the inputs and the optimizer's state are there throughout. The forward pass adds what operators
return, and what reshards bring, and drops both after their last reader, unless a backward pass needs them. The backward
pass runs the operators in reverse: it drops what was saved, gathers parameters again, and holds the gradient of every
tensor from its last reader's turn to its producer's. Gradients of parameters stay. What is recomputed is dropped in the
forward pass, made again when the backward pass first reads it, with what that takes, and held until it is read for the last
time. Of several micro-batches this is the last one, which begins with the gradients of the others, not reduced. Views own
no storage. What operators use inside (workspaces) is not known here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
from torch import fx

from autotp.costs.moment import Moment, Turn
from autotp.costs.priced import Priced
from autotp.costs.storages import CAST, Key, Storages, casts
from passes.graph import cast_of, note_of
from passes.layouts.layout import Layout
from passes.layouts.reshard import COMMUNICATING, steps
from passes.rules.factors import Value, value_of
from passes.rules.table import kept_besides, saved_by
from passes.strategies.strategy import Strategy, Want, gradient_of, whole_layout

__all__ = ["Footprint"]


class Footprint:
    """A plan's step on one device; ``held`` has the most bytes at every moment, once it has run.

    Args:
        priced: the plan's strategies and layouts.
    """

    def __init__(self, priced: Priced) -> None:
        self.priced, self.model, self.prices = priced, priced.model, priced.prices
        self.strategies, self.layouts = priced.strategies, priced.layouts
        self.panels, self.again = priced.panels, priced.again
        model, prices = priced.model, priced.prices
        self.parameters = model.captured.parameters
        self.storages = Storages(priced)
        self.operands, self.results = self.storages.operands, self.storages.results
        self.whole = whole_layout(len(prices.mesh))
        self.sizes: dict[tuple, float] = {}
        self.live: dict[Key, float] = {}
        self.total = self.peak = 0.0
        self.now = Moment(0, Turn.FORWARD)
        self.held: dict[Moment, float] = {}
        self.watched = math.inf
        self.worst: list[tuple[str, str, float]] = []
        self.saved: dict[fx.Node, set[Key]] = defaultdict(set)
        self.holders: dict[Key, int] = defaultdict(int)
        self.inputs: dict[fx.Node, set[Key]] = {}
        self.besides: dict[fx.Node, tuple[Key, float]] = {}
        self.gradients: dict[Value, dict[Layout, float]] = defaultdict(dict)

    def run(self) -> float:
        """Bytes at the worst moment, under ``zero_grad()`` as it is by default (gradients dropped)."""
        self.state()
        nodes = list(self.model.operators)
        self.last = self.storages.last
        leaves = {value_of(leaf) for leaf in self.model.outputs}
        ends: dict[fx.Node, list[Key]] = defaultdict(list)
        for key, node in self.last.items():
            ends[node].append(key)
        for at, node in enumerate(nodes):
            self.now = Moment(at, Turn.FORWARD)
            self.forward(node)
            for key in ends[node]:
                idle = not self.holders[key] or self.transient(key)
                if idle and key[0] not in leaves and self.temporary(key[0]):
                    self.drop(key)
        if self.prices.train:
            for leaf in self.model.outputs:
                if value_of(leaf) in self.model.trained:
                    self.grow(value_of(leaf), self.whole, leaf.meta["val"])
            for at, node in reversed(list(enumerate(nodes))):
                self.now = Moment(at, Turn.ARRIVAL)
                self.backward(node)
        return self.peak

    def state(self) -> None:
        """What is there throughout."""
        for node in self.model.captured.graph_module.graph.nodes:
            value = node.meta.get("val")
            if node.op != "placeholder" or not isinstance(value, torch.Tensor):
                continue
            size = self.bytes(value, self.layouts[node, 0], cast_of(node).rests)
            if node.name in self.parameters and self.prices.train:
                itemsize = cast_of(node).rests.itemsize
                size = float(self.prices.states(np.array(size / itemsize), itemsize)) - size
            self.take(((node, 0), self.layouts[node, 0]), size)
        if self.prices.train and self.prices.accumulate > 1:
            for node, strategy in ((n, self.strategies[n.name]) for n in self.model.operators):
                for operand, want in zip(self.operands[node], strategy.wants, strict=True):
                    value = value_of(operand)
                    if value[0].name in self.parameters and value in self.model.trained:
                        tensor = operand.meta["val"]
                        self.grow(value, self.waiting(value, want, tensor), tensor, cast_of(value[0]).rests)

    def waiting(self, value: Value, want: Want, tensor: torch.Tensor) -> Layout:
        """The layout in which a parameter's gradient, wanted so, waits for the last micro-batch."""
        own = gradient_of(self.layouts[value])
        mirror = steps(tuple(tensor.shape), want.gradient, own, self.prices.mesh)
        waits = any(step.kind in COMMUNICATING for step in mirror) and not cast_of(value[0]).changes
        return want.gradient if waits else own

    def bytes(self, value: torch.Tensor, layout: Layout, dtype: torch.dtype | None = None) -> float:
        """Bytes of one device's part of a tensor, in its own dtype or another."""
        key = value.shape, value.element_size(), layout
        if key not in self.sizes:
            self.sizes[key] = self.prices.bytes(value, layout)
        return self.sizes[key] if dtype is None else self.sizes[key] / value.element_size() * dtype.itemsize

    def take(self, key: Key, size: float) -> None:
        """A storage appears, unless it is there."""
        if key not in self.live:
            self.live[key] = size
            self.total += size
            self.reach()

    def reach(self, passing: float = 0.0) -> None:
        """Looks whether this moment, with bytes that pass, is the worst yet."""
        self.peak = max(self.peak, self.total + passing)
        self.held[self.now] = max(self.held.get(self.now, 0.0), self.total + passing)
        if self.total + passing >= self.watched:
            self.watched, self.worst = math.inf, self.holding(passing)

    def explain(self) -> list[tuple[str, str, float]]:
        """What is held at the worst moment: (kind, name, bytes), most first."""
        again = Footprint(self.priced)
        again.watched = self.run() * (1 - 1e-12)
        again.run()
        return sorted(again.worst, key=lambda entry: -entry[2])

    def holding(self, passing: float) -> list[tuple[str, str, float]]:
        """What is held now: (kind, name, bytes)."""
        found = []
        for (value, layout), size in self.live.items():
            node = value[0]
            if node.name in self.parameters:
                kind = "parameter" if layout == self.layouts.get(value) else "gathered parameter"
                found.append((kind, self.parameters[node.name], size))
            elif node.op == "placeholder":
                found.append(("input or buffer", node.name, size))
            else:
                kept = self.holders.get((value, layout), 0)
                found.append(("saved for the backward pass" if kept else "result in use", node.name, size))
        for value, gradients in self.gradients.items():
            name = self.parameters.get(value[0].name, value[0].name)
            kind = "gradient of a parameter" if value[0].name in self.parameters else "gradient in use"
            found += [(kind, name, size) for size in gradients.values()]
        rest = self.total + passing - sum(size for *_, size in found)
        return [*found, ("in passing", "", rest)] if rest > 0.5 else found

    def drop(self, key: Key) -> None:
        """A storage goes."""
        self.total -= self.live.pop(key, 0.0)

    def transient(self, key: Key) -> bool:
        """Whether a storage is made again for the backward pass: a result, or its copy in another layout."""
        value, layout = key
        repeats = self.model.recomputed.get(value[0])
        if repeats is None or repeats or value[1] < 0 or layout == self.layouts[value]:
            return repeats is not None
        tensor = self.model.named[value].meta["val"]
        return not self.prices.moving(tuple(tensor.shape), tensor.element_size(), self.layouts[value], layout).communication

    def temporary(self, value: Value) -> bool:
        """Whether a tensor is made in the step."""
        return value[0].op != "placeholder"

    def forward(self, node: fx.Node) -> None:
        """Runs an operator: what it gathers, what it returns, what is kept of it."""
        strategy = self.strategies[node.name]
        gathered, passing = [], 0.0
        for operand, want in zip(self.operands[node], strategy.wants, strict=True):
            value = value_of(operand)
            key = self.storages.key(value, want.layout)
            size = self.bytes(operand.meta["val"], want.layout)
            if key in self.live:
                continue
            if node.name in self.panels and (value[0].name in self.parameters or (value, node) in self.again):
                passing += size / self.panels[node.name]
                continue
            self.take(key, size)
            if value[0].name in self.parameters:
                gathered.append(key)
        for i, result in enumerate(self.results[node]):
            if (node, i) not in self.storages.roots:
                self.take(((node, i), strategy.results[i]), self.bytes(result, strategy.results[i]))
        self.reach(passing)
        for key in gathered:
            if self.last[key] is node:
                self.drop(key)
        if self.prices.train:
            self.save(node, strategy, saved_by(node) if node in self.model.differentiated else "")

    def save(self, node: fx.Node, strategy: Strategy, saves: str) -> None:
        """Remembers what the backward pass of an operator needs, and what it takes to run it again."""
        keys = set()
        if node in self.model.recomputed and (node, 0) not in self.storages.roots:
            wanted = zip(self.operands[node], strategy.wants, strict=True)
            read = [
                self.storages.key(value_of(operand), want.layout)
                for operand, want in wanted
                if self.temporary(value_of(operand))
            ]
            self.inputs[node] = set(read)
        if saves == "operands":
            for operand, want in zip(self.operands[node], strategy.wants, strict=True):
                value = value_of(operand)
                if value[0].op == "placeholder" or not operand.meta["val"].dtype.is_floating_point:
                    continue
                layout = self.layouts[value] if (value, node) in self.again else want.layout
                keys.add(self.storages.key(value, layout))
        elif saves == "result":
            keys = {self.storages.key((node, i), layout) for i, layout in enumerate(strategy.results)}
        bound, besides = self.model.operators[node].rule, kept_besides(node)
        if bound is not None and besides and strategy.axes(*bound.inner):
            key = (node, -1), strategy.wants[0].layout
            self.besides[node] = key, besides * self.bytes(self.operands[node][0].meta["val"], strategy.wants[0].layout)
            if node not in self.model.recomputed:
                self.take(*self.besides[node])
            keys.add(key)
        for key in (*keys, *self.inputs.get(node, ())):
            self.holders[key] += 1
        self.saved[node] = keys

    def restore(self, key: Key) -> None:
        """Makes a storage again that the forward pass dropped, by running operators again as far as need be."""
        if key in self.live:
            return
        value, layout = key
        node = value[0]
        if layout != self.layouts.get(value, layout):
            own = self.storages.key(value, self.layouts[value])
            self.restore(own)
            self.take(key, self.bytes(self.model.named[value].meta["val"], layout))
            self.release([own], 0)
            return
        strategy, inputs, passing = self.strategies[node.name], self.inputs.pop(node, set()), 0.0
        for each in inputs:
            self.restore(each)
        for operand, want in zip(self.operands[node], strategy.wants, strict=True):
            moved = want.layout != self.layouts[value_of(operand)] or casts(value_of(operand))
            if operand.name in self.parameters and moved:
                passing += self.bytes(operand.meta["val"], want.layout) / self.panels.get(node.name, 1)
        made = [((node, i), layout) for i, layout in enumerate(strategy.results)]
        for each, result in zip(made, self.results[node], strict=True):
            self.take(each, self.bytes(result, each[1]))
        if node in self.besides:
            self.take(*self.besides[node])
        self.reach(passing)
        self.release(inputs)
        self.release(made, 0)

    def release(self, keys: Iterable[Key], holders: int = 1) -> None:
        """Storages have so many holders less; those without any go."""
        for key in keys:
            self.holders[key] -= holders
            if not self.holders[key] and self.temporary(key[0]):
                self.drop(key)

    def grow(self, value: Value, layout: Layout, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """A gradient arrives; a second one is added to the first."""
        size = self.bytes(tensor, layout, dtype)
        self.reach(size)
        if layout not in self.gradients[value]:
            self.gradients[value][layout] = size
            self.total += size

    def fall(self, value: Value) -> None:
        """A tensor's gradient is not needed any more."""
        self.total -= sum(self.gradients.pop(value, {}).values())

    def backward(self, node: fx.Node) -> None:
        """Runs an operator's backward pass, and drops what only that needed."""
        strategy, passing = self.strategies[node.name], 0.0
        mine = [(node, i) for i in range(len(self.results[node])) if (node, i) in self.model.trained]
        if not mine:
            self.release(self.inputs.pop(node, ()))
            return
        for i, tensor in enumerate(self.results[node]):
            if (node, i) in self.model.trained:
                self.bring((node, i), tensor)
        self.now = self.now._replace(turn=Turn.BACKWARD)
        for key in self.saved[node]:
            if self.transient(key):
                self.restore(key)
        for operand, want in zip(self.operands[node], strategy.wants, strict=True):
            value = value_of(operand)
            moved = want.layout != self.layouts[value] or casts(value)
            if moved and (value[0].name in self.parameters or (value, node) in self.again):
                passing += self.bytes(operand.meta["val"], want.layout) / self.panels.get(node.name, 1)
        self.total += passing
        if mine[0] in self.storages.roots:  # the gradient of a view is a view of the gradient
            for value in mine:
                self.fall(value)
        for operand, want in zip(self.operands[node], strategy.wants, strict=True):
            if value_of(operand) in self.model.trained:
                value = value_of(operand)
                arrives = value if note_of(value[0]).cast is None else (value[0], CAST)
                self.grow(arrives, want.gradient, operand.meta["val"])
        self.total -= passing
        for value in mine:
            self.fall(value)
        self.release((*self.saved.pop(node, ()), *self.inputs.pop(node, ())))
        for operand in self.operands[node]:
            if operand.name in self.parameters:
                self.bring((operand, 0), operand.meta["val"])

    def bring(self, value: Value, tensor: torch.Tensor) -> None:
        """All of a tensor's gradient comes to the layout of the tensor itself, and to the dtype in which it rests."""
        own = gradient_of(self.layouts[value])
        if (cast := note_of(value[0]).cast) is not None:
            for layout, size in self.gradients.pop((value[0], CAST), {}).items():
                self.reach(self.bytes(tensor, layout, cast.reduced) if cast.back else 0.0)
                self.grow(value, own, tensor, cast.rests)
                self.total -= size
            return
        for layout in [found for found in self.gradients[value] if found != own]:
            self.grow(value, own, tensor)
            self.total -= self.gradients[value].pop(layout)
