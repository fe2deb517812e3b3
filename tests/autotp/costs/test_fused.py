"""What compiled operators need not read and write, and what a plan that runs compiled is predicted to take."""

import pytest
import torch
from torch import nn

import autotp
from autotp.analysis.explain import priced_plan
from autotp.costs.model import Fused
from autotp.planner.search import prepare
from costmodel import Device
from passes.capture import capture

#: Bytes count for all, FLOP and launches for nothing.
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
    analysed = prepare(capture(model, (x,)))
    return {node.name: fused for node, fused in analysed.fused(train=train).items()}


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
            return self.linear(x).neg().exp().sin().neg()  # exp keeps its result, sin its operand: the same; neg nothing

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


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_a_step_takes_as_long_as_the_bytes_that_remain(mode):
    model, x = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Softsign()), torch.randn(16, 8)
    plans = {way: autotp.plan(model, MACHINE, (x,), mode=mode, compile=way) for way in (False, True)}
    assert plans[True].compile and autotp.Plan.from_json(plans[True].to_json()).compile
    assert plans[True].predicted.compute_seconds < plans[False].predicted.compute_seconds
    for plan in plans.values():
        priced = priced_plan(capture(model, (x,)), plan)
        assert priced.sums.predicted(True, 0.0).step_seconds == pytest.approx(plan.predicted.step_seconds)
    if mode == "inference":  # softsign: x.abs() + 1, x / that; compiled, it reads x once and writes once
        tensor, weight = 16 * 8 * 4, 8 * 8 * 4
        eager = (2 * tensor + weight) + 2 * tensor + 2 * tensor + 3 * tensor
        compiled = (2 * tensor + weight) + tensor + 0 + tensor
        assert plans[False].predicted.step_seconds == pytest.approx(eager / 1e12)
        assert plans[True].predicted.step_seconds == pytest.approx(compiled / 1e12)
