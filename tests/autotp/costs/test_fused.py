"""Bytes that compiled operators need not read and write, and the predicted step of a compiled plan."""

import pytest
import torch
from torch import nn

import autotp
from autotp.analysis.explain import priced_plan
from autotp.costs.runs import Fused, Run, Runs
from autotp.planner.search import prepare
from costmodel import Device
from passes.capture import capture

#: Only bytes count: FLOP and launches take no time.
DEVICE = Device("bytes", {"float32": 1e18}, memory=1e9, memory_bandwidth=1e12, launch=0.0)
MACHINE = autotp.Topology.flat(1, bandwidth=1e9, latency=0.0, device=DEVICE)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        a = self.linear(x)
        b = a.neg()
        c = b.view(2, 2, 4).abs()
        d = self.linear(c.view(4, 4))
        return (d + b).neg()


def found(model, x, *, train):
    analysed = prepare(capture(model, (x,)), train=train, compiled=True)
    runs = Runs(analysed)
    return {node.name: fused for node in analysed.operators if (fused := runs.run(node).fused) is not None}


def test_what_lies_between_element_wise_operators_stays_inside():
    fused = found(Chain(), torch.randn(4, 4), train=False)
    assert fused["neg"] == Fused(((1, 0),), (1, 0)), "of a product; and read behind another one"
    assert fused["abs_1"] == Fused(((0, 0),), (1, 0)), "through a view; a product reads it"
    assert fused["add"] == Fused(((1, 0), (1, 0)), (0, 0), ends=False), "b was made before the second product"
    assert fused["neg_1"] == Fused(((0, 0),), (1, 0)), "returned"
    assert not {"linear", "linear_1"} & fused.keys()


def test_what_the_backward_pass_reads_is_written_and_read_once():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.linear(x).neg().exp().sin().neg()  # exp saves its result, sin its operand: the same; neg saves none

    for train in (True, False):
        fused = found(Kept(), torch.randn(4, 4), train=train)
        assert fused["neg"] == Fused(((1, train),), (0, 0), ends=False), "with the product's gradient"
        assert fused["exp"] == Fused(((0, 0),), (train, train), ends=False)
        assert fused["sin"] == Fused(((0, 0),), (0, 0), ends=False)
        assert fused["neg_1"] == Fused(((0, 0),), (1, train)), "whose gradient is read"


def test_a_kernel_reads_once_what_several_operators_read():
    fused = found(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Softsign()), torch.randn(4, 4), train=True)
    assert fused["abs_1"].operands == ((1, 2),), "in the backward pass it is read, and its gradient written"
    assert fused["div"] == Fused(((0, 0), (0, 1)), (1, 1)), "the sum that it divides by is kept"


def test_what_is_recomputed_is_written_only_for_other_kernels_and_read_in_none_of_its_own():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.linear(self.linear(x).exp().sin())  # exp saves its result, sin its operand, the product sin's

    captured = capture(Kept(), (torch.randn(4, 4),))
    exp = Fused(((1, 2),), (0, 0), ends=False)
    for again, sin in (({"exp"}, Fused(((0, 0),), (1, 1))), ({"exp", "sin"}, Fused(((0, 0),), (1, 2)))):
        runs = Runs(prepare(captured, recomputed=dict.fromkeys(again, False), compiled=True))
        found = {node.name: runs.run(node) for node in runs.model.operators}
        assert found["exp"] == Run(True, True, exp), "reads the product again, and writes its gradient"
        assert found["sin"] == Run(True, "sin" in again, sin)
        assert found["exp"].kernels(next(n for n in runs.model.operators if n.name == "exp")) == 0


@pytest.mark.exact
def test_recomputing_what_stays_inside_kernels_is_planned_where_it_is_faster():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Softsign(), nn.Linear(8, 8)) for _ in range(12)))
    args = (torch.randn(64, 8),)
    ways = {way: autotp.plan(model, MACHINE, args, compile=True, recompute=way) for way in ("none", "selective", "full")}
    auto = autotp.plan(model, MACHINE, args, compile=True)
    assert auto.recomputed and auto.predicted.memory_bytes < ways["none"].predicted.memory_bytes
    assert auto.predicted.step_seconds < min(plan.predicted.step_seconds for plan in ways.values())
    short = autotp.plan(model, MACHINE, args, compile=True, memory=ways["selective"].predicted.memory_bytes)
    assert short.predicted.memory_bytes < min(plan.predicted.memory_bytes for plan in (auto, ways["full"]))
    for plan in (auto, short, *ways.values()):
        priced = priced_plan(capture(model, args), plan)
        assert priced.sums.predicted(True, 0.0).step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-12)


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_a_step_takes_as_long_as_the_bytes_that_remain(mode):
    model, x = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Softsign()), torch.randn(16, 8)
    plans = {way: autotp.plan(model, MACHINE, (x,), mode=mode, compile=way) for way in (False, True)}
    assert plans[True].compile and autotp.Plan.from_json(plans[True].to_json()).compile
    assert plans[True].predicted.compute_seconds < plans[False].predicted.compute_seconds
    for plan in plans.values():
        priced = priced_plan(capture(model, (x,)), plan)
        assert priced.sums.predicted(True, 0.0).step_seconds == pytest.approx(plan.predicted.step_seconds)
    if mode == "inference":  # softsign is x / (x.abs() + 1); compiled, it reads x once and writes once
        tensor, weight = 16 * 8 * 4, 8 * 8 * 4
        eager = (2 * tensor + weight) + 2 * tensor + 2 * tensor + 3 * tensor
        compiled = (2 * tensor + weight) + tensor + 0 + tensor
        assert plans[False].predicted.step_seconds == pytest.approx(eager / 1e12)
        assert plans[True].predicted.step_seconds == pytest.approx(compiled / 1e12)
