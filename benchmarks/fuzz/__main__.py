"""``python -m benchmarks.fuzz --minutes N [--seed S] [--case K] [--processes | --parsers]``."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

from benchmarks.fuzz.campaign import fuzz, fuzz_processes
from benchmarks.fuzz.parsers import fuzz_parsers

__all__ = ["main"]


def main() -> int:
    """Runs the command; returns 1 if it found wrong results or crashes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one alone")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--processes", action="store_true", help="run plans in processes, with gloo")
    parser.add_argument("--parsers", action="store_true", help="damage files and command lines instead")
    parser.add_argument("--output", type=Path, help="folder for tests of what is found")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("autotp").setLevel(logging.ERROR)  # hide the warnings of every plan about replicated operators
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
    first, last = (given.first, None) if given.case is None else (given.case, given.case)
    way = fuzz_parsers if given.parsers else fuzz_processes if given.processes else fuzz
    tally, found = way(given.seed, given.minutes, first, last, folder=given.output)
    print(tally.report())
    print(f"{len(found)} findings shown" if found else "nothing found")
    return 1 if any(tally.kinds[kind] for kind in ("wrong", "crash")) else 0


if __name__ == "__main__":
    sys.exit(main())
