"""All functions and commands that take options have the same defaults."""

import dataclasses
import inspect

import numpy
import pytest
import torch
from torch import nn

import autotp
from autotp.analysis.sweep import sweep
from autotp.cli.entry import _plan
from autotp.cli.sweep import sweep_command
from autotp.planner import plan_captured
from autotp.plans.options import Options
from passes.capture import capture

DEFAULTS = {field.name: field.default for field in dataclasses.fields(Options)}


@pytest.mark.parametrize("asks", [autotp.plan, autotp.parallelize, sweep, _plan, sweep_command])
def test_every_way_to_ask_has_the_records_defaults(asks):
    """Regression: ``plan_captured`` had another default schedule than ``plan``; no test compared the two."""
    shared = {n: p.default for n, p in inspect.signature(asks).parameters.items() if n in DEFAULTS}
    if asks is autotp.parallelize:
        plans = [shared.pop(name) for name in ("schedule", "compile", "outputs", "observe")]
        assert plans == [None] * 4, "left out, they are those of the plan"
    if asks is sweep:
        assert shared.keys() >= {"mode", "memory", "optimizer", "panels", "time_limit"}
    assert len(shared) > 3 and shared == {name: DEFAULTS[name] for name in shared}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "none"}, "choose one of auto"),
        ({"mesh": (2, 0)}, "at least 1"),
        ({"mode": "test"}, "'train' or 'inference'"),
        ({"optimizer": "none"}, "choose one of"),
        ({"panels": 0}, "at least 1"),
        ({"panels": 2, "chunks": {"rows": 2}}, "exclude each other"),
        ({"chunks": {"rows": 0}}, "at least 1"),
        ({"schedule": "later"}, "'overlap' or 'none'"),
        *(({"compile": wrong}, "give True or False") for wrong in ("yes", 1, None)),
        ({"constraints": ["lm_head"]}, "expected PATTERN=TERMS"),
        *(({name: numpy.array(["a", "b"])}, f"{name}=.*not an array") for name in ("strategy", "memory", "constraints")),
    ],
)
def test_a_wrong_option_is_refused_as_the_record_is_made(options, said):
    with pytest.raises(autotp.AutotpError, match=said):
        Options(**options)


def test_a_mesh_is_checked_against_the_machine():
    with pytest.raises(autotp.AutotpError, match="multiply to 4"):
        Options(mesh=(3,)).check(autotp.Topology.flat(4))


def test_what_a_plan_was_asked_for_makes_it_again():
    captured = capture(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), (torch.randn(4, 8),))
    asked = Options("megatron-1d", optimizer="sgd", schedule="none", compile=True, constraints=["0.weight=Shard(0)@x"])
    plan = plan_captured(captured, autotp.Topology.flat(4), asked)
    replanned = plan_captured(captured, plan.topology, Options.of(plan))
    assert replanned.hash == plan.hash and replanned.predicted == plan.predicted
    assert (replanned.optimizer, replanned.schedule, replanned.constraints) == ("sgd", "none", plan.constraints)
    assert replanned.compile
