"""Runs cases until a deadline, counts their outcomes, and writes shrunk defects as tests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.generate import generate
from benchmarks.fuzz.plans import decided
from benchmarks.fuzz.processes import Job, alone, prepared, run_processes
from benchmarks.fuzz.run import Outcome, run
from benchmarks.fuzz.shrink import shrink
from benchmarks.fuzz.tally import Tally
from benchmarks.fuzz.written import as_test

__all__ = ["case_of", "fuzz", "fuzz_processes", "shrunk"]

_OF_ONE_KIND = 2
_BATCH = 40
_LAUNCHES = 30


def case_of(seed: int, number: int) -> Case:
    """Case ``number`` of ``seed``; half of the cases have random strategies."""
    case, rng = generate(seed, number), random.Random(f"{seed}/{number}/strategies")
    return decided(case, rng) if rng.random() < 0.5 else case


@dataclass
class _Campaign:
    seed: int
    minutes: float
    tries: int
    folder: Path | None
    run: Callable[[Case], Outcome] = run
    processes: bool = False
    tally: Tally = field(default_factory=Tally)
    tests: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    reported: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return time.monotonic() - self.started > 60 * self.minutes

    def add(self, number: int, case: Case, outcome: Outcome) -> None:
        self.tally.add(case, outcome)
        if outcome.defect:
            self.show(number, case, outcome)
        if time.monotonic() - self.reported > 60:
            self.reported = time.monotonic()
            print(f"{(self.reported - self.started) / 60:.0f} min: {self.tally.line()}", flush=True)

    def show(self, number: int, case: Case, outcome: Outcome) -> None:
        key = f"{outcome.kind}: {outcome.reason}"
        print(f"case {number} of seed {self.seed}: {key}", flush=True)
        if sum(k.startswith(key) for k in self.tests) >= _OF_ONE_KIND:
            return
        name = f"seed_{self.seed}_case_{number}"
        lone = self.processes and not run(case).defect  # shrinking is faster in lockstep, if the defect also occurs there
        text = shrunk(case, outcome, name, self.run if lone else run, _LAUNCHES if lone else self.tries, processes=lone)
        self.tests[f"{key} ({number})"] = text
        print(text, flush=True)
        if self.folder is not None:
            (self.folder / f"{name}.py").write_text(text)


def shrunk(
    case: Case,
    outcome: Outcome,
    name: str,
    rerun: Callable[[Case], Outcome] = run,
    tries: int = 300,
    *,
    processes: bool = False,
) -> str:
    """The source of a test of the smallest case with the same outcome."""
    kind = outcome.reason if outcome.kind == "crash" else ""

    def reproduces(simpler: Case) -> bool:
        other = rerun(simpler)
        return other.kind == outcome.kind and (not kind or other.reason == kind)

    return as_test(shrink(case, reproduces, tries), name, f"{outcome.kind}: {outcome.reason}", processes=processes)


def fuzz(
    seed: int, minutes: float, first: int = 0, last: int | None = None, *, tries: int = 300, folder: Path | None = None
) -> tuple[Tally, dict[str, str]]:
    """Runs cases in lockstep until the deadline or the last case.

    Returns the counts, and kind of defect (with the number of the case) -> source of its test.
    """
    campaign, number = _Campaign(seed, minutes, tries, folder), first
    while not campaign.over and (last is None or number <= last):
        case = case_of(seed, number)
        campaign.add(number, case, run(case))
        number += 1
    return campaign.tally, campaign.tests


def fuzz_processes(
    seed: int, minutes: float, first: int = 0, last: int | None = None, *, tries: int = 300, folder: Path | None = None
) -> tuple[Tally, dict[str, str]]:
    """Like `fuzz`, but in processes, and only for cases of two to four devices."""
    campaign, number = _Campaign(seed, minutes, tries, folder, alone, processes=True), first
    waiting: dict[int, list[Job]] = {2: [], 3: [], 4: []}
    ended = False
    while not ended:
        case = case_of(seed, number)
        if case.options.devices in waiting:
            job = prepared(number, case)
            if isinstance(job, Outcome):
                campaign.add(number, case, job)
            else:
                waiting[case.options.devices].append(job)
        number += 1
        ended = campaign.over or (last is not None and number > last)
        for devices, jobs in waiting.items():
            if len(jobs) >= _BATCH or (ended and jobs):
                run_processes(jobs, devices, lambda job, outcome: campaign.add(job.number, job.case, outcome))
                waiting[devices] = []
    return campaign.tally, campaign.tests
