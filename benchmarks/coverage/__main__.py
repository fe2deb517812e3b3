"""Runs every architecture and writes docs/coverage.md: ``python -m benchmarks.coverage --write``.

Results are kept in ``build/coverage.jsonl``, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import machine, table, write

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "coverage.jsonl"


def main() -> None:
    """Runs the architectures that have no result yet, many per process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--only", default="", help="architectures whose names contain this; their results are made anew")
    parser.add_argument("--fresh", action="store_true", help="make all results anew")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for an architecture")
    parser.add_argument("--write", action="store_true", help="write docs/coverage.md")
    parser.add_argument("--worker", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        _work(given.worker)
        return
    names, found = _names(), _kept()
    wanted = [n for n in names if given.only in n and (given.fresh or given.only or n not in found)]
    _run(wanted, given.limit)
    found = _kept()
    rows = [found[name] for name in names if name in found and given.only in name]
    text = page(rows)
    sys.stdout.write(text)
    if given.write:
        every = [found[name] for name in names if name in found]
        write("coverage.md", page(every, len(names) - len(every)))
    bad = [row["name"] for row in rows if row["verdict"] in ("differs", "fails", "too long")]
    sys.exit(f"not exact: {', '.join(bad)}" if bad else 0)


def _names() -> list[str]:
    from benchmarks.coverage.architectures import ARCHITECTURES

    return list(ARCHITECTURES)


def _kept() -> dict[str, dict[str, Any]]:
    """Name of the architecture -> its latest result."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def _run(names: Sequence[str], limit: float) -> None:
    """Runs architectures in a child process; after one that takes too long or ends the process, a new one continues."""
    KEPT.parent.mkdir(exist_ok=True)
    left = list(names)
    while left:
        before = len(KEPT.read_text().splitlines()) if KEPT.exists() else 0
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.coverage", "--worker", *left], cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        seen, since = 0, time.monotonic()
        while process.poll() is None and time.monotonic() - since < limit:
            time.sleep(0.5)
            if (now := _lines() - before) != seen:
                seen, since = now, time.monotonic()
                print(f"{len(names) - len(left) + seen}/{len(names)}", file=sys.stderr, flush=True)
        hung = process.poll() is None
        process.kill()
        said = process.communicate()[1].strip().splitlines()
        left = left[_lines() - before :]
        if left and (hung or process.returncode):
            what = ("too long", f"more than {limit:.0f} s") if hung else ("fails", said[-1][:300] if said else "")
            _keep({"name": left[0], "verdict": what[0], "detail": what[1], "error": 0.0, "without": {}, "share": 0.0,
                   "seconds": {}, "operators": 0})  # fmt: skip
            left = left[1:]


def _lines() -> int:
    return len(KEPT.read_text().splitlines()) if KEPT.exists() else 0


def _keep(row: dict[str, Any]) -> None:
    with KEPT.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _work(names: Sequence[str]) -> None:
    from benchmarks.coverage.check import check

    logging.disable(logging.WARNING)
    for name in names:
        _keep(check(name).to_dict())


_MODELS = ("exact", "differs", "refused", "fails", "too long")


def page(rows: Sequence[dict[str, Any]], left: int = 0) -> str:
    """The text of the page for these results; ``left`` architectures have not been run yet."""
    models = [row for row in rows if row["verdict"] in _MODELS]
    exact = [row for row in models if row["verdict"] == "exact"]
    shared = [row for row in exact if row["share"] >= 0.95]
    slow = [row["name"] for row in models if max(row["seconds"].values(), default=0.0) > 10]
    without = Counter(target for row in exact for target in row["without"])
    lines = [
        [
            row["name"],
            f"{row['verdict']}, {row['error']:.0e}" if row["verdict"] in ("exact", "differs") else row["verdict"],
            f"{row['share']:.0%}" if row["verdict"] == "exact" else "",
            row["operators"] or "",
            ", ".join(f"`{t.removeprefix('aten.').removesuffix('.default')}` {n}" for t, n in row["without"].items())
            or row["detail"].replace("|", "\\|")[:140],
            " and ".join(f"{seconds:.1f}" for seconds in row["seconds"].values()),
        ]
        for row in rows
    ]
    missing = ", ".join(f"`{t.removeprefix('aten.').removesuffix('.default')}` {n}" for t, n in without.most_common())
    return f"""# Coverage

Generated by `python -m benchmarks.coverage --write` on {machine()}.

Tiny models of {len(rows)} architectures, built from configs, with random weights and without dropout. Each is captured in
float64, planned for 4 devices (`auto` on a mesh of 2 × 2, `megatron-1d` on one axis of 4), and simulated; outputs, and the
gradients of a loss of all of them, are compared with the plain model's. Not counted below are {len(rows) - len(models)}
that their library does not build so, or `torch.export` refuses.{f" {left} more have not been run yet." if left else ""}

- Of {len(models)}, **{len(exact)} are exact**, to 1e-9 of the largest element.
- **{len(shared)}** of these divide at least 95 % of their compute among the devices.
- {len(slow)} take longer than 10 s to plan{": " + ", ".join(slow) if slow else ""}.
- Operators without a rule, by the number of architectures that have them: {missing or "none"}.

*Compute shared*: the predicted seconds of all operators, forward and backward, on a machine that computes slowly: with
100 %, every device has a quarter of them. *Planning*: processor seconds of both plans, without the capture.

{table(["architecture", "result", "compute shared", "operators", "without a rule, or why", "planning, s"], lines)}"""


if __name__ == "__main__":
    main()
