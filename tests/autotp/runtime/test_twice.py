"""Gradients of gradients: gradient penalties and products with the Hessian, eager and scheduled."""

import dataclasses

import pytest
import torch
from overlapping import planned, tokens
from second_order import agree, critic, penalised, slopes
from thinned import SCHEDULES, thinned
from torch import nn

import autotp

F64 = {"dtype": torch.float64}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunks", thinned([{}, {"batch": 2}], whole=True), ids=str)
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    thinned([("data", (2,)), ("zero3", (2,)), ("megatron-1d", (2,)), ("tensor3d", (2, 2)), ("auto", (2, 2))], 4),
)
def test_a_penalty_on_the_slope_of_the_inputs(strategy, mesh, chunks, schedule):
    model, x = critic()
    wanted = slopes(model, penalised(model, x))
    plan = dataclasses.replace(planned(model, (x,), strategy, mesh), chunks=chunks)
    ours = autotp.simulate(model, plan, (x,), schedule=schedule)
    agree(slopes(model, penalised(ours, x)), wanted)


@pytest.mark.parametrize("strategy", ["data", "megatron-1d", "megatron-sp"])
def test_the_hessian_times_a_vector(strategy):
    model, args = tokens()

    def product(called):
        first = torch.autograd.grad(called(*args), list(model.parameters()), create_graph=True)
        return slopes(model, sum((slope.sin() * slope.detach()).sum() for slope in first))

    agree(product(autotp.simulate(model, planned(model, args, strategy), args)), product(model))


def test_gradients_of_gradients_draw_the_same_dropout():
    torch.manual_seed(0)
    x = torch.randn(4, 8, **F64)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    found = []
    for schedule in ("none", "overlap"):
        ours = autotp.simulate(model, planned(model, (x,), "data"), (x,), schedule=schedule)
        torch.manual_seed(3)
        found.append([*slopes(model, penalised(ours, x)), ours(x)])
    agree(*found)


class Attending(nn.Module):
    """Attention with dropout."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5).square().sum()


@pytest.mark.parametrize("chunks", [{}, {"batch": 2}], ids=str)
def test_attention_that_is_run_again_drops_the_same(chunks):
    torch.manual_seed(0)
    model, x = Attending().double().train(), torch.randn(4, 6, 8, **F64)
    plan = dataclasses.replace(planned(model, (x,), "data"), chunks=chunks)
    ours = autotp.simulate(model, plan, (x,), schedule="overlap")
    loss = ours(x)
    plain = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    agree(torch.autograd.grad(loss, list(model.parameters()), create_graph=True), plain)


def test_panels_say_that_they_have_no_gradients_of_gradients():
    model, args = tokens()
    topology = autotp.Topology.flat(4, bandwidth="1 GB/s", latency="10 us")
    plan = autotp.plan(model, topology, args, strategy="summa-2d", mesh=(2, 2), panels=2, schedule="none")
    ours = autotp.simulate(model, plan, args)
    with pytest.raises(RuntimeError, match="panels=1"):
        torch.autograd.grad(ours(*args), list(model.parameters()), create_graph=True)
