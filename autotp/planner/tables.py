"""Tables of bytes: what operators, parameters and tensors hold at one moment of a step, by strategies and layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotp.costs.prices import Prices
from autotp.costs.step import Moment, Turn
from autotp.planner.choices import Edge
from passes.layouts.codes import local_elements

__all__ = ["Held", "Ledger", "Life", "Reader", "Sizes", "Tables"]

#: A tensor, those of its uses that hold it, and whether it is there once for every wanted layout, for every layout of its
#: gradient ("gradients"), or for every pair of them ("pairs").
Held = tuple[int, tuple[int, ...], str]

#: Bytes by node and strategy, and by what holds them and (have, want).
Tables = tuple[dict[int, np.ndarray], dict[Held, np.ndarray]]

_PANELS = 4  # of an operand that is gathered in panels, about one in so many is there at once


@dataclass(frozen=True, slots=True)
class Reader:
    """One use of a tensor: when, and what of it is kept for the reader's backward pass: nothing, it, or it as it rests.

    ``saves`` is whether it ever is: where the planner decides, that depends on the choice. ``gradient``: the reader's
    gradient needs it in any case. ``until``: the last operator whose gradient needs a result of the reader, which, if it is
    recomputed, is there by then. ``block``: the last operator of the block in whose backward pass it may be. ``flows``: a
    gradient comes back, ``same_storage``: which may be that of the reader's result, or ``gone``: for which the reader's own
    gradients need the tensor no more. ``ends``: it is an output of the model.
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
    ends: bool


@dataclass(frozen=True, slots=True)
class Life:
    """When one tensor is made (before all operators: -1), whether its producer keeps it or it is a view; who reads it.

    ``until`` is the last operator of the block in whose backward pass it may be recomputed. ``alone``: of the names of its
    storage, which are views, it is the one that counts; ``shown``: how many times its bytes the storage has.
    """

    made: int
    until: int
    kept: bool
    view: bool
    alone: bool
    shown: float
    last: int
    returned: bool
    readers: tuple[Reader, ...]

    def seen_from(self, at: int) -> Life:
        """The same with what is more than two operators away from one put there: nothing asks how far it is."""

        def near(position: int) -> int:
            return position if position < 0 else max(at - 2, min(position, at + 2))

        readers = tuple(replace(r, at=near(r.at), until=near(r.until), block=near(r.block)) for r in self.readers)
        return replace(self, made=near(self.made), until=near(self.until), last=near(self.last), readers=readers)


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Bytes of a tensor on one device.

    Attributes:
        own: as it is, or rests, ``[H]``.
        wanted: as it is wanted, ``[W]``.
        back: of the gradient that a reader returns, ``[W]``.
        stays: where nothing has to move, ``[H, W]``.
    """

    own: np.ndarray
    wanted: np.ndarray
    back: np.ndarray
    stays: np.ndarray

    @classmethod
    def of(cls, edge: Edge, mesh: tuple[int, ...]) -> Sizes:
        """Of an edge's tensors on a mesh."""
        shape, cast = tuple(edge.value.shape), edge.cast
        return cls(
            own=local_elements(shape, edge.rows, mesh) * cast.rests.itemsize,
            wanted=local_elements(shape, edge.wants, mesh) * cast.used.itemsize,
            back=local_elements(shape, edge.gradients, mesh) * (cast.used.itemsize + cast.back * cast.reduced.itemsize),
            stays=edge.stays,
        )

    @classmethod
    def shared(cls, edge: Edge, mesh: tuple[int, ...]) -> Sizes:
        """Of an edge's tensors where each device of a mesh has its share, in whatever layout."""
        found, share, cast = cls.of(edge, mesh), edge.value.numel() / math.prod(mesh), edge.cast
        return replace(
            found,
            own=np.full(len(found.own), share * cast.rests.itemsize),
            wanted=np.full(len(found.wanted), share * cast.used.itemsize),
            back=np.full(len(found.back), share * (cast.used.itemsize + cast.back * cast.reduced.itemsize)),
        )


