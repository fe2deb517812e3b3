"""Plans measured runs as they were run, and compares predictions with measurements."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autotp.analysis.explain import priced_plan
from autotp.costs.step import Sums
from autotp.errors import AutotpError
from autotp.planner import plan_captured
from autotp.plans.families import Family
from autotp.plans.options import Options
from autotp.plans.plan import Plan
from autotp.validate.models import LanguageModel
from autotp.validate.runs import MeasuredRun, Skipped
from costmodel import Device
from costmodel.compute import Work
from passes.capture import Captured, Precision, capture
from passes.rules.table import flop_of
from passes.strategies.space import Space

__all__ = [
    "Accuracy",
    "Prediction",
    "Ranking",
    "StepWork",
    "accuracy",
    "by_source",
    "kendall",
    "predicted",
    "predicted_all",
    "rankings",
]


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step, which determines its seconds on other devices.

    Attributes:
        kernels: for each kind and dtype, the work of all kernels as arrays, and how often the seconds of each count in the
            forward and in the backward pass.
        sums: the seconds of the step on the run's own device.
        hides: whether communication overlaps computation.
        launches: the number of kernels that the host starts in a step.
        update: the work of the optimizer's step.
    """

    kernels: Sequence[tuple[Work, np.ndarray, np.ndarray]]
    sums: Sums
    hides: bool
    launches: float
    update: Work

    def seconds(self, device: Device, own: Device) -> float:
        """Seconds of the step if the rates of the run's device, ``own``, are replaced by those of ``device``."""
        passes = []
        for number, one in enumerate((self.sums.forward, self.sums.backward)):
            changed = sum(
                float((counts[number] * (work.seconds(device) - work.seconds(own))).sum()) for work, *counts in self.kernels
            )
            passes.append(replace(one, compute=one.compute + changed))
        update, host = float(self.update.seconds(device)), device.host * self.launches
        sums = replace(self.sums, forward=passes[0], backward=passes[1], update=update, host=host)
        return sums.seconds(self.hides)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run, its plan, and the work of its step."""

    run: MeasuredRun
    plan: Plan
    work: StepWork = field(repr=False)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.plan.predicted.step_seconds

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds of a step."""
        return self.seconds / self.run.seconds

    @property
    def memory_ratio(self) -> float | None:
        """Predicted over measured bytes; None if the measured ones were not published."""
        return self.plan.predicted.memory_bytes / self.run.memory if self.run.memory else None


def predicted(run: MeasuredRun) -> Prediction:
    """Plans a run with its own mesh, scheme and recomputation, and without a memory bound, because it did run.

    Raises:
        AutotpError: the run has no plan.
    """
    precision = _PRECISIONS.get(run.precision)
    with torch.device("meta"):
        try:
            model = LanguageModel(run.model, run.sequence).to(_WEIGHTS.get(run.precision, torch.float32))
            tokens = torch.zeros(run.batch * run.data, run.sequence, dtype=torch.long)
        except RuntimeError as error:
            raise AutotpError(f"tensors of these sizes cannot be made: {error}") from error
        captured = capture(model, (tokens, tokens), None, precision)
    options = replace(_options(run), precision=precision)
    plan = plan_captured(captured, run.topology, options)
    return Prediction(run, plan, _work(captured, plan))


def predicted_all(
    runs: Sequence[MeasuredRun], progress: Callable[[str], None] = lambda name: None
) -> tuple[list[Prediction], list[Skipped]]:
    """Plans every run, and skips those that have no plan. Calls ``progress`` with the name of each run."""
    found, skipped = [], []
    for run in runs:
        progress(run.name)
        try:
            found.append(predicted(run))
        except AutotpError as error:
            skipped.append(Skipped(run.name, str(error), run.source))
    return found, skipped


def by_source(predictions: Sequence[Prediction]) -> dict[tuple[str, str], list[Prediction]]:
    """The predictions of each pair of (who measured the runs, device)."""
    groups: dict[tuple[str, str], list[Prediction]] = defaultdict(list)
    for one in predictions:
        groups[one.run.source, one.run.device].append(one)
    return groups


_PRECISIONS: Mapping[str, Precision] = {
    "bf16-mixed": "bf16-mixed",
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}
#: Precision -> the dtype of weights that are 16-bit themselves, of which the optimizer has float32 copies. The gradients
#: of micro-batches are summed before they are reduced.
_WEIGHTS: Mapping[str, torch.dtype] = {"fp16": torch.float16}


