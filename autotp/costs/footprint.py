"""The peak memory of a device: a simulation of a training step, storage by storage.

Parameters, buffers, inputs and optimizer state are live throughout. The forward pass adds the results of operators and of
reshards (`transit`), and frees both after their last consumer, unless the backward pass reads them (`needs`). The backward
pass runs the operators in reverse, and holds gradients until they are returned to the layouts of their tensors (`returns`);
those of parameters stay. Recomputed results and gathered parameters are restored when they are first read, with the
memory that this takes, and held until they are last read. Of several micro-batches, the last one is simulated, which
begins with the unreduced gradients of the others. Views own no storage. Workspaces inside kernels are not known.

With overlap, a schedule may hold more by a given share (`Prices.spare`), and respects this limit (`passes.overlap.memory`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import fx

from autotp.costs.needs import BESIDES, Needs
from autotp.costs.priced import Priced
from autotp.costs.returns import Returns
from autotp.costs.step import Moment, Turn
from autotp.costs.storages import CAST, Key, Storages, casts
from autotp.costs.transit import in_transit, sums_in_place
from passes.graph import cast_of
from passes.layouts.layout import Layout
from passes.rules.factors import value_of
from passes.rules.kept import working
from passes.rules.table import rule_of
from passes.strategies.strategy import Strategy, whole_layout

__all__ = ["Footprint"]


class Footprint:
    """The simulation of a plan's step on one device. After `run`, ``held`` has the peak bytes of every moment.

    Args:
        priced: the plan's strategies and layouts.
    """

    def __init__(self, priced: Priced) -> None:
        self.priced, self.model, self.prices = priced, priced.model, priced.prices
        self.strategies, self.layouts = priced.strategies, priced.layouts
        self.panels, self.regathered = priced.panels, priced.regathered
        self.mesh = priced.prices.mesh
        self.parameters = self.model.captured.parameters
        self.traced = self.prices.together > 0 or bool(self.model.recomputed)
        self.storages = Storages(priced, traced=self.traced)
        self.operands, self.results = self.storages.operands, self.storages.results
        self.whole = whole_layout(len(self.mesh))
        self.spare = priced.prices.spare
        self.sizes: dict[tuple, float] = {}
        self.live: dict[Key, float] = {}
        self.stored = 0.0
        self.now = Moment(0, Turn.FORWARD)
        self.held: dict[Moment, float] = {}
        self.watched = math.inf
        self.worst: list[tuple[str, str, float]] = []
        self.resident: set[Key] = set()
        self.gradients = Returns(priced, self.operands, self.bytes, self.reach, traced=self.traced)

    @property
    def total(self) -> float:
        """Bytes held now."""
        return self.stored + self.gradients.held.total

    def run(self) -> float:
        """Simulate the step. Returns the peak memory in bytes, with gradients freed by ``zero_grad()`` (its default)."""
        self.state()
        nodes = list(self.model.operators)
        self.last = self.storages.last
        leaves = {self.storages.key(value_of(leaf), self.layouts[value_of(leaf)]) for leaf in self.model.returned}
        self.needs = Needs(self.priced, self.storages) if self.prices.train else None
        self.staying = self.resident | leaves | (self.needs.kept if self.needs is not None else set())
        ends: dict[fx.Node, list[Key]] = defaultdict(list)
        for key, node in self.last.items():
            ends[node].append(key)
        for at, node in enumerate(nodes):
            self.now = Moment(at, Turn.FORWARD)
            self.forward(node, ends[node])
        if self.needs is not None:
            for leaf in self.model.returned:
                if value_of(leaf) in self.model.trained and leaf not in self.model.observed:
                    layout = self.whole if leaf in self.model.outputs else self.layouts[value_of(leaf)]
                    self.gradients.held.arrive((value_of(leaf), None), self.bytes(leaf.meta["val"], layout))
            for at, node in reversed(list(enumerate(nodes))):
                self.now = Moment(at, Turn.ARRIVAL)
                self.backward(node, self.needs)
        return max(self.held.values(), default=0.0)

    def state(self) -> None:
        """Add what is live from the beginning: placeholders, optimizer state, gradients of earlier micro-batches."""
        for node in self.model.captured.graph_module.graph.nodes:
            value = node.meta.get("val")
            if node.op != "placeholder" or not isinstance(value, torch.Tensor):
                continue
            size = self.bytes(value, self.layouts[node, 0], cast_of(node).rests)
            if node.name in self.parameters and self.prices.train:
                itemsize = cast_of(node).rests.itemsize
                size = float(self.prices.states(np.array(size / itemsize), itemsize)) - size
            self.take(((node, 0), self.layouts[node, 0]), size)
            self.resident.add(((node, 0), self.layouts[node, 0]))
        if self.prices.train and self.prices.accumulate > 1:
            self.gradients.wait()

    def bytes(self, value: torch.Tensor, layout: Layout, dtype: torch.dtype | None = None) -> float:
        """Bytes of one device's part of a tensor, in its own dtype or another."""
        key = value.shape, value.element_size(), layout
        if key not in self.sizes:
            self.sizes[key] = self.prices.bytes(value, layout)
        return self.sizes[key] if dtype is None else self.sizes[key] / value.element_size() * dtype.itemsize

    def take(self, key: Key, size: float) -> None:
        """Add a storage of ``size`` bytes, unless it is live."""
        if key not in self.live:
            self.live[key] = size
            self.stored += size
            self.reach()

    def reach(self, passing: float = 0.0) -> None:
        """Update the peak of this moment with the bytes held now and ``passing`` temporary bytes."""
        total = self.total + passing
        total += self.spare * total
        if total > self.held.get(self.now, 0.0):
            self.held[self.now] = total
        if total >= self.watched:
            self.watched, self.worst = math.inf, self.holding(passing + self.spare * (self.total + passing))

    def explain(self, peak: float | None = None) -> list[tuple[str, str, float]]:
        """The memory at the peak: (kind, name, bytes), the largest first.

        Args:
            peak: bytes at the peak, if known.
        """
        second = Footprint(self.priced)
        second.watched = (self.run() if peak is None else peak) * (1 - 1e-12)
        second.run()
        return sorted(second.worst, key=lambda entry: -entry[2])

    def holding(self, passing: float) -> list[tuple[str, str, float]]:
        """The memory held now, and ``passing`` temporary bytes: (kind, name, bytes)."""
        found = []
        for (value, layout), size in self.live.items():
            node = value[0]
            if node.name in self.parameters:
                kind = "parameter" if layout == self.layouts.get(value) else "gathered parameter"
                found.append((kind, self.parameters[node.name], size))
            elif node.op == "placeholder":
                found.append(("input or buffer", node.name, size))
            else:
                kept = self.needs is not None and self.needs.left[value, layout] > 0
                found.append(("saved for the backward pass" if kept else "result in use", node.name, size))
        for slot, size in self.gradients.held.items():
            node = (slot[1] if isinstance(slot[0], str) else slot[0])[0]  # type: ignore[index]
            kind = "gradient of a parameter" if node.name in self.parameters else "gradient in use"
            found.append((kind, self.parameters.get(node.name, node.name), size))
        rest = self.total + passing - sum(size for *_, size in found)
        return [*found, ("in passing, and for overlap", "", rest)] if rest > 0.5 else found

    def drop(self, key: Key) -> None:
        """Free a storage."""
        self.stored -= self.live.pop(key, 0.0)

    def move(self, key: Key, source: Key, tensor: torch.Tensor, *, leaves: bool) -> None:
        """Reshard a tensor from ``source`` to ``key``; if it ``leaves``, the source is freed once it has been sent."""
        if key in self.live:
            return
        shape, layouts = tuple(tensor.shape), (source[1], key[1])
        if leaves and self.traced and sums_in_place(shape, *layouts, self.mesh):
            self.drop(source)
        size = self.bytes(tensor, key[1])
        extra = float(in_transit(shape, *layouts, self.mesh, not leaves, self.traced) * tensor.element_size())
        if casts((key[0][0], 0)) and source[1] != key[1]:
            extra += self.bytes(tensor, source[1])  # the tensor at rest is cast before it moves
        self.take(key, size)
        self.reach(extra)
        if leaves:
            self.drop(source)

    def forward(self, node: fx.Node, ends: Sequence[Key]) -> None:
        """Run an operator: reshard its operands, add its results and saved tensors, free the storages in ``ends``."""
        strategy, passing = self.strategies[node.name], 0.0
        for operand, want, key in zip(self.operands[node], strategy.wants, self.storages.read[node], strict=True):
            if key in self.live:
                continue
            value = value_of(operand)
            own = self.storages.key(value, self.layouts[value])
            if node.name in self.panels and (value[0].name in self.parameters or (value, node) in self.regathered):
                passing += self.bytes(operand.meta["val"], want.layout) / self.panels[node.name]
                continue
            source = ((value[0], 0), self.layouts[value]) if casts(value) else (own[0], self.layouts[value])
            leaves = own in self.live and self.last[own] is node and own not in self.staying
            self.move(key, source, operand.meta["val"], leaves=leaves and own == source)
        for i, result in enumerate(self.results[node]):
            if (node, i) not in self.storages.roots:
                self.take(((node, i), strategy.results[i]), self.bytes(result, strategy.results[i]))
        if self.needs is not None and node in self.needs.besides:
            self.beside(node, self.needs)
        for number, key in self.storages.sliced.get(node, ()):
            own = (node, number), strategy.results[number]
            if own not in self.staying:
                self.move(key, own, self.results[node][number], leaves=False)
        self.reach(passing)
        for key in ends:
            if key not in self.staying:
                self.drop(key)

    def beside(self, node: fx.Node, needs: Needs) -> None:
        """Add what an operator saves besides operands and results; the forward pass frees it if it is recomputed."""
        key = (node, BESIDES), self.strategies[node.name].results[0]
        self.take(key, self.parts(node, needs.besides[node]))
        if key not in needs.kept and self.now.turn is Turn.FORWARD:
            self.drop(key)

    def parts(self, node: fx.Node, parts: Iterable[tuple[int, float]]) -> float:
        """Bytes of tensors, given as (operand of the same shape, or -1 for the first result; bytes per element)."""
        strategy, found = self.strategies[node.name], 0.0
        for position, size in parts:
            tensor = self.results[node][0] if position < 0 else self.operands[node][position].meta["val"]
            layout = strategy.results[0] if position < 0 else strategy.wants[position].layout
            found += self.bytes(tensor, layout) / tensor.element_size() * size
        return found

    def restore(self, key: Key, needs: Needs) -> None:
        """Restore a storage that the forward pass freed: reshard it again, recompute operators as far as necessary."""
        if key in self.live:
            return
        (node, number), layout = key
        if node.op == "placeholder" or (number != BESIDES and layout != self.layouts[node, number]):
            if node.op == "placeholder":
                own, tensor = ((node, 0), self.layouts[node, 0]), node.meta["val"]
            else:
                own = self.storages.key((node, number), self.layouts[node, number])
                tensor = self.model.named[node, number].meta["val"]
                self.restore(own, needs)
            self.move(key, (own[0], self.layouts[node, 0 if number == CAST else number]), tensor, leaves=False)
            self.done(own, needs)
            return
        strategy, inputs = self.strategies[node.name], needs.recomputing[node]
        for each in inputs:
            self.restore(each, needs)
        made = [((node, i), layout) for i, layout in enumerate(strategy.results) if (node, i) not in self.storages.roots]
        for each in made:
            self.take(each, self.bytes(self.results[node][each[0][1]], each[1]))
        if node in needs.besides:
            self.beside(node, needs)
        self.reach(self.panelled(node, strategy))
        for each in inputs:
            self.done(each, needs)
        for each in made:
            if not needs.left[each]:
                self.drop(each)

    def panelled(self, node: fx.Node, strategy: Strategy) -> float:
        """Bytes of one panel of each operand that a product in panels gathers panel by panel in the backward pass."""
        if node.name not in self.panels:
            return 0.0
        wanted = zip(self.operands[node], strategy.wants, strict=True)
        return sum(
            self.bytes(operand.meta["val"], want.layout) / self.panels[node.name]
            for operand, want in wanted
            if operand.name in self.parameters or (value_of(operand), node) in self.regathered
        )

    def done(self, key: Key, needs: Needs) -> None:
        """Count one read of a storage, and free it after the last one."""
        if key in needs.left:
            needs.left[key] -= 1
            if not needs.left[key] and key not in self.resident:
                self.drop(key)

    def backward(self, node: fx.Node, needs: Needs) -> None:
        """Run an operator's backward pass, and free the storages that it is the last to read."""
        mine = [(node, i) for i in range(len(self.results[node])) if (node, i) in self.model.trained]
        for value in mine:
            self.gradients.begun(value)
        passing = self.panelled(node, self.strategies[node.name])
        reads = needs.reads.get(node, ())
        if not any((value, None) in self.gradients.held for value in mine):
            for key in reads:
                self.done(key, needs)
            return
        self.now = self.now._replace(turn=Turn.BACKWARD)
        spans = needs.spans(node) if self.traced else dict.fromkeys(reads, (0, len(self.operands[node]) - 1))
        passing += self.parts(node, working(node))
        self.reach(passing)
        turns = [position for position, _ in self.model.turns.get(node, ())]
        for turn, position in enumerate(turns or range(len(self.operands[node]))):
            for key, (since, _) in spans.items():
                if since == turn:
                    self.restore(key, needs)
            if value_of(self.operands[node][position]) in self.model.trained:
                if not turns:  # one formula computes this gradient and all later ones
                    self.reach(passing + self.gradients.at_once(node, position))
                self.returned(node, position, passing)
            for key, (_, until) in spans.items():
                if until == turn:
                    self.done(key, needs)
        for value in mine:
            self.gradients.held.fall((value, None))
        self.gradients.ended(node)

    def returned(self, node: fx.Node, position: int, passing: float) -> None:
        """Add an operator's gradient of an operand."""
        tensor, result, rule = self.operands[node][position].meta["val"], self.results[node][0], rule_of(node)
        if tensor.numel() < result.numel() and rule is not None and rule.saves == "others" and rule.flop is None:
            self.reach(passing + self.bytes(result, self.strategies[node.name].results[0]))  # not summed yet
        self.gradients.arrive(node, position, result, shares=len(self.results[node]) == 1)
        self.reach(passing)
