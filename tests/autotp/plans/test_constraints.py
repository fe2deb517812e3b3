"""Constraints: pins hold, numbers stay correct, and a conflict is reported as a minimal subset."""

import json

import pytest
import torch
from models import MODELS
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import autotp
from autotp.cli import main
from autotp.plans.constraints import parse

FOUR = autotp.Topology.flat(4, bandwidth=1e9, latency=1e-6)


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def planned(*constraints, model=None, **options):
    torch.manual_seed(0)
    model, x = model or Perceptron().double(), torch.randn(8, 16, dtype=torch.float64)
    options = {"mesh": (2, 2), **options}
    return model, x, autotp.plan(model, FOUR, (x,), constraints=constraints, **options)


def check_numbers(model, x, plan):
    """Checks that the output and gradients of a plan equal the model's."""
    expected = model(x)
    model.zero_grad()
    expected.square().sum().backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    found = autotp.simulate(model, plan, (x,))(x)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-9, atol=1e-12)


def operators(plan, module):
    return [op for op in plan.operators if op.module == module]


def test_a_parameter():
    model, x, plan = planned("head.weight=Shard(0)@x Shard(1)@y")
    assert plan.layouts["head.weight"] == (Shard(0), Shard(1))
    check_numbers(model, x, plan)
    model, x, plan = planned("head.weight=Replicate", memory=None)
    assert plan.layouts["head.weight"] == (Replicate(), Replicate())


def test_one_layer_of_many_and_all_of_them():
    _, _, plan = planned("layers.1.0.weight=S(0)@x R@y")
    assert plan.parameters["layers.1.0.weight"] == "S(0)@x"
    model, x, plan = planned("layers.*.0=n@y", "layers.*.2=k@y")
    for layer in range(3):
        (up,), (down,) = operators(plan, f"layers.{layer}.0"), operators(plan, f"layers.{layer}.2")
        assert up.strategy["n"] == ("y",) and down.strategy["k"] == ("y",)
    assert len({up.fold for up in plan.operators if up.module.endswith(".0")}) == 1, "identical layers stay folded"
    check_numbers(model, x, plan)


def test_partial_sums_through_the_operators_of_a_module():
    class Twice(nn.Module):
        def forward(self, x):
            return x * 2

    model = nn.Sequential(nn.Linear(16, 32, bias=False), Twice(), nn.Linear(32, 8)).double()
    model, x, plan = planned("0=k@y", "1=+0@y", model=model)
    assert [op.assignment[1] for op in operators(plan, "1")] == ["+0"]
    check_numbers(model, x, plan)


def test_operators_by_kind_and_node_inputs_and_outputs():
    model, x, plan = planned("layers.*.1:tanh=Shard(1)@x", "input:x=Shard(0)@y", "output:0=Shard(0)@y")
    tanhs = [op for op in plan.operators if "tanh" in op.target]
    assert len(tanhs) == 3 and all("S(1)@x" in op.layouts[-1] for op in tanhs)
    assert "S(0)@y" in operators(plan, "head")[0].layouts[-1]
    first = operators(plan, "layers.0.0")[0]
    assert "S(0)@y" in first.layouts[0]
    check_numbers(model, x, plan)
    _, _, plan = planned("linear_1=Partial@x")
    assert "P@x" in next(op for op in plan.operators if op.name == "linear_1").layouts[-1]


def test_a_pin_costs_at_least_nothing_and_is_kept_in_the_plan(tmp_path):
    _, _, free = planned()
    _, _, pinned = planned("layers.*.0.weight=Shard(1)@x", "head.weight=Shard(0)@x")
    assert pinned.predicted.step_seconds >= free.predicted.step_seconds * (1 - 1e-9)
    assert pinned.constraints == ("layers.*.0.weight=Shard(1)@x", "head.weight=Shard(0)@x")
    pinned.save(tmp_path / "plan.json")
    assert autotp.Plan.load(tmp_path / "plan.json").constraints == pinned.constraints


