"""Schedules a graph with collectives: launches them early, waits for them late, and runs compute in between.

This is list scheduling on several resources. Compute runs one operator after the other; a collective occupies its group's
link from its launch to its completion. The scheduler launches all collectives that are ready, most urgent first, then runs
an operator whose operands are ready; it waits for a collective only if there is no such operator. The most urgent node has
the longest path to the end of the graph. But before a link becomes idle, the nodes that lead soonest to a collective on it
come first: of two equally urgent chunks, one runs ahead, and communicates while the other is computed. The order depends on
the graph, on predicted durations and on sizes alone.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from passes.graph import note_of
from passes.overlap.aliasing import source_of
from passes.overlap.launch import launch, local, wait

__all__ = ["Durations", "Limits", "Slot", "Task", "reordered", "schedule"]


@dataclass(frozen=True, slots=True)
class Task:
    """The properties of a node that the scheduler uses.

    Attributes:
        seconds: how long it occupies its lane.
        lane: ``compute``, or the group of a collective.
        bytes: the size of its result; 0 for a view.
    """

    seconds: float = 0.0
    lane: str = "compute"
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Slot:
    """The predicted time at which a node runs, in seconds from the start of the graph, and the lane of its `Task`."""

    node: fx.Node
    begin: float
    end: float
    lane: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a schedule.

    Attributes:
        collectives: how many may be in progress at once per lane; 0: the given order is kept, including its waits.
        slack: how far peak memory may exceed that of the given order, as a share of the latter. Collectives that would
            exceed this limit are not launched before their turn in the given order, and if the most urgent operator would,
            the given order is followed instead. The limit is not strict, as earlier decisions may hold more memory.
    """

    collectives: int = 8
    slack: float = 0.05


Durations = Callable[[fx.Node], Task]
#: A node that is ready: its negative urgency, its number in the given order, and the node.
Entry = tuple[float, int, fx.Node]


def schedule(graph: fx.Graph, durations: Durations, limits: Limits = Limits()) -> list[Slot]:
    """Schedules the nodes of a graph, except for its placeholders and output.

    Args:
        graph: see ``passes.overlap.launch.launches``; its order is the given order.
        durations: maps every node to its `Task`, a launch to that of its collective.
        limits: see `Limits`.

    Returns:
        The slots, in the order in which the nodes are to run.
    """
    return _Scheduler(graph, durations, limits).run()


def reordered(graph: fx.Graph, order: Iterable[fx.Node]) -> fx.Graph:
    """A copy of the graph with its nodes in another order, except that all items of a tuple are taken out of it at once.

    The tuple holds all its items until the last one is taken.
    """
    result = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    nodes = list(graph.nodes)
    for node in (*(n for n in nodes if n.op == "placeholder"), *order, nodes[-1]):
        for each in (node, *(user for user in node.users if user.target is operator.getitem)):
            if each not in values:
                values[each] = result.node_copy(each, lambda n: values[n])
    return result


class _Memory:
    """Counts the bytes of live results; a result is live until all nodes that read it, or a view of it, have run."""

    def __init__(self, tasks: Mapping[fx.Node, Task]) -> None:
        self.tasks = tasks
        self.roots: dict[fx.Node, fx.Node] = {}
        for node in tasks:
            source = node.all_input_nodes[0] if node.target is wait else source_of(node)
            if node.target is local and tasks[node].bytes:  # it copies
                source = None
            self.roots[node] = node if source is None else self.roots[source]
        self.left: dict[fx.Node, int] = defaultdict(int)
        for node in tasks:
            for root in self.read(node):
                self.left[root] += 1
            if any(user.op == "output" for user in node.users):  # outputs are live to the end
                self.left[self.roots[node]] += 1
        self.held = sum(each.bytes for node, each in tasks.items() if node.op == "placeholder")

    def read(self, node: fx.Node) -> set[fx.Node]:
        """The nodes in whose memory the operands of a node lie."""
        sources = node.all_input_nodes
        if node.target is wait:  # the operand of a collective is live until the wait
            sources = [*sources, *sources[0].all_input_nodes]
        return {self.roots[n] for n in sources if n in self.roots}

    def change(self, node: fx.Node) -> float:
        """The bytes by which running a node changes the live memory."""
        return self.tasks[node].bytes - sum(self.tasks[root].bytes for root in self.read(node) if self.left[root] == 1)

    def run(self, node: fx.Node) -> None:
        """Updates the counts for a node that runs."""
        self.held += self.change(node)
        for root in self.read(node):
            self.left[root] -= 1


def _peak(nodes: Sequence[fx.Node], tasks: Mapping[fx.Node, Task]) -> float:
    memory, most = _Memory(tasks), 0.0
    for node in nodes:
        memory.run(node)
        most = max(most, memory.held)
    return most


