"""Runs all workflows under torchrun and writes docs/workflows.md: ``python -m benchmarks.workflows --write``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "workflows.md"
SIDES = ("autotp", "FSDP2")
_SECONDS = 300
#: Name of the row -> (verdict, detail).
Results = dict[str, tuple[str, str]]


def main() -> None:
    """Runs the rows with both autotp and FSDP2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="numbers of them (default: 2 4)")
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--write", action="store_true", help="docs/workflows.md")
    parser.add_argument("--side", choices=SIDES, help="run this one alone")
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.output:
        _rank(given)
        return
    sides = [side for side in SIDES if given.side in (None, side)]
    found = {(side, ranks): _all(side, ranks, given.only) for ranks in given.processes for side in sides}
    text = _page(found)
    print(text)
    if given.write:
        PAGE.write_text(text)
    bad, behind = set[str](), set[str]()
    for (side, ranks), results in found.items():
        if side == "autotp":
            other = found.get(("FSDP2", ranks), {})
            bad |= {name for name, (verdict, _) in results.items() if verdict in ("wrong", "silent", "hangs", "ended")}
            behind |= {n for n, (v, _) in results.items() if v == "refused" and other.get(n, ("",))[0] == "exact"}
    sys.exit(f"wrong or silent: {sorted(bad)}; works with FSDP2 alone: {sorted(behind)}" if bad or behind else 0)


def _rows(only: str) -> list[Any]:
    from benchmarks.workflows.mistakes import ROWS

    return [row for row in ROWS if only in row.name]


def _all(side: str, ranks: int, only: str) -> Results:
    """The results of the rows on this number of processes. After a row that hangs or ends them, new processes continue."""
    rows, found = _rows(only), Results()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found"
        while len(found) < len(rows):
            output.write_text("")
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
            ]
            command += ["-m", "benchmarks.workflows", "--side", side, "--first", str(len(found)), "--only", only]
            process = subprocess.Popen(
                [*command, "--output", str(output)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            seen, since = 0, time.monotonic()
            while process.poll() is None and time.monotonic() - since < _SECONDS:
                time.sleep(0.2)
                if (now := len(output.read_text().splitlines())) != seen:
                    seen, since = now, time.monotonic()
            hung = process.poll() is None
            process.kill()
            subprocess.run(["pkill", "-f", str(output)], check=False)
            said = process.communicate()[1]
            found |= {name: (verdict, detail) for name, verdict, detail in map(json.loads, output.read_text().splitlines())}
            if len(found) < len(rows) and (hung or process.returncode):  # otherwise, the last row ended the job on purpose
                last = [line for line in said.splitlines() if line.strip(" =-")][-1:] or [""]
                found[rows[len(found)].name] = ("hangs", "") if hung else ("ended", last[0][:200])
    return found


def _rank(given: argparse.Namespace) -> None:
    import torch.distributed as dist

    from benchmarks.workflows.side import Side

    dist.init_process_group("gloo")
    side, store = Side(given.side), dist.distributed_c10d._get_default_store()
    for row in _rows(given.only)[given.first :]:
        store.set(f"{row.name} {side.rank}", json.dumps(_verdict(row, side)))
        every = [json.loads(store.get(f"{row.name} {rank}")) for rank in range(side.ranks)]
        worst = max(every, key=lambda each: ("absent", "exact", "refused", "wrong", "silent").index(each[0]))
        if side.rank == 0:
            with open(given.output, "a") as file:
                file.write(json.dumps([row.name, *worst]) + "\n")
            store.set(row.name, "")
        store.get(row.name)
        if row.ends:
            os._exit(0)
    dist.destroy_process_group()


def _verdict(row: Any, side: Any) -> tuple[str, str]:
    import torch

    from benchmarks.workflows.side import Different

    try:
        found = row.run(side)
    except Different as error:
        return "wrong", str(error)
    except Exception as error:  # noqa: BLE001 - the row reports the error
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return "refused", f"{type(error).__name__}: {lines[0]}"
    finally:
        torch.set_grad_enabled(True)
    if isinstance(found, str):
        return ("silent" if found == "no error" else "absent"), found
    return ("exact" if found <= row.tolerance else "wrong"), f"{found:.1e}"


_WORDS = {
    "exact": "works",
    "refused": "refused",
    "wrong": "**differs**",
    "silent": "**silent**",
    "hangs": "hangs",
    "ended": "ends",
}


def _page(found: dict[tuple[str, int], Results]) -> str:
    numbers = sorted({ranks for _, ranks in found})
    each = ", one for each number of processes," if len(numbers) > 1 else ","
    lines = [
        "# What people do, beside FSDP2",
        "",
        f"`python -m benchmarks.workflows --write` runs every row on {' and on '.join(map(str, numbers))} processes, with"
        " autotp and with FSDP2",
        "(`fully_shard` of every block), and compares them with the plain model in one process. The figures are the",
        f"largest differences of losses, gradients or parameters{each} in float64 unless the",
        "row names another dtype. A mistake should raise an error on every rank, or have the intended effect; *silent*",
        "means that it does neither.",
        "",
    ]
    group = ""
    for row in _rows(""):
        if not any(row.name in results for results in found.values()):
            continue
        if row.group != group:
            group = row.group
            lines += ["", f"## {group}", "", "| what | autotp | FSDP2 |", "|---|---|---|"]
        cells = []
        for side in SIDES:
            made = {ranks: found[side, ranks].get(row.name, ("", "")) for ranks in numbers if (side, ranks) in found}
            cells.append(_cell(made))
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(made: dict[int, tuple[str, str]]) -> str:
    """The table cell of a row, from its results by number of processes."""
    if {verdict for verdict, _ in made.values()} == {"exact"}:
        return f"works: {', '.join(detail for _, detail in made.values())}"
    said = {ranks: _said(*each) for ranks, each in made.items()}
    if len(set(said.values())) < 2:
        return next(iter(said.values()), "")
    return "; ".join(f"on {ranks}: {each}" for ranks, each in said.items())


def _said(verdict: str, detail: str) -> str:
    detail = detail.replace("|", "\\|")
    detail = detail if len(detail) <= 140 else f"{detail[:137]}..."
    return f"{_WORDS.get(verdict, verdict)}{f': {detail}' if detail else ''}"


if __name__ == "__main__":
    main()
