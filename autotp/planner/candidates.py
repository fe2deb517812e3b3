"""The integer programs of the search: lists them, builds them, and reads their solutions."""

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

_STEEP = 4  # the number of prices of memory to try, each a multiple of the one before
_FINE = 5  # the number of prices to try between one at which a choice does not fit and one at which it does


@dataclass(frozen=True, slots=True)
class Candidate:
    """One integer program: sizes of the mesh axes, their roles, and the panels of each product (None for the fastest)."""

    mesh: tuple[int, ...]
    restriction: Restriction
    panels: int | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The integer programs of a model.

    Attributes:
        model: analysed and folded.
        topology: with as many devices as the meshes.
        options: those of the job. If ``panels`` is left out, plans without panels are tried first, then, where memory is
            short, the fastest numbers of panels.
        together: see ``Prices``.
        structures: cache of structures, by restriction and number of axes.
        pricers, meshes: caches of reshard pricers, by number of axes, and of prices, by mesh.
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
        """The numbers of panels to try, in this order; None stands for the fastest."""
        possible: list[int | None] = [1] if self.options.family.gathers == "once" else [1, None]
        return possible if self.options.panels is None else [self.options.panels]

    def restrictions(self, meshes: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], Restriction]]:
        """Every mesh with every assignment of roles to its axes that the family tries."""
        for mesh in meshes:
            for restriction in self.options.family.restrictions(len(mesh)):
                yield mesh, restriction

    def over(self, meshes: Sequence[tuple[int, ...]]) -> Iterator[Candidate]:
        """All candidates on these meshes."""
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
            candidate: the candidate.
            deadline, weights: see `autotp.planner.assemble.assemble`.
            scatters: whether partial sums may be reduce-scattered even if the family only all-reduces.
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
        """A solution of a candidate, or one of its choices, as a `Found`, which computes its costs."""
        if not isinstance(solution, Solution):
            solution = solution_at(assembled.problem, solution, 0.0, "footprint")
        return Found(assembled, solution, self.prices(candidate.mesh), candidate.panels)

    def prices(self, mesh: tuple[int, ...]) -> Prices:
        """The prices on a mesh, cached."""
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

    If ``devices`` has fewer prime factors than ``least``, the fewest axes are as many as it has prime factors.
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
    """Returns a choice that fits, found by a heuristic: the fastest at a price of memory, which its solution states.

    None if no choice fits at any of the prices tried.

    Args:
        candidates, candidate: the candidate to search, and the programs that it belongs to.
        allowed: memory of each device, in bytes.
        deadline: after which any choice that fits is returned.
        guess: the first price, in seconds per byte, such as one that was found on another mesh; 0 if none is known.
        finely: whether to search for a lower price at which a choice fits.
        assembled: the integer program, without a memory limit.

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
    """Checks that the mesh axes which have to split the batch, in a family with roles, divide it.

    Args:
        assembled: the integer program.
        admits: whether the layouts may admit a choice; then one operator whose batch the axes divide suffices.

    Raises:
        BatchError: the axes do not divide the batch.
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
