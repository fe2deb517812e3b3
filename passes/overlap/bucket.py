"""Bucketing: merges small collectives of one kind, group and dtype into one, if none depends on another.

A collective of few bytes takes its latency; several of them in one message take it once. The members of a bucket are
adjacent in the order of the graph, up to a number of bytes that the cost model gives: several buckets may be better than
one, because compute, or a collective on another link, runs while the next bucket is filled. If collectives send on the
results of others, both kinds get the same number of buckets.

Collectives that other work waits for are not delayed: those between products, such as those of two chunks, are merged only
if their operands depend on the same products.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from costmodel.overlap import messages
from passes.graph import annotate, emit, note_of
from passes.overlap.aliasing import source_of
from passes.overlap.primitives import COLLECTIVE_OF, axes_of

__all__ = ["Buckets", "Enough", "Hiding", "buckets", "merge"]

_aten = torch.ops.aten

_COPIES = frozenset({_aten.clone.default, _aten.cat.default, _aten.stack.default, _aten._to_copy.default})

#: (kind, mesh axes, bytes of this device's parts in all collectives of a kind) -> bytes from which on one is not small.
Enough = Callable[[str, tuple[int, ...], float], float]

#: (kind, mesh axes, bytes of this device's parts) -> seconds of sending them that compute could hide, seconds of sending
#: no bytes (the latency), and the most bytes of one message.
Hiding = Callable[[str, tuple[int, ...], float], tuple[float, float, float]]

#: Sets of collectives to merge, as indices into a graph's nodes.
Buckets = tuple[tuple[int, ...], ...]


def buckets(graph: fx.Graph, enough: Enough, hiding: Hiding | None = None) -> Buckets:
    """Chooses the small collectives of a traced graph to merge.

    Args:
        graph: its collectives are operators of `passes.overlap.primitives`.
        enough: the number of bytes from which on a collective is sent by itself.
        hiding: for collectives that send on the results of others; None: their numbers of buckets are independent.
    """
    nodes = list(graph.nodes)
    number = {node: i for i, node in enumerate(nodes)}
    return tuple(tuple(number[node] for node in members) for members in _buckets(nodes, enough, hiding))


def merge(graph: fx.Graph, chosen: Buckets) -> None:
    """Merges collectives of a traced graph in place.

    Args:
        graph: see ``buckets``.
        chosen: the buckets of this graph, or of another device's graph with the same nodes.
    """
    nodes = list(graph.nodes)
    for places in chosen:
        _merge(graph, [nodes[i] for i in places])
    if chosen:
        _sort(graph)
        graph.lint()


def _key(node: fx.Node) -> Hashable:
    return node.target, axes_of(node.target, node.args), str(node.args[2:]), node.meta["val"].dtype


def _group(node: fx.Node) -> tuple[str, tuple[int, ...]]:
    return COLLECTIVE_OF[node.target], axes_of(node.target, node.args)


def _size(node: fx.Node) -> float:
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    return float(value.nbytes)


def _buckets(nodes: Sequence[fx.Node], enough: Enough, hiding: Hiding | None) -> list[list[fx.Node]]:
    """Sets of collectives to merge. Each set is checked together with those before it, so that no cycles arise."""
    number = {node: i for i, node in enumerate(nodes)}
    amid = _amid(nodes)
    small: dict[Hashable, list[fx.Node]] = {}
    large: dict[Hashable, list[fx.Node]] = {}
    for node in nodes:
        if node.target in COLLECTIVE_OF:
            kind = small if _size(node) < enough(*_group(node), math.inf) else large
            kind.setdefault((_key(node), amid[node]), []).append(node)
    behind = _Behind(nodes)
    found = []
    for group, limit in _limits(list(small.values()), list(large.values()), enough, hiding):
        open_: list[fx.Node] = []
        for node in group:
            fits = sum(map(_size, open_)) + _size(node) <= limit
            if open_ and (not fits or not behind.independent(open_, node)):
                if len(open_) > 1:
                    found.append(open_)
                    behind.merge(open_)
                open_ = []
            open_.append(node)
        if len(open_) > 1:
            found.append(open_)
            behind.merge(open_)
    return sorted(found, key=lambda members: number[members[-1]])


def _limits(
    small: Sequence[list[fx.Node]], large: Sequence[list[fx.Node]], enough: Enough, hiding: Hiding | None
) -> Iterator[tuple[list[fx.Node], float]]:
    """Yields groups of small collectives, each with the most bytes that one message of the group has.

    Collectives that send on the results of others, such as those of a gradient that is reduce-scattered within nodes and
    then all-reduced between them, get the number of messages that is best for both together: if there were only one, all
    of the second would wait for all of the first.
    """
    groups = [*small, *large]
    totals = [sum(map(_size, group)) for group in groups]
    chains = _chains(groups) if hiding is not None else [[i] for i in range(len(groups))]
    for chain in chains:
        figures = [hiding(*_group(groups[i][0]), totals[i]) for i in chain] if hiding is not None else []
        hidden, latency = sum(figure[0] for figure in figures), sum(figure[1] for figure in figures)
        for i in chain:
            if i < len(small) and len(chain) == 1:
                yield groups[i], enough(*_group(groups[i][0]), totals[i])
            elif i < len(small):
                count = float(messages(hidden + latency, latency, 0.0)) if latency else math.inf
                yield groups[i], min(figures[chain.index(i)][2], totals[i] / count)


def _chains(groups: Sequence[Sequence[fx.Node]]) -> list[list[int]]:
    """Groups the sets of collectives, by number, so that sets that send on one another's results are together."""
    of = {node: i for i, group in enumerate(groups) for node in group}
    together = list(range(len(groups)))  # the parents of a union-find structure

    def first(i: int) -> int:
        while together[i] != i:
            i = together[i]
        return i

    for node, i in of.items():
        for other in _next_collectives(node):
            together[first(of[other])] = first(i)
    found: dict[int, list[int]] = defaultdict(list)
    for i in range(len(groups)):
        found[first(i)].append(i)
    return list(found.values())


