"""The integer programs that a plan is searched by: which there are, and how each is built and read."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autotp.costs.model import Model
from autotp.costs.prices import Prices
from autotp.errors import BatchError
from autotp.planner.assemble import EVEN, Assembled, assemble
from autotp.planner.choices import Choice
from autotp.planner.describe import Found
from autotp.planner.ilp import NEVER, Deadline, Hasty, Solution, solution_at
from autotp.planner.structure import Structure, structure
from autotp.plans.families import Restriction
from autotp.plans.options import Options
from costmodel import Topology
from costmodel.overlap import Weights
from passes.layouts.reshard_matrix import ReshardPricer

__all__ = ["Candidate", "Candidates", "candidate_meshes", "check_batch", "in_haste"]

_STEEP = 4  # prices of memory, each several times the last
_FINE = 5  # prices between one at which a choice does not fit, and one at which it does


@dataclass(frozen=True, slots=True)
class Candidate:
    """One integer program: sizes of the mesh axes, their roles, and panels of each product (None for the fastest)."""

    mesh: tuple[int, ...]
    restriction: Restriction
    panels: int | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The integer programs of a model.

    Attributes:
        model: analysed and folded.
        topology: of as many devices as the meshes have.
        options: what was asked for; where it leaves panels out, none are tried first, and then the fastest where memory is
            short.
        together: see ``Prices``.
        structures: what may be chosen, as far as somebody asked.
        pricers, meshes: how layouts are reached, by the number of axes, and prices by mesh, likewise.
    """

    model: Model
    topology: Topology
    options: Options
    together: float = 0.0
    structures: dict[tuple[Restriction, int], Structure] = field(default_factory=dict)
    pricers: defaultdict[int, ReshardPricer] = field(default_factory=lambda: defaultdict(ReshardPricer))
    meshes: dict[tuple[int, ...], Prices] = field(default_factory=dict)

    @property
    def panels(self) -> list[int | None]:
        """What to try for panels, in this order."""
        possible: list[int | None] = [1] if self.options.family.gathers == "once" else [1, None]
        return possible if self.options.panels is None else [self.options.panels]

    def restrictions(self, meshes: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], Restriction]]:
        """Every mesh with the roles of its axes that the family tries."""
        for mesh in meshes:
            for restriction in self.options.family.restrictions(len(mesh)):
                yield mesh, restriction

    def over(self, meshes: Sequence[tuple[int, ...]]) -> Iterator[Candidate]:
        """All of them."""
        for mesh, restriction in self.restrictions(meshes):
            for panels in self.panels:
                yield Candidate(mesh, restriction, panels)

    def assemble(
        self,
        candidate: Candidate,
        deadline: Deadline = NEVER,
        *,
        weights: Weights = EVEN,
        scatters: bool = False,
    ) -> Assembled:
        """A candidate's integer program.

        Args:
            candidate: which.
            deadline, weights: see `autotp.planner.assemble.assemble`.
            scatters: whether partial sums may be scattered though the family only all-reduces.
        """
        key = candidate.restriction, len(candidate.mesh)
        if key not in self.structures:
            self.structures[key] = structure(self.model, *key, self.pricers[len(candidate.mesh)], deadline)
        built = self.structures[key]
        if scatters:
            built = replace(built, chosen=replace(built.chosen, family=replace(built.chosen.family, scatters=True)))
        prices = self.prices(candidate.mesh)
        panelled = candidate.panels != 1
        return assemble(built, prices, panelled, weights=weights, deadline=deadline)

    def found(self, candidate: Candidate, assembled: Assembled, solution: Solution | tuple[int, ...]) -> Found:
        """A solution of a candidate, or one of its choices, with what it costs."""
        if not isinstance(solution, Solution):
            solution = solution_at(assembled.problem, solution, 0.0, "footprint")
        return Found(assembled, solution, self.prices(candidate.mesh), candidate.panels)

    def prices(self, mesh: tuple[int, ...]) -> Prices:
        """Prices on a mesh."""
        options = self.options
        if mesh not in self.meshes:
            self.meshes[mesh] = Prices(
                self.topology,
                mesh,
                train=options.trains,
                optimizer=options.optimizer,
                together=self.together,
                accumulate=options.accumulate,
            )
        return self.meshes[mesh]


