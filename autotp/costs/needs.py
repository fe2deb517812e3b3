"""What is saved of the forward pass for the backward pass, in which layouts, and what is recomputed from that.

The formula of a gradient reads an operand as its operator did: in the layout that the operator required, after the reshard,
which all operators with the same requirement share. A recomputed result is not saved, nor are its reshards that do not
communicate or that are repeated. To recompute it, its operator's operands are read, which are saved or recomputed
themselves. Tensors that none of this reads are not saved, whatever recomputation was requested: for a sum over devices, the
sum is saved, not the summands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import fx

from autotp.costs.priced import Priced
from autotp.costs.storages import CAST, Key, Storages, casts
from autotp.costs.transit import gathers, travels
from passes.rules.factors import value_of
from passes.rules.kept import kept_lowered
from passes.rules.table import rule_of

__all__ = ["BESIDES", "Needs"]

#: In the place of a result number: the tensors that an operator saves besides its operands and results.
BESIDES = -1


class Needs:
    """The storages that the backward pass of a plan reads.

    Attributes:
        reads: operator -> the storages that its gradients read.
        recomputing: recomputed operator -> the storages that its recomputation reads.
        besides: operator -> the tensors that it saves besides operands and results, as `Kept.besides`.
        kept: the storages that the forward pass saves.
        left: storage -> the number of times that the backward pass reads it.
    """

    def __init__(self, priced: Priced, storages: Storages) -> None:
        self.priced, self.model, self.storages = priced, priced.model, storages
        self.mesh = priced.prices.mesh
        self.parameters = self.model.captured.parameters
        self.reads: dict[fx.Node, tuple[Key, ...]] = {}
        self.recomputing: dict[fx.Node, tuple[Key, ...]] = {}
        self.besides: dict[fx.Node, tuple[tuple[int, float], ...]] = {}
        self.kept: set[Key] = set()
        self.left: Counter[Key] = Counter()
        for node in self.model.operators:
            if node in self.model.differentiated:
                self.reads[node] = self._read(node)
        for node in self.reads:
            self._resolve(self.reads[node])

    def _read(self, node: fx.Node) -> tuple[Key, ...]:
        """The storages that an operator's gradients read."""
        strategy, rule = self.priced.strategies[node.name], self.model.operators[node].rule
        found = kept_lowered(node) if rule is not None and strategy.axes(*rule.inner) else self.model.kept(node)
        keys = {self._operand(node, position) for position in found.operands}
        if copy := self._laid_out(node, found.operands):
            keys.remove(self._operand(node, 0))
            found = found._replace(besides=(*found.besides, copy))
        if found.results:
            keys |= {self.storages.key((node, i), layout) for i, layout in enumerate(strategy.results)}
        if found.besides:
            self.besides[node] = found.besides
            keys.add(((node, BESIDES), strategy.results[0]))
        return tuple(key for key in keys if key is not None)

    def _operand(self, node: fx.Node, position: int) -> Key | None:
        """The storage in which a gradient's formula reads an operand; None if it is gathered panel by panel."""
        if node.name in self.priced.panels:
            value = value_of(self.storages.operands[node][position])
            if (value, node) in self.priced.regathered:
                return self.storages.key(value, self.priced.layouts[value])
            if value[0].name in self.parameters:
                return None
        return self.storages.read[node][position]

    def _laid_out(self, node: fx.Node, read: Sequence[int]) -> tuple[int, float] | None:
        """The channels-last copy that a convolution saves of a placeholder, as (0, bytes per element), if there is one."""
        rule, operands = rule_of(node), self.storages.operands[node]
        if rule is None or rule.channels_last is None or 0 not in read or operands[0].op != "placeholder":
            return None
        have, want = self.priced.layouts[operands[0], 0], self.priced.strategies[node.name].wants[0].layout
        return (0, float(operands[0].meta["val"].element_size())) if have == want else None

    def spans(self, node: fx.Node) -> dict[Key, tuple[int, int]]:
        """Storage -> the first and the last turn in which the gradient of one of the operator's operands reads it."""
        turns, last = self.model.turns.get(node, ()), len(self.storages.operands[node]) - 1
        found = dict.fromkeys(self.reads.get(node, ()), (0, last))
        operands = [(i, self._operand(node, i)) for i, _ in turns] if found else []
        for key in found if operands else ():
            mine = {i for i, operand in operands if operand == key}
            readers = [turn for turn, (i, reads) in enumerate(turns) if reads and mine - {i}]
            found[key] = min(readers, default=0), max(readers, default=last)
        return found

    def _resolve(self, keys: tuple[Key, ...]) -> None:
        """Count one read of each storage, and the reads that restore those which are not saved."""
        pending = list(keys)
        while pending:
            key = pending.pop()
            self.left[key] += 1
            if self.left[key] == 1:
                if self.transient(key):
                    pending += self._sources(key)
                else:
                    self.kept.add(key)

    def _sources(self, key: Key) -> tuple[Key, ...]:
        """The storages that are read to restore a storage; none if its operator is recomputed already."""
        (node, number), layout = key
        if node.name in self.parameters:
            return ()
        if number != BESIDES and layout != self.priced.layouts[node, number]:
            return (self.storages.key((node, number), self.priced.layouts[node, number]),)
        if node in self.recomputing:
            return ()
        found = {self._operand(node, position) for position in range(len(self.storages.operands[node]))}
        self.recomputing[node] = tuple(key for key in found if key is not None)
        return self.recomputing[node]

    def transient(self, key: Key) -> bool:
        """Whether a storage (a result, or a copy of one or of a parameter in another layout) is restored, not saved."""
        (node, number), layout = key
        if node.op == "placeholder":
            if node.name in self.priced.gathered_once:
                return False
            if node.name not in self.parameters or number == CAST:
                return number == CAST and casts((node, 0))
            return gathers(tuple(node.meta["val"].shape), self.priced.layouts[node, 0], layout, self.mesh)
        repeats = self.model.recomputed.get(node)
        if repeats is None or repeats or number == BESIDES or layout == self.priced.layouts[node, number]:
            return repeats is not None
        shape = tuple(self.model.named[node, number].meta["val"].shape)
        return not travels(shape, self.priced.layouts[node, number], layout, self.mesh)
