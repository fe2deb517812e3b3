"""Statistics of a run of the fuzzer: counts of outcomes, covered rules, and covered uses of mesh axes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.plans import Use
from benchmarks.fuzz.run import Outcome
from passes.rules.table import RULES

__all__ = ["Tally"]


@dataclass
class Tally:
    """Counts of one run.

    Attributes:
        kinds: Kind of outcome -> number of cases.
        reasons: (kind, reason) -> number of cases.
        offered, taken: Uses of mesh axes that were possible in any case, and those of cases with correct results.
        written: Rules whose operators the modules of cases with correct results call.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    offered: set[Use] = field(default_factory=set)
    taken: set[Use] = field(default_factory=set)
    written: set[str] = field(default_factory=set)

    def add(self, case: Case, outcome: Outcome) -> None:
        """Counts a case."""
        self.kinds[outcome.kind] += 1
        if outcome.reason:
            self.reasons[outcome.kind, outcome.reason] += 1
        self.offered |= outcome.offered
        if outcome.kind == "ok":
            self.taken |= outcome.taken
            names = {step.call.removeprefix("torch.ops.") for step in case.steps if step.call.startswith("torch.ops.")}
            self.written |= names & RULES.keys()

    def merge(self, other: Tally) -> None:
        """Adds another run's counts."""
        self.kinds += other.kinds
        self.reasons += other.reasons
        self.offered |= other.offered
        self.taken |= other.taken
        self.written |= other.written

    @property
    def reached(self) -> set[str]:
        """Rules whose operators ran in a case with correct results, under their own names or as capture rewrites them."""
        return {rule for rule, _ in self.taken} | self.written

    def line(self) -> str:
        """The statistics in one line."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        pairs = len(self.taken & self.offered)
        share = pairs / max(1, len(self.offered))
        return (
            f"{sum(self.kinds.values())} cases ({kinds}); rules {len(self.reached)} of {len(RULES)}; "
            f"pairs {pairs} of {len(self.offered)} ({share:.1%})"
        )

    def report(self) -> str:
        """The full statistics, with all reasons and with the rules and uses that were not covered."""
        lines = [self.line(), ""]
        lines += [f"{count:6} {kind}: {reason}" for (kind, reason), count in self.reasons.most_common()]
        graphs = {rule for rule, _ in self.taken}
        other = sorted(self.written - graphs)
        lines += ["", f"spelled otherwise by the capture: {', '.join(other) or 'none'}"]
        lines += [f"rules not reached: {', '.join(sorted(RULES.keys() - self.reached)) or 'none'}"]
        missed = sorted(f"{rule} {_short(use)}" for rule, use in self.offered - self.taken)
        return "\n".join([*lines, f"pairs not reached: {', '.join(missed) or 'none'}"])


def _short(use: str) -> str:
    return re.sub(r"\s", "", use)