def candidate_meshes(devices: int, axes: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """All ordered factorisations of ``devices`` into ``least`` to ``axes`` sizes above 1, fewest axes first.

    Where ``devices`` has fewer prime factors than ``least``, as many axes as it has.
    """
    if devices == 1:
        yield (1,)
        return
    divisors = [n for n in range(2, devices + 1) if devices % n == 0]
    by_count = [
        [sizes for sizes in itertools.product(divisors, repeat=count) if math.prod(sizes) == devices]
        for count in range(1, axes + 1)
    ]
    most = sum(1 for found in by_count if found)
    for found in by_count[min(least, most) - 1 :]:
        yield from found


def in_haste(
    candidates: Candidates,
    candidate: Candidate,
    allowed: float,
    deadline: Deadline,
    guess: float,
    finely: bool,
    assembled: Assembled,
) -> Found | None:
    """A choice that fits: the fastest, or the one that is it at a price of memory, which is in its solution.

    Args:
        candidates, candidate: of which.
        allowed: bytes on each device.
        deadline: after which one that fits is good enough.
        guess: seconds per byte that memory is worth elsewhere; 0 where nothing is known.
        finely: whether to look for a lower price at which a choice fits.
        assembled: the integer program, without a bound.

    Raises:
        Infeasible: the layouts admit no choice.
    """
    choices = Hasty(assembled.problem)

    def at(price: float) -> Found:
        found = candidates.found(candidate, assembled, choices.at(price))
        return replace(found, solution=replace(found.solution, price=price))

    found = at(guess)
    price = 8 * guess or found.solution.seconds / max(found.memory, 1.0)
    for _ in range(_STEEP):
        if found.memory <= allowed:
            break
        found, price = at(price), 8 * price
    if found.memory > allowed:
        return None
    best, low, high = found, found.solution.price / 8, found.solution.price
    for _ in range(_FINE if high and finely else 0):
        if deadline.over:
            break
        found = at((low * high) ** 0.5)
        if found.memory > allowed:
            low = found.solution.price
            continue
        high = found.solution.price
        best = found if found.solution.seconds < best.solution.seconds else best
    return best


def check_batch(assembled: Assembled, admits: bool = True) -> None:
    """A family whose axes split the batch needs a batch that they divide.

    Args:
        assembled: the integer program.
        admits: whether layouts admit a choice, as far as is known; then one operator that the axes divide will do.

    Raises:
        BatchError: they do not.
    """
    built = assembled.structure
    chosen, mesh, model = built.chosen, assembled.mesh, built.model
    if chosen.roles is None:
        return
    axes = [a for a, role in enumerate(chosen.roles) if role == "b" and mesh[a] > 1]
    for (_, choice, _), node in zip(built.nodes, assembled.problem.nodes, strict=True) if admits else ():
        if isinstance(choice, Choice):
            batch = frozenset(f.name for f in choice.space.operator.factors.values() if f.role == "batch")
            if (choice.twice(np.asarray(choice.space.axes_of(batch)[:, axes].all(axis=-1))) & np.isfinite(node.cost)).any():
                return
    ways = math.prod(mesh[a] for a in axes)
    shapes = {
        n.name: tuple(n.meta["val"].shape)
        for n in model.captured.graph_module.graph.nodes
        if n.op == "placeholder" and n.name in model.captured.inputs
    }
    if any(shape and shape[0] % ways for shape in shapes.values()):
        raise BatchError(
            f"strategy {chosen.family.name!r} splits the batch {ways} ways on mesh {mesh}, but dim 0 of the example inputs "
            f"{shapes} is not divisible by {ways}; choose a batch that is a multiple of {ways}, or another mesh or strategy"
        )
