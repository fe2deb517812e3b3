"""Products in panels: which exist, that their numbers are correct, and that they hold less memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autotp
from autotp.errors import AutotpError
from autotp.runtime.rewrite import rewrite
from benchmarks.models import Chain, Transformer
from benchmarks.volumes import CountingWorld
from passes.sharding.panel_loop import panelled
from passes.world import ops

SCHEMES = [
    ("summa-2d", (2, 2)),
    ("summa-2d", (2, 3)),
    ("summa-2d", (4, 2)),
    ("tesseract-2.5d", (2, 2, 2)),
    ("3d", (2, 2, 2)),
    ("zero3", (3,)),
    ("zero3", (2, 2)),
    ("zero3", (2, 3)),
]


def planned(model, x, strategy, mesh, panels, **options):
    topology = autotp.Topology.flat(math.prod(mesh), bandwidth=1e9, latency=0.0)
    return autotp.plan(model, topology, (x,), strategy=strategy, mesh=mesh, panels=panels, **options)


def gradients(module, x):
    module.zero_grad()
    module(x).backward()
    return [p.grad.clone() for p in module.parameters()]


@pytest.mark.exact
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_number_of_panels_gives_the_same_numbers(data):
    strategy, mesh = data.draw(st.sampled_from(SCHEMES))
    panels = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    torch.manual_seed(0)
    model = Chain(1, 24, 48).double()
    x = torch.randn(12, 3, 24, dtype=torch.float64)
    plan = planned(model, x, strategy, mesh, panels)
    expected = gradients(model, x)
    found = gradients(autotp.simulate(model, plan, (x,)), x)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_products_that_share_an_operand_gather_it_once():
    model, x = Transformer(1, 32, 4).double(), torch.randn(8, 4, 32, dtype=torch.float64)
    plan = planned(model, x, "summa-2d", (2, 2), 2)
    graph = rewrite(model, plan, (x,)).graph_module.graph
    loops = [node for node in graph.nodes if node.target is panelled]
    assert sorted(len(node.args[2]) for node in loops) == [1, 1, 1, 1, 3]
    assert not [n for n in graph.nodes if n.target is ops.gather]


@pytest.mark.slow
def test_panels_hold_less_of_what_is_gathered():
    """The largest tensor that an all-gather returns shrinks by the number of panels."""
    largest = {}

    class Watching(CountingWorld):
        def all_gather(self, parts, axis):
            pending = super().all_gather(parts, axis)
            largest[panels] = max(largest.get(panels, 0), pending._parts[0].numel())
            return pending

    torch.manual_seed(0)
    model, x = Chain(2, 64, 64).double(), torch.randn(16, 4, 64, dtype=torch.float64)
    for panels in (1, 2, 4, 8):
        plan = planned(model, x, "summa-2d", (2, 2), panels)
        autotp.simulate(model, plan, (x,), world=Watching((2, 2)))(x).backward()
    assert [largest[1] / largest[p] for p in (2, 4, 8)] == [2, 4, 8]


@pytest.mark.slow
def test_the_planner_takes_panels_where_memory_is_short():
    with torch.device("meta"):
        model, x = Chain(8, 256, 1024), torch.zeros(64, 64, 256)
    roomy = planned(model, x, "summa-2d", (4, 4), None)
    assert {op.panels for op in roomy.operators} == {1}
    bound = 0.7 * roomy.predicted.memory_bytes
    tight = planned(model, x, "summa-2d", (4, 4), None, memory=bound, recompute="none")
    assert tight.predicted.memory_bytes <= 0.7 * roomy.predicted.memory_bytes
    assert max(op.panels for op in tight.operators) > 1
    assert tight.predicted.communication_seconds > roomy.predicted.communication_seconds


def test_a_plan_remembers_its_panels(tmp_path):
    model, x = Chain(1, 16, 16), torch.randn(4, 2, 16)
    plan = planned(model, x, "summa-2d", (2, 2), 2)
    plan.save(tmp_path / "plan.json")
    loaded = autotp.Plan.load(tmp_path / "plan.json")
    assert loaded.hash == plan.hash != planned(model, x, "summa-2d", (2, 2), 1).hash
    assert [op.panels for op in loaded.operators] == [op.panels for op in plan.operators]


def test_low_precision_sums_are_kept_in_single_precision():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Tanh(), nn.Linear(256, 256, bias=False), nn.Tanh()).bfloat16()
    x = torch.randn(8, 256).bfloat16()
    exact = model.double()(x.double())
    model.bfloat16()
    errors = []
    for panels in (1, 16):
        plan = planned(model, x, "summa-2d", (2, 2), panels)
        errors.append((autotp.simulate(model, plan, (x,))(x).double() - exact).abs().mean().item())
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize("panels", [0, -1, 1.5])
def test_a_wrong_number_is_refused(panels):
    with pytest.raises(AutotpError, match="must be a whole number"):
        planned(Chain(1, 8, 8), torch.randn(4, 2, 8), "auto", (2,), panels)


def test_memory_counts_operands_that_no_loop_gathers_again():
    """If the number of panels does not divide, the gathered operand is kept after all, and the plan counts it."""
    model = nn.Sequential(nn.Linear(24, 36, bias=False), nn.Tanh(), nn.Linear(36, 24, bias=False), nn.Tanh())
    args = (torch.randn(12, 24),)
    memory = {}
    for panels in (1, 3, 5):
        plan = autotp.plan(model, autotp.Topology.flat(4), args, strategy="summa-2d", mesh=(2, 2), panels=panels)
        memory[panels] = plan.predicted.memory_bytes
        assert all(op.panels in (1, panels) for op in plan.operators)
        assert any(op.panels == 3 for op in plan.operators) == (panels == 3)
    assert memory[3] < memory[1] <= memory[5]
