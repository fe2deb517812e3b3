"""Reading a plan: explain, inspect and diff, as functions and as commands."""

import dataclasses
import json
import random
from dataclasses import replace

import graphviz
import pytest
import torch
from devices import SMALL
from models import MODELS
from thinned import SCHEDULES, thinned
from torch.utils._pytree import tree_leaves

import autotp
from autotp.analysis.difference import difference
from autotp.analysis.drawing import drawing
from autotp.analysis.explain import Explainer, explain_operator, priced_plan
from autotp.analysis.graph_rows import filtered, graph_rows
from autotp.analysis.inspection import Filters, inspect_plan
from autotp.analysis.trace import scheduled, trainable
from autotp.costs.footprint import Footprint
from autotp.planner import plan_captured
from autotp.plans.options import Options
from passes.capture import capture
from passes.strategies.space import strategies

FOUR = autotp.Topology.flat(4, bandwidth=1e8, latency=1e-6, device=SMALL)


@pytest.fixture(scope="module", params=["gpt2", "unet"])
def explained(request):
    model, args, kwargs = MODELS[request.param]()
    captured = capture(model, args, kwargs)
    plans = {
        schedule: plan_captured(captured, FOUR, Options("auto", mesh=(2, 2), schedule=schedule, chunks={}))
        for schedule in ("none", "overlap")
    }
    return captured, plans


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_terms_of_every_operator_are_the_plans_cost_for_it(explained, schedule):
    captured, plans = explained
    plan = plans[schedule]
    explainer = Explainer(captured, plan)
    for operator in plan.operators:
        found = explainer.explain(operator.name, count=0, planned=0)
        assert found.seconds == pytest.approx(operator.seconds, rel=1e-9, abs=1e-15)
        assert found.compute_seconds == pytest.approx(operator.seconds - operator.communication_seconds, abs=1e-12)
        assert sum(s.times * s.seconds / s.shared for s in found.reshards) == pytest.approx(
            found.reshard_seconds, abs=1e-12
        )
        assert found.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_change_by_classes_costs_what_all_operators_summed_up_do(explained, schedule):
    captured, plans = explained
    explainer = Explainer(captured, plans[schedule])
    model, priced = explainer.model, explainer.priced
    stands = [node for node in model.operators if model.stands[node] is node and explainer.copies(node)]
    random.Random(0).shuffle(stands)
    tried = []
    for node in stands:
        for strategy in list(explainer.others(node))[:2]:
            chosen, layouts = dict(priced.strategies), dict(priced.layouts)
            for copy in explainer.copies(node):
                ways = strategies(model.operators[copy], plans[schedule].mesh_shape)
                chosen[copy.name] = next(way for way in ways if way.assignment == strategy.assignment)
                layouts |= {(copy, i): layout for i, layout in enumerate(chosen[copy.name].results)}
            whole = replace(priced, strategies=chosen, layouts=layouts).sums
            quick = explainer.classes.changed(node, strategy)
            mine, theirs = (tree_leaves(dataclasses.astuple(sums)) for sums in (quick, whole))
            assert len(mine) > 10 and mine == pytest.approx(theirs, rel=1e-9)
            tried.append(len(explainer.copies(node)))
        if len(tried) > 40:
            break
    assert len(tried) > 40 and (max(tried) > 1 or all(len(explainer.copies(node)) == 1 for node in stands))


def test_the_expression_gives_the_seconds(explained):
    import sympy

    captured, plans = explained
    name = max(plans["none"].operators, key=lambda op: op.seconds).name
    found = explain_operator(captured, plans["none"], name, count=0, planned=0)
    names = {name: sympy.Symbol(name) for name in found.values}
    value = sympy.sympify(found.expression, locals=names).subs({names[name]: v for name, v in found.values.items()})
    assert float(value) == pytest.approx(found.compute_seconds, rel=1e-9)