def _options(run: MeasuredRun) -> Options:
    sharded = run.sharding != "ddp"
    within = max(1, run.node // run.tensor) if run.sharding == "hsdp" else run.data
    outer, inner = run.data // within, "b" if sharded else "d"
    axes = [(role, degree) for role, degree in (("d", outer), (inner, within), ("w", run.tensor)) if degree > 1]
    axes = axes or [("d", 1)]
    family = Family(
        "as it was run",
        "the degrees and the scheme of a measured run",
        roles=lambda _: ["".join(role for role, _ in axes)],
        between=frozenset({"token"}) if run.sequence_parallel else frozenset(),
        scatters=run.sequence_parallel or run.tensor == 1,
        rest="sharded" if sharded else "free",
        gathers="once" if run.sharding == "zero2" else "twice",
        merges=True,  # Megatron-LM's gradients are in one buffer
    )
    recompute: str | list[str] = run.recompute
    if recompute == "every 2nd":
        recompute = [f"blocks.{number}" for number in range(1, run.model.layers, 2)]
    mesh = tuple(degree for _, degree in axes)
    return Options(
        family,
        mesh=mesh,
        memory=math.inf,
        recompute=recompute,
        accumulate=run.accumulate,
        panels=1,
        chunks={},
        schedule="overlap" if run.overlaps else "none",
        compile=run.compiled,
        optimizer="adamw-master" if run.precision in _WEIGHTS else "adamw",
    )


def _work(captured: Captured, plan: Plan) -> StepWork:
    priced = priced_plan(captured, plan, merged=True)
    found: dict[tuple[str, str, bool], list[tuple[list[float], float, float]]] = defaultdict(list)
    for node, operator in priced.model.operators.items():
        run = priced.runs.run(node)
        work = priced.prices.work(Space.alone(operator, priced.strategies[node.name]), flop_of(node), run)
        if work is None:
            continue
        late, _ = priced.prices.behind(node, run)
        ahead, behind = (1 - late) * plan.accumulate, late * plan.accumulate
        figures = [
            float(np.asarray(x).ravel()[0]) for x in (work.flop, work.bytes, *(work.dims or (1, 1, 1)), work.launches)
        ]
        found[work.kind, work.dtype, work.dims is not None].append((figures, ahead, behind))
    kernels: list[tuple[Work, np.ndarray, np.ndarray]] = []
    for (kind, dtype, multiplies), rows in found.items():
        flop, moved, m, k, n, launches = np.array([figures for figures, _, _ in rows]).T
        forward, backward = np.array([counts for _, *counts in rows]).T
        work = Work(flop, moved, dtype, kind, (m, k, n) if multiplies else None, launches)
        kernels.append((work, forward, backward))
    update = Work(0.0, priced.updated, "float32", "pointwise", None, 0.0)
    return StepWork(kernels, priced.sums, plan.schedule == "overlap", priced.launches, update)


@dataclass(frozen=True, slots=True)
class Ranking:
    """A comparison of runs that differ only in their degrees and micro-batches.

    Attributes:
        predictions: of the runs.
        tau: Kendall's tau of predicted and measured seconds. Runs with equal settings count once, with their mean.
        fastest, predicted: the run that is measured to be the fastest, and the one that is predicted to be.
    """

    predictions: Sequence[Prediction]
    tau: float
    fastest: MeasuredRun
    predicted: MeasuredRun


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The errors of the predictions of some runs, relative to the measurements.

    Attributes:
        runs: the number of runs.
        mean, median, largest: of the absolute relative errors.
        bias: the geometric mean of predicted over measured.
    """

    runs: int
    mean: float
    median: float
    largest: float
    bias: float


def accuracy(ratios: Sequence[float]) -> Accuracy:
    """The accuracy of predictions, given the ratios of predicted over measured values."""
    errors = [abs(ratio - 1) for ratio in ratios]
    mean, median = statistics.fmean(errors), statistics.median(errors)
    return Accuracy(len(errors), mean, median, max(errors), statistics.geometric_mean(ratios))


def kendall(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's tau-a of two rankings: concordant minus discordant pairs, over all pairs."""
    pairs = list(itertools.combinations(range(len(predicted)), 2))
    signs = [np.sign((predicted[i] - predicted[j]) * (measured[i] - measured[j])) for i, j in pairs]
    return float(sum(signs)) / len(pairs)


def rankings(predictions: Sequence[Prediction]) -> list[Ranking]:
    """The rankings of runs that differ only in their degrees and micro-batches, if these have at least three degrees."""
    groups: dict[object, dict[tuple[int, int, int], list[Prediction]]] = defaultdict(lambda: defaultdict(list))
    for one in predictions:
        run = one.run
        whole = run.batch * run.accumulate * run.data
        key = run.source, run.model, run.sequence, run.topology.device.name, run.topology.devices, whole, run.recompute
        groups[key][run.data, run.tensor, run.batch].append(one)
    found = []
    for settings in groups.values():
        if len({(data, tensor) for data, tensor, _ in settings}) < 3:
            continue
        group = list(settings.values())
        measured = [statistics.fmean(one.run.seconds for one in same) for same in group]
        told = [statistics.fmean(one.seconds for one in same) for same in group]
        fastest, predicted = (group[seconds.index(min(seconds))][0].run for seconds in (measured, told))
        found.append(Ranking([one for same in group for one in same], kendall(told, measured), fastest, predicted))
    return found