def test_a_mapping_and_a_free_mesh():
    model, x = Perceptron().double(), torch.randn(8, 16, dtype=torch.float64)
    plan = autotp.plan(model, FOUR, (x,), constraints={"head.weight": "Shard(0)@y"})
    assert len(plan.mesh_shape) > 1, "only meshes that have the axis y will do"
    assert "S(0)@y" in plan.parameters["head.weight"]


@pytest.mark.slow
def test_a_transformer():
    model, args, kwargs = MODELS["gpt2"]()
    plan = autotp.plan(model, FOUR, args, kwargs, mesh=(2, 2), constraints=["transformer.h.*.mlp.c_fc=n@x"])
    found = [op for op in plan.operators if op.module.endswith("mlp.c_fc") and "addmm" in op.target]
    assert len(found) == 2 and all("S(1)@x" in op.layouts[-1] for op in found)
    assert autotp.verify(model, plan, args, kwargs).right


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("head.weight", "expected PATTERN=TERMS"),
        ("head.weight=Shard(0)", "names no mesh axis"),
        ("head.weight=Shard(0)@q", "cannot be read"),
        ("head.weight=Sharded(0)@x", "cannot be read"),
        ("hed.weight=Shard(0)@x", "did you mean 'head.weight'"),
    ],
)
def test_mistakes(text, said):
    with pytest.raises(autotp.AutotpError, match=said.replace("(", r"\(")):
        planned(text)
    with pytest.raises(autotp.AutotpError, match="sequence of texts"):
        parse("head.weight=R")


def test_a_minimal_conflict():
    with pytest.raises(autotp.ConstraintError) as error:
        planned("layers.*.0=n@x", "head.weight=Shard(0)@x", "layers.1.2=k@y", "head.weight=Shard(1)@x")
    assert set(error.value.conflict) == {"head.weight=Shard(0)@x", "head.weight=Shard(1)@x"}
    with pytest.raises(autotp.ConstraintError) as error:
        planned("head.weight=Shard(0)@z", "layers.*.0=n@x")
    assert error.value.conflict == ("head.weight=Shard(0)@z",)
    assert "cannot hold" in str(error.value)


@pytest.mark.exact
def test_a_conflict_with_the_family_and_with_memory():
    with pytest.raises(autotp.ConstraintError) as error:
        planned("head=n@x", strategy="data", mesh=(4,))
    assert error.value.conflict == ("head=n@x",)
    _, _, roomy = planned()
    with pytest.raises(autotp.ConstraintError) as error:
        planned(
            *(f"layers.{n}.{k}.weight=Replicate" for n in range(3) for k in (0, 2)),
            "head.bias=Replicate",
            memory=roomy.predicted.memory_bytes * 0.6,
        )
    assert "head.bias=Replicate" not in error.value.conflict and error.value.conflict


def test_the_command_line(tmp_path, capsys):
    spec = tmp_path / "pinned.py"
    spec.write_text(
        "import torch\nfrom torch import nn\n\n\ndef build():\n    return nn.Linear(8, 8), (torch.randn(4, 8),)\n"
    )
    words = ["plan", "--model", f"{spec}:build", "--topology", "dgx-h100", "--devices", "4", "--mesh", "4", "--json"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--pin", "weight=Shard(0)@x"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layouts"]["weight"] == [[0, 1]] and found["constraints"] == ["weight=Shard(0)@x"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--pin", "weight=Shard(0)@x", "--pin", "weight=Shard(1)@x"])
    assert ended.value.code == 2 and "without any one of them" in capsys.readouterr().err


@pytest.mark.parametrize("ways", [{"mesh": (2,)}, {}], ids=["one mesh", "all meshes"])
def test_a_model_without_operators_whose_constraint_no_mesh_can_hold(ways):
    class Returned(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.zeros(1, 1, 1))

        def forward(self):
            return self.p

    machine = autotp.Topology.flat(2 if ways else 4)
    with pytest.raises(autotp.ConstraintError, match="cannot hold on any mesh that is searched"):
        autotp.plan(Returned(), machine, (), constraints=["p=Shard(2)@x"], schedule="none", **ways)
