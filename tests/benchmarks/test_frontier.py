"""The frontier of memory and time: its plans, its report, and a run."""

import pytest

from autotp.planner import plan_captured
from autotp.plans.options import Options
from benchmarks.frontier import PICTURE, Frontier, behind, measure, planned, report, some
from benchmarks.frontier_steps import BUDGETS, CHECKPOINT, PLAIN, budget
from benchmarks.models import trained
from costmodel import Topology
from passes.capture import capture

ALONE = Topology.load("cpu").resized(1)


@pytest.fixture(scope="module")
def plans():
    module, args = trained("unet")
    captured = capture(module, args)
    free = plan_captured(captured, ALONE, Options("auto", optimizer="sgd", recompute="none"))
    return free, *planned(captured, ALONE, (1.0, 0.9, 0.5, 0.01))


@pytest.mark.exact
def test_less_memory_takes_more_time(plans):
    free, found, least = plans
    whole = free.predicted.memory_bytes
    assert found[0][1].predicted.step_seconds == pytest.approx(free.predicted.step_seconds)
    assert len(found) >= 3
    for share, plan in found:
        assert plan.predicted.memory_bytes <= share * whole * (1 + 1e-9)
    times = [plan.predicted.step_seconds for _, plan in found]
    # each is within its gap of the best for its memory
    assert all(later >= earlier * (1 - 0.01) for earlier, later in zip(times, times[1:], strict=False))
    assert times[-1] > times[0]
    assert found[-1][1].predicted.memory_bytes == pytest.approx(least)


def frontier(plans, measured):
    return Frontier("unet", 1, tuple(some(plans[1], 2)), plans[2], measured)


@pytest.mark.exact
def test_the_first_and_the_last_plan_are_measured(plans):
    points = some(plans[1], 2)
    named = [place for place, point in enumerate(points) if point.name]
    assert named == [0, len(points) - 1]


@pytest.mark.exact
def test_ways_that_are_better_are_reported(plans):
    first, *_, last = (point.name for point in some(plans[1], 2))
    measured = {first: (100e6, 1.0), last: (60e6, 1.2)}
    measured |= {PLAIN: (100e6, 0.9), CHECKPOINT: (70e6, 1.3), budget(0.5): (50e6, 2.0), budget(0.75): (70e6, 1.1)}
    reported = behind(frontier(plans, measured))
    assert [line.partition(":")[0] for line in reported] == [PLAIN, budget(0.5), budget(0.75)]
    page, others = report([frontier(plans, measured)])
    assert "as it is: 0.900 s, 11.1% less" in page and others[PICTURE].count("<svg") == 1


@pytest.mark.exact
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_run():
    found = measure("unet", ALONE, 1, 1, (1.0, 0.8))
    named = {point.name: point.plan for point in found.points if point.name}
    assert set(found.measured) == {PLAIN, CHECKPOINT, *map(budget, BUDGETS), *named}
    for name, plan in named.items():
        size, seconds = found.measured[name]
        assert plan.predicted.memory_bytes == pytest.approx(size, rel=0.1) and seconds > 0
