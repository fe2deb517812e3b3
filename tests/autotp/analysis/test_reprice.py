"""Plans repriced on a machine for which they were not made."""

import json

import pytest
import torch
from devices import SMALL
from models import MODELS
from thinned import thinned

import autotp
from autotp.analysis.difference import difference
from autotp.analysis.explain import Explainer, explain_operator
from autotp.analysis.memory import explain_memory
from autotp.analysis.reprice import repriced
from autotp.planner import plan_captured
from autotp.plans.options import Options
from passes.capture import capture

FAST = autotp.Topology.flat(4, bandwidth=1e10, latency=1e-6, device=SMALL)
FAR = autotp.Topology.flat(4, bandwidth=1e7, latency=1e-4, device=SMALL)


@pytest.fixture(scope="module")
def captured():
    model, args, kwargs = MODELS["gpt2"]()
    return capture(model, args, kwargs)


@pytest.mark.parametrize(
    ("schedule", "options"),
    thinned([("none", {"panels": 2}), ("overlap", {"chunks": {"batch": 2}}), ("overlap", {}), ("none", {})], first=1),
    ids=["panels", "chunks", "overlap", "none"],
)
def test_on_its_own_machine_a_plan_costs_what_was_predicted(captured, schedule, options):
    name = "summa-2d" if options else "auto"
    plan = plan_captured(captured, FAST, Options(name, mesh=(2, 2), schedule=schedule, **options))
    for same in (repriced(captured, plan, FAST), repriced(captured, repriced(captured, plan, FAR), FAST)):
        assert same.hash == plan.hash and same.predicted.memory_bytes == plan.predicted.memory_bytes
        for figure in ("step_seconds", "compute_seconds", "communication_seconds", "exposed_seconds"):
            assert getattr(same.predicted, figure) == pytest.approx(getattr(plan.predicted, figure), rel=1e-9, abs=1e-15)
        for one, other in zip(same.operators, plan.operators, strict=True):
            assert one.seconds == pytest.approx(other.seconds, rel=1e-9, abs=1e-15)
            assert one.communication_seconds == pytest.approx(other.communication_seconds, rel=1e-9, abs=1e-15)


def test_elsewhere_it_is_no_better_than_the_plan_made_there(captured):
    plans = {
        t: plan_captured(captured, t, Options("auto", mesh=(2, 2), schedule="overlap", chunks={})) for t in (FAST, FAR)
    }
    there = repriced(captured, plans[FAST], FAR)
    assert there.topology == FAR and not there.optimal
    assert there.predicted.step_seconds >= plans[FAR].predicted.step_seconds * (1 - 1e-9)
    assert there.predicted.step_seconds > plans[FAST].predicted.step_seconds
    assert Explainer(captured, there).whole == pytest.approx(there.predicted.step_seconds, rel=1e-9)
    assert there.planning["repriced"]["step_seconds"] == plans[FAST].predicted.step_seconds


def test_the_users_bound_stays_and_the_devices_does_not(captured):
    plan = plan_captured(captured, FAST, Options("data", mesh=(4,), schedule="none"))
    other = autotp.Topology.load("dgx-h100").resized(4)
    assert repriced(captured, plan, other).memory_bound == other.device.memory
    plan = plan_captured(captured, FAST, Options("data", mesh=(4,), memory=2e9, schedule="none"))
    assert repriced(captured, plan, other).memory_bound == 2e9
    with pytest.raises(autotp.PlanMismatchError, match="for 4 devices"):
        repriced(captured, plan, autotp.Topology.flat(8))


def test_the_command(run_cli, perceptron, tmp_path, capsys):
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    assert run_cli("plan", "--model", perceptron, "--topology", "dgx-h100", "--devices", 4, "--save", here) == 0
    capsys.readouterr()
    assert run_cli("reprice", here, "--model", perceptron, "--topology", "ethernet-10g", "--save", there) == 0
    assert "made for dgx-h100" in " ".join(capsys.readouterr().out.split())
    assert run_cli("reprice", here, "--model", perceptron, "--topology", "ethernet-10g", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["topology"]["name"] == "ethernet-10g" and printed["hash"] == autotp.Plan.load(there).hash
    assert run_cli("diff", here, there) == 1
    out = capsys.readouterr().out
    assert "topology" in out and "operator" not in out
    assert run_cli("explain", "linear", "--plan", there, "--model", perceptron) == 0
    assert (
        run_cli("reprice", here, "--model", perceptron, "--topology", "ethernet-10g", "--save", "/no/such/folder/plan.json")
        == 2
    )
    assert "--save /no/such/folder/plan.json: cannot be written" in capsys.readouterr().err


def test_what_is_no_plan_no_model_or_no_machine_is_refused(captured):
    plan = plan_captured(captured, FAST, Options("data"))
    assert repriced(captured, plan, "cpu").topology == autotp.Topology.load("cpu")
    for wrong in (
        lambda: repriced(captured, plan, None),
        lambda: repriced(captured, "plan.json", FAST),
        lambda: repriced(torch.nn.Linear(2, 2), plan, FAST),
        lambda: explain_operator(torch.nn.Linear(2, 2), plan, "linear"),
        lambda: explain_memory(plan, captured),
        lambda: difference(plan, "plan.json"),
    ):
        with pytest.raises(autotp.AutotpError, match="the (topology|plan|model) is "):
            wrong()
