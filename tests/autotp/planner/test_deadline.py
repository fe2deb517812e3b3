"""Time limits hold for every graph, and the plan that is returned at the limit has a valid gap.

Time is counted in calls and returns of the interpreter, so that results do not depend on the machine: a second is two
million of them, about what an idle machine executes in one.
"""

import math
import random
import sys

import pytest
import torch
from thinned import thinned
from torch import nn
from torch.nn import functional as F

import autotp
from autotp.costs.floor import least_seconds
from autotp.costs.prices import Prices
from autotp.planner import candidate_meshes, plan_captured, prepare
from autotp.planner.ilp import NEVER, Deadline, Expired
from autotp.plans.options import Options
from passes.capture import capture

#: Calls and returns of the interpreter.
SECOND = 2_000_000


class Work:
    """A clock that counts the interpreter's calls and returns inside its context."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        return self.count / SECOND

    def _tick(self, frame, event, arg):
        self.count += 1

    def __enter__(self):
        sys.setprofile(self._tick)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)


class Tangle(nn.Module):
    """A random graph without repeated blocks: layers of random widths that read earlier values."""

    def __init__(self, steps, seed):
        super().__init__()
        draw = random.Random(seed)
        self.steps, self.layers, self.widths = [], nn.ModuleList(), [64]
        for _ in range(steps):
            source = (
                len(self.widths) - 1
                if draw.random() < 0.5
                else draw.randrange(max(0, len(self.widths) - 20), len(self.widths))
            )
            width, kind = self.widths[source], draw.choice(["linear", "linear", "norm", "gelu", "add", "mul"])
            same = [at for at, other in enumerate(self.widths) if other == width]
            made = draw.choice([48, 64, 80, 96, 128, 160]) if kind == "linear" else width
            if kind == "linear":
                self.layers.append(nn.Linear(width, made, bias=draw.random() < 0.5))
            elif kind == "norm":
                self.layers.append(nn.LayerNorm(width))
            self.steps.append((kind, source, draw.choice(same), len(self.layers) - 1))
            self.widths.append(made)

    def forward(self, x):
        found, read = [x], set()
        for kind, source, other, layer in self.steps:
            value = found[source]
            read |= {source, other} if kind in ("add", "mul") else {source}
            if kind in ("linear", "norm"):
                value = self.layers[layer](value)
            else:
                value = F.gelu(value) if kind == "gelu" else value + found[other] if kind == "add" else value * found[other]
            found.append(value)
        return sum(value.mean() for at, value in enumerate(found) if at not in read)


def tangle(steps, seed):
    with torch.device("meta"):
        return capture(Tangle(steps, seed), (torch.empty(16, 8, 64),))


TOPOLOGY = autotp.Topology.load("dgx-h100")


@pytest.mark.exact
@pytest.mark.parametrize(("schedule", "seed"), [("none", 0), ("overlap", 2)])
def test_whenever_the_time_is_over_the_gap_is_true(schedule, seed):
    captured, topology = tangle(10, seed), TOPOLOGY.resized(4)
    ample = plan_captured(captured, topology, Options(schedule=schedule))
    for memory in (math.inf, 0.85 * ample.predicted.memory_bytes):
        best = plan_captured(captured, topology, Options(memory=memory, schedule=schedule))
        step, bound = best.predicted.step_seconds, best.predicted.step_seconds * (1 - best.gap)
        for limit in (0.0, 0.1, 0.2, 0.4, 0.8, 1.6):
            with Work() as work:
                options = Options(time_limit=limit, memory=memory, schedule=schedule)
                plan = plan_captured(captured, topology, options, clock=work)
            assert plan.predicted.memory_bytes <= memory
            assert plan.predicted.step_seconds >= bound * (1 - 1e-9), limit
            assert plan.predicted.step_seconds * (1 - plan.gap) <= step * (1 + 1e-9), limit
        if math.isinf(memory):
            assert plan.optimal, "and time helps"
            assert plan.predicted.step_seconds == pytest.approx(step, rel=1e-9)


@pytest.mark.parametrize("short", thinned([True, False], whole=True))
@pytest.mark.parametrize("limit", thinned([0.0, 2.0, 6.0], first=1, slow=1, whole=True))
def test_a_limit_is_kept_to_within_a_second(large, limit, short):
    captured, memory = large
    with Work() as work:
        plan = plan_captured(
            captured, TOPOLOGY, Options(time_limit=limit, memory=0.75 * memory if short else None), clock=work
        )
    assert plan.predicted.memory_bytes <= (0.75 * memory if short else math.inf)
    # The first plan may exceed the limit: it takes the analysis, and a short search of the mesh with the fewest axes.
    assert work() <= max(limit + 1, 3 if short else 2)
    assert plan.planning["seconds"] <= work()


@pytest.fixture(scope="module")
def large():
    captured = tangle(200, 7)
    plan = plan_captured(captured, TOPOLOGY, Options(time_limit=0.0))
    return captured, plan.predicted.memory_bytes


def test_no_plan_takes_less_than_its_share_of_the_computing():
    captured = tangle(14, 5)
    model = prepare(captured)
    for mesh in candidate_meshes(4, 2):
        for strategy in ("auto", "data", "megatron-1d"):
            topology = TOPOLOGY.resized(4)
            try:
                plan = plan_captured(captured, topology, Options(strategy, mesh=mesh))
            except autotp.AutotpError:
                continue
            floor = least_seconds(model, Prices(topology, mesh, together=model.parameter_bytes))
            assert 0 < floor <= plan.predicted.compute_seconds * (1 + 1e-9), (mesh, strategy)


def test_a_deadline_is_a_time_on_its_clock():
    now = iter(range(100))
    deadline = Deadline.after(3.0, lambda: float(next(now)))  # expires at 3
    assert deadline.left == 2.0  # at 1
    assert not deadline.over  # at 2
    with pytest.raises(Expired) as late:
        deadline.check(bound=7.0)  # at 3
    assert late.value.bound == 7.0
    assert deadline.left == 0.0
    assert not NEVER.over and NEVER.left == math.inf and NEVER.part(0.5) is NEVER
    fixed = Deadline(10.0, lambda: 2.0)
    assert fixed.within(3.0).at == 5.0 and fixed.within(30.0).at == 10.0
    assert fixed.part(0.5).at == 10.0, "only short time is shared out"
    assert Deadline(10.0, lambda: 2.0, shared=True).part(0.5).at == 6.0
