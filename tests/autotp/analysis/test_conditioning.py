"""Departures that rounding alone explains are distinguished from errors, and do not hide them.

The models that earlier tests verify are small and well-conditioned: moving their weights by one unit in the last place
moves no value beyond the tolerance, so that every departure was a defect.
"""

import json

import pytest
import torch
import transformers
from devices import slow_machine
from float64 import double, float64_mode
from torch import nn

import autotp
from autotp import cli
from autotp.analysis.conditioning import moved, nudged, rounding
from autotp.analysis.verify import verify, verify_graph
from autotp.analysis.verify_runs import Runs
from autotp.runtime.rewrite import rewrite
from passes.graph import note_of

FOUR = slow_machine((4,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128])
def test_one_unit_in_the_last_place(dtype):
    value = torch.cat([torch.randn(997, dtype=dtype), torch.tensor([0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)])
    value.requires_grad_()
    before = value.detach().clone()
    made = nudged(value, torch.Generator().manual_seed(0))
    assert made.requires_grad and made.dtype == dtype and torch.equal(value[:998], before[:998])
    parts = [torch.view_as_real(t).flatten() if dtype.is_complex else t for t in (made.detach(), before)]
    after, first = (part[: 2 * 997 if dtype.is_complex else 997] for part in parts)
    up, down = (torch.nextafter(first, torch.full_like(first, towards)) for towards in (torch.inf, -torch.inf))
    assert ((after == up) | (after == down)).all() and 400 < (after == up).sum() < 0.6 * after.numel()
    if not dtype.is_complex:
        assert made[997] == 0 and torch.equal(made[998:1000], before[998:1000]) and made[1000].isnan()


def test_nothing_but_floats_is_moved():
    state = {"ids": torch.arange(5), "flags": torch.tensor([True, False])}
    assert moved(lambda given: given, state) == {"ids": 0.0, "flags": 0.0}


def test_how_far_results_move():
    x = torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1

    def run(state):
        y = state["x"]
        return {
            "scaled": y * 3,
            "cancels": y - (x - 1e-8),
            "same": torch.ones(3),
            "order": y.argsort(),
            "flips": (y * 1e16).long() % 7,
            "loss": (y - y.detach().mean()).sum(),
        }

    found = moved(run, {"x": x})
    assert 1e-17 < found["scaled"] < 1e-15
    assert 1e-9 < found["cancels"] < 1e-7
    assert found["same"] == found["order"] == 0 and found["flips"] == 1
    assert found["loss"] > 1e-2, "its own magnitude is rounding"
    assert moved(run, {"x": x}, least={"loss": 100.0})["loss"] < 1e-14
    assert moved(run, {"x": x}) == found and moved(run, {"x": x}, seed=1) != found
    assert rounding(torch.float16) < rounding(torch.float32)


class Twins(nn.Module):
    """The difference of two products whose weights agree in all but their last eight digits, or are independent."""

    def __init__(self, identical=True):
        super().__init__()
        self.up, self.one, self.other, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 8)
        self.scale = 1e8 if identical else 1.0
        if identical:
            for one, other in zip(self.one.parameters(), self.other.parameters(), strict=True):
                other.data = one.data.double() * (1 + 1e-8 * torch.randn(one.shape, dtype=torch.float64))

    def forward(self, x):
        y = torch.tanh(self.up(x))
        return self.head(torch.tanh((self.one(y) - self.other(y)) * self.scale)).tanh()


def made(identical=True, strategy="megatron-1d"):
    torch.manual_seed(0)
    model, x = Twins(identical).double(), torch.randn(8, 16, dtype=torch.float64)
    plan = autotp.plan(model, FOUR, (x,), strategy=strategy, mesh=(4,), panels=1, chunks={})
    return model, plan, x


def test_rounding_is_no_departure():
    model, plan, x = made(strategy="auto")
    assert any("k" in op.assignment for op in plan.operators), "sums in another order than the model's"
    found = verify(model, plan, (x,))
    assert found.right and max(found.outputs.values()) > found.tolerance
    assert {"output 0", "gradient of head.weight"} <= set(found.ill_conditioned)
    for name, error in found.gradients.items():
        if error > found.tolerance:
            assert error <= 16 * found.ill_conditioned[f"gradient of {name}"], name
    assert all(1e-11 < move < 1e-6 for move in found.ill_conditioned.values()), found.ill_conditioned