class _Scheduler:
    def __init__(self, graph: fx.Graph, durations: Durations, limits: Limits) -> None:
        self.nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        self.tasks = {node: durations(node) for node in self.nodes}
        given = {n: Task(bytes=note_of(n).held) for n in graph.nodes if n.op == "placeholder"}
        self.limits = limits
        known = given | self.tasks
        self.most = _peak(self.nodes, known) * (1 + limits.slack)
        self.memory = _Memory(known)
        self.number = {node: i for i, node in enumerate(self.nodes)}
        self.users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self.missing: dict[fx.Node, int] = {}
        for node in self.nodes:
            sources = {n for n in node.all_input_nodes if n in self.number}
            self.missing[node] = len(sources)
            for source in sources:
                self.users[source].append(node)
        self.urgency: dict[fx.Node, float] = {}
        for node in reversed(self.nodes):
            self.urgency[node] = self.tasks[node].seconds + max((self.urgency[u] for u in self.users[node]), default=0.0)
        self.nearest: dict[fx.Node, tuple[float, str]] = {}
        for node in reversed(self.nodes):
            ways = [(0.0, self.tasks[u].lane) if u.target is launch else self.nearest[u] for u in self.users[node]]
            seconds, lane = min(ways, default=(math.inf, ""))
            self.nearest[node] = (math.inf, "") if node.target is launch else (seconds + self.tasks[node].seconds, lane)
        self.free: dict[str, float] = defaultdict(float)
        self.ready: dict[str, list[Entry]] = {"launch": [], "wait": [], "compute": []}
        self.done: dict[fx.Node, float] = {}
        self.under_way: dict[str, int] = defaultdict(int)
        self.now = 0.0

    def run(self) -> list[Slot]:
        slots: list[Slot] = []
        for node in self.nodes:
            if not self.missing[node]:
                self.offer(node)
        while any(self.ready.values()):
            node = self.pick()
            task = self.tasks[node]
            self.memory.run(node)
            if node.target is launch:
                begin = max(self.now, self.free[task.lane])
                self.done[node] = self.free[task.lane] = begin + task.seconds
                slots.append(Slot(node, begin, self.done[node], task.lane))
                self.under_way[task.lane] += 1
            else:
                if node.target is wait:
                    begun = node.all_input_nodes[0]
                    self.now = max(self.now, self.done[begun])
                    self.under_way[self.tasks[begun].lane] -= 1
                slots.append(Slot(node, self.now, self.now + task.seconds, "compute"))
                self.now += task.seconds
            for user in self.users[node]:
                self.missing[user] -= 1
                if not self.missing[user]:
                    self.offer(user)
        return slots

    def offer(self, node: fx.Node) -> None:
        kind = "launch" if node.target is launch else "wait" if node.target is wait else "compute"
        heapq.heappush(self.ready[kind], (-self.urgency[node], self.number[node], node))

    def pick(self) -> fx.Node:
        ready = self.ready
        if not self.limits.collectives:
            return self.take(*min(((kind, e) for kind in ready for e in ready[kind]), key=lambda each: each[1][1]))
        arrived = [e for e in ready["wait"] if self.done[e[2].all_input_nodes[0]] <= self.now]
        most = self.limits.collectives
        open_ = [e for e in ready["launch"] if self.under_way[self.tasks[e[2]].lane] < most]
        free = [e for e in open_ if not self.crowded(e[2])]
        if free:
            return self.take("launch", min(free))
        if ready["launch"] and not open_ and arrived:
            return self.take("wait", min(arrived))
        if ready["compute"]:
            return self.take(*self.best(open_, arrived))
        if ready["wait"]:
            return self.take("wait", min(ready["wait"], key=lambda e: (self.done[e[2].all_input_nodes[0]], e)))
        return heapq.heappop(ready["launch"])[2]

    def crowded(self, node: fx.Node) -> bool:
        """Whether running a node before its turn in the given order would exceed the memory limit."""
        return self.memory.held + self.memory.change(node) > self.most

    def best(self, launches: Sequence[Entry], arrived: Sequence[Entry]) -> tuple[str, Entry]:
        """Chooses a ready operator, a collective to launch, or the wait for one that has arrived: (kind, entry)."""
        ready = self.ready["compute"]
        # If no lane is about to be idle, the given order is best: recent results are still in the caches.
        first = min(ready, key=lambda e: e[1])
        if self.crowded(ready[0][2]):  # the given order is known to fit
            waiting = [("launch", e) for e in launches] + [("wait", e) for e in arrived]
            return min([("compute", first), *waiting], key=lambda each: each[1][1])
        hurried = []
        for kind, entries in (("wait", arrived), ("compute", ready)):
            for entry in entries:
                seconds, lane = self.nearest[entry[2]]
                if self.free[lane] <= self.now + seconds < math.inf:
                    hurried.append((seconds, entry, kind))
        if hurried:
            _, entry, kind = min(hurried)
            return kind, entry
        urgent = [e for e in arrived if e < first]
        return ("wait", min(urgent)) if urgent else ("compute", first)

    def take(self, kind: str, entry: Entry) -> fx.Node:
        if entry is self.ready[kind][0]:
            return heapq.heappop(self.ready[kind])[2]
        self.ready[kind].remove(entry)
        heapq.heapify(self.ready[kind])
        return entry[2]
