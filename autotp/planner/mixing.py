"""Plans that treat identical layers in two ways.

The first layers, which the backward pass reaches last, keep the results that one choice keeps, and the others those that
another one keeps. So the bytes and the seconds of the plan are between those of both choices. In the last of the first
layers, single results may be kept too, where memory is left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from autotp.costs.step import Moment
from autotp.planner.assemble import Assembled
from autotp.planner.describe import Found
from autotp.planner.ilp import evaluate
from autotp.planner.memory.moments import Moments

__all__ = ["Met", "like", "mix"]

_TRIES = 4
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Met:
    """A measured choice: the sides of its passes and its step, in seconds."""

    found: Found
    sides: tuple[tuple[float, ...], ...]
    step: float

    @property
    def held(self) -> Mapping[Moment, float]:
        """Bytes on each device at the moments at which memory may peak, up to rounding."""
        return self.found.nearly_held

    @property
    def most(self) -> Moment:
        """The moment at which it holds most."""
        return max(self.held, key=self.held.__getitem__)

    def fits(self, room: float) -> bool:
        """Whether it fits into the memory of a device, ``room`` bytes, exactly."""
        return self.held[self.most] <= room * (1 + _ROUNDING) and self.found.memory <= room


def like(
    base: Met,
    other: Met,
    moments: Moments,
    found: Callable[[Assembled, tuple[int, ...]], Found],
    offer: Callable[[Found], Met],
) -> Met:
    """The plan with the strategies of ``base`` that recomputes what ``other`` does; ``other`` if both cost the same.

    Args:
        base, other: plans of the same program.
        moments: of steps on their mesh.
        found: makes a plan of a choice.
        offer: measures a plan, and keeps it if it is the best.
    """
    assembled, choice = base.found.assembled, other.found.solution.choice
    joined, worst = assembled.joined(base.found.solution.choice, choice), other.most
    costs = [(evaluate(assembled.problem, one).seconds, moments.bytes(worst, one)) for one in {joined, choice}]
    return other if np.allclose(costs[0], costs[-1], 1e-12, 0.0) else offer(found(assembled, joined))


def mix(
    more: Met, less: Met, moments: Moments, room: float, layers: int, gap: float, offer: Callable[[Found], Met]
) -> None:
    """Searches for the fewest first layers that have to follow ``less`` so that the plan fits; offers every plan tried.

    Args:
        more, less: plans with the same strategies; one takes more memory than a device has, the other less.
        moments: of steps on their mesh.
        room: memory of a device, in bytes.
        layers: the number of identical layers.
        gap: the share of a step that does not matter.
        offer: measures a plan, and keeps it if it is the best.
    """
    over = [
        (held - room) / (held - less.held.get(moment, 0.0))
        for moment, held in more.held.items()
        if held > max(room, less.held.get(moment, 0.0))
    ]
    count = math.ceil(layers * max(over, default=0.0) - 1e-9)
    other = frozenset(less.found.assembled.rematerialized(less.found.solution.choice))
    fine = (less.step - more.step) / layers < gap / 4 * more.step
    fitting: Met | None = None
    for _ in range(_TRIES):
        if not 0 < count < layers:
            break
        one = offer(replace(more.found, layers=count / layers, other=other))
        if not one.fits(room):
            if fitting is not None:
                break
            count += 1
        else:
            fitting, count = one, count - 1
            if fine:
                return
    if fitting is not None:
        _spare(fitting, less, moments, room, offer)


def _spare(one: Met, less: Met, moments: Moments, room: float, offer: Callable[[Found], Met]) -> None:
    """Keeps in the last of the first layers the results that save most seconds per byte, as far as they fit."""
    assembled, choice = less.found.assembled, less.found.solution.choice
    worst = one.most
    own = evaluate(assembled.problem, choice).seconds, moments.bytes(worst, choice, surely=True)
    groups: dict[fx.Node, set[fx.Node]] = defaultdict(set)  # a view belongs to the tensor whose storage it shows
    for node in one.found.other - assembled.rematerialized(one.found.solution.choice):
        groups[moments.model.root((node, 0))[0]].add(node)
    worth: list[tuple[float, float, set[fx.Node]]] = []
    for nodes in groups.values():
        kept = assembled.keeping(choice, nodes)
        copies = max(assembled.structure.nodes[assembled.structure.index[node]][2] for node in nodes)
        seconds = (own[0] - evaluate(assembled.problem, kept).seconds) / copies
        size = (moments.bytes(worst, kept, surely=True) - own[1]) / copies
        if seconds > 0 and math.isfinite(seconds):
            worth.append((size / seconds, size, nodes))
    left, spared = room - one.held[worst], set[fx.Node]()
    for _, size, nodes in sorted(worth, key=lambda each: each[0]):
        if size <= left:
            left, spared = left - size, spared | nodes
    if spared:
        offer(replace(one.found, spared=frozenset(spared)))
