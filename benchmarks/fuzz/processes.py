"""Runs cases in processes with gloo, many per launch; the parent plans them and compares the results of all ranks."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

import autotp
from autotp.plans.plan import Plan
from benchmarks.fuzz.case import Case, build
from benchmarks.fuzz.numbers import Numbers, exactly, plain, step
from benchmarks.fuzz.plans import planned, uses_of
from benchmarks.fuzz.run import Outcome, judged, refusal

__all__ = ["Job", "prepared", "run_processes"]

#: Time limits of the ranks in seconds: for each case, and in addition to start. At the lowest priority, imports alone can
#: take minutes.
_PATIENCE, _STARTING = 90.0, 300.0


@dataclass(frozen=True, slots=True)
class Job:
    """A case with its plan, ready to run in processes."""

    number: int
    case: Case
    plan: str
    outcome: Outcome


def prepared(number: int, case: Case) -> Job | Outcome:
    """Plans a case; returns an outcome instead of a job if it cannot be planned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain(case)
            exactly(case)
        except Exception as error:  # noqa: BLE001 - it is not a model
            return Outcome("not a model", str(error)[:80])
        try:
            model, args = build(case)
            captured, plan = planned(case, model, args)
            uses = uses_of(captured, plan)
        except Exception as error:  # noqa: BLE001
            return refusal(error)
    return Job(number, case, plan.to_json(), Outcome("ok", "", uses.offered, uses.taken, plan))


def run_processes(jobs: Sequence[Job], devices: int, done: Callable[[Job, Outcome], None]) -> None:
    """Runs jobs for the same number of devices; after an error, new processes are started for the remaining jobs."""
    left = list(jobs)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            (place / "jobs").write_bytes(pickle.dumps(left))
            context = mp.start_processes(_rank, (devices, str(place)), nprocs=devices, join=False, start_method="spawn")
            finished = _watched(context, left, devices, place)
            for job, results in finished:
                done(job, _outcome(job, results))
        left = left[len(finished) :]


def _watched(context: Any, jobs: Sequence[Job], devices: int, place: Path) -> list[tuple[Job, list[Any]]]:
    """The jobs that ended, with every rank's result; stops the processes at the end, or if a job exceeds its time."""
    finished: list[tuple[Job, list[Any]]] = []
    since = time.monotonic() + _STARTING
    while len(finished) < len(jobs):
        files = [place / f"{len(finished)}.{rank}" for rank in range(devices)]
        if all(file.exists() for file in files):
            results = [pickle.loads(file.read_bytes()) for file in files]
            finished.append((jobs[len(finished)], results))
            since = time.monotonic()
            if any(isinstance(result, Outcome) for result in results):
                break  # its processes have exited, which must not be counted as a crash of the next job
            continue
        alive = any(process.is_alive() for process in context.processes)
        if (not alive and not all(file.exists() for file in files)) or time.monotonic() - since > _PATIENCE:
            lost = Outcome("crash", "a rank ended" if not alive else "ranks wait for each other")
            there = [pickle.loads(file.read_bytes()) if file.exists() else lost for file in files]
            finished.append((jobs[len(finished)], there))
            break
        time.sleep(0.02)
    for process in context.processes:
        process.join(2)
        if process.is_alive():
            process.kill()
            process.join()
    return finished


def _outcome(job: Job, results: Sequence[Any]) -> Outcome:
    errors = [result for result in results if isinstance(result, Outcome)]
    if errors:
        first = min(errors, key=lambda e: ("ranks wait" in e.reason, "gloo" in e.reason or "Connection" in e.reason))
        whole = len(errors) == len(results) and {e.kind for e in errors} == {"refused"}
        return first if whole or first.defect else Outcome("crash", f"on some ranks only: {first.reason}")
    theirs, exact = plain(job.case), exactly(job.case)
    for ours in results:
        outcome = judged(job.case, ours, theirs, exact)
        if outcome.kind != "ok":
            return outcome
    return job.outcome


def _rank(rank: int, devices: int, folder: str) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
    warnings.simplefilter("ignore")
    logging.getLogger("autotp").setLevel(logging.ERROR)
    meet = f"file://{folder}/meet"  # no port, which another program might take before the ranks do
    dist.init_process_group("gloo", meet, timedelta(seconds=_PATIENCE / 2), devices, rank)
    for i, job in enumerate(pickle.loads((Path(folder) / "jobs").read_bytes())):
        try:
            result: Numbers | Outcome = _numbers(job)
        except Exception as error:  # noqa: BLE001
            result = refusal(error)
        file = Path(folder) / f"{i}.{rank}"
        file.with_suffix(f".{rank}-written").write_bytes(pickle.dumps(result))
        file.with_suffix(f".{rank}-written").rename(file)
        if isinstance(result, Outcome):
            os._exit(0)  # the others may wait for this rank, and fail only when its connections close
    dist.destroy_process_group()


def _numbers(job: Job) -> Numbers:
    model, args = build(job.case)
    plan = Plan.from_json(job.plan)
    parallel = autotp.parallelize(model, None, args, plan=plan)
    return _detached(step(parallel, parallel, args, not job.case.options.inference))


def _detached(numbers: Numbers) -> Mapping[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in numbers.items()}


def alone(case: Case) -> Outcome:
    """The outcome of one case in processes."""
    job = prepared(0, case)
    if isinstance(job, Outcome):
        return job
    outcomes: list[Outcome] = []
    run_processes([job], case.options.devices, lambda _, outcome: outcomes.append(outcome))
    return replace(outcomes[0], plan=job.outcome.plan)
