"""One case: planned, run for all devices in lockstep, and compared with the plain model."""

from __future__ import annotations

import logging
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
    """What became of a case.

    Attributes:
        kind: "ok", "refused", "not a model", "ill-conditioned", "wrong" or "crash".
        told: why, for people; the same for findings of one kind.
        offered, taken: uses that a mesh axis could have, and had.
        plan: that was run, as JSON.
    """

    kind: str
    told: str = ""
    offered: frozenset[Use] = field(default_factory=frozenset, repr=False)
    taken: frozenset[Use] = field(default_factory=frozenset, repr=False)
    plan: Plan | None = field(default=None, repr=False)

    @property
    def found(self) -> bool:
        """Whether it is a defect."""
        return self.kind in FINDINGS


def refusal(error: Exception) -> Outcome:
    """What an error is: a refusal that a user can read, a model that cannot be exported, or a crash."""
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
    """A message without names and numbers, so that equal ones count together."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return re.sub(r"'[^']*'|\([\d, ]*\)|\b[vxpb]?\d+(\.\d+)?(e-?\d+)?\b|_\d+", "·", line)[:140]


def run(case: Case) -> Outcome:
    """Plans a case, runs it and compares."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("autotp").setLevel(logging.ERROR)
        return _run(case)


def _run(case: Case) -> Outcome:
    try:
        theirs, exact = plain(case), exactly(case)
    except Exception as error:  # noqa: BLE001 - whatever torch says: it is not a model
        return Outcome("not a model", _essence(str(error)))
    model, args = build(case)
    try:
        captured, plan = planned(case, model, args)
        simulated = autotp.simulate(model, plan, args, schedule=plan.schedule)
        ours = step(simulated, model, args, not case.options.inference)
    except Exception as error:  # noqa: BLE001 - what is no refusal is a finding
        return refusal(error)
    uses = uses_of(captured, plan)
    outcome = judged(case, ours, theirs, exact)
    return Outcome(outcome.kind, outcome.told, uses.offered, uses.taken, plan)


def judged(case: Case, ours: Numbers, theirs: Numbers, exact: Numbers | None) -> Outcome:
    """Right, ill-conditioned or wrong."""
    name, ratio = worst(case, ours, theirs, exact)
    if ratio <= 1:
        return Outcome("ok")
    told = f"{name.split()[0]} off, {case.dtype}"
    if name in theirs and ill_conditioned(case, name, ours, theirs):
        return Outcome("ill-conditioned", told)
    return Outcome("wrong", told)
