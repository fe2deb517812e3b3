"""The plan with the shortest step where communication overlaps with computation, and its chunk counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch.distributed.tensor import Replicate

from autotp.costs.priced import Priced
from autotp.costs.prices import Prices
from autotp.costs.step import Sums
from autotp.planner.describe import Found
from autotp.planner.ilp import Deadline
from autotp.planner.shares import Shares, next_shares
from autotp.plans.options import Options
from costmodel import overlap
from costmodel.overlap import Weights
from passes.sharding.chunk import CHUNKS, Chunked, in_chunks
from passes.sharding.shard import Sharding

__all__ = [
    "Searched",
    "best_chunks",
    "chunked",
    "first_shares",
    "in_parts",
    "least_of_meshes",
    "least_step",
    "most_chunks",
    "sharding_of",
]

_ROUNDS = 8
_COUNTS = (2, 4)  # the numbers of chunks to try
_LEAST = 5.0  # seconds for the search of one mesh after the other, at least


@dataclass(frozen=True, slots=True)
class Searched:
    """The result of a search: a choice that fits, if any; a lower bound on the cost of all choices; bytes that it takes.

    ``smallest``: if none fits, the plan with the least memory, if that was searched.
    """

    best: Found | None
    floor: float
    used: float
    smallest: Found | None = None


def least_step(
    search: Callable[[Weights], Searched],
    sums: Callable[[Found], Sums],
    depth: int,
    deadline: Deadline,
    accumulate: int = 1,
    chunks: int = 1,
    gap: float = 1e-6,
) -> tuple[list[Searched], float]:
    """Searches for the shortest step by integer programs over weighted sums of its sides (see `costmodel.overlap`).

    Args:
        search: minimizes a weighted sum over all plans.
        sums: the seconds of a choice's step, without chunks.
        depth: the number of operators with a weight.
        deadline: after which no further search begins.
        accumulate: the number of micro-batches of a step.
        chunks: the bound holds for steps in at most so many chunks.
        gap: relative; the search ends where the bound can rise by less.

    Returns:
        The results, the shortest step first, and a lower bound on the step time in seconds. If the first search finds no
        plan, only its result.
    """
    met: list[tuple[Sums, Searched]] = []
    shares, floor = first_shares(accumulate), 0.0
    for _ in range(_ROUNDS):
        if met and deadline.over:
            break
        try:
            found = search(overlap.weights(shares, depth, accumulate, chunks))
        except TimeoutError:
            if not met:
                raise
            break
        floor = max(floor, found.floor)
        if found.best is None:
            if not met:
                return [found], floor
            break
        met.append((sums(found.best).at_least(chunks), found))
        following = next_shares([each.sides for each, _ in met])
        if min(each.step(hides=True) for each, _ in met) <= floor * (1 + 1e-9) or following.value <= floor * (1 + gap):
            break
        shares = following.shares
    met.sort(key=lambda each: each[0].step(hides=True))
    return [found for _, found in met], min(floor, met[0][0].step(hides=True))


def least_of_meshes(
    search: Callable[[Sequence[tuple[int, ...]], float, Weights], Searched],
    sums: Callable[[Found], Sums],
    meshes: Sequence[tuple[int, ...]],
    depth: int,
    deadline: Deadline,
    accumulate: int = 1,
    chunks: int = 1,
    gap: float = 1e-6,
    enough: float = 0.0,
) -> tuple[list[Searched], float]:
    """Searches for the shortest step of all meshes together (`least_step`) and, if a gap remains, of one after the other.

    The weights that prove most for one mesh prove less for another one, and a mixture of plans of both is no plan.

    Args:
        search: minimizes a weighted sum over all plans of some meshes, of which only those below a limit are of interest.
        sums, depth, deadline, accumulate, chunks, gap: as for `least_step`.
        meshes: to search.
        enough: relative; the largest gap at which meshes are not searched one after the other. That takes about as long as
            the search of all together, or some seconds.

    Returns:
        As `least_step`.
    """

    def step(found: Searched) -> float:
        return math.inf if found.best is None else sums(found.best).at_least(chunks).step(hides=True)

    begun = deadline.clock()
    met, floor = least_step(partial(search, meshes, math.inf), sums, depth, deadline, accumulate, chunks, gap)
    until, floors = deadline.within(max(_LEAST, deadline.clock() - begun)), []
    for mesh in meshes if len(meshes) > 1 and met[0].best is not None else ():
        limit = step(met[0])
        if floor >= limit * (1 - enough) or until.over:
            break
        try:
            found, own = least_step(partial(search, [mesh], limit), sums, depth, until, accumulate, chunks, gap)
        except TimeoutError:
            break
        met = sorted([*met, *(one for one in found if one.best is not None)], key=step)
        floors.append(max(floor, own))
    if len(floors) == len(meshes):
        floor = min(*floors, step(met[0]))
    return met, floor


def first_shares(accumulate: int) -> Shares:
    """The shares of a step that the devices limit in every pass."""
    return ((1.0,),) * (3 if accumulate == 1 else 4)


def most_chunks(options: Options) -> int:
    """The number of chunks up to which bounds hold; not fewer if fewer are requested, so that the same plans are met."""
    asked = max(_COUNTS if options.chunks is None else options.chunks.values(), default=1)
    return max(asked, *_COUNTS) if options.hides and asked > 1 else 1


def best_chunks(
    priced: Priced, deadline: Deadline, asked: Mapping[str, int] | None = None
) -> tuple[Mapping[str, int], Sums]:
    """The chunk counts with which the step of a plan's strategies is shortest, and the seconds of that step.

    Args:
        priced: the strategies.
        deadline: after which no other counts are tried.
        asked: the counts, if they are given.
    """
    best = priced.sums
    if asked is not None:
        return asked, chunked(priced, in_parts(priced, asked)) if asked else best
    chosen: Mapping[str, int] = {}
    if best.activations < overlap.MARGIN * best.step(hides=True):
        return chosen, best
    for way in CHUNKS:
        for count in _COUNTS:
            if deadline.over:
                return chosen, best
            found = chunked(priced, in_parts(priced, {way: count}))
            if found.seconds(hides=True) >= best.seconds(hides=True):
                break
            chosen, best = {way: count}, found
    return chosen, best


def sharding_of(priced: Priced) -> Sharding:
    """A plan's strategies, and the resting layouts of the graph's placeholders."""
    graph = priced.model.captured.graph_module.graph
    resting = {node.name: priced.layouts[node, 0] for node in graph.nodes if node.op == "placeholder"}
    return Sharding(priced.prices.mesh, priced.strategies, resting, frozenset(priced.model.captured.parameters))


def in_parts(priced: Priced, chunks: Mapping[str, int]) -> Chunked:
    """A plan's strategies with the work of every device in chunks."""
    model = priced.model
    graph = model.captured.graph_module.graph
    return in_chunks(graph, model.operators, sharding_of(priced), model.captured.inputs, chunks, model.stands)


def chunked(priced: Priced, made: Chunked) -> Sums:
    """The seconds of a step in chunks. Each kind of chunks is a virtual axis behind the mesh's (see ``Plan.chunks``).

    Args:
        priced: a plan's strategies.
        made: the same strategies in chunks, from ``in_parts``.
    """
    if not made.counts:
        return priced.sums
    model, prices, strategies = priced.model, priced.prices, made.sharding.strategies
    virtual = Prices(
        prices.topology,
        prices.devices,
        train=prices.train,
        optimizer=prices.optimizer,
        chunks=tuple(made.counts.values()),
        together=prices.together,
        accumulate=prices.accumulate,
    )
    layouts = {(node, i): layout for node in model.operators for i, layout in enumerate(strategies[node.name].results)}
    rest = (Replicate(),) * len(made.counts)
    layouts |= {value: (*layout, *rest) for value, layout in priced.layouts.items() if value not in layouts}
    rows = None if "batch" in made.counts else made.cut["rows"]
    return Priced(model, virtual, strategies, layouts, gathered_once=priced.gathered_once).in_chunks(
        next(iter(made.counts.values())), rows
    )