class Ledger:
    """The tables of one moment while they are filled."""

    def __init__(self, sizes: Sequence[Sizes], prices: Prices, needs: Sequence[int]) -> None:
        self.prices, self.needs, self.sizes = prices, needs, sizes
        self.nodes: dict[int, np.ndarray] = {}
        self.tensors: dict[Held, np.ndarray] = {}

    def own(self, edge: Edge, sizes: np.ndarray, recomputed: bool = True) -> None:
        """Bytes that a tensor takes by how it is made, or rests; where it is recomputed, only if it is there then."""
        mine = sizes[edge.have]
        if not recomputed and edge.needs is not None:
            mine = np.where(edge.needs.have < len(sizes), mine, 0.0)
        self.nodes[edge.producer] = self.nodes.get(edge.producer, 0.0) + mine

    def held(self, number: int, uses: Sequence[int], table: np.ndarray, once: str = "layouts") -> None:
        """Bytes that a tensor takes by how these uses want it, once for those that want the same layout."""
        if uses:
            key = number, tuple(uses), once
            self.tensors[key] = self.tensors.get(key, 0.0) + table

    def parameter(
        self, number: int, edge: Edge, life: Life, count: int, moment: Moment, panelled: bool, surely: bool
    ) -> None:
        """Its state, what it is gathered to, and its gradient from its last reader's turn on."""
        sizes = self.sizes[number]
        own, wanted, stays = sizes.own, sizes.wanted, sizes.stays
        trained = edge.trained and self.prices.train
        state = self.prices.states(own / edge.cast.rests.itemsize, edge.cast.rests.itemsize)
        forward = moment.turn is Turn.FORWARD
        come = trained and not forward and moment.at < max(reader.at for reader in life.readers)
        self.own(edge, count * (state - (own if self.prices.train else 0.0) + (own if come else 0.0)))
        moved = np.where(stays, 0.0, wanted[None, :] / (_PANELS if panelled else 1))
        kept = [use for use, r in enumerate(life.readers) if r.saves and r.at < moment.at]
        self.held(number, kept, count * np.where(edge.regathered[:, None], 0.0, moved))
        now = [use for use, reader in enumerate(life.readers) if reader.at == moment.at]
        if forward and not surely:
            begun = any(reader.at <= moment.at for reader in life.readers)
            later = [use for use, reader in enumerate(life.readers) if reader.at >= moment.at]
            self.held(number, later if begun else [], count * moved)
        elif moment.turn is Turn.BACKWARD:
            if trained and surely:  # a product's weight may be gone when its gradient comes, or is counted above
                there = np.where(edge.regathered[:, None] | (not kept), moved, 0.0)
                self.held(number, now, count * np.maximum(there, sizes.back), "pairs")
            else:
                self.held(number, now, count * (moved + sizes.back if trained else moved), "pairs")

    def activation(self, number: int, edge: Edge, life: Life, count: int, moment: Moment) -> None:
        """The tensor, copies of it, and its gradient."""
        sizes = self.sizes[number]
        own, wanted, stays = sizes.own, sizes.wanted, sizes.stays
        at, readers, forward = moment.at, list(enumerate(life.readers)), moment.turn is Turn.FORWARD
        given = life.made < 0
        if given:
            self.own(edge, count * own)
        elif life.made > at:
            if not forward and life.returned and not life.view:
                self.own(edge, count * own)
            return
        in_use = forward and life.made <= at <= life.last
        there = given or life.returned or in_use
        whole = there or life.kept
        back = not forward and at <= life.until  # recomputed by now
        if whole and not given and not life.view:
            self.own(edge, count * own, recomputed=there or back)
        moved = np.where(stays, 0.0, wanted[None, :])
        kept = moved if whole else np.broadcast_to(wanted[None, :], stays.shape)
        saved = [use for use, r in readers if r.saves and not r.panelled and r.at <= at]
        rests = [use for use, r in readers if r.saves and r.panelled and r.at <= at]
        if edge.needs is not None:
            recomputed = [use for use in saved if life.readers[use].at == at]
            recomputed += [len(readers) + use for use in saved if life.readers[use].at < at]
            self.held(self.needs[number], recomputed if back else [], count * np.concatenate([np.zeros_like(kept), kept]))
            kept = np.concatenate([kept, np.zeros_like(kept)])
        self.held(self.needs[number], saved, count * kept)
        if rests and not whole:
            resting = np.where(stays, 0.0, own[:, None])
            if edge.needs is not None:
                resting = np.concatenate([resting, resting if back else np.zeros_like(resting)])
            if saved or edge.needs is not None:
                self.held(self.needs[number], rests, count * resting)
            else:  # kept once, however many want it
                self.own(edge, count * own)
        panels = [use for use, r in readers if r.at == at and r.panelled]
        if forward:
            now = [use for use, r in readers if r.at == at and not r.saves and not r.panelled]
            self.held(number, now, count * moved)
            # The result of a view is a storage of its own only where the operand had to move.
            views = [use for use, r in readers if r.view and r.at <= at <= life.last]
            self.held(number, views, count * moved)
        if moment.turn is not Turn.ARRIVAL:
            self.held(number, panels, count * moved / _PANELS)
        if not forward and edge.trained and not given:
            self.gradient(number, edge, life, count, moment)

    def least(self, number: int, edge: Edge, life: Life, count: int, moment: Moment) -> None:
        """What there is of a tensor in any case, however many names a storage has, and whenever it is recomputed."""
        sizes = self.sizes[number]
        own, wanted, back, stays = sizes.own, sizes.wanted, sizes.back, sizes.stays
        if life.made < 0:
            self.own(edge, count * own)
        if not 0 <= life.made <= moment.at:
            return
        kept = np.where(stays, 0.0, wanted[None, :])
        if life.returned and moment.turn is not Turn.FORWARD:
            if not life.view and moment.at >= min((r.at for r in life.readers if r.saves), default=0):
                self.own(edge, count * own)
            if edge.trained and life.made < moment.at:
                ends = [use for use, r in enumerate(life.readers) if r.ends]
                self.held(number, ends, np.broadcast_to(count * back, stays.shape), "gradients")
        elif life.alone:
            if life.kept and not life.view:
                self.own(edge, count * own, recomputed=False)
            else:
                kept = np.where(stays, life.shown * wanted[None, :], wanted[None, :])
        kept = count * kept
        # What is kept to recompute a reader may be gone once its block has begun.
        saved = [
            use
            for use, r in enumerate(life.readers)
            if r.saves
            and not r.panelled
            and r.at <= moment.at
            and (r.gradient or moment.turn is Turn.FORWARD or moment.at > r.block)
        ]
        if edge.needs is not None:
            come = moment.at + (moment.turn is not Turn.BACKWARD)
            recomputed = [use for use in saved if life.readers[use].gradient and life.readers[use].at == come]
            recomputed += [
                len(life.readers) + use
                for use in saved
                if life.readers[use].gradient and life.readers[use].at < moment.at and come <= life.readers[use].until
            ]
            recomputed = recomputed if moment.turn is not Turn.FORWARD else []
            self.held(self.needs[number], recomputed, np.concatenate([np.zeros_like(kept), kept]))
            kept = np.concatenate([kept, np.zeros_like(kept)])
        self.held(self.needs[number], saved, kept)
        if moment.turn is Turn.BACKWARD and edge.trained:
            readers = enumerate(life.readers)
            now = [use for use, r in readers if r.at == moment.at and r.flows and not (r.same_storage or r.gone)]
            self.held(number, now, np.broadcast_to(count * back, stays.shape), "gradients")
            if life.made == moment.at and not life.view and any(r.flows for r in life.readers):
                self.own(edge, count * own)

    def gradient(self, number: int, edge: Edge, life: Life, count: int, moment: Moment) -> None:
        """In the layouts in which readers return it, until all of it comes to that of the tensor."""
        sizes = self.sizes[number]
        own, back, stays = sizes.own, sizes.back, sizes.stays
        every = np.broadcast_to(back[None, :], stays.shape)
        later = [use for use, r in enumerate(life.readers) if r.at > moment.at]
        if life.made < moment.at:
            self.held(number, later, count * every, "gradients")
            if moment.turn is Turn.BACKWARD:  # beside what is there, to be added to it, if that is not gone
                kept = life.kept or life.returned or any(r.saves and r.at < moment.at for r in life.readers)
                now = [use for use, r in enumerate(life.readers) if r.at == moment.at and (kept or not r.gone)]
                self.held(number, now, count * every, "gradients")
        elif moment.turn is Turn.ARRIVAL:
            arrived = np.where(stays & (back[None, :] == own[:, None]), every, every + own[:, None])
            self.held(number, later, count * arrived, "pairs")
        elif not life.view:
            self.own(edge, count * own)
