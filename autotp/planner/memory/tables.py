"""Tables of the bytes that operators, parameters and tensors hold at one moment of a step, by strategy and layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotp.costs.prices import Prices
from autotp.costs.step import Moment, Turn
from autotp.planner.choices import Edge
from autotp.planner.memory.lives import Life
from passes.layouts.codes import local_elements

__all__ = ["Held", "Ledger", "Sizes", "Tables"]

#: A tensor, the uses that hold it, and which of them share a storage: those that want the same layout ("layouts"), that
#: return its gradient in the same layout ("gradients"), or both ("pairs").
Held = tuple[int, tuple[int, ...], str]

#: Bytes by node and strategy, and by `Held` and (have, want).
Tables = tuple[dict[int, np.ndarray], dict[Held, np.ndarray]]

_PANELS = 4  # about one part in so many of an operand that is gathered in panels is live at once


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Bytes of a tensor on one device.

    Attributes:
        own: in each layout in which it is made or rests, ``[H]``.
        wanted: in each wanted layout, ``[W]``.
        back: of the gradient that a reader returns, ``[W]``.
        stays: whether nothing has to be moved or cast, ``[H, W]``.
    """

    own: np.ndarray
    wanted: np.ndarray
    back: np.ndarray
    stays: np.ndarray

    @classmethod
    def of(cls, edge: Edge, mesh: tuple[int, ...]) -> Sizes:
        """The sizes of an edge's tensors on a mesh."""
        shape, cast = tuple(edge.value.shape), edge.cast
        return cls(
            own=local_elements(shape, edge.rows, mesh) * cast.rests.itemsize,
            wanted=local_elements(shape, edge.wants, mesh) * cast.used.itemsize,
            back=local_elements(shape, edge.gradients, mesh) * (cast.used.itemsize + cast.back * cast.reduced.itemsize),
            stays=edge.stays,
        )

    @classmethod
    def shared(cls, edge: Edge, mesh: tuple[int, ...]) -> Sizes:
        """The same sizes if each device of a mesh has just its share of each tensor, whatever the layout."""
        found, share, cast = cls.of(edge, mesh), edge.value.numel() / math.prod(mesh), edge.cast
        return replace(
            found,
            own=np.full(len(found.own), share * cast.rests.itemsize),
            wanted=np.full(len(found.wanted), share * cast.used.itemsize),
            back=np.full(len(found.back), share * (cast.used.itemsize + cast.back * cast.reduced.itemsize)),
        )


def _begun(moment: Moment) -> int:
    """The last operator, in the order of the backward pass, whose turn in it has begun."""
    return moment.at + (moment.turn is not Turn.BACKWARD)