def _next_collectives(node: fx.Node) -> set[fx.Node]:
    """The collectives that send on the result of another, possibly after copies and views."""
    found: set[fx.Node] = set()
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if user.target in COLLECTIVE_OF:
                found.add(user)
            elif user not in seen and (user.target in _COPIES or source_of(user) is not None):
                seen.add(user)
                pending.append(user)
    return found


def _amid(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The matrix products that each node depends on, as bits; 0 if no other product depends on the node."""
    before: dict[fx.Node, int] = {}
    behind: dict[fx.Node, bool] = {}
    bit = 1
    for node in nodes:
        before[node] = 0
        for operand in node.all_input_nodes:
            before[node] |= before[operand]
        if _is_product(node):
            before[node] |= bit
            bit <<= 1
    for node in reversed(nodes):
        behind[node] = all(behind[user] and not _is_product(user) for user in node.users)
    return {node: 0 if behind[node] else before[node] for node in nodes}


def _is_product(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in flop_registry


class _Behind:
    """The dependencies between nodes, where each merged set counts as one node."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.one = {node: node for node in nodes}
        self.members: dict[fx.Node, list[fx.Node]] = {}
        self.users = {node: list(node.users) for node in nodes}

    def independent(self, members: Sequence[fx.Node], other: fx.Node) -> bool:
        """Whether merging ``other`` into a set creates no cycle: no path leads from one of them to another."""
        wanted = {*members, other}
        seen: set[fx.Node] = set()
        pending = [user for member in wanted for user in self.after(member)]
        while pending:
            node = self.one[pending.pop()]
            if node in wanted:
                return False
            if node not in seen:
                seen.add(node)
                pending += self.after(node)
        return True

    def after(self, node: fx.Node) -> list[fx.Node]:
        return [user for member in self.members.get(node, [node]) for user in self.users[member]]

    def merge(self, members: list[fx.Node]) -> None:
        self.members[members[0]] = members
        for member in members:
            self.one[member] = members[0]


def _merge(graph: fx.Graph, members: Sequence[fx.Node]) -> None:
    kind = COLLECTIVE_OF[members[0].target]
    parts = [node.args[0] for node in members]
    shapes = [list(node.meta["val"].shape) for node in members]
    # The leading dim separates what devices exchange, except for all_reduce and operands of all_gather (not stacked yet).
    rows = kind in ("reduce_scatter", "all_to_all")
    ways = members[0].args[2] if kind == "all_gather" else 0
    with graph.inserting_before(members[-1].next):
        flat = []
        for part in parts:
            lead = [part.meta["val"].shape[0]] if rows else []  # type: ignore[union-attr]
            plain = part.meta["val"].dim() == len(lead) + 1  # type: ignore[union-attr]
            flat.append(part if plain else emit(graph, _aten.reshape.default, part, [*lead, -1]))
        joined = emit(graph, _aten.cat.default, flat, 1 if rows else 0)
        sent = emit(graph, members[0].target, joined, *members[0].args[1:])
        annotate(sent, at=_all_of([note_of(node).at for node in members]))
        lead = [ways] if ways else [shapes[0][0]] if kind == "all_to_all" else []
        lengths = [math.prod(shape) // math.prod(lead) for shape in shapes]
        pieces = emit(graph, _aten.split_with_sizes.default, sent, lengths, len(lead))
        for i, (node, shape) in enumerate(zip(members, shapes, strict=True)):
            piece = emit(graph, operator.getitem, pieces, i)
            if lead and not _copied(node):  # unlike the result that it replaces, it is not contiguous
                piece = emit(graph, _aten.clone.default, piece)
                piece.kwargs = {"memory_format": torch.contiguous_format}
            plain = len(shape) == len(lead) + 1
            node.replace_all_uses_with(piece if plain else emit(graph, _aten.view.default, piece, shape))
    for node in members:
        graph.erase_node(node)


def _all_of(places: Sequence[str]) -> str:
    """The operators for which a merged collective runs, in short."""
    first, *rest = dict.fromkeys(place for place in places if place) or ("",)
    return f"{first} and {len(rest)} more" if rest else first


def _copied(node: fx.Node) -> bool:
    """Whether the result of a collective is only unbound and concatenated again, and so copied anyway."""
    parts = [part for user in node.users for part in user.users]
    return all(user.target is _aten.unbind.int for user in node.users) and all(
        reader.target is _aten.cat.default for part in parts for reader in part.users
    )


def _sort(graph: fx.Graph) -> None:
    """Sorts the nodes topologically, in place, and keeps their order otherwise."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    missing = {node: len(set(node.all_input_nodes)) for node in number}
    ready = [(i, node) for node, i in number.items() if not missing[node]]
    heapq.heapify(ready)
    end = graph.output_node()
    while ready:
        _, node = heapq.heappop(ready)
        if node is not end:
            end.prepend(node)
        for user in node.users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (number[user], user))
