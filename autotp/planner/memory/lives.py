"""The lifetimes of the tensors of a step: when each is made, which operators read it, and what is kept of it for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from torch import fx

from autotp.planner.structure import Structure
from passes.rules.factors import Value
from passes.rules.shapes import results_of
from passes.rules.table import rule_of
from passes.sharding.panel import data_position

__all__ = ["Life", "Lives", "Reader"]


@dataclass(frozen=True, slots=True)
class Reader:
    """One use of a tensor by an operator, the reader: when, and what is kept of it for the reader's backward pass.

    ``saves``: it may be kept, with ``panelled`` in its resting layout; where the planner decides, that depends on the
    choice. ``gradient``: the reader's gradient needs it in any case. ``until``: the last operator whose gradient needs a
    result of the reader; if the reader is recomputed, that is done by then. ``block``: the first operator, in the order of
    the backward pass, in whose turn the reader may be recomputed; -1: unknown. ``flows``: a gradient comes back;
    ``same_storage``: it may be that of the reader's result; ``gone``: then the reader's gradients no longer need the
    tensor; ``additive``: it needs no other operand, which may be gone then. ``ends``: it is a model output.
    """

    at: int
    saves: bool
    gradient: bool
    until: int
    block: int
    panelled: bool
    view: bool
    flows: bool
    same_storage: bool
    gone: bool
    additive: bool
    ends: bool


@dataclass(frozen=True, slots=True)
class Life:
    """The lifetime of one tensor: when it is made (-1: before all operators), and its readers.

    ``until``: the last operator of the block in whose backward pass it may be recomputed. ``kept``: its own gradient reads
    it. ``again``: it is recomputed in any case; ``brought``: then, copies that collectives bring into other layouts are
    kept. ``alone``: of the names of its storage, which are views, it is the one that counts; ``shown``: the size of the
    storage relative to the tensor.
    """

    made: int
    until: int
    kept: bool
    view: bool
    again: bool
    brought: bool
    alone: bool
    shown: float
    last: int
    returned: bool
    readers: tuple[Reader, ...]

    def seen_from(self, at: int) -> Life:
        """The same, with positions clamped to two operators from ``at``: it does not matter how far away others are."""

        def near(position: int) -> int:
            return position if position < 0 else max(at - 2, min(position, at + 2))

        readers = tuple(replace(r, at=near(r.at), until=near(r.until), block=near(r.block)) for r in self.readers)
        return replace(self, made=near(self.made), until=near(self.until), last=near(self.last), readers=readers)


class Lives:
    """The lifetimes of the tensors of a structure's plans, which are the same on all meshes."""

    def __init__(self, structure: Structure, panelled: bool, train: bool) -> None:
        self.structure, self.model, self.panelled, self.train = structure, structure.model, panelled, train
        self.order = {node: at for at, node in enumerate(self.model.operators)}
        self.readers = self._readers()
        self.latest, self.first = self._latest(), self._first()
        self.counted: dict[Value, Value] = {}
        self.every = [Counter(self._life(value) for value in edge.copies) for edge in structure.edges]
        self.known: dict[int, list[Counter[Life]]] = {}

    def around(self, at: int) -> list[Counter[Life]]:
        """For every edge, the lives of its tensors as seen from an operator, with the number of tensors of each."""
        if at not in self.known:
            self.known[at] = [Counter[Life]() for _ in self.every]
            for lives, found in zip(self.every, self.known[at], strict=True):
                for life, count in lives.items():
                    found[life.seen_from(at)] += count
        return self.known[at]

    def _latest(self) -> dict[fx.Node, int]:
        """Operator -> the last operator by whose backward pass it is recomputed, if it is: a gradient needs its result.

        If none does, recomputing one of its readers does.
        """
        found = {value[0]: at for node, at in self.order.items() for value in self.model.saved[node]}
        for node in reversed(list(self.model.undecided)):
            again = [found[user] for user in self._users(node) if user in self.model.undecided and user in found]
            if node not in found and again:
                found[node] = min(again)
        return found

    def _first(self) -> dict[fx.Node, int]:
        """Operator that is recomputed in any case -> the first operator in whose backward pass it may be.

        Empty if copies are kept that make recomputing some operators needless.
        """
        found: dict[fx.Node, int] = {}
        for node in () if False in self.model.recomputed.values() else reversed(list(self.order)):
            if node in self.model.recomputed:
                users = (found.get(user, self.order.get(user, -1)) for user in self._users(node))
                found[node] = max([self.order[node], *users])
        return found

    def _users(self, node: fx.Node) -> set[fx.Node]:
        """The readers of an operator's results."""
        return {user for i in range(len(results_of(node))) for user, _ in self.model.readers.get((node, i), ())}

    def _readers(self) -> dict[Value, list[tuple[fx.Node, int]]]:
        """The readers of every tensor, in the order of the uses of the tensor that stands for it."""
        stands, index = self.model.stands, self.structure.index
        return {
            value: sorted(uses, key=lambda use: (index[stands.get(use[0], use[0])], use[1]))
            for value, uses in self.model.readers.items()
        }

    def _life(self, value: Value) -> Life:
        producer = value[0]
        readers = tuple(self._reader(value, user, position) for user, position in self.readers[value])
        ends = len(self.order)
        return Life(
            made=self.order.get(producer, -1),
            until=self.order.get(self.model.undecided.get(producer, producer), -1),
            kept=producer in self.order and self.model.kept(producer).results and value in self.model.trained,
            view=producer in self.model.shown,
            again=producer in self.model.recomputed,
            brought=self.model.recomputed.get(producer) is False,
            alone=self._alone(value),
            shown=self._shown(value),
            last=self._last(value),
            returned=any(reader.at == ends for reader in readers),
            readers=readers,
        )

    def _last(self, value: Value) -> int:
        """The last operator that reads a tensor or a view of it."""
        last = self.order.get(value[0], -1)
        for user, position in self.readers.get(value, ()):
            last = max(last, self.order.get(user, -1))
            if position == 0 and self.model.shown.get(user) == value:
                last = max(last, self._last((user, 0)))
        return last

    def _alone(self, value: Value) -> bool:
        """Whether this is, of all names of a storage, the one that most readers save; saves for gradients count first."""
        root = self.model.root(value)
        if root not in self.counted:
            self.counted[root] = self._most_saved(root)
        return root[0].op != "placeholder" and value == self.counted[root]

    def _most_saved(self, root: Value) -> Value:
        best, most, names = root, (-1, -1), [root]
        for name in names:
            readers = self.readers.get(name, ())
            gradients = sum(user in self.order and name in self.model.saved[user] for user, _ in readers)
            gradients += name[0] in self.order and self.model.kept(name[0]).results
            saves = (
                gradients,
                sum(user in self.model.undecided and self.model.shown.get(user) != name for user, _ in readers),
            )
            best, most = (name, saves) if saves > most else (best, most)
            names += [(user, 0) for user, position in readers if position == 0 and self.model.shown.get(user) == name]
        return best

    def _shown(self, value: Value) -> float:
        """The size of a tensor's storage relative to the tensor: above 1 for a part of it, below 1 if it is expanded."""
        root, number = self.model.root(value)
        return results_of(root)[number].numel() / max(1, self.model.named[value].meta["val"].numel())

    def _reader(self, value: Value, user: fx.Node, position: int) -> Reader:
        if user not in self.order:
            return Reader(len(self.order), False, False, -1, -1, False, False, True, False, False, False, True)
        given, rule = value[0].op == "placeholder", rule_of(user)
        gradient = read = value in self.model.saved[user]
        again, brought = value[0] in self.model.recomputed, self.model.recomputed.get(value[0]) is False
        if given or again or user in self.model.recomputed:  # a lowering need not read placeholders
            found = self.model.operators[user].rule
            gradient = position in self.model.kept(user).operands and not (found is not None and found.inner)
            read = gradient if given or again else read
        undecided = user in self.model.undecided
        saves = (brought or not again) and (read or (undecided and not given))
        block = self.order[self.model.undecided[user]] if undecided else self.first.get(user, -1)
        until = self.latest.get(user, -1) if undecided else -1
        data = self.panelled and data_position(user) == position
        view, flows = position == 0 and self.model.shown.get(user) == value, user in self.model.differentiated
        same, saves = rule is not None and (rule.hands_on or rule.view), saves and self.train
        turns = self.model.turns.get(user, ())
        order = [i for i, _ in turns]
        gone = gradient and position in order and not any(reads for _, reads in turns[order.index(position) + 1 :])
        additive = rule is not None and position in rule.additive
        return Reader(self.order[user], saves, gradient, until, block, data, view, flows, same, gone, additive, ends=False)
