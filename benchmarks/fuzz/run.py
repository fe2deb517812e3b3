"""Plans one case, runs it for all devices in lockstep, and compares it with the plain model."""

from __future__ import annotations

import re
import traceback
import warnings
from dataclasses import dataclass, field

import autotp
from autotp.errors import AutotpError, PlanMismatchError
from autotp.plans.plan import Plan
from benchmarks.fuzz.case import Case, build
from benchmarks.fuzz.numbers import Numbers, exactly, ill_conditioned, plain, step, worst
from benchmarks.fuzz.plans import Use, planned, uses_of
from passes.capture import CaptureError

__all__ = ["FINDINGS", "Outcome", "judged", "refusal", "run"]

FINDINGS = ("wrong", "crash")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a case.

    Attributes:
        kind: "ok", "refused", "not a model", "ill-conditioned", "wrong" or "crash".
        reason: A message; the same for defects of one kind.
        offered, taken: The possible uses of mesh axes, and those of the plan.
        plan: The plan that was run.
    """

    kind: str
    reason: str = ""
    offered: frozenset[Use] = field(default_factory=frozenset, repr=False)
    taken: frozenset[Use] = field(default_factory=frozenset, repr=False)
    plan: Plan | None = field(default=None, repr=False)

    @property
    def defect(self) -> bool:
        """Whether the outcome is a defect of autotp."""
        return self.kind in FINDINGS


def refusal(error: Exception) -> Outcome:
    """Classifies an error: a refusal that a user can act on, a model that cannot be exported, a wrong result or a crash."""
    text = f"{type(error).__name__}: {error}"
    defect = "defect of autotp" in text
    if isinstance(error, CaptureError) and "torch.export failed" in text:
        return Outcome("not a model", text.splitlines()[0][:160])
    if isinstance(error, AutotpError) and not isinstance(error, PlanMismatchError) and not defect:
        return Outcome("refused", _essence(text))
    if defect:
        return Outcome("wrong", _essence(text))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/autotp/" in f.filename or "/passes/" in f.filename]
    where = f" in {frames[-1].name}" if frames else ""
    return Outcome("crash", _essence(text) + where)


def _essence(text: str) -> str:
    """A message without names and numbers, so that cases with the same reason are counted together."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return re.sub(r"'[^']*'|\([\d, ]*\)|\b[vxpb]?\d+(\.\d+)?(e-?\d+)?\b|_\d+", "·", line)[:140]


def run(case: Case) -> Outcome:
    """Plans a case, runs it in lockstep, and compares its results with the plain model's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(case)


def _run(case: Case) -> Outcome:
    try:
        theirs, exact = plain(case), exactly(case)
    except Exception as error:  # noqa: BLE001 - a case that torch itself rejects is not a model
        return Outcome("not a model", _essence(str(error)))
    model, args = build(case)
    try:
        captured, plan = planned(case, model, args)
        simulated = autotp.simulate(model, plan, args, schedule=plan.schedule)
        ours = step(simulated, model, args, not case.options.inference)
    except Exception as error:  # noqa: BLE001 - anything that is not a refusal is a defect
        return refusal(error)
    uses = uses_of(captured, plan)
    outcome = judged(case, ours, theirs, exact)
    return Outcome(outcome.kind, outcome.reason, uses.offered, uses.taken, plan)


def judged(case: Case, ours: Numbers, theirs: Numbers, exact: Numbers | None) -> Outcome:
    """The outcome of a comparison: ok, ill-conditioned or wrong."""
    name, ratio = worst(case, ours, theirs, exact)
    if ratio <= 1:
        return Outcome("ok")
    reason = f"{name.split()[0]} off, {case.dtype}"
    if name in theirs and ill_conditioned(case, name, ours, theirs):
        return Outcome("ill-conditioned", reason)
    return Outcome("wrong", reason)
