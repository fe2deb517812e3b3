"""The memory that a device holds at every moment of a step, and what each recomputation saves and costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autotp.analysis.explain import priced_plan
from autotp.costs.footprint import Footprint
from autotp.costs.priced import Priced
from autotp.costs.recompute import keeping
from autotp.costs.step import Moment, Turn
from autotp.errors import AutotpError
from autotp.plans.plan import Plan
from passes.capture import Captured
from passes.graph import note_of
from passes.rules.factors import Value
from passes.rules.table import name_of

__all__ = ["MemoryUse", "Position", "Recomputation", "explain_memory", "memory_use"]

#: The largest number of positions of the curve.
_POSITIONS = 400
_AGAIN = "recomputed"


@dataclass(frozen=True, slots=True)
class Position:
    """The moment of most memory in an operator's forward or backward pass, or in those of several operators in a row if
    there are many.

    Attributes:
        operator: its name.
        backward: whether the moment is in its backward pass.
        bytes: held by a device.
        kinds: kind of tensor -> bytes of that kind.
    """

    operator: str
    backward: bool
    bytes: float
    kinds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Recomputation:
    """An operator that the backward pass runs again, with its views and the operators that are decided together with it.

    All figures compare the plan with one that keeps the results of these operators and is the same otherwise.

    Attributes:
        name, target, module, source: of the first operator; ``source`` is the line in the user's model.
        copies: the number of operators, without views.
        saved_bytes: by how many bytes less is held between the forward and the backward pass.
        peak_bytes: by how many bytes the peak memory is smaller.
        seconds: of additional computation and communication.
        step_seconds: by how many seconds a step is longer, given what the plan's schedule hides.
    """

    name: str
    target: str
    module: str
    source: str | None
    copies: int
    saved_bytes: float
    peak_bytes: float
    seconds: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory that a device holds in a step.

    Attributes:
        allowed: the memory bound in bytes.
        peak_bytes: the peak memory.
        worst: the index of the peak in ``curve``.
        held: (kind, name, bytes) of the tensors held at the peak, largest first; parameters include their optimizer state.
        curve: positions of the forward pass, then of the backward pass.
        recomputed: recomputations, with most ``saved_bytes`` first.
    """

    allowed: float
    peak_bytes: float
    worst: int
    held: tuple[tuple[str, str, float], ...]
    curve: tuple[Position, ...]
    recomputed: tuple[Recomputation, ...]


class _Watched(Footprint):
    """A step that records the held tensors at the ``wanted`` moments, whose bytes are known from a previous run."""

    def __init__(self, priced: Priced, wanted: Mapping[Moment, float]) -> None:
        super().__init__(priced)
        self.wanted = dict(wanted)
        self.seen: dict[Moment, list[tuple[str, str, float]]] = {}
        self.between = 0.0  # bytes held when the backward pass begins
        self.repeated = {node.name for node in self.model.recomputed}

    def reach(self, passing: float = 0.0) -> None:
        super().reach(passing)
        if self.now.turn is not Turn.FORWARD:
            self.between = self.between or self.total
        most = self.held.get(self.now, 0.0)  # absent if all tensors are empty
        if most >= self.wanted.get(self.now, float("inf")) * (1 - 1e-12):
            del self.wanted[self.now]
            self.seen[self.now] = self.holding(most - self.total)

    def holding(self, passing: float) -> list[tuple[str, str, float]]:
        held = super().holding(passing)
        if self.now.turn is Turn.FORWARD:
            return held
        results = ("saved for the backward pass", "result in use")
        return [(_AGAIN if kind in results and name in self.repeated else kind, name, size) for kind, name, size in held]


def explain_memory(captured: Captured, plan: Plan) -> MemoryUse:
    """The memory that a device holds in a step of a plan.

    Args:
        captured: the model that was planned, captured for the same inputs.
        plan: the plan.

    Raises:
        PlanMismatchError: the plan is for another model or other inputs.
        AutotpError: the graph has no operators.
    """
    return memory_use(priced_plan(captured, plan), plan)


def memory_use(priced: Priced, plan: Plan) -> MemoryUse:
    """`explain_memory` for a plan that is already priced.

    Raises:
        AutotpError: the graph has no operators.
    """
    first = _Watched(priced, {})
    peak = first.run()
    chosen = _chosen(first.held)
    if not chosen or not priced.model.operators:
        raise AutotpError("the graph has no operators, and holds nothing but what it is given")
    watched = _Watched(priced, chosen)
    watched.run()
    nodes = list(priced.model.operators)
    curve = [_position(nodes[moment.at], moment, watched.seen[moment]) for moment in chosen]
    worst = max(range(len(curve)), key=lambda place: curve[place].bytes)
    held = sorted(watched.seen[list(chosen)[worst]], key=lambda entry: -entry[2])
    hides = plan.schedule == "overlap"
    recomputed = [
        _recomputation(priced, group, first.between, peak, hides)
        for group in _groups(priced, {view: root for view, (root, _) in first.storages.roots.items()})
    ]
    recomputed.sort(key=lambda one: -one.saved_bytes)
    return MemoryUse(plan.memory_bound, peak, worst, tuple(held), tuple(curve), tuple(recomputed))


def _chosen(held: Mapping[Moment, float]) -> dict[Moment, float]:
    """The moments of most memory -> bytes: of each operator's forward pass, then of the backward passes; of several
    operators in a row if there are too many.
    """
    worst: dict[tuple[bool, int], Moment] = {}
    for moment, size in held.items():
        place = moment.turn is not Turn.FORWARD, moment.at
        if place not in worst or size > held[worst[place]]:
            worst[place] = moment
    order = sorted(worst, key=lambda place: (place[0], -place[1] if place[0] else place[1]))
    row = -(-len(order) // _POSITIONS)
    parts = [order[begin : begin + row] for begin in range(0, len(order), row)]
    found = [max((worst[place] for place in part), key=held.__getitem__) for part in parts]
    return {moment: held[moment] for moment in found}


def _position(node: fx.Node, moment: Moment, held: Sequence[tuple[str, str, float]]) -> Position:
    kinds: Counter[str] = Counter()
    for kind, _, size in held:
        kinds[kind] += size  # type: ignore[assignment]
    return Position(node.name, moment.turn is not Turn.FORWARD, sum(kinds.values()), dict(kinds))


def _groups(priced: Priced, roots: Mapping[Value, Value]) -> list[list[fx.Node]]:
    """The recomputed operators, grouped by those that are decided together. A view is in the group of what it views."""
    groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    stands, recomputed = priced.model.stands, priced.model.recomputed
    for node in priced.model.operators:
        source = roots.get((node, 0), (node, 0))[0]
        if node in recomputed and source in recomputed:
            groups[stands[source]].append(node)
    return list(groups.values())


def _recomputation(priced: Priced, group: Sequence[fx.Node], between: float, peak: float, hides: bool) -> Recomputation:
    kept = replace(priced, model=keeping(priced.model, group))
    footprint = _Watched(kept, {})
    more = footprint.run()
    longer = [one.sums.step(hides=False) for one in (priced, kept)] + [one.sums.seconds(hides) for one in (priced, kept)]
    node = group[0]
    return Recomputation(
        name=node.name,
        target=name_of(node),
        module=note_of(node).module,
        source=note_of(node).source,
        copies=sum(priced.model.stands[one] is priced.model.stands[node] for one in group),
        saved_bytes=footprint.between - between,
        peak_bytes=more - peak,
        seconds=longer[0] - longer[1],
        step_seconds=longer[2] - longer[3],
    )
