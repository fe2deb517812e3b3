"""The plan whose step is shortest where communication goes on while something is computed, and in how many chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

__all__ = ["Searched", "best_chunks", "chunked", "first_shares", "in_parts", "least_step", "most_chunks", "sharding_of"]

_ROUNDS = 8
_COUNTS = (2, 4)  # in how many chunks it may be best to work


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search found: a choice that fits, if any; its cost by the weights and what none is below; bytes it takes.

    Where none fits, and what takes the least memory was looked for, also that.
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
    """Choices with short steps by integer programs over weighted sums, and what no step is below (see `costmodel.overlap`).

    Args:
        search: the least weighted sum over all plans.
        sums: of a choice, without chunks.
        depth: operators with a weight.
        deadline: when no other search begins.
        accumulate: micro-batches of a step.
        chunks: what no step in at most so many chunks is below.
        gap: relative; where the bound can rise by less, the search ends.

    Returns:
        What was met, the shortest step first, and the bound in seconds; what the first search found where nothing fits.
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


def first_shares(accumulate: int) -> Shares:
    """Shares of a step that the devices limit in every pass."""
    return ((1.0,),) * (3 if accumulate == 1 else 4)


def most_chunks(options: Options) -> int:
    """The chunks for which bounds have to hold; not fewer if fewer are asked for, so that the same plans are met."""
    asked = max(_COUNTS if options.chunks is None else options.chunks.values(), default=1)
    return max(asked, *_COUNTS) if options.hides and asked > 1 else 1


def best_chunks(
    priced: Priced, deadline: Deadline, asked: Mapping[str, int] | None = None
) -> tuple[Mapping[str, int], Sums]:
    """The chunks with which the step of a plan's strategies is shortest, and what it takes.

    Args:
        priced: the strategies.
        deadline: when nothing else is tried.
        asked: the chunks, if they are not to be chosen.
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
    """A plan's strategies, and the layouts in which what the graph is given rests."""
    graph = priced.model.captured.graph_module.graph
    resting = {node.name: priced.layouts[node, 0] for node in graph.nodes if node.op == "placeholder"}
    return Sharding(priced.prices.mesh, priced.strategies, resting, frozenset(priced.model.captured.parameters))


def in_parts(priced: Priced, chunks: Mapping[str, int]) -> Chunked:
    """A plan's strategies where devices do their work in chunks."""
    model = priced.model
    graph = model.captured.graph_module.graph
    return in_chunks(graph, model.operators, sharding_of(priced), model.captured.inputs, chunks, model.stands)


def chunked(priced: Priced, made: Chunked) -> Sums:
    """A step's seconds in chunks, each kind a virtual axis behind the mesh's (see ``Plan.chunks``).

    Args:
        priced: a plan's strategies.
        made: the same in chunks, as ``in_parts`` makes them.
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
