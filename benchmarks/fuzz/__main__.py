"""``python -m benchmarks.fuzz --minutes N [--seed S] [--case K] [--processes]``."""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from pathlib import Path

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.generate import generate
from benchmarks.fuzz.plans import decided
from benchmarks.fuzz.run import Outcome, run
from benchmarks.fuzz.shrink import shrink
from benchmarks.fuzz.tally import Tally
from benchmarks.fuzz.written import as_test
from passes.capture import CaptureError

__all__ = ["case_of", "fuzz"]


def case_of(seed: int, number: int) -> Case:
    """A case; half of them have strategies at random."""
    case, rng = generate(seed, number), random.Random(f"{seed}/{number}/strategies")
    if rng.random() < 0.5:
        try:
            return decided(case, rng)
        except CaptureError:
            pass
    return case


def fuzz(
    seed: int, minutes: float, first: int = 0, last: int | None = None, *, tries: int = 300, folder: Path | None = None
) -> tuple[Tally, dict[str, str]]:
    """Runs cases until the time or the numbers are over; what it found, as tests, by kind."""
    tally, found, number = Tally(), dict[str, str](), first
    end, told = time.monotonic() + 60 * minutes, time.monotonic()
    while time.monotonic() < end and (last is None or number <= last):
        case = case_of(seed, number)
        outcome = run(case)
        tally.add(case, outcome)
        if outcome.found:
            key = f"{outcome.kind}: {outcome.told}"
            print(f"case {number} of seed {seed}: {key}", flush=True)
            if sum(k.startswith(key) for k in found) < 2:
                found[f"{key} ({number})"] = text = shrunk(case, outcome, f"seed_{seed}_case_{number}", tries)
                print(text, flush=True)
                if folder is not None:
                    (folder / f"seed_{seed}_case_{number}.py").write_text(text)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"{(told - end) / 60 + minutes:.0f} min: {tally.line()}", flush=True)
        number += 1
    return tally, found


def shrunk(case: Case, outcome: Outcome, name: str, tries: int = 300) -> str:
    """The test of the smallest case that shows the same."""
    kind = outcome.told if outcome.kind == "crash" else ""

    def tells(simpler: Case) -> bool:
        again = run(simpler)
        return again.kind == outcome.kind and (not kind or again.told == kind)

    return as_test(shrink(case, tells, tries), name, f"{outcome.kind}: {outcome.told}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one alone")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--processes", action="store_true", help="run plans in processes, with gloo")
    parser.add_argument("--output", type=Path, help="folder for tests of what is found")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
    first, last = (given.first, None) if given.case is None else (given.case, given.case)
    if given.processes:
        from benchmarks.fuzz.processes import fuzz_processes

        tally, found = fuzz_processes(given.seed, given.minutes, first, last, folder=given.output)
    else:
        tally, found = fuzz(given.seed, given.minutes, first, last, folder=given.output)
    print(tally.report())
    print(f"{len(found)} findings shown" if found else "nothing found")
    return 1 if any(tally.kinds[kind] for kind in ("wrong", "crash")) else 0


if __name__ == "__main__":
    sys.exit(main())
