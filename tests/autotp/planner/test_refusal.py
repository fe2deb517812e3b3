"""Errors for jobs that do not fit: the memory needed, what it consists of, and which single changes make the job fit."""

from dataclasses import replace

import pytest
import torch
from thinned import thinned
from torch import nn

import autotp
from autotp.costs.floor import least_bytes
from autotp.costs.prices import Prices
from autotp.planner import plan_captured, plan_model, prepare
from autotp.planner.ilp import Expired
from autotp.planner.refusal import changes
from autotp.plans.options import Options
from passes.capture import capture

TOPOLOGY = autotp.Topology.load("dgx-h100").resized(2)


class Layers(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def refused(model, x, **asked):
    with pytest.raises(autotp.MemoryBoundError) as error:
        plan_model(model, TOPOLOGY, (x,), None, Options(schedule="none", **asked))
    return error.value


def needed(model, x, **asked):
    return refused(model, x, memory=1.0, **asked).needed


@pytest.mark.exact
@pytest.mark.parametrize("rows", [16, 2048], ids=["parameters", "activations"])
def test_every_change_does_what_is_said_of_it(rows, recompute="none"):
    """Planned with a suggested change, the job fits or is refused, as the error says."""
    model, x = Layers(), torch.randn(rows, 64)
    bound = 0.85 * needed(model, x, recompute=recompute)
    error = refused(model, x, recompute=recompute, memory=bound)
    assert sum(error.consists.values()) == pytest.approx(error.needed, abs=1.0)
    assert list(error.consists.values()) == sorted(error.consists.values(), reverse=True)
    changes = {change.name: change for change in error.changes}
    fewer = {"1/2 of the batch": 2, "1/4 of the batch": 4}
    several = {"the batch in parts, accumulate=2": 2, "the batch in parts, accumulate=4": 4}
    for name, change in changes.items():
        machine, given, asked = TOPOLOGY, x, Options(schedule="none", recompute=recompute, memory=bound)
        if name.endswith("devices"):
            machine = TOPOLOGY.resized(int(name.split()[0]))
        elif name in fewer:
            given = x[: rows // fewer[name]]
        elif name in several:
            given, asked = x[: rows // several[name]], replace(asked, accumulate=several[name])
        else:
            key, _, value = name.partition("=")
            asked = replace(asked, **{key: value.strip("'")})
        if change.fits is None:
            assert change.reason, change
        elif change.fits:
            assert change.needed <= bound
            assert plan_model(model, machine, (given,), None, asked).predicted.memory_bytes <= bound, change
        else:
            assert change.needed > bound
            with pytest.raises(autotp.MemoryBoundError):
                plan_model(model, machine, (given,), None, asked)
    assert {"4 devices", "8 devices", "optimizer='sgd'", "precision='bf16-mixed'", *fewer, *several} <= set(changes)
    assert "recompute='auto'" in changes
    assert True in {change.fits for change in error.changes}


@pytest.mark.slow
def test_the_message_says_what_fits_and_what_does_not():
    model, x = Layers(), torch.randn(2048, 64)
    error = refused(model, x, recompute="none", memory=0.85 * needed(model, x, recompute="none"))
    first, consists, *changes = str(error).splitlines()
    assert "the smallest found needs" in first
    assert "saved for the backward pass" in consists
    assert "parameters and optimizer state" in consists
    assert changes[0].strip().startswith("fits with: recompute='auto' (takes ")
    assert changes[1].strip().startswith("does not fit with: optimizer=")


def test_without_the_model_what_takes_it_is_said_not_to_be_tried():
    captured = capture(Layers(), (torch.randn(2048, 64),))
    with pytest.raises(autotp.MemoryBoundError, match="not tried as that takes the model") as error:
        plan_captured(captured, TOPOLOGY, Options(memory=1e5))
    untried = [change.name for change in error.value.changes if change.fits is None]
    assert "1/2 of the batch" in untried
    assert "4 devices" not in untried


def test_what_there_is_no_time_for_is_said_not_to_be_tried(monkeypatch):
    def late(*_):
        raise Expired("no plan was found within the time limit")

    monkeypatch.setattr(changes, "fit_of", late)
    error = refused(Layers(), torch.randn(2048, 64), memory=1e5)
    assert error.changes and not any(change.fits for change in error.changes)
    assert "not tried" in str(error)


def test_a_mesh_that_is_given_and_inference_leave_fewer_changes():
    model, x = Layers(), torch.randn(16, 64)
    assert not any("devices" in change.name for change in refused(model, x, memory=1e3, mesh=(2,)).changes)
    error = refused(model, x, memory=1e3, mode="inference")
    assert [change.name for change in error.changes] == ["4 devices", "8 devices"]
    assert "parameter" in error.consists


@pytest.mark.parametrize("way", thinned(["auto", "none", "selective", "full"], 3, whole=True))
def test_no_plan_takes_less_than_the_floor(way):
    model, x = Layers(), torch.randn(512, 64)
    captured = capture(model, (x,))
    floor = least_bytes(prepare(captured), Prices(TOPOLOGY, (2,)))
    assert needed(model, x, recompute="none") >= floor
    plan = plan_captured(captured, TOPOLOGY, Options(schedule="none", recompute=way))
    if not plan.recomputed:
        assert plan.predicted.memory_bytes >= floor


def test_what_full_recomputation_needs_is_never_refused():
    model, tokens = (
        nn.Sequential(nn.Embedding(32, 16), Layers(16), Layers(16), nn.Linear(16, 32)),
        torch.zeros(8, 16, dtype=torch.long),
    )
    least = {way: needed(model, tokens, recompute=way) for way in ("auto", "full", "selective", "none")}
    assert least["auto"] == min(least.values())
