"""Runs damaged inputs in child processes with limits on memory and time, counts outcomes, and shrinks defects."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.fuzz.parsers.inputs import Damaged, captured, case_of, folder
from benchmarks.fuzz.parsers.judge import PATIENCE, judged

__all__ = ["ParserTally", "fuzz_parsers"]

_MEMORY = 2**30  # bytes in addition to the parent's
_BATCH = 300
_TRIES, _SLOW = 150, 5  # launches to shrink a case, and to shrink one that runs until its limit
_SHOWN = 20


@dataclass
class ParserTally:
    """Counts of one run: kind of outcome -> cases; (kind of outcome, "kind of input: reason") -> cases."""

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, kind: str, reason: str) -> None:
        """Counts a case."""
        self.kinds[kind] += 1
        self.reasons[kind, reason] += 1

    def report(self) -> str:
        """The counts by kind of input and outcome, all defects, and the most frequent refusals."""
        found = Counter[str]()
        for (kind, reason), count in self.reasons.items():
            found[f"{reason.partition(':')[0]}: {kind}"] += count
        lines = [f"{sum(self.kinds.values())} cases", *(f"{count:7} {what}" for what, count in sorted(found.items())), ""]
        refusals = sum(kind == "refused" for kind, _ in self.reasons)
        shown = [f"{count:7} {kind}: {reason}" for (kind, reason), count in self.reasons.most_common() if kind != "ok"]
        defects = [line for line in shown if " refused: " not in line]
        return "\n".join([*lines, *defects, f"{refusals} different refusals, the most frequent:", *shown[:_SHOWN]])


def fuzz_parsers(
    seed: int, minutes: float, first: int = 0, last: int | None = None, *, folder: Path | None = None
) -> tuple[ParserTally, dict[str, str]]:
    """Runs cases until the deadline or the last case; returns the counts, and kind of defect -> source of a test."""
    tally, tests, number, end = ParserTally(), dict[str, str](), first, time.monotonic() + 60 * minutes
    _prepare()
    while time.monotonic() < end and (last is None or number <= last):
        print(
            f"from case {number}: {', '.join(f'{count} {kind}' for kind, count in sorted(tally.kinds.items()))}", flush=True
        )
        cases = [case_of(seed, n) for n in range(number, number + _BATCH if last is None else last + 1)][:_BATCH]
        for case, (kind, reason) in zip(cases, _outcomes(cases, end), strict=False):
            tally.add(kind, reason)
            if kind in ("crash", "wrong") and f"{kind}: {reason}" not in tests:
                print(f"case {number} of seed {seed}: {kind}: {reason}", flush=True)
                text = _as_test(_shrunk(case, kind, reason), seed, number, f"{kind}: {reason}")
                tests[f"{kind}: {reason}"] = text
                print(text, flush=True)
                if folder is not None:
                    (folder / f"seed_{seed}_parsers_{number}.py").write_text(text)
            number += 1
    return tally, tests


def _prepare() -> None:
    """Prepares what every child would otherwise have to import, capture or write itself."""
    import transformers

    _ = transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM
    torch.set_num_threads(1)
    captured()
    folder()


def _outcomes(cases: Sequence[Damaged], end: float) -> Iterator[tuple[str, str]]:
    """Yields the outcome of each case; after a case that ends its child process, a new child continues."""
    done = 0
    while done < len(cases) and time.monotonic() < end:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _child(cases[done:], writer)
        os.close(writer)
        with os.fdopen(reader) as lines:
            while select.select([lines], [], [], 20 * PATIENCE)[0]:
                line = lines.readline()
                if not line:
                    break
                done += 1
                yield tuple(json.loads(line))
                if time.monotonic() > end:
                    break
        over = time.monotonic() > end
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            time.sleep(0.05 if not over else 0)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if over:
            return
        if not ended or status:
            name = signal.Signals(os.WTERMSIG(status)).name if ended and os.WIFSIGNALED(status) else f"status {status}"
            why = {"SIGPROF": f"it takes more than {PATIENCE:.0f} s"}.get(name, f"the process ended ({name})")
            yield "crash", f"{cases[done].kind}: {why if ended else 'it waits for ever'}"
            done += 1


def _child(cases: Sequence[Damaged], writer: int) -> None:
    """Judges cases within their limits, and writes a line of JSON for each; the body of a child process."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, size + _MEMORY))
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    for case in cases:
        # CPU time, so that the load of the machine does not matter; the signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, PATIENCE)
        outcome = judged(case)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(writer, (json.dumps(outcome) + "\n").encode())
    os._exit(0)


def _shrunk(case: Damaged, kind: str, reason: str) -> Damaged:
    """Removes parts of an input as long as its outcome remains the same."""
    content, part = case.content, max(1, len(case.content) // 2)
    tries = _TRIES - _SLOW if "takes more than" in reason or "for ever" in reason else 0
    while part and tries < _TRIES:
        at = 0
        while at < len(content) and tries < _TRIES:
            shorter = Damaged(case.kind, content[:at] + content[at + part :])
            tries += 1
            if shorter.content and next(_outcomes([shorter], time.monotonic() + 10 * PATIENCE), None) == (kind, reason):
                content = shorter.content
            else:
                at += part
        part //= 2
    return Damaged(case.kind, content)


def _as_test(case: Damaged, seed: int, number: int, reason: str) -> str:
    """The source of a test that fails as the case does."""
    return (
        "from benchmarks.fuzz.parsers.inputs import Damaged\nfrom benchmarks.fuzz.parsers.judge import judged\n\n\n"
        f"def test_seed_{seed}_parsers_{number}():\n"
        f'    """{reason}"""\n'
        f"    assert judged(Damaged({case.kind!r}, {case.content!r}))[0] in ('ok', 'refused')\n"
    )