class Ledger:
    """Fills the tables of one moment."""

    def __init__(self, sizes: Sequence[Sizes], prices: Prices, needs: Sequence[int], again: Mapping[int, int]) -> None:
        self.prices, self.needs, self.again, self.sizes = prices, needs, again, sizes
        self.nodes: dict[int, np.ndarray] = {}
        self.tensors: dict[Held, np.ndarray] = {}

    def own(self, edge: Edge, sizes: np.ndarray, recomputed: bool = True) -> None:
        """Adds bytes of a tensor in its own layout; without ``recomputed``, only in choices that do not recompute it."""
        mine = sizes[edge.have]
        if not recomputed and edge.needs is not None:
            mine = np.where(edge.needs.have < len(sizes), mine, 0.0)
        self.nodes[edge.producer] = self.nodes.get(edge.producer, 0.0) + mine

    def held(self, number: int, uses: Sequence[int], table: np.ndarray, once: str = "layouts") -> None:
        """Adds bytes of a tensor in the layouts that ``uses`` want, once for those that share a storage (see `Held`)."""
        if uses:
            key = number, tuple(uses), once
            self.tensors[key] = self.tensors.get(key, 0.0) + table

    def waiting(self, number: int, edge: Edge, uses: Sequence[int], count: int) -> None:
        """Adds the gradient that one of ``uses`` has returned: it waits, alone or in a sum, for those of other uses.

        One that is scattered along some axes, and then gathered along others, waits in between.
        """
        if not uses:
            return
        sizes, made, wanted = self.sizes[number], edge.rows[:, None, :] >= 0, edge.gradients[None, :, :] >= 0
        found = np.minimum(sizes.back[None, :], sizes.own[:, None])
        scattered, gathered = made & ~wanted, wanted & ~made
        between = scattered.any(axis=-1) & gathered.any(axis=-1)
        if between.any():
            split = np.where(scattered, self.prices.mesh, 1).prod(axis=-1)
            found = np.where(between, np.minimum(found, sizes.back[None, :] / split), found)
        self.held(number, uses[:1], count * found, "pairs")

    def parameter(
        self, number: int, edge: Edge, life: Life, count: int, moment: Moment, panelled: bool, surely: bool
    ) -> None:
        """Adds a parameter's state, its gathered copies, and its gradient, which is held from its last reader's turn on."""
        sizes = self.sizes[number]
        own, wanted, stays = sizes.own, sizes.wanted, sizes.stays
        trained = edge.trained and self.prices.train
        state = self.prices.states(own / edge.cast.rests.itemsize, edge.cast.rests.itemsize)
        forward = moment.turn is Turn.FORWARD
        arrived = trained and not forward and moment.at < max(reader.at for reader in life.readers)
        if arrived and surely and moment.at >= min(reader.at for reader in life.readers):  # or not summed yet
            arrived = False
            self.waiting(number, edge, [use for use, r in enumerate(life.readers) if r.at > moment.at], count)
        self.own(edge, count * (state - (own if self.prices.train else 0.0) + (own if arrived else 0.0)))
        moved = np.where(stays, 0.0, wanted[None, :] / (_PANELS if panelled else 1))
        kept = [use for use, r in enumerate(life.readers) if r.saves and r.at < moment.at]
        self.held(number, kept, count * np.where(edge.regathered[:, None], 0.0, moved))
        now = [use for use, reader in enumerate(life.readers) if reader.at == moment.at]
        if number in self.again and not forward and not panelled:  # gathered to recompute a reader, held for its gradient
            readers = enumerate(life.readers)
            early = [use for use, r in readers if r.gradient and r.at < moment.at and _begun(moment) <= r.until]
            self.held(self.again[number], early, count * np.where(edge.regathered[:, None], moved, 0.0))
        if forward and not surely:
            begun = any(reader.at <= moment.at for reader in life.readers)
            later = [use for use, reader in enumerate(life.readers) if reader.at >= moment.at]
            self.held(number, later if begun else [], count * moved)
        elif moment.turn is Turn.BACKWARD:
            if trained and surely:  # a product's weight may be gone when its gradient comes, or is counted above
                now = [use for use in now if not life.readers[use].additive]
                there = np.where(edge.regathered[:, None] | (not kept), moved, 0.0)
                beside = len(now) == 1 and life.readers[now[0]].gradient and not (life.readers[now[0]].gone or panelled)
                self.held(number, now, count * (there + sizes.back if beside else np.maximum(there, sizes.back)), "pairs")
            else:
                self.held(number, now, count * (moved + sizes.back if trained else moved), "pairs")

    def activation(self, number: int, edge: Edge, life: Life, count: int, moment: Moment) -> None:
        """Adds an activation, its copies in other layouts, and its gradient."""
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
        whole = there or (life.kept and not life.again)
        back = not forward and at <= life.until  # it is recomputed by now
        if whole and not given and not life.view:
            self.own(edge, count * own, recomputed=there or back)
        moved = np.where(stays, 0.0, wanted[None, :])
        kept = moved if whole else np.where(edge.travels if life.brought else np.ones_like(stays), wanted, 0.0)
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
            else:  # kept once for all uses
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
        if life.again:
            self.restored(number, edge, life, count, moment)
        if not forward and edge.trained and not given:
            self.gradient(number, edge, life, count, moment)

    def least(self, number: int, edge: Edge, life: Life, count: int, moment: Moment) -> None:
        """Adds a lower bound for a tensor, whatever other names its storage has, and whenever it is recomputed."""
        sizes = self.sizes[number]
        own, wanted, back, stays = sizes.own, sizes.wanted, sizes.back, sizes.stays
        if life.made < 0:
            self.own(edge, count * own)
            saved = [use for use, r in enumerate(life.readers) if r.saves and r.gradient and r.at <= moment.at]
            self.held(number, saved, count * np.where(stays, 0.0, wanted[None, :]))
        if not 0 <= life.made <= moment.at:
            return
        kept = np.where(stays, 0.0, wanted[None, :])
        # A result that its own gradient reads stays from the first gradient that reads it on.
        now = _begun(moment)
        restored = moment.turn is not Turn.FORWARD and any(r.saves and r.gradient and r.at >= now for r in life.readers)
        if life.returned and moment.turn is not Turn.FORWARD:
            if not life.view and moment.at >= min((r.at for r in life.readers if r.saves), default=0):
                self.own(edge, count * own)
            if edge.trained and life.made < moment.at:
                ends = [use for use, r in enumerate(life.readers) if r.ends]
                self.held(number, ends, np.broadcast_to(count * back, stays.shape), "gradients")
        elif life.again:
            kept = np.where(edge.travels, wanted, 0.0)
            self.restored(number, edge, life, count, moment)
        elif life.alone:
            if life.kept and not life.view:
                self.own(edge, count * own, recomputed=restored)
            else:
                kept = np.where(stays, life.shown * wanted[None, :], wanted[None, :])
        kept = count * kept
        # A tensor that is kept to recompute a reader may be gone once the backward pass of the reader's block has begun.
        saved = [
            use
            for use, r in enumerate(life.readers)
            if r.saves
            and not r.panelled
            and r.at <= moment.at
            and (r.gradient or (r.block >= 0 and (moment.turn is Turn.FORWARD or moment.at > r.block)))
        ]
        if edge.needs is not None:
            recomputed = [use for use in saved if life.readers[use].gradient and life.readers[use].at == now]
            recomputed += [
                len(life.readers) + use
                for use in saved
                if life.readers[use].gradient and life.readers[use].at < moment.at and now <= life.readers[use].until
            ]
            recomputed = recomputed if moment.turn is not Turn.FORWARD else []
            self.held(self.needs[number], recomputed, np.concatenate([np.zeros_like(kept), kept]))
            kept = np.concatenate([kept, np.zeros_like(kept)])
        self.held(self.needs[number], saved, kept)
        if moment.turn is not Turn.FORWARD and edge.trained and life.made < moment.at and not life.returned:
            later = [use for use, r in enumerate(life.readers) if r.at > moment.at and r.flows and not r.same_storage]
            self.waiting(number, edge, later, count)
        if moment.turn is Turn.BACKWARD and edge.trained:
            come = [use for use, r in enumerate(life.readers) if r.at == now and r.flows]
            come = [use for use in come if not (life.readers[use].same_storage or life.readers[use].additive)]
            gone = [use for use in come if life.readers[use].gone]
            every = np.broadcast_to(count * back, stays.shape)
            self.held(number, [use for use in come if use not in gone], every, "gradients")
            if len(come) == 1 and life.alone and life.kept and not life.view:  # its own gradient still reads it
                self.held(number, gone, np.where(stays, every, 0.0), "pairs")
            if life.made == moment.at and not life.view and any(r.flows for r in life.readers):
                self.own(edge, count * own)

    def restored(self, number: int, edge: Edge, life: Life, count: int, moment: Moment) -> None:
        """Adds what the backward pass restores of a tensor that is recomputed in any case, while gradients read it."""
        sizes, now = self.sizes[number], _begun(moment)
        if moment.turn is Turn.FORWARD or not life.alone:
            return
        own = life.kept and not life.view
        read = not life.brought and any(r.gradient and r.at >= now for r in life.readers)
        if own and (read or life.made == now):
            self.own(edge, count * sizes.own)
        table = np.where(sizes.stays, 0.0 if own else life.shown * sizes.wanted, sizes.wanted)
        uses = [use for use, r in enumerate(life.readers) if r.gradient and r.at == now and not r.panelled]
        self.held(number, uses, count * np.where(edge.travels & life.brought, 0.0, table))

    def gradient(self, number: int, edge: Edge, life: Life, count: int, moment: Moment) -> None:
        """Adds an activation's gradient: in the layouts in which readers return it, then, complete, in the tensor's own."""
        sizes = self.sizes[number]
        own, back, stays = sizes.own, sizes.back, sizes.stays
        every = np.broadcast_to(back[None, :], stays.shape)
        later = [use for use, r in enumerate(life.readers) if r.at > moment.at]
        if life.made < moment.at:
            self.held(number, later, count * every, "gradients")
            if moment.turn is Turn.BACKWARD:  # the new part, before it is added, unless the tensor is gone then
                kept = life.kept or life.returned or any(r.saves and r.at < moment.at for r in life.readers)
                now = [use for use, r in enumerate(life.readers) if r.at == moment.at and (kept or not r.gone)]
                self.held(number, now, count * every, "gradients")
        elif moment.turn is Turn.ARRIVAL:
            arrived = np.where(stays & (back[None, :] == own[:, None]), every, every + own[:, None])
            self.held(number, later, count * arrived, "pairs")
        elif not life.view:
            self.own(edge, count * own)
