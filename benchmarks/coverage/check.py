"""Plans one architecture, runs it for all devices in lockstep, and compares it with the plain model, in float64."""

from __future__ import annotations

import copy
import math
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autotp.errors import AutotpError
from autotp.planner import plan_captured
from autotp.plans.options import Options
from autotp.plans.plan import Plan
from autotp.runtime.rewrite import apply
from autotp.runtime.simulate import Simulated
from benchmarks.coverage.architectures import ARCHITECTURES
from costmodel import Device, Topology
from passes.capture import CaptureError, capture
from passes.world.world import LocalWorld
from tests.float64 import double, float64_mode

__all__ = ["PLANS", "Found", "check"]

#: Strategy -> mesh.
PLANS: Mapping[str, tuple[int, ...]] = {"auto": (2, 2), "megatron-1d": (4,)}

#: A device so slow that dividing the work of a tiny model pays. It moves ten bytes in the time of one FLOP, so that
#: products have about the same share of the compute as in models that are hundreds of times as large.
_SLOW = Device("slow", {"float64": 1e6, "float32": 1e6}, 1e12, 1e7, 0.0)
_EXACT = 1e-9


@dataclass(frozen=True)
class Found:
    """The result of an architecture.

    Attributes:
        name: The name of the architecture.
        verdict: "exact", "differs", "refused", "fails", "too long"; or, if there is no model: "not exported", "not built".
        detail: A message.
        error: The largest difference of outputs and gradients, relative to the largest element of each.
        without: Operator without a rule -> its number of occurrences.
        share: The share of the compute that the first plan divides among the devices (see `shared`).
        seconds: Strategy -> CPU seconds of planning.
        operators: The number of operators in the captured graph.
    """

    name: str
    verdict: str
    detail: str = ""
    error: float = 0.0
    without: Mapping[str, int] = field(default_factory=dict)
    share: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    operators: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The result as a dict for JSON."""
        return asdict(self)


def check(name: str) -> Found:
    """Builds an architecture, plans it, and compares its simulated step with the plain model's."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, args, kwargs = double(ARCHITECTURES[name])
            with float64_mode():
                theirs = _step(copy.deepcopy(model), args, kwargs)
        except Exception as error:  # noqa: BLE001 - this version of its library cannot build or run it
            return Found(name, "not built", _line(error))
        try:
            return _checked(name, model, args, kwargs, theirs)
        except Exception as error:  # noqa: BLE001 - the row reports the error
            refused = isinstance(error, AutotpError) and "defect of autotp" not in str(error)
            exported = not (isinstance(error, CaptureError) and "torch.export failed" in str(error))
            if refused:
                return Found(name, "refused" if exported else "not exported", _line(error))
            frame = traceback.extract_tb(error.__traceback__)[-1]
            return Found(name, "fails", f"{_line(error)} ({frame.name})")


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _checked(name: str, model: nn.Module, args: Any, kwargs: Any, theirs: Mapping[str, Tensor]) -> Found:
    with float64_mode():
        captured = capture(model, args, kwargs)
    plans, seconds = {}, {}
    for strategy, mesh in PLANS.items():  # outside of float64_mode, which slows down every query of a tensor's shape
        topology = Topology.flat(math.prod(mesh), bandwidth=1e12, latency=1e-9, device=_SLOW)
        begun = time.process_time()
        plans[strategy] = plan_captured(captured, topology, Options(strategy, mesh=mesh, schedule="none"))
        seconds[strategy] = time.process_time() - begun
    alone = plan_captured(captured, Topology.flat(1, bandwidth=1e12, latency=1e-9, device=_SLOW), Options(mesh=(1,)))
    worst, where = 0.0, ""
    with float64_mode():
        for strategy, mesh in PLANS.items():
            mine = copy.deepcopy(model)
            plan = plans[strategy]
            ours = Simulated(mine, plan, apply(captured, plan), LocalWorld(mesh), lambda _: None)
            error, place = _difference(_step(ours, args, kwargs, mine), theirs)
            if error > worst or not where:
                worst, where = error, f"{place} with {strategy}"
    first = next(iter(plans.values()))
    without = dict(Counter(op.target for op in first.operators if op.replicated).most_common())
    wrong = not worst <= _EXACT
    return Found(
        name, "differs" if wrong else "exact", where if wrong else "", worst, without, shared(first, alone), seconds,
        len(first.operators),
    )  # fmt: skip


def shared(plan: Plan, alone: Plan) -> float:
    """The share of the compute that is divided among all devices, if the rest is replicated on each of them.

    Args:
        plan: The plan for several devices.
        alone: The plan for one device.
    """
    whole, mine = (sum(op.seconds for op in each.operators) for each in (alone, plan))
    devices = math.prod(plan.mesh_shape)
    return (1 - mine / whole) / (1 - 1 / devices) if whole else 1.0


def _step(module: nn.Module, args: Any, kwargs: Any, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Runs a step; returns the outputs, and the gradients of a loss of all outputs."""
    output = module(*args, **kwargs)
    found = [leaf for leaf in tree_leaves(_plain(output)) if isinstance(leaf, Tensor)]
    numbers = {f"output {i}": leaf.detach() for i, leaf in enumerate(found)}
    losses = [leaf.abs().square().mean() for leaf in found if leaf.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    gradients = {f"gradient of {n}": p.grad for n, p in (model or module).named_parameters() if p.grad is not None}
    return {**numbers, **gradients}


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output


def _difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference, relative to the largest element of its tensor, and the name of this tensor."""
    worst, where = 0.0, ""
    gradients = [t.abs().max().item() for n, t in theirs.items() if n.startswith("gradient") and t.numel()]
    least = 1e-3 * max(gradients, default=0.0)
    for name, want in theirs.items():
        got = ours.get(name)
        if got is None:
            got = torch.zeros_like(want)
        if got.shape != want.shape or got.dtype != want.dtype:
            return math.inf, f"{name}: {tuple(got.shape)} {got.dtype} for {tuple(want.shape)} {want.dtype}"
        if not want.numel():
            continue
        if not (want.dtype.is_floating_point or want.dtype.is_complex):
            error = 0.0 if torch.equal(got, want) else math.inf
        else:
            kept = want.isfinite()
            if not torch.equal(kept, got.isfinite()):
                return math.inf, f"{name}: other elements are finite"
            size = torch.where(kept, want.abs(), 0).max().item()
            scale = max(size, least if name.startswith("gradient") else 0.0) or 1.0
            error = torch.where(kept, (got - want).abs(), 0).max().item() / scale
        if error > worst:
            worst, where = error, name
    return worst, where
