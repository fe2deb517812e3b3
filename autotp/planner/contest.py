"""The search for the fastest candidate, regardless of memory.

A candidate is a mesh, the roles that a family gives its axes, and the panels of products. First, every mesh gets a share of
the time. The cost of the best choice so far is the cutoff for all later candidates. Then, open candidates are solved by
rising bound until no bound is below the best plan's cost, which proves it optimal. If memory is short, the plan is searched
elsewhere (`autotp.planner.squeeze`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from autotp.costs.floor import shared_seconds
from autotp.costs.model import Model
from autotp.costs.step import Moment
from autotp.errors import BatchError
from autotp.planner.assemble import EVEN, Assembled
from autotp.planner.candidates import Candidate, Candidates, check_batch
from autotp.planner.choices import Choice
from autotp.planner.describe import Found
from autotp.planner.ilp import (
    CLOSEST,
    NEVER,
    Deadline,
    Expired,
    Infeasible,
    Problem,
    Solution,
    least,
    solve,
)
from autotp.planner.memory.least_memory import Least, Smallest, smallest
from autotp.planner.memory.moments import Moments
from costmodel import overlap
from costmodel.overlap import Weights

__all__ = ["Contest"]

T = TypeVar("T")
_log = logging.getLogger("autotp.plan")
_LOOK = 1 / 8  # share of the remaining time, at least, for the first solution of one of several meshes
_NEAR = 0.8  # share of ``room``; below it, the sum over tensors, which is free and may be too low, replaces a footprint
_AXES = 2  # meshes with more axes have many
_SCALES = (0.7, 1.0)  # factors of the prices that are best on one mesh, for a bound that holds on all meshes
_CLOSE = 1e-4  # relative to the lower bound on memory; a plan as close to it is not improved


@dataclass(frozen=True, slots=True)
class Open:
    """A candidate that is not settled, with a proven lower bound on its cost, in seconds."""

    bound: float
    candidate: Candidate


@dataclass(slots=True)
class Contest:
    """A search for the best plan of a model over meshes, and its state.

    Attributes:
        candidates: the integer programs.
        allowed: the memory limit of a step on each device, in bytes.
        deadline: when the search ends with the best plan so far.
        weights: the weights of seconds, by what may hide them; costs and bounds are then weighted sums.
        limit: the first cutoff, in seconds: only cheaper choices are of interest.
        best: the cheapest choice so far.
        indivisible: the error of a mesh that does not divide the batch.
        assembling, solving: seconds spent on building integer programs, and on solving them.
        open: candidates that are not settled.
        loosened: candidates that may reduce-scatter although their family only all-reduces (see `ask`).
        leasts, floors: caches by meshes: the plan with the least memory, and a lower bound on the memory of all plans, in
            bytes; they hold for all limits and weights.
        short: whether memory may have ruled out a faster choice, here or in a contest that this one was made from.
    """

    candidates: Candidates
    allowed: float
    deadline: Deadline
    weights: Weights = EVEN
    limit: float = math.inf
    best: Found | None = None
    indivisible: BatchError | None = None
    assembling: float = 0.0
    solving: float = 0.0
    open: list[Open] = field(default_factory=list)
    loosened: set[Candidate] = field(default_factory=set)
    leasts: dict[tuple[tuple[int, ...], ...], Least | None] = field(default_factory=dict)
    floors: dict[tuple[tuple[int, ...], ...], float] = field(default_factory=dict)
    short: bool = False

    @property
    def cutoff(self) -> float:
        """The cost of the best choice so far, in seconds, or the limit if there is none."""
        return self.limit if self.best is None else self.best.solution.seconds

    @property
    def bound(self) -> float:
        """A proven lower bound on the cost of all plans, in seconds."""
        return min((entry.bound for entry in self.open), default=self.cutoff)

    def anew(self, weights: Weights | None = None) -> Contest:
        """A new contest, with other weights if they are given."""
        fresh = replace(self, best=None, indivisible=None, open=[], loosened=set())
        return fresh if weights is None else replace(fresh, weights=weights)

    def of(self, model: Model) -> Contest:
        """A new contest for a model with other constraints or other recomputation."""
        return self.posing(replace(self.candidates, model=model, structures={}))

    def within(self, strategy: str) -> Contest:
        """A new contest for a family of strategies."""
        options = replace(self.candidates.options, strategy=strategy)
        return self.posing(replace(self.candidates, options=options, structures={}))

    def posing(self, candidates: Candidates) -> Contest:
        """A new contest over other integer programs."""
        return replace(self.anew(), candidates=candidates, leasts={}, floors={})

    def sides(self, candidate: Candidate, chunks: int) -> list[list[Problem]]:
        """For each pass of a step, one program per side, whose cost is the seconds of that side (`costmodel.overlap`)."""
        options, depth = self.candidates.options, self.candidates.model.depth
        if not options.hides:
            return [[self.anew().assemble(candidate).problem]]
        passes, sides = 2 if options.accumulate == 1 else 3, 1 + len(self.candidates.topology.levels)
        found = []
        for one in range(passes):
            weights = []
            for side in range(sides):
                shares = [np.eye(sides)[side] * (other == one) for other in range(passes)]
                shares.append(np.full(1, float(one == 0)))  # the optimizer's step, in all sides of the first pass
                weights.append(overlap.weights(shares, depth, options.accumulate, chunks))
            found.append([self.anew(weight).assemble(candidate).problem for weight in weights])
        return found

    def admits(self, meshes: Sequence[tuple[int, ...]]) -> bool:
        """Whether a choice on some mesh fits; True if the deadline passes before that is known."""
        with suppress(Expired):
            return self.some_fits(meshes)
        return True

    def run(self, meshes: Sequence[tuple[int, ...]], room: float = math.inf) -> None:
        """Solves every mesh within a share of the time, then settles open candidates by rising bound, up to the cutoff.

        Meshes with few axes come first: their programs are small, and their best choice is a cutoff for larger ones. Of
        these, balanced sizes come first: they have good choices.

        Args:
            meshes: to search.
            room: bytes. If the best choice takes more after the first mesh with many axes, memory is short, and the best
                choice regardless of memory matters little: the other meshes with many axes are left open.

        Raises:
            Expired: the deadline passed before any choice was found.
        """
        pairs = sorted(self.candidates.restrictions(meshes), key=lambda pair: (len(pair[0]), max(pair[0])))
        share, many = max(_LOOK, 1 / max(1, len(pairs))), 0
        for mesh, restriction in pairs:
            candidate = Candidate(mesh, restriction, self.candidates.panels[0])
            if many == 1 and self.best is not None and self.best.solution.memory > _NEAR * room:
                self.short |= self.best.memory > room
            many += len(mesh) > _AXES
            if self.short and len(mesh) > _AXES:
                self.open.append(Open(0.0, candidate))
                continue
            try:
                self.deadline.check()
                self._settle(Open(0.0, candidate), self.deadline.part(share))
            except Expired:
                self.open.append(Open(0.0, candidate))
        late: list[Open] = []
        self.open.sort(key=lambda entry: entry.bound)
        looked, self.open = self.open, []
        for number, entry in enumerate(looked):
            if self.short or entry.bound >= self.cutoff * (1 - CLOSEST) or self.deadline.over:
                late += looked[number:]
                break
            try:
                self._settle(entry, self.deadline)
            except Expired:
                late.append(entry)
        self.open = [entry for entry in (*late, *self.open) if entry.bound < self.cutoff]
        if self.best is None and math.isinf(self.limit):
            self.deadline.check(self.bound)

    @staticmethod
    def key(meshes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """The key of meshes in the caches, independent of their order."""
        return tuple(sorted(meshes))

    def some_fits(self, meshes: Sequence[tuple[int, ...]]) -> bool:
        """Whether the plan with the least memory fits."""
        least = self.least(meshes, self.allowed)
        return least is not None and least.used <= self.allowed

    def _settle(self, entry: Open, deadline: Deadline) -> None:
        """Solves a candidate; it stays open if its optimum is not proven by the deadline."""
        candidate = entry.candidate
        try:
            assembled, found = self.ask(
                candidate, lambda a: solve(a.problem, deadline=deadline, cutoff=self.cutoff, trusted=True)
            )
        except BatchError as error:
            self.indivisible = error
            return
        if found is None:
            return
        if isinstance(found, Solution) and found.seconds < self.cutoff:
            self.best = self.candidates.found(candidate, assembled, found)
        if found.bound < self.cutoff:
            self.open.append(Open(max(entry.bound, found.bound), candidate))
        _log.debug(
            "mesh %s%s: at least %.4g s%s",
            "x".join(map(str, candidate.mesh)),
            f" {candidate.restriction.roles}" if candidate.restriction.roles else "",
            found.bound,
            f", {found.seconds:.4g} s found" if isinstance(found, Solution) else "",
        )

    def _in_order(self, meshes: Sequence[tuple[int, ...]]) -> list[Candidate]:
        """All candidates; those without panels, of which more is certain, come first."""
        return sorted(self.candidates.over(meshes), key=lambda one: one.panels != 1)

    def shared(self, meshes: Sequence[tuple[int, ...]]) -> float:
        """A tighter lower bound on the memory of all plans, in bytes: every device has just its share of every tensor."""
        key = self.key(meshes)
        for candidate in () if key in self.floors else self._in_order(meshes):
            with suppress(BatchError, Infeasible):
                assembled = self.assemble(candidate)
                prices = self.candidates.prices(candidate.mesh)
                moments = Moments(assembled, prices, False, self.deadline, shared=True)
                self.floors[key] = max(map(moments.least, moments.usual))
                break
        return self.floors.setdefault(key, 0.0)

    def shared_step(self, meshes: Sequence[tuple[int, ...]], worth: Mapping[Moment, float]) -> float:
        """A lower bound on the step time of plans that fit, in seconds: every device computes and holds just its share.

        Args:
            meshes: one of them determines the choices; the bound holds for all.
            worth: prices of bytes at some moments, in seconds per byte (`autotp.planner.squeeze`).
        """
        candidate = self._in_order(meshes)[0]
        assembled, prices = self.assemble(candidate), self.candidates.prices(candidate.mesh)
        moments = Moments(assembled, prices, False, self.deadline, shared=True)
        problem, nodes = assembled.problem, []
        for (_, choice, copies), node in zip(assembled.structure.nodes, problem.nodes, strict=True):
            seconds = np.zeros(len(node.cost))
            if isinstance(choice, Choice):
                ways = [run for run in (choice.run, choice.rerun) if run is not None]
                each = [shared_seconds(prices, choice.space.operator, choice.flop, run) for run in ways]
                seconds = prices.accumulate * copies * np.repeat(each, choice.count)
            nodes.append(replace(node, cost=seconds))
        free = [replace(each, cost=cost) for each, cost in zip(problem.tensors, moments.allowed, strict=True)]
        computing = replace(problem, nodes=tuple(nodes), tensors=tuple(free))
        found = 0.0
        for scale in _SCALES:
            weights = {moment: scale * price for moment, price in worth.items()}
            weighed = moments.program(weights, True, besides=computing)
            with suppress(Infeasible):  # another mesh may have a plan
                bound, _ = least(weighed, cutoff=math.inf, deadline=self.deadline)
                found = max(found, bound - sum(weights.values()) * self.allowed)
        return found

    def least(
        self, meshes: Sequence[tuple[int, ...]], enough: float = 0.0, tries: int | None = None, until: Deadline = NEVER
    ) -> Least | None:
        """The plan with the least memory on any mesh, or one that takes at most ``enough`` bytes; None if there is none.

        At most ``tries`` candidates are searched, and none after ``until`` once a plan is known.
        """
        if (key := self.key(meshes)) not in self.leasts:
            best, floor = None, self.shared(meshes)
            for candidate in self._in_order(meshes)[:tries]:
                if best is not None and until.over:
                    return best
                try:
                    found = self._least_of(candidate, math.inf if best is None else best.used, floor, enough, tries)
                except Expired:
                    if best is None:
                        raise
                    return best
                best = found if best is None or (found is not None and found.used < best.used) else best
                if best is not None and best.used <= max(floor * (1 + _CLOSE), enough):
                    break
            if best is not None and (tries is not None or floor * (1 + _CLOSE) < best.used <= enough):
                return best
            self.leasts[key] = best
        return self.leasts[key]

    def _least_of(
        self, candidate: Candidate, known: float, floor: float, enough: float, rounds: int | None
    ) -> Least | None:
        """The choice of a candidate with the least memory (`smallest`); None if there is none, or none below ``known``."""

        def ask(assembled: Assembled) -> tuple[Moments, Smallest | None]:
            problem = assembled.frugal.problem
            prices = self.candidates.prices(candidate.mesh)
            moments = Moments(assembled.frugal, prices, candidate.panels != 1, self.deadline)

            def held(choice: tuple[int, ...]) -> Mapping[Moment, float]:
                return self.candidates.found(candidate, assembled, choice).held

            return moments, smallest(problem, moments, held, self.deadline, known, floor, enough, rounds)

        try:
            assembled, found = self.ask(candidate, ask)
        except BatchError as error:
            self.indivisible = error
            return None
        if found is None or found[1] is None:
            return None
        return Least(candidate, assembled, found[0], found[1])

    def ask(self, candidate: Candidate, ask: Callable[[Assembled], T]) -> tuple[Assembled, T | None]:
        """A candidate's program, and what ``ask``, such as a solver, returns for it; None if the layouts admit no choice.

        In a family that only all-reduces, a partial sum may not reach its consumers; then reduce-scatters are allowed.
        """
        assembled = self.assemble(candidate)
        check_batch(assembled)
        begun = self.deadline.clock()
        try:
            return assembled, ask(assembled)
        except Infeasible:
            if assembled.structure.chosen.family.scatters or candidate in self.loosened:
                check_batch(assembled, admits=False)
                return assembled, None
        finally:
            self.solving += self.deadline.clock() - begun
        self.loosened.add(candidate)
        return self.ask(candidate, ask)

    def assemble(self, candidate: Candidate) -> Assembled:
        """A candidate's integer program."""
        begun = self.deadline.clock()
        scatters = candidate in self.loosened
        try:
            return self.candidates.assemble(candidate, self.deadline, weights=self.weights, scatters=scatters)
        finally:
            self.assembling += self.deadline.clock() - begun