@pytest.mark.parametrize("most", [4, pytest.param(None, marks=[pytest.mark.exact, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize("schedule", thinned(["none", "overlap"], whole=True))
def test_forcing_the_next_best_gives_the_cost_that_is_claimed(explained, schedule, most):
    """Checks the most expensive operators, and with `make exact` every one."""
    captured, plans = explained
    plan = plans[schedule]
    dearest = sorted({op.fold: op for op in plan.operators}.values(), key=lambda op: -op.seconds)[:most]
    tried = 0
    for operator in dearest:
        found = explain_operator(captured, plan, operator.fold, count=2, planned=1)
        for other in found.alternatives:
            if schedule == "none":
                assert sum(found.step_terms) == pytest.approx(found.step_seconds, rel=1e-9)
                assert sum(other.terms) == pytest.approx(other.in_place_seconds, rel=1e-9)
            assert other.in_place_seconds >= plan.predicted.step_seconds * (1 - plan.gap) * (1 - 1e-9)
        if not found.alternatives or found.alternatives[0].planned_seconds is None:
            continue
        best = found.alternatives[0]
        copies = [op.name for op in plan.operators if op.fold == operator.fold]
        pins = [f"{copy}={best.pin.partition('=')[2]}" for copy in copies]
        forced = plan_captured(
            captured,
            FOUR,
            Options("auto", mesh=(2, 2), schedule=schedule, chunks={}, constraints=pins, panels=plan.planning["panels"]),
        )
        assert forced.predicted.step_seconds == pytest.approx(best.planned_seconds, rel=1e-9)
        assert best.planned_seconds <= best.in_place_seconds * (1 + 1e-9), "planned anew is no worse than left alone"
        assert best.planned_seconds >= plan.predicted.step_seconds * (1 - plan.gap) * (1 - 1e-9)
        tried += 1
    assert tried >= 2


def test_what_is_held_at_the_worst_moment_is_the_predicted_memory(explained):
    captured, plans = explained
    for plan in plans.values():
        priced = priced_plan(captured, plan)
        held = Footprint(priced).explain()
        assert sum(size for *_, size in held) == pytest.approx(plan.predicted.memory_bytes, rel=1e-6)
        assert {"parameter"} <= {kind for kind, *_ in held}


def test_rows_and_filters(explained):
    captured, plans = explained
    plan = plans["none"]
    priced = priced_plan(captured, plan)
    rows = inspect_plan(plan, priced)
    assert sum(row.count for row in rows) == len(plan.operators)
    total = sum(row.seconds for row in rows)
    assert total == pytest.approx(sum(op.seconds for op in plan.operators), rel=1e-9)
    assert all(row.source is None or ":" in row.source for row in rows) and any(row.source for row in rows)
    assert [r.seconds for r in Filters(top=5)(rows)] == sorted((r.seconds for r in rows), reverse=True)[:5]
    communicating = Filters(collectives=True)(rows)
    assert communicating and all(row.communication_seconds > 0 or row.reshards for row in communicating)
    assert all(row.scheme == "replicated" for row in Filters(unsharded=True)(rows))
    module = next(row.module for row in rows if row.module)
    assert {row.module.split(".")[0] for row in Filters(module=module.split(".")[0])(rows)} == {module.split(".")[0]}
    with pytest.raises(autotp.AutotpError, match="no operator has the name or kind 'liner'; there are "):
        Filters(op="liner")(rows)
    with pytest.raises(autotp.AutotpError, match="no operator is in a module 'bloks'"):
        Filters(module="bloks")(rows)
    graph = drawing(rows, priced.model)
    assert isinstance(graph, graphviz.Digraph) and all(f"{row.name} [" in graph.source for row in rows[:5])


@pytest.mark.exact
def test_the_graphs_that_a_device_runs():
    model, args, kwargs = MODELS["gpt2"]()
    captured = capture(model, args, kwargs)
    plan = plan_captured(captured, FOUR, Options("tensor3d", mesh=(2, 2), schedule="overlap", chunks={}))
    halves = scheduled(captured, plan, trainable(model))
    for half in halves:
        rows = graph_rows(half, plan.mesh_axes)
        computing = sum(row.seconds for row in rows if not row.axes)
        exposed = sum(row.exposed for row in rows)
        assert computing + exposed == pytest.approx(max(slot.end for slot in half), rel=1e-9)
        assert 0 < exposed <= sum(row.seconds for row in rows if row.axes) * (1 + 1e-9)
        moving = filtered(rows, None, True, None)
        assert moving and all(row.target.startswith(("all_", "reduce_")) for row in moving)
        assert [row.seconds for row in filtered(rows, None, False, 3)] == sorted((r.seconds for r in rows), reverse=True)[
            :3
        ]
        assert all("mm" in row.target for row in filtered(rows, "mm", False, None))


def test_a_difference():
    model, args, kwargs = MODELS["gpt2"]()
    one = autotp.plan(model, FOUR, args, kwargs, strategy="data", mesh=(4,))
    two = autotp.plan(model, FOUR, args, kwargs, strategy="megatron-1d", mesh=(4,))
    found = difference(one, two)
    assert found.settings["strategy"] == ("data", "megatron-1d") and found.operators
    changed = sum(change.count for change in found.operators)
    others = {op.name: op for op in two.operators}
    assert changed == sum(op.layouts != others[op.name].layouts for op in one.operators)
    assert found.predicted["step_seconds"] == (one.predicted.step_seconds, two.predicted.step_seconds)
    same = difference(one, one)
    assert not same.settings and not same.operators and not same.parameters
    other, x = torch.nn.Linear(4, 4), torch.randn(4, 4)
    with pytest.raises(autotp.AutotpError, match="different models"):
        difference(one, autotp.plan(other, FOUR, (x,)))


@pytest.fixture
def plans(run_cli, perceptron, tmp_path):
    for name in ("data", "megatron-1d"):
        run_cli(
            "plan",
            "--model",
            perceptron,
            "--topology",
            "dgx-h100",
            "--devices",
            4,
            "--strategy",
            name,
            "--save",
            tmp_path / f"{name}.json",
        )
    return tmp_path, perceptron


def test_code_goes_to_the_output_of_the_process(run_cli, plans, capfd):
    folder, spec = plans
    capfd.readouterr()
    assert run_cli("inspect", folder / "megatron-1d.json", "--model", spec, "--code") == 0
    assert "def forward" in capfd.readouterr().out


def test_commands(run_cli, plans, capsys):
    folder, spec = plans
    plan = folder / "megatron-1d.json"
    capsys.readouterr()
    assert run_cli("inspect", plan, "--model", spec, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["module"] for row in rows} >= {"up", "down"}
    assert run_cli("inspect", plan, "--model", spec, "--module", "up") == 0
    assert "linear" in capsys.readouterr().out
    assert run_cli("inspect", plan, "--model", spec, "--graph", "forward", "--module", "up") == 2
    assert "--module selects nothing of what --graph shows" in capsys.readouterr().err
    assert run_cli("inspect", plan, "--model", spec, "--graph", "", "--module", "up") == 2
    assert "--module selects nothing of what --graph shows" in capsys.readouterr().err
    assert run_cli("inspect", plan, "--model", spec, "--graph", "backward") == 0
    assert "of which nothing hides" in capsys.readouterr().out
    assert run_cli("inspect", plan, "--model", spec, "--graph", "forward", "--collectives", "--json") == 0
    moving = json.loads(capsys.readouterr().out)
    assert moving and all(row["axes"] and row["seconds"] > 0 for row in moving)
    assert run_cli("inspect", plan, "--model", spec, "--graph", "sideways") == 2
    assert "choose forward or backward" in capsys.readouterr().err
    assert run_cli("inspect", plan, "--model", spec, "--html", folder / "report.html") == 0
    assert "<!doctype html>" in (folder / "report.html").read_text()
    assert run_cli("inspect", plan, "--model", spec, "--dot", folder / "graph.dot") == 0
    assert (folder / "graph.dot").read_text().startswith("digraph")
    assert run_cli("inspect", plan, "--model", spec, "--dot", folder / "graph.txt") == 2
    capsys.readouterr()
    assert run_cli("explain", "linear", "--plan", plan, "--model", spec) == 0
    assert "chosen" in capsys.readouterr().out
    assert run_cli("explain", "linear", "--plan", plan, "--model", spec, "--json", "--planned", 0) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "linear"
    assert run_cli("explain", "--memory", "--plan", plan, "--model", spec) == 0
    assert "worst moment" in capsys.readouterr().out
    assert run_cli("explain", "--memory", "--plan", plan, "--model", spec, "--planned", 2) == 2
    assert "--planned: for an operator alone" in capsys.readouterr().err
    assert run_cli("explain", "liner", "--plan", plan, "--model", spec) == 2
    assert "no operator 'liner'" in capsys.readouterr().err
    assert run_cli("explain", "linear", "--plan", plan) == 2
    assert "--model" in capsys.readouterr().err
    assert run_cli("diff", folder / "data.json", plan) == 1
    assert "strategy" in capsys.readouterr().out
    assert run_cli("diff", plan, plan) == 0
    assert "the same" in capsys.readouterr().out
    assert run_cli("diff", folder / "data.json", plan, "--json") == 1
    assert json.loads(capsys.readouterr().out)["settings"]["strategy"] == ["data", "megatron-1d"]
    assert run_cli("verify", plan, "--model", spec) == 0
    assert "correct: " in capsys.readouterr().out
    assert run_cli("verify", plan, "--model", spec, "--json") == 0
    assert json.loads(capsys.readouterr().out)["departure"] is None
    assert run_cli("verify", plan, "--model", spec, "--tolerance", 0) == 1
