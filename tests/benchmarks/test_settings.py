"""The plans of families are in the space of `auto`, and what the report says of them."""

import dataclasses

import pytest

from autotp import FAMILIES
from benchmarks.settings import MACHINES, MODELS, behind, contained, outcomes, report
from passes.capture import capture

QUICK = (("GPT 4 × 1024", "8 × dgx-h100"), ("perceptron 4096, 16384", "4 × ethernet-25g"))


@pytest.mark.exact
@pytest.mark.parametrize(("model", "machine"), QUICK)
def test_every_family_is_inside_auto(model, machine):
    """Pinned to a family's choices, `auto` finds the same step, so the family's plan is in its space."""
    (found,) = outcomes(model, machine, ["ample"])
    captured = capture(*MODELS[model](4 * MACHINES[machine].devices))
    some = 0
    for name, plan in found.plans.items():
        if plan is None:
            continue
        same = contained(captured, plan)
        assert same.predicted.step_seconds <= plan.predicted.step_seconds * (1 + 1e-9), name
        # Pins do not fix the order in which axes shard a dim. Chunked plans are not optimal, so it may find a better one.
        close = 1e-4 if plan.chunks else 1e-9
        assert same.predicted.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=close), name
        assert same.predicted.memory_bytes == pytest.approx(plan.predicted.memory_bytes, rel=close), name
        some += 1
    assert some >= len(FAMILIES) // 2
    setting = found.setting
    assert setting.auto <= setting.best[1] * (1 + setting.gap + 1e-9)


@pytest.mark.exact
def test_what_is_slower_is_reported():
    found = outcomes("perceptron 4096, 16384", "4 × ethernet-25g", ["ample", "short"], ["data", "zero3"])
    assert [one.memory for one in found] == ["ample", "short"]
    short = found[1].plans
    assert (
        short["auto"] is not None and short["auto"].predicted.memory_bytes < found[0].plans["auto"].predicted.memory_bytes
    )
    best = next(plan for plan in found[0].plans.values())
    worse = dataclasses.replace(best, predicted=dataclasses.replace(best.predicted, step_seconds=1.0))
    some = [dataclasses.replace(found[0], plans={"auto": worse, "data": best}).setting]
    assert len(behind(some)) == 1 and "data is faster" in behind(some)[0]
    assert behind(some)[0] in report(some)


def test_there_are_sixty():
    assert len(MODELS) * len(MACHINES) * 2 == 60