@pytest.mark.parametrize("identical", [True, False])
@pytest.mark.parametrize("defect", ["doubled", "unreduced", "scaled", "slightly scaled"])
def test_rounding_hides_no_defect(identical, defect):
    model, plan, x = made(identical, "data" if defect == "unreduced" else "megatron-1d")
    graphs = rewrite(model, plan, (x,))
    graph = graphs.graph_module.graph
    if defect == "unreduced":
        (node,) = (n for n in graph.nodes if note_of(n).tensor == "p_head_weight")
        assert node.args[3], "its gradient is summed up"
        node.args = (*node.args[:3], ())
        operator = "head.weight"
    else:
        # After the weight, so that only its gradient is wrong, or after the product.
        (weight,) = (n for n in graph.nodes if n.op == "placeholder" and n.target == "p_one_weight")
        product = next(n for n in graph.nodes if note_of(n).operator == "linear_1")
        node = weight if defect == "doubled" else product
        factor = {"doubled": 2.0, "scaled": 1.001, "slightly scaled": 1 + 1e-5}[defect]
        with graph.inserting_after(node):
            wrong = graph.call_function(torch.mul, (node, factor))
        node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
        if defect != "doubled":
            wrong.meta, node.meta = dict(node.meta), {}
        else:
            with graph.inserting_after(wrong):
                whole = graph.call_function(torch.sub, (wrong, node))
            with graph.inserting_after(whole):
                detached = graph.call_function(torch.Tensor.detach, (whole,))
            with graph.inserting_after(detached):
                same = graph.call_function(torch.sub, (wrong, detached))
            wrong.replace_all_uses_with(same, delete_user_cb=lambda user: user not in (whole, same))
        operator = "one.weight" if defect == "doubled" else "linear_1"
    found = verify_graph(model, graphs, (x,))
    assert not found.right and found.departure.operator == operator, found.departure
    if defect == "doubled":
        assert found.gradients["one.weight"] == pytest.approx(1.0, abs=1e-6)


def test_nothing_is_run_again_where_nothing_departs(monkeypatch):
    monkeypatch.setattr(Runs, "moved", lambda self: pytest.fail("run again"))
    model, plan, x = made(identical=False)
    found = verify(model, plan, (x,))
    assert found.right and not found.ill_conditioned


class Shared(nn.Module):
    """A value that is read through a reshard and is also an output, as CLAP's embeddings of text."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = torch.tanh(self.first(x))
        return self.second(y), y


def test_the_outputs_share_of_a_gradient_is_not_missed():
    """No plan that earlier tests verify reads a value both as an output in its own layout and in another layout."""
    torch.manual_seed(0)
    model, x = Shared().double(), torch.randn(8, 16, dtype=torch.float64)
    pins = ["first=Replicate", "tanh=Replicate", "second=k@x"]
    plan = autotp.plan(model, FOUR, (x,), mesh=(4,), constraints=pins, panels=1, chunks={})
    graph = rewrite(model, plan, (x,)).graph_module.graph
    shared = [n for n in graph.nodes if note_of(n).moves and n.args[1] in graph.output_node().all_input_nodes]
    assert [note_of(n).tensor for n in shared] == ["tanh"]
    found = verify(model, plan, (x,))
    assert found.right, found.departure
    assert not found.ill_conditioned


SPEC = """
import torch
from torch import nn

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.second = nn.BatchNorm1d(16), nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.second(self.inner(self.first(x)))

def build():
    torch.manual_seed(0)
    return Normed().double(), (torch.randn(64, 16).double(),)
"""


def test_the_command_reports_it(tmp_path, capsys):
    """The second running mean is 0 up to rounding."""
    (tmp_path / "normed.py").write_text(SPEC)
    model, saved = f"{tmp_path}/normed.py:build", str(tmp_path / "plan.json")
    for words in (
        ["plan", "--model", model, "--topology", "cpu", "--devices", "2", "--strategy", "data", "--save", saved],
        ["verify", saved, "--model", model, "--json"],
        ["verify", saved, "--model", model],
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert not stop.value.code
        printed = capsys.readouterr().out
        if words[-1] == "--json":
            found = json.loads(printed)
            assert found["right"] and set(found["ill_conditioned"]) == {"new value of buffer second.running_mean"}
            assert found["ill_conditioned"]["new value of buffer second.running_mean"] > 1e-3
    said = " ".join(printed.split())
    assert "ill-conditioned: moving weights and inputs by one unit in the last place" in said
    assert "new value of buffer second.running_mean (" in said and "correct: " in said


def efficientnet():
    torch.manual_seed(0)
    config = transformers.EfficientNetConfig(
        image_size=64, width_coefficient=0.25, depth_coefficient=0.5, hidden_dim=320, num_labels=16,
        dropout_rate=0.0, drop_connect_rate=0.0,
    )  # fmt: skip
    model = transformers.EfficientNetForImageClassification(config).train()
    return model, (), {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 16, (8,))}


@pytest.mark.exact
@pytest.mark.parametrize(("strategy", "mesh"), [("data", (2,)), ("auto", (2, 2))])
def test_efficientnet_is_ill_conditioned_where_it_departs(strategy, mesh):
    """Gradients agree; the running means of normalised values, which are 0 up to rounding, do not."""
    topology = autotp.Topology.flat(torch.Size(mesh).numel(), bandwidth=1e12, latency=0.0)
    with float64_mode():
        model, args, kwargs = double(efficientnet)
        plan = autotp.plan(model, topology, args, kwargs, strategy=strategy, mesh=mesh, memory=float("inf"))
        found = verify(model, plan, args, kwargs)
    assert found.right, found.departure
    assert max(found.outputs.values()) < 1e-12 and max(found.gradients.values()) < 1e-12
    assert found.ill_conditioned and all(name.endswith("running_mean") for name in found.ill_conditioned)
    assert max(found.ill_conditioned.values()) > 0.1
